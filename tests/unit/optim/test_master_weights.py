"""bfloat16 weights with float32 master weights lose nothing of float32."""

from __future__ import annotations

from collections.abc import Callable

import torch

from config.training.optimizer import MuonConfig
from diffusionlm.models.transformer import Transformer
from diffusionlm.optim.build import build_optimizers
from diffusionlm.optim.master_weights import MasterWeights, join_float32, select_block_matrices, split_float32


def test_splitting_loses_nothing() -> None:
    """All exponents and signs, the ends of all halves, infinities, NaNs and subnormals."""
    high = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32) << 16
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    bits = (high[:, None] | low).flatten()
    rounded, rest = split_float32(bits.view(torch.float32))
    assert rounded.dtype == torch.bfloat16
    assert rest.dtype == torch.int16
    assert torch.equal(join_float32(rounded, rest).view(torch.int32), bits)


def test_the_larger_part_is_the_nearest_bfloat16() -> None:
    numbers = torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * 3
    is_half = numbers.view(torch.int32) & 0xFFFF == 0x8000
    assert torch.equal(split_float32(numbers)[0][~is_half], numbers.bfloat16()[~is_half])
    half = torch.tensor([1.0 + 2**-8, -1.0 - 2**-8])  # between 1 and the next bfloat16
    assert torch.equal(split_float32(half)[0].float(), torch.tensor([1.0 + 2**-7, -1.0 - 2**-7]))


def test_equal_gradients_give_the_weights_of_float32_training(tiny_model: Callable[..., Transformer]) -> None:
    """Three steps of two micro-batches with gradients that are exact in bfloat16."""
    models = [tiny_model(), tiny_model()]
    optimizers = [build_optimizers(MuonConfig(), dict(model.named_parameters())) for model in models]
    master_weights = [MasterWeights({}), MasterWeights(select_block_matrices(models[1]))]
    rng = torch.Generator().manual_seed(0)
    for _ in range(3):
        for _ in range(2):
            gradients = [torch.randn(parameter.shape, generator=rng) for parameter in models[0].parameters()]
            for model, masters in zip(models, master_weights, strict=True):
                for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                    gradient = gradient.bfloat16().to(parameter.dtype)
                    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
                masters.accumulate_gradients()
        for optimizer, masters in zip(optimizers, master_weights, strict=True):
            with masters.as_float32():
                optimizer.step(1.0)
    expected, actual = (dict(model.named_parameters()) for model in models)
    dtypes = {name: parameter.dtype for name, parameter in actual.items()}
    assert dtypes["model.layers.0.mlp.up_proj.weight"] == torch.bfloat16
    assert {dtypes[name] for name in ("model.embed_tokens.weight", "model.norm.weight")} == {torch.float32}
    with master_weights[1].as_float32():
        assert all(torch.equal(expected[name], actual[name]) for name in expected)
    assert dtypes == {name: parameter.dtype for name, parameter in actual.items()}
    assert all(value.dtype == torch.float32 for value in optimizers[1].state_dict().values())
