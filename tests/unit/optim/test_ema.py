"""The weight average against the recursion written out; master weights lose nothing of float32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from config.training.optimizer import MuonConfig
from diffusionlm.models.transformer import Transformer
from diffusionlm.optim import ema
from diffusionlm.optim.build import build_optimizers
from diffusionlm.optim.chunks import split_by_elements
from diffusionlm.optim.ema import WeightAverage
from diffusionlm.optim.master_weights import MasterWeights, join_float32, select_block_matrices, split_float32
from tests.conftest import MakeModel


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recursion_with_warm_up(tiny_model: MakeModel, dtype: torch.dtype) -> None:
    model = tiny_model(dtype)
    average = WeightAverage(model, decay=0.3)
    name, parameter = next(iter(model.named_parameters()))
    expected = parameter.detach().double().clone()
    for n in range(1, 8):
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight))
        average.update()
        decay = min(0.3, (1 + n) / (10 + n))
        expected = decay * expected + (1 - decay) * parameter.detach().double()
    assert average.num_updates == 7
    assert average.averages[name].dtype == torch.float32
    torch.testing.assert_close(average.averages[name].double(), expected, rtol=1e-5, atol=1e-5)


def test_applied_puts_the_weights_back(tiny_model: MakeModel) -> None:
    model = tiny_model()
    average = WeightAverage(model, decay=0.9)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    live = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    addresses = [parameter.data_ptr() for parameter in model.parameters()]

    def fail_inside() -> None:
        with average.use_averages():
            for name, parameter in model.named_parameters():
                assert torch.equal(parameter, before[name])
            assert model.lm_head.weight is model.model.embed_tokens.weight
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail_inside()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, live[name])
    assert addresses == [parameter.data_ptr() for parameter in model.parameters()], "optimizers hold these tensors"


def test_parameters_together_move_as_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(split_by_elements([torch.empty(size) for size in (20, 30, 60, 10, 50)], 50)) == [
        slice(0, 2),
        slice(2, 3),
        slice(3, 4),
        slice(4, 5),
    ]
    monkeypatch.setattr(ema, "split_by_elements", lambda tensors: split_by_elements(tensors, 50))
    starts, ends = ([torch.randn(size, dtype=torch.float64) for size in (20, 30, 60, 10, 50)] for _ in range(2))
    expected = [start.lerp(end, 0.3) for start, end in zip(starts, ends, strict=True)]
    ema.lerp_together(starts, ends, torch.tensor(0.3, dtype=torch.float64))
    for start, other in zip(starts, expected, strict=True):
        torch.testing.assert_close(start, other, rtol=1e-14, atol=1e-14)
    same = [start.clone() for start in starts]
    ema.lerp_together(same, ends, torch.tensor(0.0, dtype=torch.float64))
    assert all(map(torch.equal, same, starts)), "a skipped step changes no bit"


def test_skipped_update_changes_neither_average_nor_count(tiny_model: MakeModel) -> None:
    models = [tiny_model(), tiny_model()]
    averages = [WeightAverage(model, decay=0.9) for model in models]
    for step, is_skipped in enumerate((True, False, True, False)):
        for model, average in zip(models, averages, strict=True):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.1 * (not is_skipped) * (step + 1))
            if average is averages[0]:
                average.update(torch.tensor(is_skipped))
            elif not is_skipped:
                average.update()
    assert averages[0].num_updates == averages[1].num_updates == 2
    for name, value in averages[1].averages.items():
        assert torch.equal(averages[0].averages[name], value), name


def test_restored_average_continues_from_its_count(tiny_model: MakeModel) -> None:
    models = [tiny_model(), tiny_model()]
    averages = [WeightAverage(model, decay=0.9) for model in models]
    for average in averages:
        average.update()
    restored = WeightAverage(models[1], decay=0.9)
    restored.restore(averages[0].averages, averages[0].num_updates)
    for model in models:
        torch.nn.init.ones_(model.lm_head.weight)
    averages[0].update()
    restored.update()
    assert restored.num_updates == 2
    for name, value in averages[0].averages.items():
        assert torch.equal(restored.averages[name], value), name


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
