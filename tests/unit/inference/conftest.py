"""Tiny models for decoding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from config.model import ModelConfig
from diffusionlm.models.init import init_weights
from diffusionlm.models.transformer import Transformer


@pytest.fixture(scope="session")
def model() -> Transformer:
    """Two layers in fp64, of 23 tokens: 22 is the mask, 21 the end of text. No weight at its default."""
    torch.set_num_threads(1)
    config = ModelConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        max_position_embeddings=40,
        vocab_size=23,
        mask_token_id=22,
        eos_token_id=21,
    )
    model = Transformer(config)
    init_weights(model, seed=0)
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=rng))
    return model.double().eval()


MakeLike = Callable[..., Transformer]


@pytest.fixture(scope="session")
def like(model: Transformer) -> MakeLike:
    """Makes models of the same weights under another config."""

    def make(**changes: Any) -> Transformer:
        other = Transformer(model.config.model_copy(update=changes))
        other.load_state_dict(model.state_dict())
        return other.double().eval()

    return make


@pytest.fixture(scope="session")
def blocks(like: MakeLike) -> Transformer:
    return like(block_length=4)


@pytest.fixture(scope="session")
def shifted_blocks(like: MakeLike) -> Transformer:
    return like(block_length=4, logit_alignment="shifted")
