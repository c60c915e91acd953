"""The learning rate's factor at the places that matter."""

from __future__ import annotations

import pytest

from config.optimizer import Schedule
from diffusionlm.training.lr_schedule import lr_factor


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Schedule(kind="constant", warmup_steps=0), {0: 1.0, 5: 1.0, 9: 1.0}),
        (Schedule(kind="linear", warmup_steps=0), {0: 1.0, 5: 0.5, 9: 0.1}),
        (Schedule(kind="linear", warmup_steps=0, final_factor=0.2), {0: 1.0, 5: 0.6, 9: 0.28}),
        (Schedule(kind="cosine", warmup_steps=0), {0: 1.0, 5: 0.5, 9: 0.0244717}),
        (Schedule(kind="linear", warmup_steps=4), {0: 0.2, 1: 0.4, 3: 0.8, 4: 1.0, 7: 0.5, 9: 1 / 6}),
        (Schedule(kind="constant", warmup_fraction=0.4), {0: 0.2, 3: 0.8, 4: 1.0, 9: 1.0}),
        (Schedule(kind="cosine", warmup_steps=4, final_factor=0.5), {3: 0.8, 4: 1.0, 7: 0.75}),
    ],
    ids=str,
)
def test_values(schedule: Schedule, expected: dict[int, float]) -> None:
    assert {step: lr_factor(schedule, step, 10) for step in expected} == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant"])
@pytest.mark.parametrize("warmup", [0, 1, 30])
def test_rises_then_falls_and_is_never_zero(kind: str, warmup: int) -> None:
    schedule = Schedule(kind=kind, warmup_steps=warmup)  # type: ignore[arg-type]
    factors = [lr_factor(schedule, step, 100) for step in range(100)]
    assert all(0 < factor <= 1 for factor in factors)
    assert factors[: warmup + 1] == sorted(factors[: warmup + 1]) and factors[warmup] == 1.0
    assert factors[warmup:] == sorted(factors[warmup:], reverse=True)
    end = 1.0 if kind == "constant" else schedule.final_factor
    assert lr_factor(schedule, 100, 100) == pytest.approx(end)


def test_single_step_run() -> None:
    assert 0 < lr_factor(Schedule(), 0, 1) <= 1
