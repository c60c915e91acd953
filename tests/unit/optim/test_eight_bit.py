"""Moments of 8 bits: what is said where bitsandbytes is missing, and their state in checkpoints."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from config.training.optimizer import AdamWConfig, LionConfig, MuonConfig
from diffusionlm.models.transformer import Transformer
from diffusionlm.optim.build import Optimizers, build_optimizers
from tests.conftest import MakeModel

WIDE: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 64, "head_dim": 16}
"""Matrices of 4,096 numbers, which have 8 bits, and smaller ones, which have 32."""
KINDS: list[AdamWConfig | LionConfig | MuonConfig] = [
    AdamWConfig(kind="adamw8bit"),
    LionConfig(kind="lion8bit"),
    MuonConfig(rest=AdamWConfig(kind="adamw8bit", weight_decay=0.0)),
]


class AdamW8bit(torch.optim.Optimizer):
    """Stands for the package's, of which it has the arguments and the names, shapes and types of the state."""

    def __init__(self, params: Any, lr: float = 1e-3, min_8bit_size: int = 0, **defaults: Any) -> None:
        super().__init__(params, {"lr": lr, **defaults})
        self.smallest = min_8bit_size

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.update(parameter, self.state[parameter], group["lr"])

    def update(self, parameter: Tensor, state: dict[str, Any], rate: float) -> None:
        is_small = parameter.numel() < self.smallest
        numbers = (1,) if isinstance(self, Lion8bit) else (1, 2)
        if not state:
            state["step"] = 0
            for number in numbers:
                state[f"state{number}"] = torch.zeros_like(parameter, dtype=torch.float32 if is_small else torch.uint8)
                if not is_small:
                    state[f"qmap{number}"] = torch.linspace(-1, 1, 256)
                    state[f"absmax{number}"] = torch.zeros(-(-parameter.numel() // 256))
        assert isinstance(state["step"], int)
        state["step"] += 1
        for number in numbers:
            state[f"state{number}"] += state["step"]
        parameter -= rate * state["step"]


class Lion8bit(AdamW8bit):
    """The package's other one."""


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module: Any = ModuleType("bitsandbytes")
    module.optim = SimpleNamespace(AdamW8bit=AdamW8bit, Lion8bit=Lion8bit)
    monkeypatch.setitem(sys.modules, "bitsandbytes", module)
    return module


def named(model: Transformer) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters())


def train(model: Transformer, optimizers: Optimizers, steps: int) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizers.step(0.5)


def goes_on_after_a_checkpoint(
    config: AdamWConfig | LionConfig | MuonConfig, tiny_model: MakeModel, path: Path
) -> Optimizers:
    model = tiny_model(tie_word_embeddings=False, **WIDE)
    optimizers = build_optimizers(config, named(model))
    train(model, optimizers, 2)
    save_file(optimizers.state_dict(), path)
    again = tiny_model(tie_word_embeddings=False, **WIDE)
    again.load_state_dict(model.state_dict())
    restored = build_optimizers(config, named(again))
    restored.load_state_dict(load_file(path))
    train(model, optimizers, 2)
    train(again, restored, 2)
    for (name, one), other in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other), name
    one_state, other_state = optimizers.state_dict(), restored.state_dict()
    assert one_state.keys() == other_state.keys()
    assert all(torch.equal(one_state[name], other_state[name]) for name in one_state)
    return optimizers


@pytest.mark.parametrize("config", KINDS, ids=lambda config: config.kind)
@pytest.mark.usefixtures("package")
def test_restored_state_continues(
    config: AdamWConfig | LionConfig | MuonConfig, tiny_model: MakeModel, tmp_path: Path
) -> None:
    optimizers = goes_on_after_a_checkpoint(config, tiny_model, tmp_path / "o.safetensors")
    names = [[group["name"] for group in optimizer.param_groups] for optimizer in optimizers.optimizers]
    assert names == ([["hidden"]] if isinstance(config, MuonConfig) else []) + (
        [["head"], ["embed", "scalar"]] if isinstance(config, MuonConfig) else [["hidden", "head"], ["embed", "scalar"]]
    )
    state = optimizers.state_dict()
    if not isinstance(config, MuonConfig):
        moments = {"1", "2"} if isinstance(config, AdamWConfig) else {"1"}
        keys = {key.rpartition(".")[2] for key in state if "layers.0.mlp.up_proj" in key}
        assert keys == {"step"} | {f"{name}{number}" for name in ("state", "qmap", "absmax") for number in moments}
    with pytest.raises(ValueError, match="unexpected"):
        build_optimizers(AdamWConfig(), named(tiny_model(tie_word_embeddings=False, **WIDE))).load_state_dict(state)


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
@pytest.mark.parametrize("config", KINDS, ids=lambda config: config.kind)
def test_restored_state_continues_with_bitsandbytes(
    config: AdamWConfig | LionConfig | MuonConfig, tiny_model: MakeModel, tmp_path: Path
) -> None:
    goes_on_after_a_checkpoint(config, tiny_model, tmp_path / "o.safetensors")


@pytest.mark.parametrize("config", KINDS[:2], ids=lambda config: config.kind)
def test_a_missing_package_is_named(
    config: AdamWConfig | LionConfig, tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    plain = config.kind.removesuffix("8bit")
    with pytest.raises(ValueError, match=rf'needs the package bitsandbytes.*choose kind = "{plain}", or set fallback'):
        build_optimizers(config, named(tiny_model()))
    messages: list[str] = []
    optimizers = build_optimizers(config.model_copy(update={"fallback": True}), named(tiny_model()), messages.append)
    [text] = messages
    assert f'using kind = "{plain}"' in text
    expected = build_optimizers(type(config)(), named(tiny_model()))
    assert [type(optimizer) for optimizer in optimizers.optimizers] == [
        type(optimizer) for optimizer in expected.optimizers
    ]
    assert optimizers.learning_rates() == expected.learning_rates()


def test_a_package_that_cannot_update_here_is_named(
    package: ModuleType, tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Any) -> None:
        raise RuntimeError("no library for CUDA 9.9")

    monkeypatch.setattr(AdamW8bit, "step", fails)
    with pytest.raises(ValueError, match=r"does not work on cpu here .*no library for CUDA 9\.9"):
        build_optimizers(KINDS[0], named(tiny_model()))


@pytest.mark.usefixtures("package")
def test_cut_parameters_are_refused(tiny_model: MakeModel) -> None:
    """A block of numbers that share a scale may lie in two rows."""
    row_exchange: Any = object()
    with pytest.raises(ValueError, match=r'"fsdp" shards them: set parallel.strategy = "ddp", choose kind = "adamw"'):
        build_optimizers(KINDS[0], named(tiny_model()), row_exchange=row_exchange)
    messages: list[str] = []
    config = AdamWConfig(kind="adamw8bit", fallback=True)
    build_optimizers(config, named(tiny_model()), messages.append, row_exchange)
    assert "fallback = true" in messages[0]
