"""Initial weights follow the table in init.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from config.model import ModelConfig
from diffusionlm.models.init import init_weights
from diffusionlm.models.transformer import Transformer
from tests.conftest import MakeConfig

WIDE = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 32, "vocab_size": 300, "mask_token_id": 299}
EXPERTS = {"num_experts": 20, "num_experts_per_tok": 2, "moe_intermediate_size": 80}


def build(config: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    model = Transformer(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    init_weights(model, seed)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("options", [{"tie_word_embeddings": True}, {"tie_word_embeddings": False}, EXPERTS], ids=str)
def test_table(make_config: MakeConfig, options: dict[str, Any]) -> None:
    config = make_config(**WIDE, **options, attention_bias=True, initializer_range=0.07)
    for name, weight in build(config).items():
        kind = name.removeprefix("model.").removesuffix(".weight").rpartition(".")[2]
        if name.endswith("norm.weight"):
            assert (weight == 1).all(), name
        elif name.endswith(".bias") or kind in ("o_proj", "down_proj"):
            assert (weight == 0).all(), name
        else:
            std = 0.07 if kind in ("embed_tokens", "lm_head") else weight.shape[1] ** -0.5
            assert weight.std().item() == pytest.approx(std, rel=0.06), name
            assert abs(weight.mean().item()) < 5 * std / weight.numel() ** 0.5, name


def test_keyed_by_seed_and_name(make_config: MakeConfig) -> None:
    two, again, other = build(make_config()), build(make_config()), build(make_config(), seed=1)
    three = build(make_config(num_hidden_layers=3))
    for name, weight in two.items():
        assert torch.equal(weight, again[name])
        assert torch.equal(weight, three[name]), f"{name} changed with a layer that it is not in"
    random = [name for name, weight in two.items() if len(weight.unique()) > 1]
    assert all(not torch.equal(two[name], other[name]) for name in random)
    assert not torch.equal(two["model.layers.0.mlp.up_proj.weight"], two["model.layers.1.mlp.up_proj.weight"])
    assert not torch.equal(two["model.layers.0.mlp.up_proj.weight"], two["model.layers.0.mlp.gate_proj.weight"])
