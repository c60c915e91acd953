"""Ranges around the forwards of decoding and judging; with NVTX off there are none, and answers are the same."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from config.generation import GenerationConfig
from diffusionlm.evaluation.nelbo import nelbo
from diffusionlm.evaluation.sampler_likelihood import sampler_likelihood
from diffusionlm.inference.generate import generate
from diffusionlm.models.transformer import Transformer
from profiling import nvtx


def test_each_forward_has_a_range(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    ranges: list[str] = []
    tokens_BL, config = torch.tensor([[1, 2, 3, 4]]), GenerationConfig(max_new_tokens=8, steps=4, stop_token_ids=())
    without_ranges = generate(model, tokens_BL.tolist(), config)
    monkeypatch.setenv(nvtx.NVTX_VARIABLE, "coarse")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "nvtx", SimpleNamespace(range_push=ranges.append, range_pop=lambda: None))
    assert generate(model, tokens_BL.tolist(), config) == without_ranges
    nelbo(model, tokens_BL, num_mc_samples=2)
    sampler_likelihood(model, tokens_BL, config=config)
    assert ranges == [*["decoding: forward"] * 4, *["likelihood: forward"] * 2, *["decoding: forward"] * 4]
