"""Likelihoods on a GPU that computes nothing: the host waits for it once in a forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from config.generation import GenerationConfig
from diffusionlm.evaluation.likelihood.scoring import OptionsRequest, conditional_likelihood
from diffusionlm.evaluation.nelbo import nelbo
from diffusionlm.evaluation.sampler_likelihood import greedy_matches, sampler_likelihood
from diffusionlm.models.transformer import Transformer
from tests.conftest import MakeModel
from tests.fake_cuda import fake_cuda

TOKENS = torch.arange(12).reshape(2, 6)
LIKELIHOODS: dict[str, tuple[Callable[[Transformer], object], str]] = {
    "answer": (
        lambda model: conditional_likelihood(model, [1, 2, 3], [4, 5, 6]),
        "evaluation/likelihood/copies.py:_read_logits",
    ),
    "answer in blocks": (
        lambda model: conditional_likelihood(model, [1, 2, 3], [4, 5, 6, 7, 8], block_length=4),
        "evaluation/likelihood/copies.py:_read_logits",
    ),
    "greedy": (
        lambda model: greedy_matches(model, [OptionsRequest((1, 2), ((3, 4, 5),))]),
        "inference/sampling/token_sampler.py:_to_arrays",
    ),
    "bound": (lambda model: nelbo(model, TOKENS, num_mc_samples=2), "evaluation/nelbo.py:compute_masked_nll"),
    "sampler": (
        lambda model: sampler_likelihood(model, TOKENS, config=GenerationConfig(block_length=3, denoising_steps=3)),
        "inference/sampling/token_sampler.py:_to_arrays",
    ),
}
"""Name -> call, and where the host reads its values."""


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_the_host_waits_once_in_a_forward(name: str, tiny_model: MakeModel) -> None:
    compute, place = LIKELIHOODS[name]
    forwards: list[Any] = []
    with fake_cuda() as record:
        model = tiny_model().to("cuda").eval()
        model.register_forward_hook(lambda *_: forwards.append(None))
        record.clear()
        compute(model)
    assert record.waits[f"diffusionlm/{place}"] == len(forwards)
