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


def test_saved_tensors_are_kept_for_another_pass() -> None:
    """The head's gradients are scaled in place by the last pass only."""
    hidden, head = torch.ones(3, 4, requires_grad=True), torch.ones(5, 4, requires_grad=True)
    loss = linear_cross_entropy(hidden, head, LossInputs(torch.arange(3), torch.ones(3))).loss_sum
    with python_backward():
        first, second = (torch.autograd.grad(2 * loss, head, retain_graph=keeps) for keeps in (True, False))
    assert torch.equal(first[0], second[0])
