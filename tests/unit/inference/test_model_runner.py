"""Ranges around the forwards of decoding and judging; with NVTX off there are none, and answers are the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from config.generation import GenerationConfig
from diffusionlm.evaluation.nelbo import nelbo
from diffusionlm.evaluation.sampler_likelihood import sampler_likelihood
from diffusionlm.inference.generate import generate, infill
from diffusionlm.models.transformer import Transformer
from profiling import nvtx

PREFILL, FORWARD = "decoding: prefill", "decoding: forward"


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What torch.cuda.nvtx would be told, with CUDA."""
    begun: list[str] = []

    class Calls:
        def range_push(self, name: str) -> int:
            begun.append(name)
            return 0

        def range_pop(self) -> int:
            return -2

    monkeypatch.setenv(nvtx.NVTX_VARIABLE, "coarse")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "nvtx", Calls())
    return begun


def settings(**values: Any) -> GenerationConfig:
    common = {"max_new_tokens": 8, "block_length": 4, "denoising_steps": 2, "stop_token_ids": ()}
    return GenerationConfig.model_validate(common | values)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"cache": "none"}, [FORWARD] * 4),
        ({"cache": "prefix"}, [PREFILL, FORWARD] * 2),
        ({"cache": "dual"}, [PREFILL, FORWARD] * 2),
        ({"cache": "block", "attention": "block_causal"}, [PREFILL, FORWARD, FORWARD, FORWARD]),
    ],
    ids=["none", "prefix", "dual", "block"],
)
def test_each_forward_of_decoding(
    values: dict[str, Any], expected: list[str], model: Transformer, ranges: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[1, 2, 3, 4], [6, 7, 8, 9]]
    with_ranges = generate(model, prompts, settings(**values))
    assert ranges == expected
    monkeypatch.delenv(nvtx.NVTX_VARIABLE)
    assert generate(model, prompts, settings(**values)) == with_ranges
    assert len(ranges) == len(expected)


def test_each_forward_of_infilling_and_of_a_bound(model: Transformer, ranges: list[str]) -> None:
    infill(model, [[1, 22, 22, 3]], GenerationConfig())
    assert ranges == [FORWARD] * 2
    ranges.clear()
    tokens_BL = torch.tensor([[1, 2, 3, 4]])
    nelbo(model, tokens_BL, num_mc_samples=2)
    assert ranges == ["likelihood: forward"] * 2
    ranges.clear()
    sampler_likelihood(model, tokens_BL, config=settings(denoising_steps=4))
    assert ranges == ["likelihood: forward"] * 4
