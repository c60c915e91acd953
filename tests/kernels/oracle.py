"""The scores of rows from their definition, over all logits at once, in float64 and with autograd's gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diffusionlm.kernels.cross_entropy import LossInputs, LossOutput


@dataclass(frozen=True)
class Expected:
    """What a score should be."""

    loss_sum: Tensor
    nll_N: Tensor
    logsumexp_N: Tensor
    is_hit_N: Tensor
    grad_hidden: Tensor
    grad_head: Tensor


def expect(hidden: Tensor, head: Tensor, loss_inputs: LossInputs, cap: float | None = None) -> Expected:
    """Row by row over a list of the allowed tokens; rows of weight 0 take no part in loss and gradient."""
    hidden, head = (each.detach().double().requires_grad_() for each in (hidden, head))
    logits = hidden @ head.T
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    allowed = [token for token in range(len(head)) if token != loss_inputs.excluded_token]
    terms, nlls, logsumexps, hits = [logits.sum() * 0.0], [], [], []
    for row, target, weight in zip(logits, loss_inputs.targets_N.tolist(), loss_inputs.weights_N.double(), strict=True):
        logsumexp = row[allowed].logsumexp(0)
        own = row[target] if target in allowed else row.new_tensor(-torch.inf)
        nll, uniform = logsumexp - own, logsumexp - row[allowed].mean()
        if weight:
            loss = (1 - loss_inputs.label_smoothing) * nll + loss_inputs.label_smoothing * uniform
            terms.append(weight * (loss + loss_inputs.z_loss * logsumexp**2))
        nlls.append(nll)
        logsumexps.append(logsumexp)
        values = row[allowed].tolist()
        hits.append(allowed[values.index(max(values))] == target)
    loss_sum = torch.stack(terms).sum()
    gradients = torch.autograd.grad(loss_sum, (hidden, head))
    stacked = (torch.stack(each).detach() if each else logits.new_zeros(0) for each in (nlls, logsumexps))
    return Expected(loss_sum.detach(), *stacked, torch.tensor(hits, dtype=torch.bool), *gradients)


def inputs(
    rows: int, vocab: int, width: int, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[Tensor, Tensor, LossInputs]:
    """Hidden states, head and score; some rows weigh nothing, and no target is excluded."""
    rng = torch.Generator().manual_seed(rows + 1000 * vocab)
    hidden = torch.randn(rows, width, generator=rng, dtype=torch.float64).to(dtype).requires_grad_()
    head = torch.randn(vocab, width, generator=rng, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (rows,), generator=rng)
    excluded = options.pop("excluded_token", None)
    if excluded is not None:
        targets[targets == excluded] = (excluded + 1) % vocab
    weights = torch.rand(rows, generator=rng, dtype=torch.float64)
    weights[2::3] = 0.0
    return hidden, head, LossInputs(targets, weights, excluded, **options)


def assert_scored(scored: LossOutput, hidden: Tensor, head: Tensor, expected: Expected, tolerance: float) -> None:
    """Everything, with gradients relative to their greatest; hits only where the greatest logit is no matter of
    rounding, which is for the caller to see to."""
    close = {"rtol": tolerance, "atol": tolerance, "check_dtype": False}
    torch.testing.assert_close(scored.loss_sum, expected.loss_sum, **close)
    torch.testing.assert_close(scored.nll_N, expected.nll_N, **close)
    torch.testing.assert_close(scored.logsumexp_N, expected.logsumexp_N, **close)
    torch.testing.assert_close(scored.is_hit_N, expected.is_hit_N)
    factor = 0.7
    ours = torch.autograd.grad(scored.loss_sum * factor, (hidden, head), retain_graph=True)
    for our, their in zip(ours, (expected.grad_hidden, expected.grad_head), strict=True):
        scale = float(their.abs().max()) if their.numel() else 0.0
        torch.testing.assert_close(our.double(), factor * their, rtol=0.0, atol=tolerance * (scale + 1e-3))
