"""Colors of the pages in both schemes: readable text, and marks that color-blind readers tell apart."""

from __future__ import annotations

import re
from importlib.resources import files
from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray

STYLES = (
    ("logger.pages", "head.html"),
    ("logger.pages", "page.css"),
    ("logger.pages", "curves.css"),
    ("logger.pages", "charts.css"),
)

VISIONS = {
    "normal": np.eye(3),
    "protanopia": np.array([[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]]),
    "deuteranopia": np.array([[0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]]),
    "tritanopia": np.array([[1.2555, -0.0767, -0.1788], [-0.0784, 0.9308, 0.1476], [0.0047, 0.6914, 0.3039]]),
}
"""Linear RGB as seen (Machado, Oliveira and Fernandes 2009, severity 1)."""

TO_LMS = np.array([[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]])
TO_LAB = np.array([[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]])
"""Linear RGB to Oklab (Ottosson 2020)."""


@pytest.fixture(params=["light", "dark"])
def colors(request: pytest.FixtureRequest) -> dict[str, NDArray[np.float64]]:
    """Linear RGB of the colors of a scheme, by name."""
    hexadecimal: dict[str, str] = {}
    for package, name in STYLES:
        schemes = re.findall(r":root \{(.*?)\}", files(package).joinpath(name).read_text("utf-8"), re.DOTALL)[:2]
        for block in schemes[: 1 + (request.param == "dark")]:
            hexadecimal.update(re.findall(r"--([a-z0-9-]+): #([0-9a-f]{6});", block))
    rgb = {name: np.frombuffer(bytes.fromhex(value), np.uint8) / 255 for name, value in hexadecimal.items()}
    return {name: np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4) for name, c in rgb.items()}


def luminance(color: NDArray[np.float64]) -> float:
    return float(color @ np.array([0.2126, 0.7152, 0.0722]))


def contrast(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Contrast ratio of WCAG 2."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def difference(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Smallest distance in Oklab, times 100, over all visions."""
    labs = [[TO_LAB @ np.cbrt(TO_LMS @ np.clip(seen @ c, 0, 1)) for c in (one, other)] for seen in VISIONS.values()]
    return 100 * min(float(np.linalg.norm(a - b)) for a, b in labs)


def test_text_is_readable(colors: dict[str, NDArray[np.float64]]) -> None:
    pairs = [(name, ground) for name in ("text", "muted", "bad", "good", "accent") for ground in ("card", "page")]
    pairs += [("text", ground) for ground in ("warn-page", "fresh")]
    pairs += [("muted", "grid")]
    ratios = {pair: contrast(colors[pair[0]], colors[pair[1]]) for pair in pairs}
    assert not {pair: ratio for pair, ratio in ratios.items() if ratio < 4.5}


def test_curves_are_visible_and_distinct_for_color_blind_readers(colors: dict[str, NDArray[np.float64]]) -> None:
    curves = [colors[f"c{index}"] for index in range(8)]
    assert min(contrast(curve, colors["card"]) for curve in curves) >= 3.0
    assert min(difference(*pair) for pair in combinations(curves, 2)) > 9.0
