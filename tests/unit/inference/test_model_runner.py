"""Ranges around the forwards of decoding and judging; with NVTX off there are none, and answers are the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from config.generation import GenerationConfig
from diffusionlm.evaluation.nelbo import nelbo
from diffusionlm.evaluation.sampler_likelihood import sampler_likelihood
from diffusionlm.inference.generate import generate
from diffusionlm.models.transformer import Transformer
from profiling import nvtx

PREFILL, FORWARD = "decoding: prefill", "decoding: forward"


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What torch.cuda.nvtx would be told, with CUDA."""
    begun: list[str] = []
    monkeypatch.setenv(nvtx.NVTX_VARIABLE, "coarse")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "nvtx", SimpleNamespace(range_push=begun.append, range_pop=lambda: None))
    return begun


def settings(**values: Any) -> GenerationConfig:
    return GenerationConfig(**{"max_new_tokens": 8, "block_length": 4, "denoising_steps": 2, **values})


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"cache": "none"}, [FORWARD] * 4),
        ({"cache": "prefix"}, [PREFILL, FORWARD] * 2),
        ({"cache": "dual"}, [PREFILL, FORWARD] * 2),
        ({"cache": "block", "attention": "block_causal"}, [PREFILL, FORWARD, FORWARD, FORWARD]),
    ],
    ids=str,
)
def test_each_forward_of_decoding(
    values: dict[str, Any], expected: list[str], model: Transformer, ranges: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(stop_token_ids=(), **values)
    with_ranges = generate(model, [[1, 2, 3, 4], [6, 7, 8, 9]], config)
    assert ranges == expected
    monkeypatch.delenv(nvtx.NVTX_VARIABLE)
    assert generate(model, [[1, 2, 3, 4], [6, 7, 8, 9]], config) == with_ranges
    assert len(ranges) == len(expected)


def test_each_forward_of_a_bound(model: Transformer, ranges: list[str]) -> None:
    tokens_BL = torch.tensor([[1, 2, 3, 4]])
    nelbo(model, tokens_BL, num_mc_samples=2)
    sampler_likelihood(model, tokens_BL, config=settings(denoising_steps=4))
    assert ranges == ["likelihood: forward"] * 2 + [FORWARD] * 4
