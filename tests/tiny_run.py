"""Config files of tiny training runs, and the runs built from them."""

from __future__ import annotations

import contextlib
import gzip
import json
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import tomli_w
import torch

from config.train import TrainConfig
from diffusionlm.data.loader import Loader
from diffusionlm.diffusion.noised_batch import NoisedBatch
from diffusionlm.diffusion.objectives import DiffusionObjective
from diffusionlm.kernels.cross_entropy import LossInputs
from diffusionlm.training.checkpointing.run_directory import open_run_directory
from diffusionlm.training.metrics import StepMetrics
from diffusionlm.training.run import Run, build_run
from diffusionlm.training.signals import StopRequest
from diffusionlm.training.step import load_step_batch, train_step

MODEL: dict[str, int] = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 16,
    "max_position_embeddings": 16,
}

REQUIRED_SECTIONS = tomli_w.dumps(
    {
        "run": {"directory": "unused"},
        "model": MODEL,
        "data": {"source": "python-stdlib"},
        "training": {"batch_size": 4, "max_steps": 10},
    }
)
"""TOML of a train config with the required keys only; nothing is trained by it."""


def write_train_config(folder: Path, name: str = "train", **changes: dict[str, Any]) -> Path:
    """Write `<name>.toml`: eight steps of masked diffusion over short paragraphs, packed into rows of 16.

    `changes` add keys to the sections of these names, or replace their values. A run from a model
    (``init_from``) has its architecture and tokenizer.
    """
    paragraphs = [f"the cat {i} sat on the mat {i * i}" for i in range(300)]
    (folder / "a.txt").write_text("\n\n".join(paragraphs), encoding="utf-8")
    source = {
        "kind": "files",
        "paths": [str(folder / "a.txt")],
        "sample_by": "paragraph",
        "validation_fraction": 0.2,
    }
    sections: dict[str, dict[str, Any]] = {
        "run": {"directory": str(folder / "run"), "device": "cpu", "threads": 1},
        **({} if "init_from" in changes.get("model", {}) else {"model": {**MODEL}, "tokenizer": {"vocab_size": 280}}),
        "data": {"source": source},
        "training": {"batch_size": 4, "max_steps": 8, "precision": "float32"},
        "validation": {"every_steps": 0, "final_rows": 8, "ngrams": False},
        "samples": {"infills": []},
        "checkpoint": {"every_steps": 2},
        "logging": {"every_steps": 1, "progress": "lines"},
    }
    for section, values in changes.items():
        sections[section] = sections.get(section, {}) | values
    path = folder / f"{name}.toml"
    path.write_text(tomli_w.dumps(sections), encoding="utf-8")
    return path


def write_code_config(folder: Path, **changes: dict[str, Any]) -> Path:
    """Write `train.toml`: two layers, over a plain and a compressed file of JSON lines, with both shuffles on."""
    lines = [json.dumps({"text": f"def f{i}(x):\n    return x + {i} * {i % 7}\n" * (1 + i % 5)}) for i in range(120)]
    (folder / "a.jsonl").write_text("\n".join(lines[:70]) + "\n", encoding="utf-8")
    with gzip.open(folder / "b.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write("\n".join(lines[70:]) + "\n")
    model = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 32,
    }
    source = {"kind": "files", "paths": [f"{folder}/*.jsonl*"], "validation_fraction": 0.2}
    data = {"document_shuffle_window": 16, "row_shuffle_window": 24, "source": source}
    code_changes: dict[str, dict[str, Any]] = {
        "model": model,
        "tokenizer": {"vocab_size": 300},
        "data": data,
        "checkpoint": {"every_steps": 9},
    }
    return write_train_config(folder, "train", **(code_changes | changes))


def wait_for_gate(process: subprocess.Popen[Any], gate: Path) -> None:
    """Wait until `tests.e2e.gated_train` is at its gate, or for another file."""
    deadline = time.monotonic() + 200
    while not gate.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def read_records(run: TrainConfig | Path, kind: str = "metrics") -> list[dict[str, Any]]:
    """The records of metrics.jsonl of a run, or its directory, that have this key: ``metrics`` or ``event``."""
    directory = run if isinstance(run, Path) else run.run.directory
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if kind in record]


def read_steps(run: TrainConfig | Path) -> list[dict[str, Any]]:
    """The metrics of the logged steps of a run."""
    return [record["metrics"] for record in read_records(run) if "loss" in record["metrics"]]


def read_losses(run: TrainConfig | Path) -> list[float]:
    """The losses of the logged steps of a run."""
    return [metrics["loss"] for metrics in read_steps(run)]


def read_events(run: TrainConfig | Path, kind: str) -> list[dict[str, Any]]:
    """The events of this kind of a run."""
    return [record for record in read_records(run, "event") if record["event"] == kind]


@contextlib.contextmanager
def failing_at(index: int) -> Iterator[None]:
    """Context in which the run's loader fails before this step, counted from 0."""
    original = Loader.next_step

    def next_step(self: Loader, step: int) -> Any:
        if step == index:
            raise RuntimeError("the machine goes down")
        return original(self, step)

    with patch.object(Loader, "next_step", next_step), pytest.raises(RuntimeError, match="the machine goes down"):
        yield


def scale_loss_weights(monkeypatch: pytest.MonkeyPatch, factors: dict[int, float]) -> list[int]:
    """Multiply the loss weights of some micro-batches, counted from 1 over all runs; the list of all is returned."""
    original, calls = DiffusionObjective.build_loss_inputs, list[int]()

    def build_loss_inputs(self: DiffusionObjective, noised_batch: Any, denominator: float) -> LossInputs:
        calls.append(len(calls) + 1)
        inputs = original(self, noised_batch, denominator)
        return replace(inputs, weights_N=inputs.weights_N * factors.get(len(calls), 1.0))

    monkeypatch.setattr(DiffusionObjective, "build_loss_inputs", build_loss_inputs)
    return calls


def change_config(config: TrainConfig, directory: Path | None = None, **changes: dict[str, Any]) -> TrainConfig:
    """The config in another directory; `changes` replace values of the sections of these names."""
    values: dict[str, Any] = config.model_dump(exclude_unset=True)
    values["run"] |= {} if directory is None else {"directory": directory}
    for section, section_changes in changes.items():
        values[section] = values.get(section, {}) | section_changes
    return TrainConfig.model_validate(values)


class KeptGradients:
    """In place of the optimizers: gradients as they are when the step would be made."""

    can_skip_on_device = True

    def __init__(self, run: Run) -> None:
        self.parameters = dict(run.state.model.named_parameters())
        self.gradients: dict[str, torch.Tensor] = {}

    def step(self, factor: float, skip: torch.Tensor | None) -> None:
        assert factor > 0 and skip is None
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                self.gradients[name], parameter.grad = parameter.grad, None


def make_first_step(config: TrainConfig) -> tuple[StepMetrics, dict[str, torch.Tensor], list[NoisedBatch], Run]:
    """Metrics, gradients and batches of the first step of a run from random weights, and the run; its weights stay."""
    with open_run_directory(config) as directory:
        run = build_run(config, directory)
    # Output projections start at zero, and would give no gradient to what is before them.
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in run.state.model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=rng))
    kept: Any = KeptGradients(run)
    run.state.optimizers = kept
    batch = load_step_batch(run.loader, 0, run.world, StopRequest())
    metrics = train_step(run.state, run.loader, batch, run.settings, run.monitor)
    return metrics, kept.gradients, batch.noised_batches, run


def build_changed_run(config: TrainConfig, directory: Path, **changes: dict[str, Any]) -> Run:
    """Build the run of `change_config`."""
    changed = change_config(config, directory, **changes)
    with open_run_directory(changed) as run_directory:
        return build_run(changed, run_directory)
