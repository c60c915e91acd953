"""A model's loss with `LossInputs` against its logits and F.cross_entropy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from diffusionlm.kernels import chunked_loss
from diffusionlm.kernels.chunked_loss import chunk_size
from diffusionlm.kernels.cross_entropy import LossInputs, LossOutput, linear_cross_entropy
from diffusionlm.models.patterns import Bidirectional
from diffusionlm.models.transformer import Transformer

MakeModel = Callable[..., Transformer]
TOKENS = torch.randint(0, 18, (20, 12), generator=torch.Generator().manual_seed(0))
POSITIONS = torch.arange(0, 240, 3)  # 80: more than the 64 positions of the smallest chunk
TARGETS = torch.randint(0, 18, (80,), generator=torch.Generator().manual_seed(1))
WEIGHTS = torch.rand(80, generator=torch.Generator().manual_seed(2)) * 3
WEIGHTS[::7] = 0.0


def naive(model: Transformer, excluded: int | None, weights: torch.Tensor = WEIGHTS) -> tuple[torch.Tensor, ...]:
    logits = model(TOKENS, pattern=Bidirectional()).flatten(0, 1)[POSITIONS].double()
    if excluded is not None:
        column = torch.zeros(logits.shape[1], dtype=torch.bool)
        column[excluded] = True
        logits = logits.masked_fill(column, -torch.inf)
    nll = F.cross_entropy(logits, TARGETS, reduction="none")
    return (nll * weights).sum(), nll


def fused(model: Transformer, excluded: int | None, weights: torch.Tensor = WEIGHTS) -> LossOutput:
    return model(
        TOKENS,
        pattern=Bidirectional(),
        output_positions=POSITIONS,
        loss_inputs=LossInputs(TARGETS, weights, excluded_token=excluded),
    )


@pytest.mark.parametrize("chunk_bytes", [32 << 20, 1])
@pytest.mark.parametrize("excluded", [None, 18])
@pytest.mark.parametrize("tied", [True, False])
def test_loss_equals_cross_entropy(
    tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch, tied: bool, excluded: int | None, chunk_bytes: int
) -> None:
    monkeypatch.setattr(chunked_loss, "CPU_CHUNK_BYTES", chunk_bytes)
    assert chunk_size(80, 19) == (80 if chunk_bytes > 1 else 40)
    model = tiny_model(tie_word_embeddings=tied)
    expected_sum, expected_nll = naive(model, excluded)
    output = fused(model, excluded)
    torch.testing.assert_close(output.nll_N.double(), expected_nll, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(output.loss_sum.double(), expected_sum, rtol=1e-5, atol=1e-5)
    assert output.loss_sum.dtype == output.nll_N.dtype == torch.float32
    assert not output.nll_N.requires_grad
    names, parameters = zip(*model.named_parameters(), strict=True)
    ours = torch.autograd.grad(output.loss_sum * 0.5, parameters)
    theirs = torch.autograd.grad(expected_sum * 0.5, parameters)
    for name, our, their in zip(names, ours, theirs, strict=True):
        torch.testing.assert_close(
            our, their, rtol=2e-3, atol=2e-4 * float(their.abs().max()), msg=f"gradient of {name}"
        )


def test_excluded_token_has_probability_zero(tiny_model: MakeModel) -> None:
    model = tiny_model(tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight[18] = model.lm_head.weight[18] * 100  # would dominate the softmax
    included, excluded = fused(model, None), fused(model, 18)
    assert not torch.allclose(included.nll_N, excluded.nll_N, atol=1e-2)
    (gradient,) = torch.autograd.grad(excluded.loss_sum, model.lm_head.weight)
    assert gradient[18].abs().max() == 0


def test_bfloat16_autocast_is_within_its_precision(tiny_model: MakeModel) -> None:
    model = tiny_model(tie_word_embeddings=False, scale=0.1)
    expected_sum, expected_nll = naive(model, 18)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = fused(model, 18)
    torch.testing.assert_close(output.nll_N.double(), expected_nll, rtol=0.05, atol=0.05)
    parameters = list(model.parameters())
    ours, theirs = torch.autograd.grad(output.loss_sum, parameters), torch.autograd.grad(expected_sum, parameters)
    for our, their in zip(ours, theirs, strict=True):
        assert our.dtype == torch.float32
        cosine = F.cosine_similarity(our.flatten(), their.flatten(), dim=0)
        assert cosine > 0.99


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
