"""Which steps are skipped, exactly so after a resume; what is on disk of their batches is what the model read."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch import Tensor

from diffusionlm.diffusion.noised_batch import NoisedBatch
from diffusionlm.models.patterns import Bidirectional, BlockDiffusion
from diffusionlm.training import skipped_batches
from diffusionlm.training.loop import update_progress
from diffusionlm.training.metrics import StepMetrics, TrainingProgress
from diffusionlm.training.skipped_batches import SkippedBatches, load_skipped_step
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


def skipped(step: int, loss: float = 2.5) -> StepMetrics:
    return StepMetrics(step, *torch.tensor([loss, 1.0, 0.0, 0.0]))


def letters(ids: list[int]) -> str:
    return "".join(chr(ord("a") + token) for token in ids)


def noised_batches() -> list[NoisedBatch]:
    """Two micro-batches: a row of two streams, and three rows of one; letter z is the mask."""
    documents = torch.tensor([[0, 0, 1, 1]], dtype=torch.int32)
    two = NoisedBatch(
        inputs_BS=torch.tensor([[0, 25, 2, 25, 0, 1, 2, 3]]),
        pattern=BlockDiffusion(2, documents),
        positions_N=torch.tensor([1, 3]),
        targets_N=torch.tensor([1, 3]),
        weights_N=torch.tensor([0.1, 1 / 3], dtype=torch.float64),
        num_targets=4,
        denominator=4.0,
    )
    one = NoisedBatch(
        inputs_BS=torch.tensor([[25, 5], [25, 25], [7, 25]]),
        pattern=Bidirectional(),
        positions_N=torch.tensor([0, 2, 3, 5]),
        targets_N=torch.tensor([4, 8, 9, 6]),
        weights_N=torch.ones(4, dtype=torch.float64),
        num_targets=6,
        denominator=6.0,
    )
    return [two, one]


def parts(draw: NoisedBatch) -> dict[str, Any]:
    """All that a draw holds, in plain values."""
    fields = {**vars(draw), **{f"pattern.{name}": value for name, value in vars(draw.pattern).items()}}
    fields["pattern"] = type(draw.pattern)
    return {
        name: (value.dtype, value.tolist()) if isinstance(value, torch.Tensor) else value
        for name, value in fields.items()
    }


@pytest.fixture
def batches(tmp_path: Path) -> SkippedBatches:
    return SkippedBatches(tmp_path / "skipped", letters, seed=11, rank=1)


def test_skipped_batch_record_has_batch_and_context(batches: SkippedBatches, tmp_path: Path) -> None:
    for step in (6, 7, 8):
        batches.hold(step, noised_batches(), {"epoch": 0, "position": [step]})
    path = tmp_path / "skipped/step-00000007-rank-1.json"
    assert batches.record(skipped(7, math.nan)) == f"its batch is kept in {path}"
    batches.record(skipped(6, 99.0))
    record, read = load_skipped_step(path)
    assert [parts(draw) for draw in read] == [parts(draw) for draw in noised_batches()]
    assert record == {
        "step": 7,
        "seed": 11,
        "rank": 1,
        "reason": "not finite",
        "loss": "nan",
        "grad_norm": 1.0,
        "first_rows": [
            {"input": "azcz", "target": "bd"},
            {"input": "zf", "target": "e"},
            {"input": "zz", "target": "ij"},
            {"input": "hz", "target": "g"},
        ],
        "loader": {"epoch": 0, "position": [7]},
    }
    earlier, _ = load_skipped_step(path.with_name("step-00000006-rank-1.json"))
    assert (earlier["reason"], earlier["loss"]) == ("spike", 99.0)


def test_newest_records_of_each_rank_are_retained(
    batches: SkippedBatches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(skipped_batches, "MAX_RECORDS", 2)
    other = SkippedBatches(tmp_path / "skipped", letters, seed=11, rank=0)
    other.hold(1, noised_batches(), {})
    other.record(skipped(1))
    for step in (2, 3, 10):
        batches.hold(step, noised_batches(), {})
        batches.record(skipped(step))
    assert sorted(path.name for path in (tmp_path / "skipped").iterdir()) == [
        f"step-{step:08d}-rank-{rank}.{ending}" for step, rank in ((1, 0), (3, 1), (10, 1)) for ending in ("json", "pt")
    ]


def test_full_disk_is_reported_and_leaves_no_file(
    batches: SkippedBatches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    batches.hold(1, noised_batches(), {})
    message = batches.record(skipped(1))
    assert (
        message.startswith("its batch could not be kept: [Errno 28] No space left on device: ")
        and ".tmp-" not in message
    )
    assert list((tmp_path / "skipped").iterdir()) == []


def test_a_damaged_record_is_named(batches: SkippedBatches, tmp_path: Path) -> None:
    batches.hold(1, noised_batches(), {})
    batches.record(skipped(1))
    path = tmp_path / "skipped/step-00000001-rank-1.json"
    stored = path.with_suffix(".pt")
    content = stored.read_bytes()
    stored.write_bytes(content[:-300])
    with pytest.raises(ValueError, match=r"step-00000001-rank-1\.json is not the whole record"):
        load_skipped_step(path)
    stored.write_bytes(b"")
    with pytest.raises(ValueError, match="not the whole record"):
        load_skipped_step(path)
    torch.save([path], stored)
    with pytest.raises(ValueError, match="not the whole record"):
        load_skipped_step(path)
    with pytest.raises(ValueError, match="not the whole record"):
        load_skipped_step(tmp_path / "skipped/none.json")
