"""Which steps are skipped: against a plain reckoning, without a look at the device, and exactly so after a resume."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from config.train import TrainConfig
from diffusionlm.diffusion.noised_batch import NoisedBatch
from diffusionlm.diffusion.objectives import DiffusionObjective
from diffusionlm.kernels.cross_entropy import LossInputs
from diffusionlm.training.loop import train
from diffusionlm.training.skipped_batches import SkippedBatches, load_skipped_step
from diffusionlm.training.spike_guard import Numbers, SpikeGuard, count_step
from logger import NoLogger
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


def judge(guard: SpikeGuard, some: list[tuple[Tensor, Tensor]]) -> list[bool]:
    decided = []
    for loss, norm in some:
        is_accepted = guard.is_accepted(loss, norm)
        guard.update_window(loss, norm, is_accepted)
        decided.append(bool(is_accepted))
    return decided


def reckoned(some: list[tuple[Tensor, Tensor]]) -> list[bool]:
    """The same by lists and numpy."""
    good: list[tuple[float, float]] = []
    decided = []
    for pair in some:
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


def test_without_a_limit_only_what_is_not_finite_is_skipped() -> None:
    decided = judge(guard := SpikeGuard(None, WINDOW, CPU), steps())
    assert [index for index, is_accepted in enumerate(decided) if not is_accepted] == [60, 61, 62, 70]
    assert guard.state_dict() == {}


def test_nothing_is_a_spike_before_half_of_the_window() -> None:
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
    kept = long.state_dict()
    for window in (4, 16):
        other = SpikeGuard(DEVIATIONS, window, CPU)
        other.load_state_dict(kept)
        assert other.state_dict()["losses"] == kept["losses"][-window:]
        judge(other, steps()[30:40])
        assert other.state_dict()["grad_norms"][-4:] == [float(norm) for _, norm in steps()[36:40]]
    off = SpikeGuard(None, WINDOW, CPU)
    off.load_state_dict(kept)
    long.load_state_dict({})  # of a run that had none
    assert long.state_dict() == kept


def test_nobody_waits_for_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
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
    some = [(loss.to(device), norm.to(device)) for loss, norm in steps()]
    guard = SpikeGuard(DEVIATIONS, WINDOW, device)
    decided = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for loss, norm in some:
            decided.append(guard.is_accepted(loss, norm))
            guard.update_window(loss, norm, decided[-1])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.stack(decided).tolist() == reckoned(steps())


@dataclass
class Progress:
    skipped: int = 0
    skipped_in_a_row: int = 0
    loss_average: float = 0.0


@dataclass(frozen=True)
class Judged:
    step: int
    loss: float
    grad_norm: float
    is_accepted: bool

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass
class Batches:
    """Remembers what it is told."""

    told: list[tuple[str, int]] = field(default_factory=list)

    def release(self, step: int) -> None:
        self.told.append(("release", step))

    def record(self, numbers: Numbers) -> str:
        self.told.append(("record", numbers.step))
        return "its batch is in a drawer"


class Events(NoLogger):
    def __init__(self) -> None:
        self.told: list[tuple[int, str, str]] = []

    def event(self, step: int, kind: str, text: str, values: Metrics | None = None) -> None:
        self.told.append((step, kind, text))


def test_steps_are_counted_recorded_and_said() -> None:
    progress, logger, batches = Progress(), Events(), Batches()
    good, spike, broken = Judged(1, 5.0, 1.0, True), Judged(2, 50.0, 9.0, False), Judged(3, math.nan, 1.0, False)
    for numbers in (good, spike, broken):
        count_step(progress, logger, numbers, batches, 3)
    assert progress == Progress(2, 2, 0.02 * 5.0)
    assert batches.told == [("release", 1), ("record", 2), ("record", 3)]
    assert logger.told == [
        (
            2,
            "skipped",
            "step 2: skipped, loss 50.0, gradient norm 9.0, a spike (training.max_spike_deviations); "
            "its batch is in a drawer",
        ),
        (3, "skipped", "step 3: skipped, loss nan, gradient norm 1.0; its batch is in a drawer"),
    ]
    count_step(progress, logger, Judged(4, 5.0, 1.0, True), batches, 3)
    assert (progress.skipped, progress.skipped_in_a_row) == (2, 0)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (math.inf, r"step 3: .*; 3 steps in a row were not finite \(training\.max_nonfinite_steps\).*learning_rate"),
        (9.0, r"step 3: .*; 3 steps in a row were spikes or not finite .*training\.max_spike_deviations"),
    ],
)
def test_several_in_a_row_are_given_up(loss: float, message: str) -> None:
    progress, batches = Progress(), Batches()
    logger: Any = Events()
    for step in (1, 2):
        count_step(progress, logger, Judged(step, loss, 1.0, False), batches, 3)
    with pytest.raises(ValueError, match=message):
        count_step(progress, logger, Judged(3, loss, 1.0, False), batches, 3)
    assert batches.told[-1] == ("record", 3)
    assert len(logger.told) == 3


def test_a_run_skips_a_spike_records_it_and_resumes_exactly(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    original, broken = DiffusionObjective.build_loss_inputs, {6}

    def build_loss_inputs(self: DiffusionObjective, noised_batch: NoisedBatch, denominator: float) -> LossInputs:
        made = original(self, noised_batch, denominator)
        scale = 100.0 if calls.pop(0) in broken else 1.0
        return LossInputs(made.targets_N, made.weights_N * scale, made.excluded_token)

    monkeypatch.setattr(DiffusionObjective, "build_loss_inputs", build_loss_inputs)
    spikes = {"max_spike_deviations": 30.0, "spike_window": 6}
    config = config.model_copy(update={"training": config.training.model_copy(update=spikes)})
    directories = [tmp_path / "whole", tmp_path / "parts"]
    whole, parts = (
        config.model_copy(update={"run": config.run.model_copy(update={"directory": each})}) for each in directories
    )
    calls = list(range(1, 9))
    train(whole)
    calls = [1, 2, 3, 4, 5, 5, 6, 7, 8]
    with monkeypatch.context() as patch:
        patch.setattr(SkippedBatches, "hold", _fail_at(5))
        with pytest.raises(KeyError):
            train(parts)  # the last checkpoint is that of step 4
    train(parts)
    assert calls == []
    skipped = []
    for directory in directories:
        records = map(json.loads, (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
        skipped.append([each["text"].partition(";")[0] for each in records if each.get("event") == "skipped"])
        record, draws = load_skipped_step(directory / "skipped/step-00000006-rank-0.json")
        assert (record["reason"], len(draws)) == ("spike", 1)
    assert skipped[0] == skipped[1]
    assert [text[:16] for text in skipped[0]] == ["step 6: skipped,"]
    last = "checkpoints/latest/model.safetensors"
    assert (directories[0] / last).read_bytes() == (directories[1] / last).read_bytes()


def _fail_at(step: int) -> Any:
    original = SkippedBatches.hold

    def hold(self: SkippedBatches, number: int, draws: list[NoisedBatch], position: dict[str, Any]) -> None:
        if number == step:
            raise KeyError("the process is gone")
        original(self, number, draws, position)

    return hold
