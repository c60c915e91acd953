"""Log-likelihood of whole texts, in disjoint windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from config.evaluation.likelihood import AnswerLikelihoodConfig
from diffusionlm.evaluation.likelihood.scoring import (
    ContinuationScore,
    OnProgress,
    ScoringRequest,
    normalize_key,
    score_continuations,
)
from diffusionlm.models.transformer import Transformer


@dataclass(frozen=True)
class RollingRequest:
    """A text to be scored from its first token on."""

    tokens: tuple[int, ...]
    """Token ids, all of them scored; at least one."""
    prefix: tuple[int, ...] = ()
    """Token before the text, which is read but not scored: at most one. A model with shifted outputs needs it."""
    key: int | tuple[int, ...] = 0
    """Non-negative numbers from which the masks are drawn, besides the seed."""


@dataclass(frozen=True)
class RollingScore:
    """The log-likelihood of a text."""

    log_likelihood: float
    """In nats, over all tokens. Longer windows give the model more context, so a value belongs to its window."""
    standard_error: float
    """Sampling error of `log_likelihood`; 0 if it is exact."""
    num_tokens: int
    num_windows: int
    num_forwards: int
    """Forwards of a single row that compute it."""
    is_exact: bool
    """The value has no sampling error."""


def rolling_log_likelihood(
    model: Transformer,
    tokens: Sequence[int],
    window: int | None = None,
    *,
    prefix: Sequence[int] = (),
    config: AnswerLikelihoodConfig | None = None,
) -> RollingScore:
    """Score one text; see `score_texts`."""
    return score_texts(model, [RollingRequest(tuple(tokens), tuple(prefix))], window, config)[0]


def score_texts(
    model: Transformer,
    requests: Sequence[RollingRequest],
    window: int | None = None,
    config: AnswerLikelihoodConfig | None = None,
    on_progress: OnProgress | None = None,
) -> list[RollingScore]:
    """Score texts in windows that together hold each token once; a window is a text by itself.

    A window has one token that it does not score, the last one of the window before it, or the prefix of the first.
    The sum is a bound: minus what `nelbo` estimates for the same windows as rows. With blocks of one token it is the
    exact log-likelihood of the windows.

    Args:
        window: tokens of a window, with the one that is not scored. None: the model's context.

    Raises:
        ValueError: a text is empty or begins with more than one token of prefix, the window is below 2 or longer than
            the model's context, the settings have guidance or an end-of-text token, or `score_continuations` raises.
    """
    if config is not None and (config.cfg_scale > 0.0 or config.end_of_text != "none"):
        raise ValueError(
            f'cfg_scale = {config.cfg_scale} and end_of_text = "{config.end_of_text}": windows of a text have neither '
            'guidance nor an end; set 0 and "none"'
        )
    window = model.config.max_position_embeddings if window is None else window
    if not 2 <= window <= model.config.max_position_embeddings:
        raise ValueError(
            f"window = {window} must be between 2 and the model's context, {model.config.max_position_embeddings}"
        )
    windows: list[ScoringRequest] = []
    ends = [0]
    for index, request in enumerate(requests):
        windows += _split_into_windows(request, window, f"text {index}")
        ends.append(len(windows))
    on_window = None
    if on_progress is not None:
        total, report = len(requests), on_progress

        def on_window(done: int, _: int) -> None:
            report(int(np.searchsorted(ends, done, side="right")) - 1, total)

    scores = score_continuations(model, windows, config, on_window)
    return [_sum_windows(scores[start:end]) for start, end in pairwise(ends)]


def _split_into_windows(request: RollingRequest, window: int, name: str) -> list[ScoringRequest]:
    if not request.tokens:
        raise ValueError(f"{name} is empty, and has no likelihood: give at least one token")
    if len(request.prefix) > 1:
        raise ValueError(f"{name} has a prefix of {len(request.prefix)} tokens: give at most one")
    tokens, key = request.prefix + request.tokens, normalize_key(request.key)
    starts = range(0, len(tokens) - 1, window - 1) if len(tokens) > 1 else range(1)
    return [
        ScoringRequest(tokens[: len(request.prefix)], tokens[len(request.prefix) : window], (*key, 0))
        if start == 0
        else ScoringRequest(tokens[start : start + 1], tokens[start + 1 : start + window], (*key, number))
        for number, start in enumerate(starts)
    ]


def _sum_windows(scores: Sequence[ContinuationScore]) -> RollingScore:
    return RollingScore(
        log_likelihood=sum(score.log_likelihood for score in scores),
        standard_error=float(np.sqrt(sum(score.standard_error**2 for score in scores))),
        num_tokens=sum(score.num_tokens for score in scores),
        num_windows=len(scores),
        num_forwards=sum(score.num_forwards for score in scores),
        is_exact=all(score.is_exact for score in scores),
    )
