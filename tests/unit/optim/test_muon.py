"""Muon against its definition by singular values and against torch's; Lion against a transcription of its algorithm."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diffusionlm.optim import muon
from diffusionlm.optim.lion import Lion
from diffusionlm.optim.muon import (
    COEFFICIENTS,
    Muon,
    group_into_stacks,
    orthogonalize,
    select_product_dtype,
)

SHAPES = [(6, 6), (12, 5), (5, 12), (1, 7), (7, 1)]


def by_singular_values(matrix: Tensor) -> Tensor:
    """The quintic applied five times to each singular value of the matrix, whose Frobenius norm is made one."""
    a, b, c = COEFFICIENTS
    left, values, right = torch.linalg.svd(matrix / matrix.norm(), full_matrices=False)
    for _ in range(5):
        values = a * values + b * values**3 + c * values**5
    return left @ values.diag() @ right


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_singular_values_are_moved_by_the_polynomial(shape: tuple[int, int]) -> None:
    stack = torch.randn(3, *shape, dtype=torch.float64)
    expected = torch.stack([by_singular_values(matrix) for matrix in stack])
    torch.testing.assert_close(orthogonalize(stack, torch.float64), expected, rtol=0, atol=1e-10)
    assert orthogonalize(stack).dtype == torch.bfloat16
    assert float((orthogonalize(stack) - expected).norm()) < 0.05 * float(expected.norm())
    torch.testing.assert_close(orthogonalize(stack * 1e-4, torch.float64), expected, rtol=0, atol=1e-9)


def test_orthogonalize_is_pure_and_works_matrix_by_matrix() -> None:
    stack = torch.randn(5, 8, 16)
    before = stack.clone()
    whole = orthogonalize(stack)
    assert torch.equal(stack, before)
    for size in (1, 2):
        parts = torch.cat([orthogonalize(part) for part in stack.split(size)])
        torch.testing.assert_close(parts, whole, rtol=0, atol=0.02)
    assert torch.equal(orthogonalize(torch.zeros(2, 3, 4)), torch.zeros(2, 3, 4, dtype=torch.bfloat16))


def make_parameters(shapes: list[tuple[int, int]]) -> list[nn.Parameter]:
    torch.manual_seed(1)
    return [nn.Parameter(torch.randn(shape)) for shape in shapes]


def give_gradients(parameters: list[nn.Parameter], step: int) -> None:
    torch.manual_seed(100 + step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape)


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_updates_are_those_of_torch(decay: float) -> None:
    """To a hundredth of their length: a processor may round products of stacks otherwise than those of matrices."""
    shapes = [(24, 24), (40, 24), (24, 40), (24, 24), (40, 24), (3, 50)]
    ours, theirs, start = make_parameters(shapes), make_parameters(shapes), make_parameters(shapes)
    settings: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "weight_decay": decay}
    one, other = (
        Muon(ours, **settings),
        torch.optim.Muon(theirs, **settings, adjust_lr_fn="match_rms_adamw"),
    )
    for step in range(4):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        one.param_groups[0]["lr"] = other.param_groups[0]["lr"] = 0.05 / (1 + step)
        one.step()
        other.step()
        for our, their, begin in zip(ours, theirs, start, strict=True):
            assert float((our - their).detach().norm()) <= 0.01 * float((their - begin).detach().norm())
            torch.testing.assert_close(one.state[our]["momentum_buffer"], other.state[their]["momentum_buffer"])


def test_float32_products_give_the_exact_update() -> None:
    [parameter] = make_parameters([(6, 4)])
    begin = parameter.detach().clone()
    give_gradients([parameter], 0)
    assert parameter.grad is not None
    gradient = parameter.grad.clone()
    Muon([parameter], lr=0.1, momentum=0.8, weight_decay=0.5, dtype=torch.float32).step()
    # The momentum starts from zero: 0.2 g, and Nesterov looks ahead to 0.2 g + 0.8 * 0.2 g, along g.
    expected = begin * (1 - 0.1 * 0.5) - 0.1 * 0.2 * math.sqrt(6) * by_singular_values(gradient)
    torch.testing.assert_close(parameter.detach(), expected, rtol=0, atol=1e-5)


def test_parameter_without_gradient_is_unchanged() -> None:
    parameters = make_parameters([(4, 4)] * 3)
    before = [parameter.detach().clone() for parameter in parameters]
    give_gradients(parameters, 0)
    parameters[1].grad = None
    optimizer = Muon(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)
    optimizer.step()
    changed = [not torch.equal(parameter, old) for parameter, old in zip(parameters, before, strict=True)]
    assert changed == [True, False, True] and set(optimizer.state) == {parameters[0], parameters[2]}


def test_matrices_of_equal_shape_are_orthogonalized_in_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """All experts of a mixture in one go, up to the size of a stack."""
    shapes: list[torch.Size] = []

    def spy(stack: Tensor, dtype: torch.dtype) -> Tensor:
        shapes.append(stack.shape)
        return orthogonalize(stack, dtype)

    monkeypatch.setattr(muon, "orthogonalize", spy)
    parameters = make_parameters([(8, 4), (4, 8), (8, 4), (8, 4), (8, 4), (8, 4)])
    give_gradients(parameters, 0)
    Muon(parameters, lr=0.1, momentum=0.9, weight_decay=0.1).step()
    assert shapes == [(5, 8, 4), (1, 4, 8)]
    monkeypatch.setitem(muon.MAX_STACK_ELEMENTS, "cpu", 70)
    assert [len(stack) for stack in group_into_stacks(list(parameters))] == [2, 2, 1, 1]
    monkeypatch.setitem(muon.MAX_STACK_ELEMENTS, "cpu", 1)
    assert [len(stack) for stack in group_into_stacks(list(parameters))] == [1] * 6


@pytest.mark.parametrize("shape", [(4,), (2, 3, 4)])
def test_only_matrices(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="matrices"):
        Muon([nn.Parameter(torch.zeros(shape))], lr=0.1, momentum=0.9, weight_decay=0.1)


def test_products_are_bfloat16_where_the_processor_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert select_product_dtype("float32", cpu) == torch.float32
    assert select_product_dtype("bfloat16", cpu) == torch.bfloat16
    for is_native, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(muon, "has_native_bfloat16", lambda device_type, is_native=is_native: is_native)
        assert select_product_dtype("auto", cpu) == dtype


def transcribed(weight: float, gradients: list[float], rates: list[float], betas: tuple[float, float]) -> list[float]:
    """Algorithm 2 of Chen et al. 2023 with decay 0.3: the weight after the last step, and the moment."""
    moment, (first, second) = 0.0, betas
    for gradient, rate in zip(gradients, rates, strict=True):
        update = first * moment + (1 - first) * gradient
        sign = math.copysign(1.0, update) if update else 0.0
        weight = weight - rate * (sign + 0.3 * weight)
        moment = second * moment + (1 - second) * gradient
    return [weight, moment]


@pytest.mark.parametrize("betas", [(0.9, 0.99), (0.5, 0.2)])
def test_updates_are_those_of_the_paper(betas: tuple[float, float]) -> None:
    steps, rates = 5, [0.1, 0.2, 0.05, 0.1, 0.01]
    gradients = torch.randn(steps, 3, 4, dtype=torch.float64)
    gradients[:, 0, 0] = 0.0
    start = torch.randn(3, 4, dtype=torch.float64)
    parameter = nn.Parameter(start.clone())
    optimizer = Lion([parameter], lr=1.0, betas=betas, weight_decay=0.3)
    for gradient, rate in zip(gradients, rates, strict=True):
        parameter.grad = gradient.clone()
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    weights, moments = parameter.detach().tolist(), optimizer.state[parameter]["exp_avg"].tolist()
    for row in range(3):
        for column in range(4):
            expected = transcribed(float(start[row, column]), gradients[:, row, column].tolist(), rates, betas)
            assert [weights[row][column], moments[row][column]] == pytest.approx(expected, abs=1e-12)


def test_groups_have_their_own_settings_and_gradients_may_be_missing() -> None:
    one, two, three = (nn.Parameter(torch.ones(2)) for _ in range(3))
    one.grad, two.grad = torch.tensor([1.0, -1.0]), torch.tensor([2.0, 0.0])
    groups: list[dict[str, Any]] = [{"params": [one, three]}, {"params": [two], "lr": 0.5, "weight_decay": 1.0}]
    optimizer = Lion(groups, lr=0.1, betas=(0.9, 0.99), weight_decay=0.0)
    optimizer.step()
    torch.testing.assert_close(one.detach(), torch.tensor([0.9, 1.1]))
    torch.testing.assert_close(two.detach(), torch.tensor([0.0, 0.5]))
    assert torch.equal(three, torch.ones(2)) and three not in optimizer.state
