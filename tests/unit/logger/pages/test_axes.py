"""Axes of charts: ticks and number formats."""

from __future__ import annotations

import math

import pytest

from logger.pages.axes import format_number, log_ticks, ticks


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 300.0, [0, 50, 100, 150, 200, 250, 300]),
        (5.8, 6.61, [5.8, 6.0, 6.2, 6.4, 6.6]),
        (-1.0, 1.0, [-1, -0.5, 0, 0.5, 1]),
        (3.0, 3.0, [3.0]),
    ],
)
def test_ticks(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.9, 21.0, [1, 2, 5, 10, 20]),
        (5.0, 7.6, [5, 6, 7]),
        (1e-9, 1e3, [1e-9, 1e-6, 1e-3, 1, 1e3]),
    ],
)
def test_ticks_of_logarithms(low: float, high: float, expected: list[float]) -> None:
    assert log_ticks(low, high) == pytest.approx(expected)


def test_short_numbers() -> None:
    assert [format_number(value) for value in (0.0, 0.00125, 3.14159, 4096, 12_345, 614_400, 1_115_520, 2.5e12,
    -20_000)] == [
        "0", "0.00125", "3.142", "4096", "12.3k", "614k", "1.12M", "2.5T", "-20k",
    ]  # fmt: skip
    assert format_number(math.nan) == format_number(math.inf) == "not finite"
