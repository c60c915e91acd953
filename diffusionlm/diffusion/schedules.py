"""Noise schedules: alpha(t), the probability that a token is still clean at time t; t = 0 is clean, t = 1 is noise.

The NELBO does not depend on the schedule (docs/objectives.md): the schedule decides how often each masked share is
sampled, and the ELBO weight compensates for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, assert_never

import numpy as np
from numpy.typing import NDArray

from config.training.objective import (
    CleanCosineScheduleConfig,
    CosineScheduleConfig,
    LinearScheduleConfig,
    LogarithmicScheduleConfig,
    NoiseScheduleConfig,
    PowerScheduleConfig,
    RaisedCosineScheduleConfig,
    SigmoidScheduleConfig,
    SquareRootScheduleConfig,
)

Array = NDArray[np.float64]


class NoiseSchedule(Protocol):
    """A decreasing function alpha with alpha(0) = 1 and alpha(1) = 0."""

    def alpha(self, t: Array) -> Array:
        """Probability that a token is still clean at time t in [0, 1]."""

    def alpha_prime(self, t: Array) -> Array:
        """Derivative of alpha, at most 0."""


@dataclass(frozen=True)
class PowerSchedule:
    """alpha = 1 - t ** exponent; linear is exponent 1, square root 1 / 2."""

    exponent: float

    def alpha(self, t: Array) -> Array:
        return 1.0 - np.asarray(t, dtype=np.float64) ** self.exponent

    def alpha_prime(self, t: Array) -> Array:
        t = np.asarray(t, dtype=np.float64)
        with np.errstate(divide="ignore"):
            return -self.exponent * t ** (self.exponent - 1.0)


@dataclass(frozen=True)
class CosineSchedule:
    """alpha = 1 - cos(pi / 2 (1 - t)) (MaskGIT, MD4, dLLM)."""

    def alpha(self, t: Array) -> Array:
        return 1.0 - np.sin(math.pi / 2 * np.asarray(t, dtype=np.float64))

    def alpha_prime(self, t: Array) -> Array:
        return -math.pi / 2 * np.cos(math.pi / 2 * np.asarray(t, dtype=np.float64))


@dataclass(frozen=True)
class RaisedCosineSchedule:
    """alpha = (1 + cos(pi t)) / 2."""

    def alpha(self, t: Array) -> Array:
        return 1.0 - np.sin(math.pi / 2 * np.asarray(t, dtype=np.float64)) ** 2

    def alpha_prime(self, t: Array) -> Array:
        return -math.pi / 2 * np.sin(math.pi * np.asarray(t, dtype=np.float64))


@dataclass(frozen=True)
class CleanCosineSchedule:
    """alpha = cos(pi t / 2) (BD3-LM)."""

    def alpha(self, t: Array) -> Array:
        # 1 - 2 sin^2 of half the angle: near t = 0 the masked share is small, and 1 - cos would cancel.
        return 1.0 - 2.0 * np.sin(math.pi / 4 * np.asarray(t, dtype=np.float64)) ** 2

    def alpha_prime(self, t: Array) -> Array:
        return -math.pi / 2 * np.sin(math.pi / 2 * np.asarray(t, dtype=np.float64))


@dataclass(frozen=True)
class SigmoidSchedule:
    """1 - alpha = (s(t) - s(0)) / (s(1) - s(0)) with s(t) = 1 / (1 + exp(-steepness (t - 1/2)))."""

    steepness: float

    def _s(self, t: Array) -> Array:
        return 1.0 / (1.0 + np.exp(-self.steepness * (np.asarray(t, dtype=np.float64) - 0.5)))

    def alpha(self, t: Array) -> Array:
        low, high = self._s(np.array(0.0)), self._s(np.array(1.0))
        return (high - self._s(t)) / (high - low)

    def alpha_prime(self, t: Array) -> Array:
        low, high, s = self._s(np.array(0.0)), self._s(np.array(1.0)), self._s(t)
        return -self.steepness * s * (1.0 - s) / (high - low)


@dataclass(frozen=True)
class LogarithmicSchedule:
    """alpha = 1 - log(1 + t) / log 2 (BD3-LM)."""

    def alpha(self, t: Array) -> Array:
        return 1.0 - np.log1p(np.asarray(t, dtype=np.float64)) / math.log(2.0)

    def alpha_prime(self, t: Array) -> Array:
        return -1.0 / (math.log(2.0) * (1.0 + np.asarray(t, dtype=np.float64)))


def build_schedule(config: NoiseScheduleConfig) -> NoiseSchedule:
    match config:
        case LinearScheduleConfig():
            return PowerSchedule(1.0)
        case SquareRootScheduleConfig():
            return PowerSchedule(0.5)
        case PowerScheduleConfig(exponent=exponent):
            return PowerSchedule(exponent)
        case CosineScheduleConfig():
            return CosineSchedule()
        case RaisedCosineScheduleConfig():
            return RaisedCosineSchedule()
        case CleanCosineScheduleConfig():
            return CleanCosineSchedule()
        case SigmoidScheduleConfig(steepness=steepness):
            return SigmoidSchedule(steepness)
        case LogarithmicScheduleConfig():
            return LogarithmicSchedule()
        case _:
            assert_never(config)
