"""The errors of approximate caches, where they are known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from benchmarking.cache_error import measure
from config.generation import GenerationConfig
from diffusionlm.models.transformer import Transformer

PROMPTS = [[1, 2, 3], [4, 5]]


@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_errors(cache: str, tiny_model: Callable[..., Transformer]) -> None:
    model = tiny_model(torch.float64).eval()
    options = {"max_new_tokens": 8, "block_length": 4, "cache": cache, "stop_token_ids": ()}
    whole = measure(model, PROMPTS, GenerationConfig.model_validate({**options, "denoising_steps": 1}))
    # The only forward of each block reads the whole text.
    assert whole.kl == pytest.approx(0.0, abs=1e-12)
    assert (whole.same_best, whole.same_tokens, whole.read) == (1.0, 1.0, 1.0)
    found = measure(model, PROMPTS, GenerationConfig.model_validate({**options, "denoising_steps": 4}))
    assert found.kl > 1e-9
    assert found.same_best <= 1.0
    # Of four forwards of a block, three read the block, or the text from it on.
    later = [4, 4] if cache == "dual" else [8, 4]
    expected = sum((length + 3 * part) / length for length in (11, 10) for part in later)
    assert found.read == pytest.approx(expected / 16)
