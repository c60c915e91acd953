"""Answers as texts: many requests are decoded, a fixed number at a time, each up to its first stop string."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from diffusionlm.inference.decoder import Decoder
from diffusionlm.inference.generate import Trajectory, to_trajectory
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
    trajectory: Trajectory
    """All that was decoded until then."""


def decode_answers(
    model: Transformer, tokenizer: Tokenizer, requests: Sequence[AnswerRequest], batch_size: int = 16
) -> Iterator[tuple[int, DecodedAnswer]]:
    """Decode requests and yield each answer with the index of its request, as soon as it is done.

    A request that is done makes room for the next one. An answer depends on its request alone, up to rounding.

    Args:
        batch_size: requests that are decoded at a time, taken in order; at least 1.
    """
    answers = [(ActiveRequest(prepared), AnswerText(tokenizer, stop)) for prepared, stop in requests]
    indices = {id(request): index for index, (request, _) in enumerate(answers)}
    decoder = Decoder.for_requests(model, [request for request, _ in answers], batch_size)
    for output in decoder.steps():
        for request in dict.fromkeys((*output.decoded, *output.finished)):
            _, text = answers[indices[id(request)]]
            for token in request.final_token_ids()[len(text.tokens) :]:
                text.push(token)
            if request.is_done:
                text.finish()
            if text.is_complete:
                decoder.remove(request)
                tokens = text.visible_tokens()
                yield (
                    indices[id(request)],
                    DecodedAnswer(
                        text="".join(token.text for token in tokens if token.token_id not in tokenizer.hidden_ids),
                        token_ids=tuple(token.token_id for token in tokens),
                        finish_reason="stop" if text.is_stopped or request.stop_index is not None else "length",
                        num_forwards=request.num_forwards,
                        trajectory=to_trajectory(request),
                    ),
                )
