"""Answers as texts: many requests are decoded, a fixed number at a time, each up to its first stop string."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from diffusionlm.inference.decoder import Decoder
from diffusionlm.inference.requests import ActiveRequest, PreparedRequest
from diffusionlm.inference.text import AnswerText
from diffusionlm.models.transformer import Transformer
from tokenizer import Tokenizer

AnswerRequest = tuple[PreparedRequest, tuple[str, ...]]
"""A prompt with stop strings: the text ends before the first of these, wherever they lie in tokens and blocks."""


@dataclass(frozen=True)
class DecodedAnswer:
    """What a model has written."""

    text: str
    """Without special tokens, but for those that are a visible part of answers."""
    token_ids: tuple[int, ...]
    """Tokens of the text. The last one may have characters beyond it, of a stop string."""
    finish_reason: Literal["stop", "length"]
    """stop: a stop token or a stop string ended it. length: every position was decoded."""
    num_forwards: int
    """Forwards that the request took part in, until the stop was final."""


def decode_answers(
    model: Transformer, tokenizer: Tokenizer, requests: Sequence[AnswerRequest], batch_size: int = 16
) -> Iterator[tuple[int, DecodedAnswer]]:
    """Decode requests and yield each answer with the index of its request, as soon as it is done.

    A request that is done makes room for the next one. An answer depends on its request alone, up to rounding.

    Args:
        batch_size: requests that are decoded at a time, taken in order.

    Raises:
        ValueError: ``batch_size`` is below 1, or the model's probabilities are not finite.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size = {batch_size} must be at least 1")
    answers = [_OpenAnswer(index, tokenizer, request) for index, request in enumerate(requests)]
    open_answers = {id(answer.request): answer for answer in answers}
    decoder = Decoder.for_requests(model, [answer.request for answer in answers], batch_size)
    while decoder.has_work:
        result = decoder.step()
        for request in dict.fromkeys((*result.decoded, *result.finished)):
            answer = open_answers[id(request)]
            if request.error is not None:
                raise request.error
            answer.read_final_tokens()
            if answer.is_done:
                decoder.remove(request)
                del open_answers[id(request)]
                yield answer.index, answer.build()
    decoder.keep_graphs()


class _OpenAnswer:
    """An answer while it is decoded."""

    def __init__(self, index: int, tokenizer: Tokenizer, source: AnswerRequest) -> None:
        self.index = index
        prepared, stop = source
        self.request = ActiveRequest(prepared)
        self._text = AnswerText(tokenizer, stop)
        self._hidden_ids = tokenizer.hidden_ids
        self._num_read = 0

    @property
    def is_done(self) -> bool:
        return self.request.is_done or self._text.is_stopped

    def read_final_tokens(self) -> None:
        """Add the tokens that have become final."""
        token_ids = self.request.final_token_ids()
        for token in token_ids[self._num_read :]:
            self._text.push(token)
        self._num_read = len(token_ids)
        if self.request.is_done:
            self._text.finish()

    def build(self) -> DecodedAnswer:
        is_stopped = self._text.is_stopped or self.request.stop_index is not None
        tokens = self._text.visible_tokens()
        bounds = [*(token.start for token in tokens), len(self._text.text)]
        shown = [
            self._text.text[start:end]
            for token, (start, end) in zip(tokens, pairwise(bounds), strict=True)
            if token.token_id not in self._hidden_ids
        ]
        return DecodedAnswer(
            text="".join(shown),
            token_ids=tuple(token.token_id for token in tokens),
            finish_reason="stop" if is_stopped else "length",
            num_forwards=self.request.num_forwards,
        )
