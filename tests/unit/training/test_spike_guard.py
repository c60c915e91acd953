"""Which steps are skipped: against a plain reckoning, without a look at the device, and exactly so after a resume."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch import Tensor

from diffusionlm.training.loop import update_progress
from diffusionlm.training.metrics import StepMetrics, TrainingProgress
from diffusionlm.training.spike_guard import SpikeGuard

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


@pytest.mark.parametrize(("loss", "remedy"), [(math.inf, r"training\.precision"), (9.0, r"max_spike_deviations$")])
def test_too_many_skipped_steps_in_a_row_are_an_error(loss: float, remedy: str) -> None:
    progress, recorded, released = TrainingProgress(), list[int](), list[int]()
    batches: Any = SimpleNamespace(record=lambda metrics: recorded.append(metrics.step), release=released.append)
    logger = MagicMock()
    for step, is_accepted in ((1, False), (2, True), (3, False), (4, False)):
        update_progress(metrics_of(step, loss, 1.0, is_accepted), progress, batches, logger, 3)
    assert (progress.skipped, progress.skipped_in_a_row, released, recorded) == (3, 2, [2], [1, 3, 4])
    message = rf"training\.max_nonfinite_steps\).*optimizer\.learning_rate.*{remedy}"
    with pytest.raises(ValueError, match=message):
        update_progress(metrics_of(5, loss, 1.0, False), progress, batches, logger, 3)
    assert [call.args[0] for call in logger.event.call_args_list] == [1, 3, 4, 5]
    texts = [call.args[2] for call in logger.event.call_args_list]
    assert all(("training.max_spike_deviations" in text) == math.isfinite(loss) for text in texts)
