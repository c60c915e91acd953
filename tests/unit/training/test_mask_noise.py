"""Noise on the mask token's embedding: only there, keyed by the sequence, and gone afterwards."""

from __future__ import annotations

from collections.abc import Callable

import torch

from diffusionlm.models.transformer import Transformer
from diffusionlm.training.setup import add_mask_noise

MakeModel = Callable[..., Transformer]

MASK = 18


def test_noise_is_at_mask_tokens_of_the_noisy_half(tiny_model: MakeModel) -> None:
    model = tiny_model(torch.float64)
    tokens = torch.tensor([[1, MASK, 2, MASK, 1, MASK, 2, 3], [MASK] * 8])
    clean = model.model.embed_tokens(tokens)
    with add_mask_noise(model, 0.5, [7, 8], num_tokens=4):
        noisy = model.model.embed_tokens(tokens)
    is_noisy = (noisy != clean).any(-1)
    assert is_noisy.tolist() == [[False, True, False, True] + [False] * 4, [True] * 4 + [False] * 4]
    assert torch.equal(model.model.embed_tokens(tokens), clean), "no noise after the context"
    with add_mask_noise(model, 0.5, [8, 7], num_tokens=4):
        swapped = model.model.embed_tokens(tokens)
    noise, other = noisy - clean, swapped - clean
    torch.testing.assert_close(noise[1, [1, 3]], other[0, [1, 3]], msg="a sequence's noise is that of its seed")
    assert not torch.equal(noise[0, 1], noise[0, 3])


def test_standard_deviation(tiny_model: MakeModel) -> None:
    model, tokens = tiny_model(), torch.full((8, 200), MASK)
    with add_mask_noise(model, 0.25, range(8), num_tokens=200):
        noise = model.model.embed_tokens(tokens) - model.model.embed_tokens.weight[MASK]
    assert abs(noise.std().item() - 0.25) < 0.01 and abs(noise.mean().item()) < 0.01
