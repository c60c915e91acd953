"""Noise schedules: alpha(t), the probability that a token is still clean at time t; t = 0 is clean, t = 1 is noise.

The NELBO does not depend on the schedule (docs/objectives.md): the schedule decides how often each masked share is
sampled, and the ELBO weight compensates for it.

A schedule is one class, whose fields are its config, and a row of `NoiseSchedule`. `config.training.objective` reads it
without torch and NumPy, so a formula imports NumPy itself.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, Field

from config.base import PositiveFloat, Section, expand_kind

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]


class ScheduleSection(Section, ABC):
    """A decreasing function alpha with alpha(0) = 1 and alpha(1) = 0."""

    @abstractmethod
    def alpha(self, t: Array) -> Array:
        """Probability that a token is still clean at times t in [0, 1]."""

    @abstractmethod
    def alpha_prime(self, t: Array) -> Array:
        """Derivative of alpha, at most 0."""


class LinearSchedule(ScheduleSection):
    """alpha = 1 - t, weight 1 / t: LLaDA, MDLM ("log-linear"), SDAR."""

    kind: Literal["linear"] = "linear"

    def alpha(self, t: Array) -> Array:
        return 1.0 - t

    def alpha_prime(self, t: Array) -> Array:
        return 0.0 * t - 1.0


class CosineSchedule(ScheduleSection):
    """alpha = 1 - cos(pi / 2 (1 - t)), weight pi / 2 cot(pi t / 2): MaskGIT, MD4, dLLM."""

    kind: Literal["cosine"] = "cosine"

    def alpha(self, t: Array) -> Array:
        import numpy as np

        return 1.0 - np.sin(math.pi / 2 * t)

    def alpha_prime(self, t: Array) -> Array:
        import numpy as np

        return -math.pi / 2 * np.cos(math.pi / 2 * t)


class RaisedCosineSchedule(ScheduleSection):
    """alpha = (1 + cos(pi t)) / 2, weight pi cot(pi t / 2): MMaDA's descendants."""

    kind: Literal["raised_cosine"] = "raised_cosine"

    def alpha(self, t: Array) -> Array:
        import numpy as np

        return 1.0 - np.sin(math.pi / 2 * t) ** 2

    def alpha_prime(self, t: Array) -> Array:
        import numpy as np

        return -math.pi / 2 * np.sin(math.pi * t)


class CleanCosineSchedule(ScheduleSection):
    """alpha = cos(pi t / 2), weight pi / 2 cot(pi t / 4): BD3-LM."""

    kind: Literal["clean_cosine"] = "clean_cosine"

    def alpha(self, t: Array) -> Array:
        import numpy as np

        # 1 - 2 sin^2 of half the angle: near t = 0 the masked share is small, and 1 - cos would cancel.
        return 1.0 - 2.0 * np.sin(math.pi / 4 * t) ** 2

    def alpha_prime(self, t: Array) -> Array:
        import numpy as np

        return -math.pi / 2 * np.sin(math.pi / 2 * t)


class PowerSchedule(ScheduleSection):
    """alpha = 1 - t^exponent, weight exponent / t: MaskGIT; BD3-LM's "square" is 2."""

    kind: Literal["power"] = "power"
    exponent: PositiveFloat = 2.0

    def alpha(self, t: Array) -> Array:
        return 1.0 - t**self.exponent

    def alpha_prime(self, t: Array) -> Array:
        import numpy as np

        with np.errstate(divide="ignore"):
            return -self.exponent * t ** (self.exponent - 1.0)


class SquareRootSchedule(ScheduleSection):
    """alpha = 1 - sqrt(t), weight 1 / (2 t): BD3-LM."""

    kind: Literal["square_root"] = "square_root"

    def alpha(self, t: Array) -> Array:
        return 1.0 - t**0.5

    def alpha_prime(self, t: Array) -> Array:
        return PowerSchedule(exponent=0.5).alpha_prime(t)


class SigmoidSchedule(ScheduleSection):
    """1 - alpha = sigmoid(steepness (t - 1/2)), stretched to begin at 0 and end at 1: MaskGIT's descendants."""

    kind: Literal["sigmoid"] = "sigmoid"
    steepness: PositiveFloat = 6.0

    def _sigmoid(self, t: Array) -> Array:
        import numpy as np

        return 1.0 / (1.0 + np.exp(-self.steepness * (t - 0.5)))

    def _ends(self) -> tuple[float, float]:
        low = 1.0 / (1.0 + math.exp(self.steepness / 2))
        return low, 1.0 / (1.0 + math.exp(-self.steepness / 2))

    def alpha(self, t: Array) -> Array:
        low, high = self._ends()
        return (high - self._sigmoid(t)) / (high - low)

    def alpha_prime(self, t: Array) -> Array:
        low, high = self._ends()
        sigmoid = self._sigmoid(t)
        return -self.steepness * sigmoid * (1.0 - sigmoid) / (high - low)


class LogarithmicSchedule(ScheduleSection):
    """alpha = 1 - log2(1 + t), weight 1 / ((1 + t) log(1 + t)): BD3-LM."""

    kind: Literal["logarithmic"] = "logarithmic"

    def alpha(self, t: Array) -> Array:
        import numpy as np

        return 1.0 - np.log1p(t) / math.log(2.0)

    def alpha_prime(self, t: Array) -> Array:
        return -1.0 / (math.log(2.0) * (1.0 + t))


NoiseSchedule = Annotated[
    LinearSchedule
    | CosineSchedule
    | RaisedCosineSchedule
    | CleanCosineSchedule
    | PowerSchedule
    | SquareRootSchedule
    | SigmoidSchedule
    | LogarithmicSchedule,
    Field(discriminator="kind"),
    BeforeValidator(expand_kind),
]
"""A name, or a table with ``kind`` and its parameters."""
