"""The answer to a call: its choices while the engine decodes them, and their JSON, whole and as chunks of a stream.

The engine's thread wakes the event loop after each forward; the loop then reads the latest state of each choice. A slow
reader so skips states, and costs the engine nothing.
"""

from __future__ import annotations

import asyncio
import math
import time
from bisect import bisect_right
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate, groupby, pairwise
from typing import Any, Generic, TypeVar

from diffusionlm.inference.requests import PreparedRequest
from diffusionlm.inference.text import AnswerText, AnswerToken
from diffusionlm.serving.engine import Engine
from diffusionlm.serving.http.bodies import GenerationBody
from diffusionlm.serving.http.wire import ApiError, to_api_error, to_json
from diffusionlm.serving.requests import EngineError, RequestState, UnknownAdapterError
from tokenizer import Tokenizer
from tokenizer.tool_calls import ToolCallFormat

LOWEST_LOGPROB = -9999.0
"""In place of minus infinity, which JSON does not have."""

Body = TypeVar("Body", bound=GenerationBody)


@dataclass(frozen=True)
class PreparedCall(Generic[Body]):
    """A request whose choices can be submitted."""

    model: str
    """Name of the model in the response."""
    body: Body
    requests: tuple[PreparedRequest, ...]
    """One for each choice: ``n`` of the first prompt, then those of the next one; then one for each prompt whose
    log-probabilities are asked for."""
    num_prompt_tokens: tuple[int, ...]
    """Tokens of the text of each choice as it was sent, whatever token healing takes back."""
    tool_format: ToolCallFormat | None
    """How the answer writes calls of tools. None: it has none."""
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def num_choices(self) -> int:
        return len(self.num_prompt_tokens)


@dataclass(frozen=True)
class TextPiece:
    """New text of a masked span; a prompt has one span."""

    span: int
    text: str
    tokens: list[AnswerToken]


class Choice:
    """One choice of an answer: follows a request of the engine, which may be a prompt that is scored.

    Args:
        prompt: with its log-probabilities, if they are asked for.
    """

    def __init__(
        self, index: int, call: PreparedCall[Body], tokenizer: Tokenizer, prompt: Choice | None = None
    ) -> None:
        self.index, self.prepared, self.prompt = index, call.requests[index], prompt
        self.num_prompt_tokens = call.num_prompt_tokens[index] if index < call.num_choices else 0
        options, body = self.prepared.options, call.body
        # Calls of tools may begin with special tokens.
        hides_special = body.skip_special_tokens and call.tool_format is None
        self._hidden_ids = tokenizer.hidden_ids if hides_special else frozenset[int]()
        self._span_ends = list(accumulate(options.span_lengths))
        """Of a prompt there is one span of any length."""
        num_spans = len(options.span_lengths) or 1
        self._num_repeated = [len(repeated) for repeated in options.repeated_bytes] or [0] * num_spans
        self.spans = [
            AnswerText(
                tokenizer,
                body.stop if index < call.num_choices else (),
                count,
                hidden_ids=self._hidden_ids,
                includes_stop=body.include_stop_str_in_output,
                min_new_tokens=self.prepared.settings.config.min_new_tokens,
            )
            for count in self._num_repeated
        ]
        self._is_scored_prompt = index >= call.num_choices
        self.finish_reason: str | None = None
        self.state: RequestState | None = None
        self.arrivals: list[float] = []
        """Times at which tokens have arrived, by `time.monotonic`."""
        self._tokenizer = tokenizer
        self._num_read = 0

    @property
    def num_tokens(self) -> int:
        """New tokens, with a stop string through the one that completes it."""
        return sum(len(span.tokens) for span in self.spans)

    @property
    def num_forwards(self) -> int:
        """Forwards that it took part in. With a stop string through the one that completes it: how many more the engine
        computes until it is told to stop is chance."""
        if self.state is None:
            return 0
        if self.spans[-1].is_stopped:
            return max(self.state.steps[: self.num_tokens])
        return self.state.num_forwards

    @property
    def visible_tokens(self) -> list[AnswerToken]:
        """Tokens of the text, without those of a stop string."""
        return [token for span in self.spans for token in span.visible_tokens()]

    def read(self, state: RequestState) -> None:
        """Read a state of the request.

        Raises:
            ApiError: the request has ended with an error.
        """
        if state.error is not None:
            raise to_api_error(state.error)
        self.state = state
        if len(state.token_ids) > self._num_read:
            self.arrivals.append(time.monotonic())
        for number in range(self._num_read, len(state.token_ids)):
            span = self.spans[bisect_right(self._span_ends[:-1], number)]
            if self._is_scored_prompt:
                for token in self._unscored_tokens_before(number):
                    span.push(token)
            top_logprobs = state.top_logprobs[number] if state.top_logprobs else ()
            span.push(state.token_ids[number], state.logprobs[number], top_logprobs)
            if number + 1 in self._span_ends:
                span.finish()
        self._num_read = len(state.token_ids)
        if self.spans[-1].is_stopped:
            self.finish_reason = "stop"
        elif state.is_done:
            assert state.generation is not None, "a request ends with an answer or an error"
            for span in self.spans:
                span.finish()
            is_stopped = self.spans[-1].is_stopped
            self.finish_reason = "stop" if is_stopped else state.generation.finish_reason

    def _unscored_tokens_before(self, number: int) -> list[int]:
        """Tokens of a prompt without a log-probability, between two scored ones: those of images and, if outputs are
        shifted, the first one."""
        positions = self.prepared.masked_positions
        tokens: list[int] = self.prepared.canvas_L[
            positions[number - 1] + 1 if number else 0 : positions[number]
        ].tolist()
        return tokens

    def take_new(self) -> list[TextPiece]:
        """Return the text that may be sent and was not yet."""
        pieces = [TextPiece(number, *span.take_new()) for number, span in enumerate(self.spans)]
        return [piece for piece in pieces if piece.text or piece.tokens]

    def build_canvas(self) -> list[str | None] | None:
        """What each new token adds to the text, None where it is masked; only of a call with `diffusing`."""
        snapshot = None if self.state is None else self.state.canvas
        if snapshot is None:
            return None
        if self.finish_reason is not None:
            return [token.text for token in self.visible_tokens]
        positions = self.prepared.masked_positions[self.prepared.masked_positions < len(snapshot.token_ids)].tolist()
        texts: list[str | None] = []
        span_bounds = pairwise([0, *(self._span_ends or [len(positions)])])
        for (start, end), num_repeated in zip(span_bounds, self._num_repeated, strict=True):
            for is_masked, group in groupby(positions[start:end], snapshot.is_masked.__getitem__):
                run = list(group)
                if is_masked:
                    texts += [None] * len(run)
                    continue
                num_bytes = num_repeated if run[0] == positions[start] else 0
                text = AnswerText(self._tokenizer, (), num_bytes, hidden_ids=self._hidden_ids)
                for position in run:
                    text.push(snapshot.token_ids[position])
                text.finish()
                texts += [token.text for token in text.visible_tokens()]
        return texts


async def decode(
    engine: Engine, call: PreparedCall[Body], choices: Sequence[Choice]
) -> AsyncGenerator[list[Choice], None]:
    """Submit all choices of a call, or none, and iterate over those that have changed until every one is done.

    The first item is empty: the engine has accepted them. A reader that is slow gets what is new together. One that
    stops early closes the iterator, which ends the choices.

    Raises:
        ApiError: the engine refuses a choice, or one has ended with an error.
    """
    loop, changed = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(changed.set)

    try:
        handles = engine.submit_prepared(call.requests)
    except (EngineError, UnknownAdapterError) as error:
        raise to_api_error(error) from error
    except ValueError as error:
        code, param = "context_length_exceeded", call.body.text_key
        raise ApiError(400, str(error), param=param, code=code) from None
    try:
        for handle in handles:
            handle.add_listener(wake)
        yield []
        while any(choice.finish_reason is None for choice in choices):
            await changed.wait()
            changed.clear()
            changed_choices = []
            for choice, handle in zip(choices, handles, strict=True):
                if choice.finish_reason is None and (state := handle.state) is not choice.state:
                    choice.read(state)
                    if choice.finish_reason is not None:
                        engine.abort(handle)  # a stop string may have ended it
                    changed_choices.append(choice)
            yield changed_choices
    finally:
        for handle in handles:
            engine.abort(handle)


class ServedAnswer(Generic[Body]):
    """What the answers of all endpoints share; each endpoint has a class of its own."""

    prefix = ""
    whole_object = ""
    chunk_object = ""

    def __init__(self, call: PreparedCall[Body], tokenizer: Tokenizer, response_id: str) -> None:
        self.call, self.body, self.tokenizer = call, call.body, tokenizer
        prompts = [Choice(index, call, tokenizer) for index in range(call.num_choices, len(call.requests))]
        self.choices = [
            Choice(index, call, tokenizer, prompts[index // call.body.n] if prompts else None)
            for index in range(call.num_choices)
        ]
        self.all_choices = [*self.choices, *prompts]
        """In the order of the call's requests."""
        self._id = f"{self.prefix}-{response_id}"
        self._begun: set[int] = set()
        """Indices of the choices that have had a chunk."""
        options = call.body.stream_options
        self.includes_usage = options is not None and options.include_usage

    def whole(self) -> bytes:
        """The response of a call that is done, as JSON. Choices are formatted one by one, since `json` lets no other
        thread run meanwhile."""
        head = self._head(self.whole_object) | self._whole_details() | {"usage": self._count_usage()}
        parts = [to_json(self._whole_choice(choice)) for choice in self.choices]
        return to_json(head).removesuffix(b"}") + b',"choices":[' + b",".join(parts) + b"]}"

    def chunks(self, choice: Choice) -> list[dict[str, Any]]:
        """The chunks of a stream for what is new of a choice; one with a finish reason is the choice's last."""
        pieces, canvas = choice.take_new(), choice.build_canvas()
        if not pieces and canvas is None and choice.finish_reason is None:
            return []
        is_first = choice.index not in self._begun
        pieces = pieces or [TextPiece(len(choice.spans) - 1, "", [])]
        contents = [content for piece in pieces for content in self._new_contents(choice, piece, is_first=is_first)]
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

    def usage_chunk(self) -> dict[str, Any]:
        """The last chunk of a stream with `include_usage`."""
        return self._wrap([]) | {"usage": self._count_usage()}

    def _wrap(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        usage = {"usage": None} if self.includes_usage else {}
        return {**self._head(self.chunk_object), "choices": choices, **usage}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self.call.created, "model": self.call.model}

    def _count_usage(self) -> dict[str, Any]:
        """Count the tokens of the call; a prompt counts once, whatever its number of choices."""
        prompts = self.choices[:: self.body.n]
        num_prompt = sum(choice.num_prompt_tokens for choice in prompts)
        num_new = sum(choice.num_tokens for choice in self.choices)
        num_cached = sum(choice.state.num_cached_tokens for choice in prompts if choice.state is not None)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }

    def _details(self, choice: Choice) -> dict[str, Any]:
        """Our own keys of a choice that is done."""
        details: dict[str, Any] = {"seed": choice.prepared.seed, "num_forwards": choice.num_forwards}
        if self.body.return_token_ids:
            details["token_ids"] = [token.token_id for token in choice.visible_tokens]
            details["prompt_token_ids"] = choice.prepared.token_ids
        return details

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        logprobs = self._logprobs(self._tokens(choice))
        content = {"index": choice.index, **self._content(choice), "logprobs": logprobs}
        return content | {"finish_reason": self._finish_reason(choice)} | self._details(choice)

    def _whole_details(self) -> dict[str, Any]:
        """Keys of the response beside those of its choices."""
        return {}

    def _prompt_logprobs(self, choice: Choice) -> dict[str, Any]:
        """Log-probabilities of the prompt in the form of vLLM: for each token null or ids with theirs, first its own
        one. A rank is null if it is beyond the alternatives."""
        count = self.body.prompt_logprobs
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

    def _finish_reason(self, choice: Choice) -> str | None:
        # A constrained answer is whole, even if its last token is the last one that was allowed.
        is_whole = choice.finish_reason == "length" and bool(choice.prepared.options.constraints)
        return "stop" if is_whole else choice.finish_reason

    def _tokens(self, choice: Choice) -> list[AnswerToken]:
        """The tokens of the text of a choice that is done."""
        return choice.visible_tokens

    def _content(self, choice: Choice) -> dict[str, Any]:
        """The text of a choice that is done."""
        raise NotImplementedError

    def _new_contents(self, choice: Choice, piece: TextPiece, *, is_first: bool) -> list[dict[str, Any]]:
        """New text of a choice and its log-probabilities, for one chunk or more."""
        raise NotImplementedError

    def _logprobs(self, tokens: Sequence[AnswerToken]) -> dict[str, Any] | None:
        """None: the request has not asked for them."""
        return None if self.body.num_alternatives is None else self._format_logprobs(tokens)

    def _format_logprobs(self, tokens: Sequence[AnswerToken]) -> dict[str, Any]:
        """In the form of chats."""
        return {"content": [self._entry(token) for token in tokens], "refusal": None}

    def _entry(self, token: AnswerToken) -> dict[str, Any]:
        alternatives = [self._token(token, token_id, logprob) for token_id, logprob in token.top_logprobs]
        return {**self._token(token, token.token_id, token.logprob), "top_logprobs": alternatives}

    def _token(self, token: AnswerToken, token_id: int, logprob: float) -> dict[str, Any]:
        text, data = self._text(token, token_id), self._bytes(token, token_id)
        return {"token": text, "bytes": list(data), "logprob": to_finite(logprob)}

    def _bytes(self, token: AnswerToken, token_id: int) -> bytes:
        """What a token, or an alternative in its place, adds to the answer."""
        return self.tokenizer.token_bytes(token_id)[token.num_repeated_bytes :]

    def _text(self, token: AnswerToken, token_id: int) -> str:
        """Text of a token; parts of characters in an alternative become U+FFFD."""
        return token.text if token_id == token.token_id else self._bytes(token, token_id).decode("utf-8", "replace")


def to_finite(logprob: float) -> float | None:
    """A log-probability in JSON; None: the token has none."""
    return None if math.isnan(logprob) else max(logprob, LOWEST_LOGPROB)
