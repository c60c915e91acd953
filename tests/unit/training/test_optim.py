"""Groups are complete, and a restored optimizer goes on bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from config.optimizer import AdamW, Muon
from diffusionlm.models.patterns import Bidirectional
from diffusionlm.models.transformer import Transformer
from diffusionlm.training.optim import Optimizers, build_optimizers

MakeModel = Callable[..., Transformer]
CONFIGS = [AdamW(weight_decay=0.3), Muon(weight_decay=0.2, rest=AdamW(weight_decay=0.1))]


def train(model: Transformer, optimizers: Optimizers, steps: range) -> None:
    for step in steps:
        tokens = torch.randint(0, 19, (2, 7), generator=torch.Generator().manual_seed(step))
        model(tokens, pattern=Bidirectional()).pow(2).mean().backward()
        optimizers.step(1.0 / (1 + step))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.kind)
@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_is_in_one_group(config: AdamW | Muon, tied: bool, tiny_model: MakeModel) -> None:
    model = tiny_model(tie_word_embeddings=tied, attention_bias=True)
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    optimizers = build_optimizers(config, model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, tuple[str, float]] = {}
    for optimizer in optimizers.optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                assert names[id(parameter)] not in found
                found[names[id(parameter)]] = (group["name"], group["weight_decay"])
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert found.keys() == trained and "model.layers.0.mlp.up_proj.weight" not in found
    for name, (group_name, decay) in found.items():
        if name.endswith(("norm.weight", ".bias")):
            assert (group_name, decay) == ("scalar", 0.0), name
        elif name in ("model.embed_tokens.weight", "lm_head.weight"):
            assert (group_name, decay) == ("embed", 0.1 if isinstance(config, Muon) else 0.0), name
        else:
            assert (group_name, decay) == ("hidden", 0.2 if isinstance(config, Muon) else 0.3), name
    assert optimizers.learning_rates().keys() == {"hidden", "embed", "scalar"}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.kind)
def test_restored_optimizer_continues_bit_equal(config: AdamW | Muon, tiny_model: MakeModel, tmp_path: Path) -> None:
    model = tiny_model()
    optimizers = build_optimizers(config, model)
    train(model, optimizers, range(4))
    save_file(optimizers.state_dict(), tmp_path / "o.safetensors")
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    train(model, optimizers, range(4, 8))

    again = tiny_model(seed=5)
    with torch.no_grad():
        for name, parameter in again.named_parameters():
            parameter.copy_(weights[name])
    restored = build_optimizers(config, again)
    restored.load_state_dict(load_file(tmp_path / "o.safetensors"))
    train(again, restored, range(4, 8))
    for (name, one), other in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other), name
        assert not torch.equal(one, weights[name]), f"{name} was not trained"


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.kind)
def test_state_is_a_copy(config: AdamW | Muon, tiny_model: MakeModel) -> None:
    model = tiny_model()
    optimizers = build_optimizers(config, model)
    train(model, optimizers, range(2))
    state = optimizers.state_dict()
    kept = {name: value.clone() for name, value in state.items()}
    train(model, optimizers, range(2, 4))
    assert all(torch.equal(state[name], kept[name]) for name in kept)
    optimizers.load_state_dict(state)
    train(model, optimizers, range(2, 4))
    assert all(torch.equal(state[name], kept[name]) for name in kept), "training on changed the loaded checkpoint"


def changed(state: dict[str, torch.Tensor], change: str) -> dict[str, torch.Tensor]:
    name = next(key for key in state if key.endswith("exp_avg"))
    if change == "unknown":
        return {**state, "model.layers.9.mlp.up_proj.weight.exp_avg": torch.zeros(1)}
    if change == "missing":
        return {key: value for key, value in state.items() if key != name}
    return {**state, name: torch.zeros(3)}


@pytest.mark.parametrize("change", ["unknown", "missing", "misshapen"])
def test_state_that_does_not_fit_is_refused(change: str, tiny_model: MakeModel) -> None:
    """A parameter whose moments are lost starts anew without a word; one of another shape fails much later."""
    model = tiny_model()
    optimizers = build_optimizers(CONFIGS[0], model)
    train(model, optimizers, range(1))
    with pytest.raises(ValueError, match="exp_avg"):
        build_optimizers(CONFIGS[0], tiny_model()).load_state_dict(changed(optimizers.state_dict(), change))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.kind)
def test_factor_scales_the_full_rate_each_time(config: AdamW | Muon, tiny_model: MakeModel) -> None:
    optimizers = build_optimizers(config, tiny_model())
    full = optimizers.learning_rates()
    for factor in (0.5, 0.1, 1.0):
        optimizers.step(factor)
        assert optimizers.learning_rates() == pytest.approx({name: rate * factor for name, rate in full.items()})


def test_step_drops_the_gradients(tiny_model: MakeModel) -> None:
    model: Any = tiny_model()
    optimizers = build_optimizers(Muon(), model)
    train(model, optimizers, range(1))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_decay_without_gradient_signal(tiny_model: MakeModel) -> None:
    """AdamW's decay is decoupled: with zero gradients matrices shrink by lr * decay, the rest stays."""
    model = tiny_model()
    optimizers = build_optimizers(AdamW(learning_rate=0.1, weight_decay=0.5), model)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizers.step(0.5)
    for name, parameter in model.named_parameters():
        factor = 1 - 0.05 * 0.5 if ".layers." in name and parameter.dim() == 2 else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor)
