"""The errors of approximate caches in cases with known values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from benchmarking.cache_error import measure_errors
from config.generation import GenerationConfig
from diffusionlm.models.transformer import Transformer

PROMPTS = [[1, 2, 3], [4, 5]]


@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_errors(cache: str, tiny_model: Callable[..., Transformer]) -> None:
    model = tiny_model(torch.float64).eval()
    options = {"max_new_tokens": 8, "block_length": 4, "cache": cache, "stop_token_ids": ()}
    whole = measure_errors(model, PROMPTS, GenerationConfig.model_validate({**options, "denoising_steps": 1}))
    # The only forward of each block computes the whole canvas.
    assert whole.kl == pytest.approx(0.0, abs=1e-12)
    assert (whole.top1_agreement, whole.token_agreement, whole.input_share) == (1.0, 1.0, 1.0)
    errors = measure_errors(model, PROMPTS, GenerationConfig.model_validate({**options, "denoising_steps": 4}))
    assert errors.kl > 1e-9
    assert errors.top1_agreement <= 1.0
    # Three of the four forwards of a block compute only the block, or the canvas from the block on.
    later = [4, 4] if cache == "dual" else [8, 4]
    expected = sum((length + 3 * part) / length for length in (11, 10) for part in later)
    assert errors.input_share == pytest.approx(expected / 16)
