"""Training on a GPU that computes nothing: the code that runs and steps take, and where the host waits for the GPU."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from config.load import load_config
from config.model import ModelConfig
from config.train import TrainConfig
from diffusionlm.models.patterns import Bidirectional
from diffusionlm.models.transformer import Transformer
from diffusionlm.training.loop import train
from diffusionlm.training.metrics import StepMonitor
from diffusionlm.training.run import build_train_state
from diffusionlm.training.signals import StopRequest
from diffusionlm.training.step import load_step_batch, train_step
from tests.conftest import MakeModel
from tests.fake_cuda import BACKWARD, FLEX_ATTENTION, FUSED_ATTENTION, LaunchRecord, even_experts, fake_cuda
from tests.preference_run import configure_preferences, write_preferences
from tests.tiny_run import build_changed_run, write_train_config

Sections = dict[str, dict[str, Any]]

ALLOWED_WAITS = {
    # at the start
    "diffusionlm/training/setup.py:build": "the weights are copied to the GPU",
    "diffusionlm/training/adapters.py:add_to": "weights are quantized on the GPU, one after the other",
    "diffusionlm/training/run.py:build_reference": "the reference of preferences is copied to the GPU",
    # in logged steps
    "diffusionlm/training/metrics.py:read": "loss, gradient norm and sums over scored positions of a step before",
    # in validations, which read each forward
    "diffusionlm/models/patterns.py:_map_tensors": "documents",
    "diffusionlm/diffusion/noised_batch.py:_map_forward_tensors": "inputs",
    "diffusionlm/evaluation/nelbo.py:compute_masked_nll": "losses",
    "diffusionlm/evaluation/validation.py:count_hits": "hits",
    # in samples
    "diffusionlm/inference/sampling/token_sampler.py:_to_arrays": "predictions: once in a round",
    # in checkpoints
    "diffusionlm/training/checkpointing/staging.py:copy": "all copies: once",
    "diffusionlm/optim/ema.py:num_updates": "number of updates of the averages",
}
"""Places where the host waits for the GPU, and for what."""
EXPERTS = "diffusionlm/models/moe.py:from_experts"
"""In each layer with experts: the number of tokens of each; again if the backward recomputes the layer."""
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ON_GPU: Sections = {
    "run": {"device": "cuda"},
    "training": {"max_steps": 4, "precision": "bfloat16"},
    "logging": {"every_steps": 2},
    "validation": {"every_steps": 2},
    "checkpoint": {"every_steps": 3},
    "runtime": {"compile": "none"},
}
RUNS: dict[str, Sections] = {
    "masked diffusion": {"training": {"ema_decay": 0.9}, "objective": {"mask_noise_steps": 2}},
    "block diffusion": {"objective": {"kind": "block_diffusion", "block_length": 4}},
    "infills": {"samples": {"every_steps": 2, "infills": ["the cat [MASK:2] on"]}},
    "experts": {"model": MOE},
    "recomputed activations": {
        "runtime": {"activation_checkpointing": "selective"},
        "training": {"micro_batch_size": 2},
    },
}


def merge(*parts: Sections) -> Sections:
    """Sections of a config; values of later parts replace those of earlier ones."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: {key: value for part in parts for key, value in part.get(name, {}).items()} for name in names}


def train_on_fake_gpu(config: TrainConfig) -> LaunchRecord:
    """Make a run as on a GPU."""
    with fake_cuda() as record, even_experts():
        result = train(config)
    assert result.summary is not None and result.step == config.training.max_steps
    assert record.count(of_backward=True)["mm"] >= 2 * config.training.max_steps
    return record


def assert_waits_are_allowed(record: LaunchRecord) -> None:
    unknown = set(record.waits) - set(ALLOWED_WAITS) - {EXPERTS}
    assert not unknown, f"the host waits for the GPU in {unknown}: remove the wait, or list it with its reason"


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_a_gpu(name: str, tmp_path: Path) -> None:
    """Prefetch, steps, metrics, validation and checkpoints; products have the precision of training."""
    sections = merge(ON_GPU, RUNS[name])
    record = train_on_fake_gpu(load_config(TrainConfig, write_train_config(tmp_path, "train", **sections)))
    assert_waits_are_allowed(record)
    assert (EXPERTS in record.waits) == (name == "experts")
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))


@pytest.mark.slow
def test_long_sequences_use_flex_attention(tmp_path: Path) -> None:
    """From 512 positions on, in training and validation, with one block mask for all layers."""
    block_diffusion = {"objective": {"kind": "block_diffusion", "block_length": 4}}
    model = {"model": {"max_position_embeddings": 512, "num_hidden_layers": 2}}
    sections = merge(ON_GPU, block_diffusion, model, {"validation": {"every_steps": 0}})
    record = train_on_fake_gpu(load_config(TrainConfig, write_train_config(tmp_path, "train", **sections)))
    assert_waits_are_allowed(record)
    launches = [launch for launch in record.launches if launch.name == FLEX_ATTENTION]
    assert launches and len(launches) % 2 == 0
    for first, last in zip(launches[::2], launches[1::2], strict=True):
        assert first.inputs[0].shape[-2:] == (1024, 16) and last.inputs[0].shape[-1] == 16
        assert first.inputs[0].dtype == torch.bfloat16
    assert record.count()["scaled_dot_product_attention"] == 0
    assert record.count()[FLEX_ATTENTION + BACKWARD] == 2 * sections["training"]["max_steps"]


@pytest.fixture
def bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stub of the package that quantizes weights, with the shapes of its results."""

    def quantize(weight: Tensor, *, blocksize: int, quant_type: str) -> tuple[Tensor, Tensor]:
        assert weight.is_cuda and quant_type == "nf4"
        return weight.new_empty(-(-weight.numel() // 2), 1, dtype=torch.uint8), weight.new_empty(weight.shape)

    functional = SimpleNamespace(quantize_4bit=quantize, dequantize_4bit=lambda packed, state: state)
    package = SimpleNamespace(functional=functional, __spec__=ModuleSpec("bitsandbytes", None))
    monkeypatch.setitem(sys.modules, "bitsandbytes", package)
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", functional)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "lora"),
    [({}, {}), ({}, {"base": "nf4"}), (MOE, {"targets": ["q_proj", "gate_proj", "up_proj", "down_proj"]})],
    ids=["LoRA", "QLoRA", "LoRA of experts"],
)
def test_adapters_on_a_gpu(model: dict[str, Any], lora: dict[str, Any], tmp_path: Path, bitsandbytes: None) -> None:
    on_cpu = merge(ON_GPU, {"run": {"device": "cpu"}, "model": model, "training": {"precision": "float32"}})
    train(
        load_config(TrainConfig, write_train_config(tmp_path, "base", **merge(on_cpu, {"training": {"max_steps": 1}})))
    )
    changes: Sections = {
        "run": {"directory": str(tmp_path / "adapted")},
        "model": {"init_from": str(tmp_path / "run")},
        "lora": {"rank": 2, **lora},
    }
    path = write_train_config(tmp_path, "adapted", **merge(ON_GPU, changes))
    record = train_on_fake_gpu(load_config(TrainConfig, path))
    assert_waits_are_allowed(record)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_preferences_on_a_gpu(loss: str, tmp_path: Path, tiny_model: MakeModel) -> None:
    write_preferences(tmp_path, tiny_model)
    sections = merge(ON_GPU, {"objective": {"loss": loss}})
    record = train_on_fake_gpu(configure_preferences(tmp_path, "preferences", **sections))
    assert_waits_are_allowed(record)


# Single steps

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
STEPS: dict[str, Sections] = {
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


@pytest.mark.parametrize("name", STEPS)
def test_a_step_does_not_wait_for_the_gpu(name: str, train_config: TrainConfig, tmp_path: Path) -> None:
    record = record_step(train_config, tmp_path / "run", **STEPS[name])
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
    with even_experts():
        record = record_step(train_config, tmp_path / "run", model=MOE, runtime={"activation_checkpointing": "full"})
    assert record.waits == {EXPERTS: 2 * 4}
