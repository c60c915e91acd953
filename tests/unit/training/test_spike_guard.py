"""Which steps are skipped: against a plain reckoning, without a look at the device, and exactly so after a resume."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from diffusionlm.training.loop import update_progress
from diffusionlm.training.metrics import StepMetrics, TrainingProgress
from diffusionlm.training.skipped_batches import SkippedBatches
from diffusionlm.training.spike_guard import SpikeGuard
from logger import LoggerGroup
from logger.run_logger import Metrics

CPU = torch.device("cpu")
WINDOW, DEVIATIONS = 8, 3.0


def steps(number: int = 120) -> list[tuple[Tensor, Tensor]]:
    """Losses and norms with spikes of each kind and numbers that are none; float32, as a run's."""
    rng = np.random.default_rng(3)
    values = np.stack([4.0 + 0.1 * rng.normal(size=number), 1.0 + 0.05 * rng.normal(size=number)], axis=1)
    values[40, 0] += 5.0
    values[50, 1] += 5.0
    values[60:63, 0] = [math.nan, math.inf, -math.inf]
    values[70, 1] = math.nan
    values[80] -= 3.0  # far below is fine
    return [(torch.tensor(loss, dtype=torch.float32), torch.tensor(norm)) for loss, norm in values]


def judge(guard: SpikeGuard, steps_of_run: list[tuple[Tensor, Tensor]]) -> list[bool]:
    decided = []
    for loss, norm in steps_of_run:
        is_accepted = guard.is_accepted(loss, norm)
        guard.update_window(loss, norm, is_accepted)
        decided.append(bool(is_accepted))
    return decided


def reckoned(steps_of_run: list[tuple[Tensor, Tensor]]) -> list[bool]:
    """The same by lists and numpy."""
    good: list[tuple[float, float]] = []
    decided = []
    for pair in steps_of_run:
        numbers = (float(pair[0]), float(pair[1]))
        is_accepted = all(map(math.isfinite, numbers))
        last = np.array(good[-WINDOW:])
        if is_accepted and len(last) >= WINDOW // 2:
            limits = last.mean(axis=0) + DEVIATIONS * last.std(axis=0, ddof=1)
            is_accepted = bool((np.array(numbers) <= limits).all())
        decided.append(is_accepted)
        good += [numbers] * is_accepted
    return decided


def test_decisions_are_those_of_a_plain_reckoning() -> None:
    decided = judge(SpikeGuard(DEVIATIONS, WINDOW, CPU), steps())
    assert decided == reckoned(steps())
    assert not any(decided[index] for index in (40, 50, 60, 61, 62, 70))
    assert decided[80] and sum(decided) > 100


def test_without_a_limit_only_nonfinite_steps_are_skipped() -> None:
    decided = judge(guard := SpikeGuard(None, WINDOW, CPU), steps())
    assert [index for index, is_accepted in enumerate(decided) if not is_accepted] == [60, 61, 62, 70]
    assert guard.state_dict() == {}


def test_no_spike_before_half_the_window() -> None:
    rising = [(torch.tensor(10.0**index), torch.tensor(1.0)) for index in range(6)]
    assert judge(SpikeGuard(1.0, 8, CPU), rising) == [True] * 4 + [False] * 2
    # Two values are the fewest that have a deviation.
    assert judge(SpikeGuard(1.0, 2, CPU), rising[:3]) == [True, True, False]


def test_a_constant_loss_may_fall_and_not_rise() -> None:
    same = [(torch.tensor(0.1), torch.tensor(0.3))] * 10
    guard = SpikeGuard(6.0, 8, CPU)
    assert all(judge(guard, same))
    assert judge(guard, [(torch.tensor(0.1001), torch.tensor(0.3))]) == [False]
    assert judge(guard, [(torch.tensor(0.09), torch.tensor(0.3))]) == [True]


@pytest.mark.parametrize("cut", [0, 3, 8, 45, 63])
def test_a_resumed_guard_is_the_same_to_the_last_bit(cut: int) -> None:
    whole, before, after = (SpikeGuard(DEVIATIONS, WINDOW, CPU) for _ in range(3))
    decided = judge(whole, steps())
    first = judge(before, steps()[:cut])
    after.load_state_dict(json.loads(json.dumps(before.state_dict(), allow_nan=False)))
    assert first + judge(after, steps()[cut:]) == decided
    assert after.state_dict() == whole.state_dict()
    assert torch.equal(after._accepted_2W, whole._accepted_2W)  # at the same places, so that sums are rounded alike


def test_another_window_takes_the_newest_steps() -> None:
    long = SpikeGuard(DEVIATIONS, WINDOW, CPU)
    judge(long, steps()[:30])
    state = long.state_dict()
    for window in (4, 16):
        other = SpikeGuard(DEVIATIONS, window, CPU)
        other.load_state_dict(state)
        assert other.state_dict()["losses"] == state["losses"][-window:]
        judge(other, steps()[30:40])
        assert other.state_dict()["grad_norms"][-4:] == [float(norm) for _, norm in steps()[36:40]]
    off = SpikeGuard(None, WINDOW, CPU)
    off.load_state_dict(state)
    long.load_state_dict({})  # of a run that had none
    assert long.state_dict() == state


def test_spike_guard_has_no_host_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    def look(*_: Any) -> None:
        raise AssertionError("somebody looked at a tensor, and waits for its device")

    guard = SpikeGuard(DEVIATIONS, WINDOW, CPU)
    loss, norm = torch.tensor(4.0), torch.tensor(1.0)
    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__"):
            patch.setattr(Tensor, name, look)
        is_accepted = guard.is_accepted(loss, norm)
        guard.update_window(loss, norm, is_accepted)
        with pytest.raises(AssertionError, match="somebody looked"):
            guard.state_dict()
    assert (is_accepted.dtype, is_accepted.shape) == (torch.bool, torch.Size())
    assert guard.state_dict()["losses"] == [4.0]


@pytest.mark.gpu
def test_a_gpu_decides_as_a_cpu() -> None:
    device = torch.device("cuda")
    steps_on_gpu = [(loss.to(device), norm.to(device)) for loss, norm in steps()]
    guard = SpikeGuard(DEVIATIONS, WINDOW, device)
    decided = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for loss, norm in steps_on_gpu:
            decided.append(guard.is_accepted(loss, norm))
            guard.update_window(loss, norm, decided[-1])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.stack(decided).tolist() == reckoned(steps())


def metrics_of(step: int, loss: float, grad_norm: float, is_accepted: bool) -> StepMetrics:
    return StepMetrics(step, *torch.tensor([loss, grad_norm, 0.0, float(is_accepted)]))


@pytest.fixture
def batches(tmp_path: Path) -> SkippedBatches:
    """Batches without micro-batches, of steps 1 to 4."""
    batches = SkippedBatches(tmp_path, str, seed=0)
    for step in range(1, 5):
        batches.hold(step, [], {})
    return batches


class Events(LoggerGroup):
    def __init__(self) -> None:
        self.events: list[tuple[int, str, str]] = []

    def event(self, step: int, kind: str, text: str, values: Metrics | None = None) -> None:
        self.events.append((step, kind, text))


def test_steps_are_counted_recorded_and_logged(batches: SkippedBatches, tmp_path: Path) -> None:
    progress, logger = TrainingProgress(), Events()
    accepted, spike = metrics_of(1, 5.0, 1.0, True), metrics_of(2, 50.0, 9.0, False)
    not_finite = metrics_of(3, math.nan, 1.0, False)
    for metrics in (accepted, spike, not_finite):
        update_progress(metrics, progress, batches, logger, 3)
    assert progress == TrainingProgress(loss_average=0.02 * 5.0, skipped_in_a_row=2, skipped=2)
    assert {path.name for path in tmp_path.glob("*.json")} == {
        "step-00000002-rank-0.json",
        "step-00000003-rank-0.json",
    }
    assert [(step, kind) for step, kind, _ in logger.events] == [(2, "skipped"), (3, "skipped")]
    texts = [text for _, _, text in logger.events]
    assert "training.max_spike_deviations" in texts[0] and "training.max_spike_deviations" not in texts[1]
    assert str(tmp_path / "step-00000002-rank-0.json") in texts[0]
    with pytest.raises(KeyError):  # it was released
        batches.record(metrics_of(1, 5.0, 1.0, False))
    update_progress(metrics_of(4, 5.0, 1.0, True), progress, batches, logger, 3)
    assert (progress.skipped, progress.skipped_in_a_row) == (2, 0)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (math.inf, r"training\.max_nonfinite_steps\).*optimizer\.learning_rate.*training\.precision"),
        (9.0, r"training\.max_nonfinite_steps\).*optimizer\.learning_rate.*training\.max_spike_deviations"),
    ],
)
def test_too_many_skipped_steps_in_a_row_are_an_error(loss: float, message: str, batches: SkippedBatches) -> None:
    progress, logger = TrainingProgress(), Events()
    for step in (1, 2):
        update_progress(metrics_of(step, loss, 1.0, False), progress, batches, logger, 3)
    with pytest.raises(ValueError, match=message):
        update_progress(metrics_of(3, loss, 1.0, False), progress, batches, logger, 3)
    assert len(logger.events) == 3
