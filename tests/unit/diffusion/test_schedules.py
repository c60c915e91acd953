"""Noise schedules against their formulae, their derivatives and published values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest

from diffusionlm.diffusion.schedules import (
    CleanCosineSchedule,
    CosineSchedule,
    LinearSchedule,
    LogarithmicSchedule,
    NoiseSchedule,
    PowerSchedule,
    RaisedCosineSchedule,
    SigmoidSchedule,
    SquareRootSchedule,
)

FIVE = 1 / (1 + math.exp(2.5)), 1 / (1 + math.exp(-2.5))
SIX = 1 / (1 + math.exp(3)), 1 / (1 + math.exp(-3))

FORMULAE: dict[str, tuple[Any, Callable[[float], float]]] = {
    "linear": (LinearSchedule(), lambda t: 1 - t),
    "cosine": (CosineSchedule(), lambda t: 1 - math.cos(math.pi / 2 * (1 - t))),
    "raised_cosine": (RaisedCosineSchedule(), lambda t: (1 + math.cos(math.pi * t)) / 2),
    "clean_cosine": (CleanCosineSchedule(), lambda t: math.cos(math.pi * t / 2)),
    "power 2": (PowerSchedule(), lambda t: 1 - t * t),
    "power 3.5": (PowerSchedule(exponent=3.5), lambda t: 1 - t**3.5),
    "square_root": (SquareRootSchedule(), lambda t: 1 - math.sqrt(t)),
    "sigmoid 6": (SigmoidSchedule(), lambda t: 1 - (1 / (1 + math.exp(3 - 6 * t)) - SIX[0]) / (SIX[1] - SIX[0])),
    "sigmoid 5": (
        SigmoidSchedule(steepness=5.0),
        lambda t: 1 - (1 / (1 + math.exp(-5 * (t - 0.5))) - FIVE[0]) / (FIVE[1] - FIVE[0]),
    ),
    "logarithmic": (LogarithmicSchedule(), lambda t: 1 - math.log(1 + t) / math.log(2)),
}
INNER = np.linspace(0.01, 0.99, 99)


EVERY_SCHEDULE = {
    **{kind.model_fields["kind"].default: kind() for kind in get_args(get_args(NoiseSchedule)[0])},
    **{name: schedule for name, (schedule, _) in FORMULAE.items()},
}


@pytest.fixture(params=EVERY_SCHEDULE)
def schedule(request: pytest.FixtureRequest) -> Any:
    return EVERY_SCHEDULE[request.param]


@pytest.mark.parametrize("name", FORMULAE)
def test_alpha_is_its_formula(name: str) -> None:
    config, formula = FORMULAE[name]
    ours = config.alpha(INNER)
    np.testing.assert_allclose(ours, [formula(t) for t in INNER], rtol=1e-13, atol=1e-15)
    assert ours.dtype == np.float64


def test_alpha_prime_is_the_derivative(schedule: Any) -> None:
    h = 1e-6
    slope = (schedule.alpha(INNER + h) - schedule.alpha(INNER - h)) / (2 * h)
    np.testing.assert_allclose(schedule.alpha_prime(INNER), slope, rtol=1e-6)


def test_small_masked_shares_keep_their_digits(schedule: Any) -> None:
    """1 - alpha(t) against the integral of the slope, near t = 0, where 1 - cos loses its digits."""
    t = 1e-6
    nodes, weights = np.polynomial.legendre.leggauss(20)
    # t = s^2 takes the singular slope of the square root out.
    s = (nodes + 1) / 2 * math.sqrt(t)
    integral = float((weights / 2 * math.sqrt(t) * -schedule.alpha_prime(s * s) * 2 * s).sum())
    assert float(1.0 - schedule.alpha(np.array(t))) == pytest.approx(integral, rel=1e-3)
