"""What a step does around its numbers: skipping on the device, prefetching, the garbage collector, the switches."""

from __future__ import annotations

import copy
import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from config.optimizer import AdamWConfig, LionConfig, MuonConfig
from config.runtime import ProfilerConfig, RuntimeConfig
from config.train import TrainConfig
from diffusionlm.diffusion.noised_batch import NoisedBatch
from diffusionlm.models.transformer import Transformer
from diffusionlm.optim.build import Optimizers, build_optimizers
from diffusionlm.training.block_wrapping import should_compile_blocks
from diffusionlm.training.checkpointing.run_directory import open_run_directory
from diffusionlm.training.garbage import GarbageCollection
from diffusionlm.training.loop import train, train_remaining_steps
from diffusionlm.training.prefetch import Prefetcher
from diffusionlm.training.reporting import describe_memory
from diffusionlm.training.run import Run, build_run
from diffusionlm.training.signals import StopRequest
from diffusionlm.training.step import DeviceStepMetrics
from diffusionlm.training.step_metrics import StepMetrics, StepMetricsQueue
from logger import LoggerGroup
from logger.run_logger import Metrics

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def give_gradients(model: Transformer, value: float) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)


def named(model: Transformer) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters())


@pytest.mark.parametrize(
    "config", [AdamWConfig(), LionConfig(weight_decay=0.3), MuonConfig()], ids=lambda config: config.kind
)
def test_a_step_that_the_device_skips_changes_nothing(
    config: AdamWConfig | LionConfig | MuonConfig, tiny_model: Any
) -> None:
    """The ones after it are what they would have been without, and those that it does not skip as if it could not."""
    nan, inf = float("nan"), float("inf")
    kept = []
    for values in ((nan, 1.0, inf, 0.5), (1.0, 0.5), None):
        model = tiny_model()
        optimizers = build_optimizers(config, named(model))
        assert optimizers.can_skip_on_device
        for value in values or (1.0, 0.5):
            give_gradients(model, value)
            optimizers.step(1.0, torch.tensor(value in (nan, inf)) if values else None)
        kept.append(optimizers.state_dict() | named(model))
    for name, expected in kept[2].items():
        assert torch.equal(kept[0][name], expected), name
        assert torch.equal(kept[1][name], expected), name


def test_optimizers_that_cannot_skip_are_known() -> None:
    parameter = nn.Parameter(torch.zeros(2, 2))
    optimizers = Optimizers([torch.optim.AdamW([parameter], fused=False)], {parameter: "x"})
    assert not optimizers.can_skip_on_device


def test_numbers_are_read_in_order() -> None:
    queue = StepMetricsQueue()
    for step, loss, is_accepted in ((1, 1.5, True), (2, float("nan"), False)):
        values = torch.tensor([loss, 0.25, 0.0])
        queue.put(step, DeviceStepMetrics(*values, torch.tensor(is_accepted)))
    first, second = queue.pop_all()
    assert first == StepMetrics(1, 1.5, 0.25, 0.0, True)
    assert first.is_finite
    assert (second.step, second.is_finite) == (2, False)
    assert queue.pop_all() == []


def built(config: TrainConfig, directory: Path, **sections: dict[str, Any]) -> Run:
    values: dict[str, Any] = config.model_dump(exclude_unset=True)
    values["run"] |= {"directory": directory}
    for name, changes in sections.items():
        values[name] = values.get(name, {}) | changes
    made = TrainConfig.model_validate(values)
    with open_run_directory(made) as opened:
        return build_run(made, opened)


class Events(LoggerGroup):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, str]] = []
        self.losses: dict[int, float] = {}

    def event(self, step: int, kind: str, text: str, values: Metrics | None = None) -> None:
        self.told.append((step, kind))

    def metrics(self, step: int, values: Any) -> None:
        self.losses[step] = values["loss"]

    def progress(self, step: int, values: Any) -> None:
        pass


def train_without_sync(run: Run) -> Events:
    """Make the steps as on a GPU, on this device: metrics are read only when an action needs them."""
    run.settings = replace(run.settings, reads_metrics_each_step=False)
    logger = Events()
    with StopRequest() as stop:
        train_remaining_steps(run, logger, stop)
    return logger


def test_numbers_that_are_read_late_are_the_same(config: TrainConfig, tmp_path: Path) -> None:
    often = {"checkpoint": {"every_steps": 100}}
    plain = built(config, tmp_path / "plain", **often)
    expected = Events()
    with StopRequest() as stop:
        train_remaining_steps(plain, expected, stop)
    run = built(config, tmp_path / "late", logging={"every_steps": 3}, **often)
    logger = train_without_sync(run)
    assert list(logger.losses) == [3, 6, 8]
    assert logger.losses == {step: expected.losses[step] for step in (3, 6, 8)}
    assert run.progress.loss_average == plain.progress.loss_average


def test_skipped_steps_are_said_with_their_numbers_also_late(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = built(config, tmp_path / "late", logging={"every_steps": 4}, checkpoint={"every_steps": 100})
    original, steps = type(run.settings.objective).build_loss_inputs, []

    def build_loss_inputs(self: Any, noised_batch: NoisedBatch, denominator: float) -> Any:
        steps.append(1)
        made = original(self, noised_batch, denominator)
        bad = len(steps) in (2, 3)
        return type(made)(made.targets_N, made.weights_N * (float("inf") if bad else 1.0))

    monkeypatch.setattr(type(run.settings.objective), "build_loss_inputs", build_loss_inputs)
    logger = train_without_sync(run)
    assert [each for each in logger.told if each[1] == "skipped"] == [(2, "skipped"), (3, "skipped")]
    assert (run.progress.skipped, run.progress.skipped_in_a_row) == (2, 0)
    assert run.progress.step == 8


def test_a_prefetcher_says_where_the_taken_step_ends(config: TrainConfig, tmp_path: Path) -> None:
    plain = built(config, tmp_path / "plain").loader
    ahead = Prefetcher(built(config, tmp_path / "ahead").loader, CPU)
    for step in range(3):
        expected, draws = plain.next_step(step), ahead.next_step(step)
        state = copy.deepcopy(ahead.state_dict())
        ahead.prefetch(step + 1)
        ahead.prefetch(step + 1)
        assert torch.equal(expected[0].inputs_BS, draws[0].inputs_BS)
        assert ahead.state_dict() == state == plain.state_dict()
        assert ahead.metrics().epoch == plain.metrics().epoch
    again = Prefetcher(built(config, tmp_path / "again").loader, CPU)
    again.load_state_dict(ahead.state_dict())
    assert torch.equal(again.next_step(3)[0].inputs_BS, plain.next_step(3)[0].inputs_BS)


def test_the_collector_runs_when_the_loop_says() -> None:
    assert gc.isenabled()
    with GarbageCollection(3) as garbage:
        assert not gc.isenabled()
        ring: list[Any] = []
        ring.append(ring)
        del ring
        garbage.collect_after_step(2)
        before = gc.get_stats()[2]["collections"]
        garbage.collect_after_step(3)
        assert gc.get_stats()[2]["collections"] == before + 1
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    with GarbageCollection(0):
        assert gc.isenabled()


@pytest.mark.parametrize(
    ("compile", "checkpointing", "device", "chosen"),
    [
        ("auto", "none", CPU, False),
        ("auto", "none", CUDA, True),
        ("auto", "full", CUDA, True),
        ("auto", "selective", CUDA, False),
        ("blocks", "none", CPU, True),
        ("none", "none", CUDA, False),
    ],
)
def test_when_blocks_are_compiled(compile: Any, checkpointing: Any, device: torch.device, chosen: bool) -> None:
    config = RuntimeConfig(compile=compile, activation_checkpointing=checkpointing)
    assert should_compile_blocks(config, device) == chosen


def test_two_ways_to_choose_what_is_kept_are_refused() -> None:
    with pytest.raises(ValueError, match='set compile = "none" or "auto"'):
        RuntimeConfig(compile="blocks", activation_checkpointing="selective")


def test_a_run_with_its_switches_and_a_profile(config: TrainConfig, tmp_path: Path) -> None:
    values: dict[str, Any] = config.model_dump(exclude_unset=True)
    train(config)
    values["runtime"] = {"prefetch": False, "garbage_collection": 2}
    values["profiler"] = {"wait": 1, "warmup": 1, "active": 2}
    values["run"] |= {"directory": tmp_path / "other"}
    other = TrainConfig.model_validate(values)
    train(other)
    assert losses(other) == losses(config)
    made = {path.name for path in (tmp_path / "other" / "profile").iterdir()}
    assert made == {"trace-4.json", "table-4.txt"}
    table = (tmp_path / "other" / "profile" / "table-4.txt").read_text(encoding="utf-8")
    rows = {line.split()[0] for line in table.splitlines() if line.strip()}
    assert {"aten::mm", "forward", "backward", "optimizer", "data"} <= rows
    lines = (tmp_path / "other" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    [said] = [record for record in map(json.loads, lines) if record.get("event") == "profile"]
    assert said["step"] == 4 and "table-4.txt has the table" in said["text"]


def test_profiles_of_a_resumed_run_stand_beside_the_old_ones(config: TrainConfig) -> None:
    profiler = ProfilerConfig(active=1, wait=0, warmup=0)
    short, config = (
        config.model_copy(
            update={"profiler": profiler, "training": config.training.model_copy(update={"max_steps": n})}
        )
        for n in (1, 2)
    )
    with open_run_directory(config) as directory, StopRequest() as stop:
        train_remaining_steps(build_run(short, directory), Events(), stop)
    train(config)
    made = {path.name for path in (config.run.directory / "profile").iterdir()}
    assert made == {"table-1.txt", "trace-1.json", "table-2.txt", "trace-2.json"}


def test_a_level_of_ranges_that_there_is_not_is_refused_first(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIFFUSIONLM_NVTX", "loud")
    with pytest.raises(ValueError, match="DIFFUSIONLM_NVTX = 'loud' is no level"):
        train(config)
    assert not config.run.directory.exists()


def test_memory_is_told_by_part(config: TrainConfig, tmp_path: Path) -> None:
    run = built(config, tmp_path / "run", optimizer={"kind": "adamw"})
    give_gradients(run.state.model, 0.5)
    run.state.optimizers.step(1.0)
    size = sum(each.numel() for each in run.state.model.parameters())
    steps = len(list(run.state.model.parameters()))  # each has a count of its own
    assert size * 4 < 1 << 20
    text = describe_memory(run.state.model, run.state.optimizers, 3 << 20, 1 << 20)
    activations = (3 << 20) - (4 * size * 4 + steps * 4)
    expected = [4 * size, 4 * size, 8 * size + 4 * steps, activations]
    shown = [f"{each / 2**20:,.1f} MiB" for each in expected]
    assert text == (
        f"memory: weights {shown[0]}, gradients {shown[1]}, optimizer {shown[2]}, activations {shown[3]} "
        "(1.0 MiB by the plan); 3.0 MiB at most"
    )


def losses(config: TrainConfig) -> list[float]:
    lines = (config.run.directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["metrics"]["loss"] for line in lines if '"loss"' in line]


@pytest.mark.gpu
@pytest.mark.parametrize("compile", ["none", "blocks"])
def test_a_run_on_a_gpu_learns_as_on_a_cpu(config: TrainConfig, tmp_path: Path, compile: str) -> None:
    """With batches sent ahead, numbers read late and steps that the device would skip."""
    values: dict[str, Any] = config.model_dump(exclude_unset=True)
    values["optimizer"] = {"kind": "adamw", "eps": 1e-4}
    runs = []
    for device in ("cpu", "cuda"):
        values["run"] |= {"device": device, "directory": tmp_path / device}
        values["runtime"] = {"compile": compile if device == "cuda" else "none"}
        runs.append(TrainConfig.model_validate(values))
        train(runs[-1])
    assert losses(runs[1]) == pytest.approx(losses(runs[0]), rel=1e-3)
