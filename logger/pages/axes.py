"""Axes of charts: scales, ticks and number formats. N points."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

SUFFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k"))
"""Numbers from these sizes on are written with a suffix."""


@dataclass(frozen=True)
class AxisScale:
    """Maps values to [0, 1], from left to right or from bottom to top."""

    low: float
    high: float
    is_log: bool = False

    def __call__(self, values_N: Floats) -> Floats:
        """Map values; NaN where a logarithmic scale has none."""
        if not self.is_log:
            return (values_N - self.low) / (self.high - self.low)
        with np.errstate(divide="ignore", invalid="ignore"):
            shares_N: Floats = (np.log(values_N) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return np.where(values_N > 0, shares_N, np.nan)

    def to_unit(self, value: float) -> float:
        """Map a single value to the range 0 to 1."""
        return float(self(np.array([value]))[0])

    def ticks(self, max_ticks: int = 6) -> list[float]:
        """Return round values in the range; of a linear scale, at most about ``max_ticks``."""
        return log_ticks(self.low, self.high) if self.is_log else ticks(self.low, self.high, max_ticks)


def ticks(low: float, high: float, max_ticks: int = 6) -> list[float]:
    """Return at most about ``max_ticks`` multiples of 1, 2 or 5 times a power of ten from ``low`` to ``high``."""
    span = high - low
    if not span > 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(span / max_ticks))
    step = next((factor * power for factor in (1, 2, 5) if span / (factor * power) <= max_ticks), 10 * power)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [multiple * step for multiple in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return ticks of a logarithmic axis: powers of ten, also 2 and 5 times them, or linear ticks on a short axis."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    between = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    inside = [value for value in between if low <= value <= high]
    if len(inside) < 3:
        return [value for value in ticks(low, high, 5) if value > 0]
    if len(inside) <= 7:
        return inside
    decades = [10.0**power for power in powers if low <= 10.0**power <= high]
    return decades[:: math.ceil(len(decades) / 6)]


def format_number(value: float, digits: int = 4) -> str:
    """Format a number with four significant digits: 0.00125, 3.142, 12.3k, 1.2e-06."""
    if not math.isfinite(value):
        return "not finite"
    for size, suffix in SUFFIXES:
        if abs(value) >= size:
            unit = 1e3 if suffix == "k" else size
            return f"{_format_plain(value / unit, digits - 1)}{suffix}"
    return _format_plain(value, digits)


def _format_plain(value: float, digits: int) -> str:
    text = f"{value:.{digits}g}"
    return text if "e+" not in text else f"{value:.0f}"
