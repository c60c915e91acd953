"""A model's loss with `LossInputs` against its logits and F.cross_entropy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from diffusionlm.kernels.cross_entropy import LossInputs, linear_cross_entropy
from diffusionlm.models.patterns import Bidirectional
from diffusionlm.models.transformer import Transformer
from tests.conftest import MakeModel

TOKENS = torch.randint(0, 18, (20, 12), generator=torch.Generator().manual_seed(0))
POSITIONS = torch.arange(0, 240, 3)
TARGETS = torch.randint(0, 18, (80,), generator=torch.Generator().manual_seed(1))
WEIGHTS = torch.rand(80, generator=torch.Generator().manual_seed(2)) * 3
WEIGHTS[::7] = 0.0


def compute_loss(model: Transformer, **options: float) -> tuple[torch.Tensor, ...]:
    """Sum, likelihood of each target and gradients."""
    loss_inputs = LossInputs(TARGETS, WEIGHTS, excluded_token=18, **options)
    output = model(TOKENS, pattern=Bidirectional(), output_positions=POSITIONS, loss_inputs=loss_inputs)
    return output.loss_sum, output.nll_N, *torch.autograd.grad(output.loss_sum, list(model.parameters()))


def expect_loss(model: Transformer, smoothing: float = 0.0, z_loss: float = 0.0) -> tuple[torch.Tensor, ...]:
    """The same from the logits; of the token 18 there are none."""
    logits = model(TOKENS, pattern=Bidirectional()).flatten(0, 1)[POSITIONS][:, :18]
    nll_N = F.cross_entropy(logits, TARGETS, reduction="none")
    loss = F.cross_entropy(logits, TARGETS, reduction="none", label_smoothing=smoothing)
    total = ((loss + z_loss * logits.logsumexp(-1).square()) * WEIGHTS).sum()
    return total, nll_N, *torch.autograd.grad(total, list(model.parameters()))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("softcap", "smoothing", "z_loss"), [(None, 0.0, 0.0), (4.0, 0.2, 0.03)], ids=["plain", "all options"]
)
def test_the_loss_is_that_of_the_logits(
    tiny_model: MakeModel, softcap: float | None, smoothing: float, z_loss: float, tied: bool
) -> None:
    model = tiny_model(torch.float64, final_logit_softcapping=softcap, tie_word_embeddings=tied)
    ours = compute_loss(model, label_smoothing=smoothing, z_loss=z_loss)
    torch.testing.assert_close(ours, expect_loss(model, smoothing, z_loss), rtol=1e-8, atol=1e-10)
    assert not ours[1].requires_grad


def test_bfloat16_autocast_is_within_its_precision(tiny_model: MakeModel) -> None:
    model = tiny_model(tie_word_embeddings=False, scale=0.1)
    _, expected_nll, *theirs = expect_loss(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, nll_N, *ours = compute_loss(model)
    torch.testing.assert_close(nll_N, expected_nll, rtol=0.05, atol=0.05)
    for our, their in zip(ours, theirs, strict=True):
        assert our.dtype == torch.float32
        assert F.cosine_similarity(our.flatten(), their.flatten(), dim=0) > 0.99


@pytest.mark.parametrize(("is_tied", "expected"), [(False, [1, 2, 2]), (True, [2, 3, 3])], ids=["untied", "tied"])
def test_memory_of_the_gradients_of_the_head(is_tied: bool, expected: list[int]) -> None:
    """Tensors of the size of the head, beside its weights, in each of three micro-batches. The gradient that the
    forward makes becomes that of the parameter without a copy; a later micro-batch has one to add, and a tied embedding
    one more. All are added in place."""
    vocab, width = 5000, 64
    head = torch.nn.Parameter(torch.randn(vocab, width, generator=torch.Generator().manual_seed(0)))
    counts = []
    for micro_batch in range(3):
        tokens = torch.arange(4) + micro_batch
        live_bytes = peak = 0 if head.grad is None else head.grad.nbytes
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            hidden = torch.tanh(F.embedding(tokens, head) if is_tied else torch.ones(4, width, requires_grad=True))
            loss_inputs = LossInputs(tokens, torch.ones(4, dtype=torch.float64))
            linear_cross_entropy(hidden, head, loss_inputs).loss_sum.backward()
        timeline: Any = profiler.profiler  # the public events are not in the order of allocations
        for event in timeline.kineto_results.events():
            if event.name() == "[memory]":
                live_bytes += event.nbytes()
                peak = max(peak, live_bytes)
        assert peak % head.nbytes < head.nbytes // 4, "logits and hidden states are small"
        counts.append(peak // head.nbytes)
    assert counts == expected
