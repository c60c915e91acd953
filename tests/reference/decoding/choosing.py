"""What the transcriptions of published samplers share: a text that is decoded, and how logits and chance choose tokens.

The chance is that of the code under test, so that both can be compared token by token: the uniform of a position is a
function of (seed, stream, step, position). Everything else is written again, for one text, in plain loops.

Shapes: L positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from diffusionlm.diffusion.rng import RngStream, keyed_rng

Array = NDArray[np.float64]
LogitsOf = Callable[[Sequence[int]], Array]
"""From the tokens of a canvas to the model's output at each position, [L, V]."""


def softmax(logits_V: Array) -> Array:
    weights_V = np.exp(logits_V - logits_V.max())
    probs_V: Array = weights_V / weights_V.sum()
    return probs_V


@dataclass(frozen=True)
class Choice:
    """How tokens are chosen."""

    mask: int
    seed: int = 0
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    confidence_from: str = "unfiltered"
    forbidden: tuple[int, ...] = ()
    """Tokens that are never chosen, beside the mask: published samplers let it through, and then emit masks."""
    cfg_scale: float = 0.0
    deferred: tuple[int, ...] = ()
    """A position whose token is one of these has no confidence, and they are left out of the softmax of the others."""

    def own(self, logits_V: Array) -> Array:
        """The model's distribution."""
        logits_V = np.array(logits_V, dtype=np.float64)
        logits_V[[self.mask, *self.forbidden]] = -np.inf
        return softmax(logits_V)

    def filtered(self, logits_V: Array) -> Array:
        """The one that tokens are drawn from: temperature (1 where it is 0), the k best, the nucleus with the token
        that crosses p, those that are not much less probable than the best one. The lowest ids come first among
        equals."""
        with np.errstate(divide="ignore"):
            logits_V = np.log(self.own(logits_V))
        if self.temperature > 0.0:
            logits_V = (logits_V - logits_V.max()) / self.temperature
        order = sorted(range(len(logits_V)), key=lambda token: (-logits_V[token], token))
        if self.top_k is not None:
            logits_V[order[self.top_k :]] = -np.inf
        probs_V, cumulative = softmax(logits_V), 0.0
        for token in order:
            if self.top_p < 1.0 and cumulative >= self.top_p:
                logits_V[token] = -np.inf
            cumulative += probs_V[token]
        logits_V[probs_V < self.min_p * probs_V.max()] = -np.inf
        return softmax(logits_V)

    def basis(self, logits_V: Array) -> Array:
        """The distribution that confidences are read from."""
        return self.own(logits_V) if self.confidence_from == "unfiltered" else self.filtered(logits_V)

    def token(self, logits_V: Array, position: int, step: int) -> int:
        """The best one, or a draw by the inverse of the distribution."""
        probs_V = self.filtered(logits_V)
        if self.temperature == 0.0:
            return int(probs_V.argmax())
        limit, cumulative = self.uniform(RngStream.TOKEN_SAMPLING, position, step) * probs_V.sum(), 0.0
        for token, probability in enumerate(probs_V):
            cumulative += probability
            if probability > 0.0 and cumulative > limit:
                return token
        raise AssertionError("a uniform is less than 1")

    def confidence(self, logits_V: Array, token: int) -> float:
        """The probability of the token among those that are not put off."""
        if token in self.deferred:
            return -np.inf
        probs_V = self.basis(logits_V)
        return float(probs_V[token] / sum(p for other, p in enumerate(probs_V) if other not in self.deferred))

    def order(self, position: int, step: int) -> float:
        """The uniform of a place, for the choice of places."""
        return self.uniform(RngStream.POSITION_ORDER, position, step)

    def uniform(self, stream: RngStream, position: int, step: int) -> float:
        return _uniforms(self.seed, stream, step)[position]


@lru_cache(maxsize=4096)
def _uniforms(seed: int, stream: RngStream, step: int) -> list[float]:
    """Of the first places; those of a shorter text are the same."""
    return keyed_rng(seed, stream, step).random(64).tolist()


@dataclass
class Text:
    """A text under way."""

    x: list[int]
    mask: int
    history: list[list[int]] = field(default_factory=list)
    """The canvas after each forward that decoded something."""
    forwards: int = 0
    """All of them, also those that only fill a cache."""
    step: int = 0
    """Of chance: counts the steps of all blocks."""
    is_masked: list[bool] = field(init=False)
    """Kept apart from the tokens: a prompt may hold the mask token as text."""

    def __post_init__(self) -> None:
        self.is_masked = [False] * len(self.x)

    def append_masks(self, count: int) -> None:
        self.x += [self.mask] * count
        self.is_masked += [True] * count

    def masked(self, start: int, end: int) -> list[int]:
        """The masked places from start to before end."""
        return [position for position in range(start, min(end, len(self.x))) if self.is_masked[position]]

    def commit(self, position: int, token: int) -> None:
        self.x[position], self.is_masked[position] = token, False

    def forget(self, position: int) -> None:
        self.x[position], self.is_masked[position] = self.mask, True

    def record_step(self) -> None:
        """A forward was made use of."""
        self.forwards += 1
        self.history.append(list(self.x))


def best(confidence: dict[int, float], count: int) -> list[int]:
    """The places of the highest confidence, the first among equals."""
    return sorted(confidence, key=lambda position: (-confidence[position], position))[:count]


def even_counts(total: int, steps: int) -> list[int]:
    """The surplus goes to the first steps; steps that would settle nothing are left out, as those forwards are."""
    counts = [total // steps + (1 if step < total % steps else 0) for step in range(steps)]
    return [count for count in counts if count]
