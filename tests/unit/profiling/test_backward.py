"""Backward passes in Python, against those of torch's engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from diffusionlm.kernels.cross_entropy import linear_cross_entropy
from diffusionlm.kernels.loss_types import LossInputs
from diffusionlm.models.patterns import Causal
from diffusionlm.training.block_wrapping import checkpoint_activations
from tests.conftest import MakeModel
from tests.python_backward import python_backward

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@pytest.mark.parametrize(
    ("mode", "shape"),
    [("none", {}), ("full", {"tie_word_embeddings": True}), ("selective", EXPERTS)],
    ids=["nothing recomputed", "full", "selective"],
)
def test_gradients_of_a_model(mode: Any, shape: dict[str, Any], tiny_model: MakeModel) -> None:
    """They equal those of torch's engine bit for bit, added over two micro-batches."""
    model = tiny_model(**shape)
    checkpoint_activations(model, mode)
    tokens_BL, positions_N = torch.arange(16).view(2, 8), torch.arange(0, 16, 2)
    inputs = LossInputs(torch.arange(8), torch.ones(8), load_balancing_weight=0.1)

    def differentiate() -> dict[str, Tensor]:
        model.zero_grad()
        for shift in (1, 2):
            with torch.autocast("cpu", torch.bfloat16):
                output = model(tokens_BL + shift, pattern=Causal(), output_positions=positions_N, loss_inputs=inputs)
            output.total_loss.backward()
        return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}

    expected = differentiate()
    with python_backward():
        gradients = differentiate()
    assert expected and gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, expected[name]) and gradient.stride() == expected[name].stride(), name


class _Split(torch.autograd.Function):
    """Twice and thrice a tensor. Its backward receives zeros for an output that is not used."""

    @staticmethod
    def forward(ctx: Any, factor: float, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return factor * x, 3 * y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, 2 * grads[0] + grads[1], 3 * grads[1]


def differentiate_inputs() -> list[Tensor | None]:
    x, y, unused = (torch.arange(1.0, 4.0, requires_grad=True) for _ in range(3))
    hooked: list[Tensor] = []
    twice, _ = _Split.apply(2.0, x, y)
    z = twice * x + y.view(1, 3).half().float().sum()
    gradients = torch.autograd.grad(z.sum(), (y, twice, unused), retain_graph=True, allow_unused=True)
    assert x.grad is None
    y.register_post_accumulate_grad_hook(lambda leaf: hooked.append(leaf.grad.clone()))
    for _ in range(2):
        torch.autograd.backward([z, x + y], [torch.ones(3), torch.arange(3.0)], retain_graph=True)
    return [*gradients, x.grad, y.grad, unused.grad, *hooked]


def test_gradients_of_inputs() -> None:
    """Some inputs only; several outputs; leaves that share a gradient; hooks of leaves."""
    expected = differentiate_inputs()
    with python_backward():
        gradients = differentiate_inputs()
    assert len(expected) == 8
    for gradient, other in zip(gradients, expected, strict=True):
        assert (gradient is None and other is None) or torch.equal(gradient, other)  # type: ignore[arg-type]


def test_leaves_share_no_gradient() -> None:
    x, y = (torch.ones(3, requires_grad=True) for _ in range(2))
    with python_backward():
        (x + y).sum().backward()
    x.grad.zero_()  # type: ignore[union-attr]
    assert y.grad is not None and y.grad.tolist() == [1.0, 1.0, 1.0]


def test_saved_tensors_are_kept_for_another_pass() -> None:
    """The head's gradients are scaled in place by the last pass only."""
    hidden, head = torch.ones(3, 4, requires_grad=True), torch.ones(5, 4, requires_grad=True)
    loss = linear_cross_entropy(hidden, head, LossInputs(torch.arange(3), torch.ones(3))).loss_sum
    with python_backward():
        first, second = (torch.autograd.grad(2 * loss, head, retain_graph=keeps) for keeps in (True, False))
    assert torch.equal(first[0], second[0])
