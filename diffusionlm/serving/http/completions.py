"""``/v1/completions``, which continues prompts, and ``/v1/infill``, which fills masked spans and is not OpenAI's: the
fields of their requests, their encoding, and the responses."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, model_validator

from config.base import NonNegativeInt
from config.generation import GenerationConfig
from diffusionlm.inference.healing import HealedText
from diffusionlm.inference.request_builder import RequestBuilder
from diffusionlm.inference.requests import RequestOptions
from diffusionlm.inference.settings import READ_KEYS, check_token_ids
from diffusionlm.inference.text import AnswerToken
from diffusionlm.serving.http.answers import LOWEST_LOGPROB, Choice, ServedAnswer, TextPiece, to_finite
from diffusionlm.serving.http.bodies import (
    LENGTH_KEYS,
    MAX_TOP_LOGPROBS,
    SPAN_EXCLUDED_KEYS,
    GenerationBody,
    check_length,
    check_limit,
    check_text,
)
from tokenizer import Tokenizer

MAX_COMPLETION_LOGPROBS = 5

READ_EXCLUDED_KEYS = (*(key for key in GenerationConfig.model_fields if key not in READ_KEYS), "n", "seed", "stream")
DEFAULT_READ_LOGPROBS = 5
"""Alternatives of each position of a read."""


def _check_segments(value: Any, info: ValidationInfo) -> list[str | int | dict[str, str]]:
    items: list[Any] = value if isinstance(value, list) else [None]
    drafts = [item.get("draft") for item in items if isinstance(item, dict) and item.keys() == {"draft"}]
    lengths = [item for item in items if type(item) is int]
    texts = [item for item in (*items, *drafts) if isinstance(item, str)]
    if len(texts) + len(lengths) != len(items):
        raise ValueError(
            'must be a list of texts, numbers, which are the lengths of masked spans in tokens, and {"draft": "TEXT"}'
        )
    if not (lengths or drafts) or min(lengths, default=1) < 1 or "" in drafts:
        raise ValueError("there must be a masked span, and each at least one token long")
    check_limit(len(lengths) + len(drafts), info, key="max_masked_spans")
    check_length(sum(lengths), info)
    check_text("".join(texts), info)
    return items


class InfillBody(GenerationBody):
    """Fields of a request that fills the masked spans of a text, or reads them (``read``)."""

    text_key = "segments"
    segments: Annotated[list[Any], BeforeValidator(_check_segments)]
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    remask: Annotated[float, Field(ge=0, le=1)] = 0.0
    read: bool = False
    choices: list[Annotated[list[str], Field(min_length=1)] | None] | None = None

    @model_validator(mode="after")
    def _check_infill(self) -> Self:
        self.refuse_keys((*LENGTH_KEYS, "stop", *SPAN_EXCLUDED_KEYS))
        if self.read:
            self.refuse_keys(READ_EXCLUDED_KEYS, "a read, which is one forward without sampling")
        elif self.choices is not None:
            raise ValueError("choices needs read = true")
        return self

    @property
    def num_alternatives(self) -> int | None:
        return DEFAULT_READ_LOGPROBS if self.read and self.logprobs is None else self.logprobs

    @property
    def can_be_healed(self) -> bool:
        """Not with choices under a constraint, which may not fit what healing takes back."""
        return not self.choices or self.constraint is None

    def encode(self, builder: RequestBuilder) -> list[HealedText]:
        text = encode_segments(self.segments, builder)
        choices = self._encode_choices(text, builder)
        return [replace(text, options=replace(text.options, is_read=self.read, remask=self.remask, choices=choices))]

    def _encode_choices(self, text: HealedText, builder: RequestBuilder) -> dict[int, list[list[int]]]:
        """Token ids of the choices of each masked span, by its first position."""
        lengths, repeated_bytes = text.options.span_lengths, text.options.repeated_bytes
        if self.choices is not None and len(self.choices) != len(lengths):
            raise ValueError(f"choices has {len(self.choices)} entries for {len(lengths)} masked spans")
        mask = builder.settings.model.mask_token_id
        masked_positions = [index for index, token in enumerate(text.token_ids) if token == mask]
        encoded: dict[int, list[list[int]]] = {}
        for number, choices in enumerate(self.choices or ()):
            prefix, start = repeated_bytes[number].decode(), masked_positions[sum(lengths[:number])]
            for choice in choices or ():
                token_ids = builder.tokenizer.encode(prefix + choice)
                if len(token_ids) != lengths[number]:
                    raise ValueError(
                        f"choices: {choice[:60]!r} has {len(token_ids)} tokens, and masked span {number + 1} has "
                        f"{lengths[number]}: ask for choices of another length in a request of their own"
                    )
                encoded.setdefault(start, []).append(token_ids)
        return encoded


def encode_segments(segments: Sequence[str | int | Mapping[str, str]], builder: RequestBuilder) -> HealedText:
    """Encode texts, masked spans and drafts as a canvas.

    Raises:
        ValueError: the model has no mask token.
    """
    require_mask_token_id(builder)
    pieces: list[tuple[str, int | list[int]]] = []
    text = ""
    for segment in segments:
        if isinstance(segment, str):
            text += segment
        else:
            span = segment if isinstance(segment, int) else builder.tokenizer.encode(segment["draft"])
            pieces.append((text, span))
            text = ""
    return builder.encode_spans([*pieces, (text, 0)])


def require_mask_token_id(builder: RequestBuilder) -> int:
    mask = builder.settings.model.mask_token_id
    if mask is None:
        raise ValueError("suffix, segments: the model has no mask token, so it cannot fill masked spans")
    return mask


class InfillAnswer(ServedAnswer[InfillBody]):
    """``infill`` and its chunks: a chunk has new text of one masked span."""

    prefix, whole_object, chunk_object = "infill", "infill", "infill.chunk"

    def _finish_reason(self, choice: Choice) -> str | None:
        return choice.finish_reason

    def _content(self, choice: Choice) -> dict[str, Any]:
        texts = iter([span.text for span in choice.spans])
        parts = [segment if isinstance(segment, str) else next(texts) for segment in self.body.segments]
        content: dict[str, Any] = {"text": "".join(parts), "holes": [span.text for span in choice.spans]}
        if self.body.choices is not None:
            assert choice.state is not None and choice.state.generation is not None
            scores = iter(choice.state.generation.choice_logprobs)
            content["choices"] = [None if texts is None else _rank(texts, next(scores)) for texts in self.body.choices]
        return content

    def _new_contents(self, choice: Choice, piece: TextPiece, *, is_first: bool) -> list[dict[str, Any]]:
        return [{"hole": piece.span, "text": piece.text, "logprobs": self._logprobs(piece.tokens)}]


def _rank(texts: Sequence[str], logprobs: Sequence[float]) -> list[dict[str, Any]]:
    """Choices with their log-probabilities, and their probabilities among each other."""
    highest = max(*logprobs, -sys.float_info.max)
    weights = [math.exp(logprob - highest) for logprob in logprobs]
    total = sum(weights) or 1.0
    return [
        {"text": text, "logprob": LOWEST_LOGPROB if math.isinf(logprob) else logprob, "probability": weight / total}
        for text, logprob, weight in zip(texts, logprobs, weights, strict=True)
    ]


def _check_prompts(value: Any, info: ValidationInfo) -> list[Any]:
    """A text, token ids, or a list of either, as a list."""
    if isinstance(value, str) or (isinstance(value, list) and value and all(type(item) is int for item in value)):
        value = [value]
    items = value if isinstance(value, list) else []
    are_ids = (isinstance(item, list) and item and all(type(token) is int for token in item) for item in items)
    if not items or not (all(isinstance(item, str) for item in items) or all(are_ids)):
        raise ValueError("must be a text, token ids, or a list of texts or of token ids")
    return [check_text(item, info) if isinstance(item, str) else item for item in items]


class CompletionBody(GenerationBody):
    """Fields of a request that continues prompts, or fills a masked span before a suffix."""

    text_key = "prompt"
    prompt: Annotated[
        list[Any], BeforeValidator(_check_prompts), AfterValidator(partial(check_limit, key="max_prompts"))
    ]
    suffix: Annotated[str, AfterValidator(check_text)] | None = None
    max_tokens: Annotated[NonNegativeInt, AfterValidator(check_length)] | None = None
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_COMPLETION_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _check_completion(self) -> Self:
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise ValueError("max_tokens = 0 needs echo or prompt_logprobs: there would be no answer")
        if self.suffix is not None:
            self.refuse_keys(SPAN_EXCLUDED_KEYS)
            if not any(self.lengths.values()):
                raise ValueError("suffix needs max_tokens, the length of the masked span")
            if self.num_prompt_alternatives is not None:
                raise ValueError("suffix has no log-probabilities of the prompt: remove echo or logprobs")
        return self

    @property
    def num_prompt_alternatives(self) -> int | None:
        counts = (self.prompt_logprobs, self.logprobs if self.echo else None)
        return max((count for count in counts if count is not None), default=None)

    @property
    def num_alternatives(self) -> int | None:
        return self.logprobs

    @property
    def can_be_healed(self) -> bool:
        """Not with a constraint on several prompts: each of their ends would need an automaton of its own."""
        return len(self.prompt) == 1 or self.constraint is None

    def encode(self, builder: RequestBuilder) -> list[HealedText]:
        return [self._encode_prompt(prompt, builder) for prompt in self.prompt]

    def _encode_prompt(self, prompt: str | list[int], builder: RequestBuilder) -> HealedText:
        length = next(iter(self.lengths.values()), None)
        if isinstance(prompt, str):
            if self.suffix is None or length is None:
                return builder.encode_text(prompt, length)
            return encode_segments([prompt, length, self.suffix], builder)
        check_token_ids((min(prompt), max(prompt)), builder.settings.model, "prompt")
        if self.echo:
            builder.tokenizer.decode(prompt)  # the model may have more tokens than the tokenizer
        if self.suffix is None or length is None:
            return HealedText(tuple(prompt))
        mask = require_mask_token_id(builder)
        if mask in prompt:
            raise ValueError("prompt: with suffix its ids must not have the mask token")
        ids = (*prompt, *[mask] * length, *builder.tokenizer.encode(self.suffix))
        return HealedText(ids, RequestOptions(is_infill=True, span_lengths=(length,)))

    def prompt_text(self, index: int, tokenizer: Tokenizer) -> str:
        prompt = self.prompt[index]
        return prompt if isinstance(prompt, str) else tokenizer.decode(prompt)


class CompletionAnswer(ServedAnswer[CompletionBody]):
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

    def _new_contents(self, choice: Choice, piece: TextPiece, *, is_first: bool) -> list[dict[str, Any]]:
        echo = self._echo(choice) if is_first else ""
        return [{"text": echo + piece.text, "logprobs": self._logprobs(piece.tokens)}]

    def _format_logprobs(self, tokens: Sequence[AnswerToken]) -> dict[str, Any]:
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [to_finite(token.logprob) for token in tokens],
            "top_logprobs": [None if math.isnan(token.logprob) else self._alternatives(token) for token in tokens],
            "text_offset": [token.start for token in tokens],
        }

    def _alternatives(self, token: AnswerToken) -> dict[str, float | None]:
        """Alternatives by their text, of equal texts the most probable one, and the token itself."""
        alternatives: dict[str, float | None] = {}
        for token_id, logprob in token.top_logprobs[: self.body.num_alternatives]:
            alternatives.setdefault(self._text(token, token_id), to_finite(logprob))
        return alternatives | {token.text: to_finite(token.logprob)}

    def _echo(self, choice: Choice) -> str:
        """The prompt, if the request wants it before the answer."""
        return self.body.prompt_text(choice.index // self.body.n, self.tokenizer) if self.body.echo else ""
