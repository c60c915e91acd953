"""The learning rate's factor at the places that matter."""

from __future__ import annotations

import pytest

from config.training.optimizer import LRScheduleConfig
from diffusionlm.optim.lr_schedule import lr_factor


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (LRScheduleConfig(kind="constant", warmup_steps=0), {0: 1.0, 5: 1.0, 9: 1.0}),
        (LRScheduleConfig(kind="linear", warmup_steps=0), {0: 1.0, 5: 0.5, 9: 0.1}),
        (LRScheduleConfig(kind="linear", warmup_steps=0, final_factor=0.2), {0: 1.0, 5: 0.6, 9: 0.28}),
        (LRScheduleConfig(kind="cosine", warmup_steps=0), {0: 1.0, 5: 0.5, 9: 0.0244717}),
        (LRScheduleConfig(kind="linear", warmup_steps=4), {0: 0.2, 1: 0.4, 3: 0.8, 4: 1.0, 7: 0.5, 9: 1 / 6}),
        (LRScheduleConfig(kind="constant", warmup_fraction=0.4), {0: 0.2, 3: 0.8, 4: 1.0, 9: 1.0}),
        (LRScheduleConfig(kind="cosine", warmup_steps=4, final_factor=0.5), {3: 0.8, 4: 1.0, 7: 0.75}),
        (
            LRScheduleConfig(kind="warmup_stable_decay", warmup_steps=2, decay_fraction=0.4),
            {0: 1 / 3, 1: 2 / 3, 2: 1.0, 5: 1.0, 6: 1.0, 7: 0.75, 8: 0.5, 9: 0.25, 10: 0.0},
        ),
        (
            LRScheduleConfig(kind="warmup_stable_decay", warmup_fraction=0.1, decay_fraction=0.4, decay_shape="sqrt"),
            {0: 0.5, 1: 1.0, 6: 1.0, 7: 0.5, 8: 1 - 0.5**0.5, 9: 1 - 0.75**0.5, 10: 0.0},
        ),
        (
            LRScheduleConfig(
                kind="warmup_stable_decay", warmup_steps=0, decay_fraction=0.4, decay_shape="cosine", final_factor=0.2
            ),
            {0: 1.0, 6: 1.0, 7: 0.2 + 0.4 * (1 + 0.5**0.5), 8: 0.6, 9: 0.2 + 0.4 * (1 - 0.5**0.5), 10: 0.2},
        ),
        (LRScheduleConfig(kind="warmup_stable_decay", warmup_steps=0), {0: 1.0, 8: 1.0, 9: 0.5, 10: 0.0}),
        (LRScheduleConfig(kind="warmup_stable_decay", warmup_steps=9, decay_fraction=0.1), {8: 0.9, 9: 1.0, 10: 0.0}),
    ],
    ids=str,
)
def test_values(schedule: LRScheduleConfig, expected: dict[int, float]) -> None:
    assert {step: lr_factor(schedule, step, 10) for step in expected} == pytest.approx(expected, abs=1e-6)


def test_single_step_run() -> None:
    assert 0 < lr_factor(LRScheduleConfig(), 0, 1) <= 1


def test_a_run_too_short_for_its_schedule_is_refused() -> None:
    """Where epochs give the length of a run, the config alone does not know it."""
    schedule = LRScheduleConfig(kind="warmup_stable_decay", warmup_steps=6, decay_fraction=0.5)
    assert lr_factor(schedule, 6, 12) == 1.0
    with pytest.raises(ValueError, match=r"schedule\.warmup_steps"):
        lr_factor(schedule, 0, 10)
