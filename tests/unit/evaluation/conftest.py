"""Models of five tokens and a mask, in fp64, whose likelihoods can be enumerated."""

from __future__ import annotations

import pytest
import torch

from diffusionlm.models.transformer import Transformer
from tests.conftest import MakeModel
from tokenizer import Tokenizer

VOCAB, MASK = 6, 5


def token_ids(tokenizer: Tokenizer) -> dict[str, int | None]:
    """What a model's config has of its tokenizer."""
    eos = tokenizer.eos_token_id
    return {"mask_token_id": tokenizer.mask_token_id, "eos_token_id": eos, "pad_token_id": eos} | {
        "vocab_size": tokenizer.vocab_size
    }


def build(tiny_model: MakeModel, **changes: object) -> Transformer:
    values = {"vocab_size": VOCAB, "mask_token_id": MASK, "eos_token_id": 0, "pad_token_id": 0, **changes}
    return tiny_model(torch.float64, num_hidden_layers=1, scale=0.5, **values)


@pytest.fixture(scope="session")
def diffusion(tiny_model: MakeModel) -> Transformer:
    return build(tiny_model)


@pytest.fixture(scope="session")
def shifted(tiny_model: MakeModel) -> Transformer:
    return build(tiny_model, logit_alignment="shifted")


@pytest.fixture(scope="session")
def autoregressive(tiny_model: MakeModel) -> Transformer:
    return build(tiny_model, logit_alignment="shifted", mask_token_id=None, block_length=1)


@pytest.fixture(scope="session")
def models(diffusion: Transformer, shifted: Transformer, autoregressive: Transformer) -> dict[str, Transformer]:
    return {"diffusion": diffusion, "shifted": shifted, "autoregressive": autoregressive}
