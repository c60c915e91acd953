"""Training and validation on a GPU that computes nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from config.model import ModelConfig
from config.train import TrainConfig
from diffusionlm.models.patterns import Bidirectional
from diffusionlm.models.transformer import Transformer
from diffusionlm.training.metrics import StepMonitor
from diffusionlm.training.run import build_train_state
from diffusionlm.training.signals import StopRequest
from diffusionlm.training.step import load_step_batch, train_step
from tests.fake_cuda import BACKWARD, FUSED_ATTENTION, LaunchRecord, even_experts, fake_cuda
from tests.tiny_run import build_changed_run

CUDA = torch.device("cuda")


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float32])
def test_evaluation_has_the_precision_of_training(
    precision: torch.dtype, train_config: TrainConfig, tmp_path: Path
) -> None:
    run = build_changed_run(train_config, tmp_path / "run")
    run.settings = replace(run.settings, device=CUDA, precision=precision)
    with fake_cuda() as record, run.evaluation_mode():
        model = build_on_gpu(run.state.model.config)
        model(torch.ones(2, 16, dtype=torch.int64, device=CUDA), pattern=Bidirectional())
    assert record.product_dtypes() == {precision}


def build_on_gpu(config: ModelConfig) -> Transformer:
    """A model with fake weights; `Module.to` cannot move fake ones."""
    with CUDA:
        return Transformer(config)


ADAPTATION = {"kind": "masked_diffusion", "anneal_attention_steps": 8, "mask_noise_steps": 8}
RUNS: dict[str, dict[str, Any]] = {
    "masked diffusion": {},
    "block diffusion": {"objective": {"kind": "block_diffusion", "block_length": 4}},
    "next token": {"objective": {"kind": "next_token"}, "model": {"logit_alignment": "shifted"}},
    "annealed attention, noise on the mask": {"objective": ADAPTATION},
    "padding, noise on all embeddings": {"training": {"neftune_alpha": 5.0}, "data": {"rows": "padded"}},
    "AdamW with averages, norms": {
        "optimizer": {"kind": "adamw"},
        "training": {"ema_decay": 0.9},
        "logging": {"norms_every_steps": 1},
    },
    "Lion, guarded": {"optimizer": {"kind": "lion"}, "training": {"max_spike_deviations": 5.0}},
    "bfloat16 weights": {"runtime": {"weights": "bfloat16_with_master"}, "training": {"precision": "bfloat16"}},
}


def record_step(config: TrainConfig, directory: Path, **changes: dict[str, Any]) -> LaunchRecord:
    """Make a step of a run as on a GPU, with all its metrics."""
    changes["runtime"] = {"compile": "none", **changes.get("runtime", {})}
    run = build_changed_run(config, directory, **changes)
    with StopRequest() as stop:
        batch = load_step_batch(run.loader, 0, run.world, stop)
    settings = replace(run.settings, device=CUDA, precision=torch.bfloat16, reads_metrics_each_step=False)
    with fake_cuda() as record:
        builder: Any = SimpleNamespace(build=lambda device: build_on_gpu(run.state.model.config), values=None)
        state = build_train_state(run.config, builder, run.world, CUDA, torch.bfloat16)
        monitor = StepMonitor(run.config.logging, settings.max_steps, state.model, state.parallel, state.master_weights)

        record.clear()
        copies = [noised_batch.pin_memory().to(CUDA) for noised_batch in batch.noised_batches]
        batch = replace(batch, loaded=replace(batch.loaded, noised_batches=copies))
        with monitor.step(settings.max_steps):
            train_step(state, run.loader, batch, settings, monitor)
    return record


@pytest.mark.parametrize("name", RUNS)
def test_a_step_does_not_wait_for_the_gpu(name: str, train_config: TrainConfig, tmp_path: Path) -> None:
    record = record_step(train_config, tmp_path / "run", **RUNS[name])
    assert not record.waits
    products = [launch for launch in record.launches if launch.is_backward and launch.name == "mm"]
    assert len(products) == 2 * 7 and {launch.outputs[0].dtype for launch in products} == {torch.bfloat16}


def test_launches_of_a_step(train_config: TrainConfig, tmp_path: Path) -> None:
    """Budgets for each layer of the first step and of its backward, and for the rest of the step."""
    records = [record_step(train_config, tmp_path / str(depth), model={"num_hidden_layers": depth}) for depth in (2, 3)]
    counts = [len(record.launches) for record in records]
    counts_of_backward = [record.count(of_backward=True).total() for record in records]
    per_layer, per_layer_of_backward = counts[1] - counts[0], counts_of_backward[1] - counts_of_backward[0]
    assert per_layer <= 124 and counts[0] - 2 * per_layer <= 212
    assert per_layer_of_backward <= 48 and counts_of_backward[0] - 2 * per_layer_of_backward <= 13


def test_recomputed_activations(train_config: TrainConfig, tmp_path: Path) -> None:
    """In each of two micro-batches the backward of the layer multiplies twice for each of 7 projections, and once more
    for those that are recomputed, all but the last. The head's gradients are computed by the forward."""
    changes: dict[str, Any] = {"training": {"micro_batch_size": 2}, "runtime": {"activation_checkpointing": "full"}}
    record = record_step(train_config, tmp_path / "run", **changes)
    counts = record.count(of_backward=True)
    assert not record.waits
    assert counts["mm"] == 2 * (2 * 7 + 6)
    assert counts[FUSED_ATTENTION] == counts[FUSED_ATTENTION + BACKWARD] == 2


def test_recomputed_experts(train_config: TrainConfig, tmp_path: Path) -> None:
    """The backward reads the number of tokens of each of 4 experts again, which is one copy."""
    model = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    with even_experts():
        record = record_step(train_config, tmp_path / "run", model=model, runtime={"activation_checkpointing": "full"})
    assert record.waits == {"diffusionlm/models/moe.py:from_experts": 2 * 4}
