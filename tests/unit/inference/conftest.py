"""Tiny models for decoding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from diffusionlm.models.transformer import Transformer
from tests.conftest import MakeModel

MakeLike = Callable[..., Transformer]


@pytest.fixture(scope="session")
def like(tiny_model: MakeModel) -> MakeLike:
    """Makes models of the same weights in fp64, of 23 tokens: 22 is the mask, 21 the end of text."""
    ids = {"mask_token_id": 22, "eos_token_id": 21, "pad_token_id": None}

    def make(**changes: Any) -> Transformer:
        shape = {"vocab_size": 23, "max_position_embeddings": 40, **ids, **changes}
        return tiny_model(torch.float64, **shape).eval()

    return make


@pytest.fixture(scope="session")
def model(like: MakeLike) -> Transformer:
    return like()


@pytest.fixture(scope="session")
def blocks(like: MakeLike) -> Transformer:
    return like(block_length=4)


@pytest.fixture(scope="session")
def shifted_blocks(like: MakeLike) -> Transformer:
    return like(block_length=4, logit_alignment="shifted")
