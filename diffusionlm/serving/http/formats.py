"""Responses: OpenAI's objects of completions and chats, and our own of infills, whole and as chunks of a stream."""

from __future__ import annotations

import math
import secrets
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from diffusionlm.inference.text import AnswerToken
from diffusionlm.serving.http.bodies import CompletionBody, InfillBody
from diffusionlm.serving.http.chat import ChatBody
from diffusionlm.serving.http.errors import to_json
from diffusionlm.serving.http.preparation import PreparedCall
from diffusionlm.serving.http.sessions import Choice, TextPiece
from tokenizer import Tokenizer
from tokenizer.tool_calls import CallPiece, ToolCallParser

LOWEST_LOGPROB = -9999.0
"""In place of minus infinity, which JSON does not have."""


class AnswerFormat:
    """What the formats share; each endpoint has one.

    Args:
        response_id: of the response, without its prefix.
    """

    prefix = ""
    whole_object = ""
    chunk_object = ""

    def __init__(self, prepared: PreparedCall, tokenizer: Tokenizer, response_id: str) -> None:
        self.prepared, self.tokenizer = prepared, tokenizer
        self._id = f"{self.prefix}-{response_id}"
        self._begun: set[int] = set()
        """Indices of the choices that have had a chunk."""
        options = prepared.body.stream_options
        self.includes_usage = options is not None and options.include_usage

    def whole(self, choices: Sequence[Choice]) -> bytes:
        """The response of a call that is done, as JSON. Choices are formatted one by one, since `json` lets no other
        thread run meanwhile."""
        head = self._head(self.whole_object) | self._whole_details(choices)
        head["usage"] = build_usage(choices, self.prepared.body.n)
        parts = [to_json(self._whole_choice(choice)) for choice in choices]
        return to_json(head).removesuffix(b"}") + b',"choices":[' + b",".join(parts) + b"]}"

    def chunks(self, choice: Choice) -> list[dict[str, Any]]:
        """The chunks of a stream for what is new of a choice; one with a finish reason is the choice's last."""
        pieces, canvas = choice.take_new(), choice.build_canvas()
        if not pieces and canvas is None and choice.finish_reason is None:
            return []
        contents = self._new_contents(choice, pieces, is_first=choice.index not in self._begun)
        if not contents:  # all new text is held back
            return []
        self._begun.add(choice.index)
        chunks = [{"index": choice.index, **content, "finish_reason": None} for content in contents]
        chunks[-1]["finish_reason"] = self._finish_reason(choice)
        if canvas is not None:
            chunks[-1]["canvas"] = canvas
        if choice.finish_reason is not None:
            chunks[-1] |= self._details(choice)
        return [self._wrap([chunk]) for chunk in chunks]

    def usage_chunk(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The last chunk of a stream with `include_usage`."""
        return self._wrap([]) | {"usage": build_usage(choices, self.prepared.body.n)}

    def _wrap(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        usage = {"usage": None} if self.includes_usage else {}
        return {**self._head(self.chunk_object), "choices": choices, **usage}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self.prepared.created, "model": self.prepared.model}

    def _details(self, choice: Choice) -> dict[str, Any]:
        """Our own keys of a choice that is done."""
        details: dict[str, Any] = {"seed": choice.prepared.seed, "num_forwards": choice.num_forwards}
        if self.prepared.body.return_token_ids:
            details["token_ids"] = [token.token_id for token in choice.visible_tokens]
            details["prompt_token_ids"] = choice.prepared.token_ids
        return details

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        logprobs = self._logprobs(self._tokens(choice))
        content = {"index": choice.index, **self._content(choice), "logprobs": logprobs}
        return content | {"finish_reason": self._finish_reason(choice)} | self._details(choice)

    def _finish_reason(self, choice: Choice) -> str | None:
        return choice.finish_reason

    def _tokens(self, choice: Choice) -> list[AnswerToken]:
        """The tokens of the text of a choice that is done."""
        return choice.visible_tokens

    def _whole_details(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Keys of the response beside those of its choices."""
        return {}

    def _prompt_logprobs(self, choice: Choice) -> dict[str, Any]:
        """Log-probabilities of the prompt in the form of vLLM: for each token null or ids with theirs, first its own
        one. A rank is null if it is beyond the alternatives."""
        count = self.prepared.body.prompt_logprobs
        if count is None or choice.prompt is None:
            return {}
        entries: list[dict[str, Any] | None] = []
        for token in choice.prompt.visible_tokens:
            alternatives = token.top_logprobs[:count]
            ranks = {token_id: rank for rank, (token_id, _) in enumerate(alternatives, 1)}
            entry = {
                str(token_id): {
                    "logprob": to_finite(logprob),
                    "rank": ranks.get(token_id),
                    "decoded_token": self.tokenizer.token_bytes(token_id).decode("utf-8", "replace"),
                }
                for token_id, logprob in dict([(token.token_id, token.logprob), *alternatives]).items()
            }
            entries.append(None if math.isnan(token.logprob) else entry)
        return {"prompt_logprobs": entries}

    def _content(self, choice: Choice) -> dict[str, Any]:
        """The text of a choice that is done."""
        raise NotImplementedError

    def _new_contents(self, choice: Choice, pieces: list[TextPiece], *, is_first: bool) -> list[dict[str, Any]]:
        """New text of a choice and its log-probabilities, for one chunk or more."""
        raise NotImplementedError

    def _logprobs(self, tokens: Sequence[AnswerToken]) -> dict[str, Any] | None:
        """None: the request has not asked for them."""
        raise NotImplementedError

    def _bytes(self, token: AnswerToken, token_id: int) -> bytes:
        """What a token, or an alternative in its place, adds to the answer."""
        return self.tokenizer.token_bytes(token_id)[token.num_repeated_bytes :]

    def _text(self, token: AnswerToken, token_id: int) -> str:
        """Text of a token; parts of characters in an alternative become U+FFFD."""
        return token.text if token_id == token.token_id else self._bytes(token, token_id).decode("utf-8", "replace")


class CompletionFormat(AnswerFormat):
    """``text_completion``, which is also the object of its chunks."""

    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def _details(self, choice: Choice) -> dict[str, Any]:
        return super()._details(choice) | self._prompt_logprobs(choice)

    def _tokens(self, choice: Choice) -> list[AnswerToken]:
        """With ``echo`` also those of the prompt."""
        tokens, num_characters = choice.visible_tokens, len(self._echo(choice))
        if choice.prompt is None or not num_characters:
            return tokens
        moved = [replace(token, start=token.start + num_characters) for token in tokens]
        return [*choice.prompt.visible_tokens, *moved]

    def _content(self, choice: Choice) -> dict[str, Any]:
        return {"text": self._echo(choice) + choice.spans[0].text}

    def _new_contents(self, choice: Choice, pieces: list[TextPiece], *, is_first: bool) -> list[dict[str, Any]]:
        echo = self._echo(choice) if is_first else ""
        text, tokens = _join(pieces)
        return [{"text": echo + text, "logprobs": self._logprobs(tokens)}]

    def _logprobs(self, tokens: Sequence[AnswerToken]) -> dict[str, Any] | None:
        if self.prepared.body.num_alternatives is None:
            return None
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [None if math.isnan(token.logprob) else to_finite(token.logprob) for token in tokens],
            "top_logprobs": [None if math.isnan(token.logprob) else self._alternatives(token) for token in tokens],
            "text_offset": [token.start for token in tokens],
        }

    def _echo(self, choice: Choice) -> str:
        """The prompt, if the request wants it before the answer."""
        body = self.prepared.body
        if not (isinstance(body, CompletionBody) and body.echo):
            return ""
        prompt = body.prompt[choice.index // body.n]
        return prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt)

    def _alternatives(self, token: AnswerToken) -> dict[str, float]:
        """Alternatives by their text, of equal texts the most probable one, and the token itself."""
        alternatives: dict[str, float] = {}
        for token_id, logprob in token.top_logprobs[: self.prepared.body.num_alternatives]:
            alternatives.setdefault(self._text(token, token_id), to_finite(logprob))
        return alternatives | {token.text: to_finite(token.logprob)}


class ChatFormat(AnswerFormat):
    """``chat.completion`` and its chunks."""

    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, prepared: PreparedCall, tokenizer: Tokenizer, response_id: str) -> None:
        super().__init__(prepared, tokenizer, response_id)
        self._parsers: dict[int, ToolCallParser] = {}
        """Of each choice, if it may call tools."""
        body, call_format = prepared.body, prepared.tool_format
        if call_format is not None and isinstance(body, ChatBody):
            for index in range(len(prepared.requests)):
                self._parsers[index] = ToolCallParser(call_format, body.callable_tools, is_constrained=body.must_call)

    def _parse(self, choice: Choice, text: str) -> list[str | CallPiece]:
        """Content and pieces of calls in new text of a choice."""
        if choice.index not in self._parsers:
            return [text] if text else []
        pieces = self._parsers[choice.index].push(text, is_last=choice.finish_reason is not None)
        body = self.prepared.body
        is_single = isinstance(body, ChatBody) and not body.parallel_tool_calls
        return [piece for piece in pieces if isinstance(piece, str) or not (is_single and piece.index)]

    def _finish_reason(self, choice: Choice) -> str | None:
        parser, reason = self._parsers.get(choice.index), choice.finish_reason
        if parser is None or reason is None or not parser.num_calls or parser.has_open_call:
            return reason
        # With a constraint nothing is missing, even if the last token is the last one that was allowed.
        return "tool_calls" if reason == "stop" or choice.prepared.options.constraints else reason

    def _whole_details(self, choices: Sequence[Choice]) -> dict[str, Any]:
        return self._prompt_logprobs(choices[0])

    def _content(self, choice: Choice) -> dict[str, Any]:
        pieces = self._parse(choice, choice.spans[0].text)
        content = "".join(piece for piece in pieces if isinstance(piece, str))
        calls = [_build_call(piece.name, piece.arguments) for piece in pieces if isinstance(piece, CallPiece)]
        message = {"role": "assistant", "content": content or None if calls else content, "refusal": None}
        return {"message": message | ({"tool_calls": calls} if calls else {})}

    def _new_contents(self, choice: Choice, pieces: list[TextPiece], *, is_first: bool) -> list[dict[str, Any]]:
        text, tokens = _join(pieces)
        deltas: list[dict[str, Any]] = []
        for piece in self._parse(choice, text):
            if isinstance(piece, str):
                deltas.append({"content": piece})
                continue
            if piece.name is not None:
                deltas.append({"tool_calls": [{"index": piece.index, **_build_call(piece.name, "")}]})
            if piece.arguments:
                deltas.append({"tool_calls": [{"index": piece.index, "function": {"arguments": piece.arguments}}]})
        first = [{"delta": {"role": "assistant", "content": ""}, "logprobs": None}] if is_first else []
        logprobs = self._logprobs(tokens) if tokens else None
        if not deltas and (logprobs or choice.finish_reason or self.prepared.body.diffusing):
            deltas.append({})
        contents = [{"delta": delta, "logprobs": None} for delta in deltas]
        if logprobs:
            contents[-1]["logprobs"] = logprobs
        return [*first, *contents]

    def _logprobs(self, tokens: Sequence[AnswerToken]) -> dict[str, Any] | None:
        if self.prepared.body.num_alternatives is None:
            return None
        return {"content": [self._entry(token) for token in tokens], "refusal": None}

    def _entry(self, token: AnswerToken) -> dict[str, Any]:
        alternatives = [self._token(token, token_id, logprob) for token_id, logprob in token.top_logprobs]
        return {**self._token(token, token.token_id, token.logprob), "top_logprobs": alternatives}

    def _token(self, token: AnswerToken, token_id: int, logprob: float) -> dict[str, Any]:
        text, data = self._text(token, token_id), self._bytes(token, token_id)
        return {"token": text, "bytes": list(data), "logprob": None if math.isnan(logprob) else to_finite(logprob)}


class InfillFormat(ChatFormat):
    """``infill`` and its chunks: a chunk has new text of one masked span."""

    prefix, whole_object, chunk_object = "infill", "infill", "infill.chunk"

    def _content(self, choice: Choice) -> dict[str, Any]:
        body = self.prepared.body
        assert isinstance(body, InfillBody)
        texts = iter([span.text for span in choice.spans])
        parts = [segment if isinstance(segment, str) else next(texts) for segment in body.segments]
        content: dict[str, Any] = {"text": "".join(parts), "holes": [span.text for span in choice.spans]}
        if body.choices is not None:
            assert choice.state is not None and choice.state.generation is not None
            scores = iter(choice.state.generation.choice_logprobs)
            content["choices"] = [None if texts is None else _rank(texts, next(scores)) for texts in body.choices]
        return content

    def _new_contents(self, choice: Choice, pieces: list[TextPiece], *, is_first: bool) -> list[dict[str, Any]]:
        pieces = pieces or [TextPiece(len(choice.spans) - 1, "", [])]
        return [{"hole": piece.span, "text": piece.text, "logprobs": self._logprobs(piece.tokens)} for piece in pieces]


def _rank(texts: Sequence[str], logprobs: Sequence[float]) -> list[dict[str, Any]]:
    """Choices with their log-probabilities, and their probabilities among each other."""
    highest = max(*logprobs, -sys.float_info.max)
    weights = [math.exp(logprob - highest) for logprob in logprobs]
    total = sum(weights) or 1.0
    shares = [weight / total for weight in weights]
    finite = [logprob if math.isfinite(logprob) else LOWEST_LOGPROB for logprob in logprobs]
    values = zip(texts, finite, shares, strict=True)
    return [{"text": text, "logprob": logprob, "probability": share} for text, logprob, share in values]


def build_usage(choices: Sequence[Choice], num_choices: int) -> dict[str, Any]:
    """Count the tokens of a call; a prompt counts once, whatever its number of choices."""
    prompts = choices[::num_choices]
    num_prompt = sum(choice.num_prompt_tokens for choice in prompts)
    num_new = sum(choice.num_tokens for choice in choices)
    num_cached = sum(choice.state.num_cached_tokens for choice in prompts if choice.state is not None)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def _build_call(name: str | None, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def _join(pieces: Sequence[TextPiece]) -> tuple[str, list[AnswerToken]]:
    return "".join(piece.text for piece in pieces), [token for piece in pieces for token in piece.tokens]


def to_finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB) if math.isfinite(logprob) else LOWEST_LOGPROB
