"""The fused loss from its definition: all logits at once, in float64, with autograd's gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diffusionlm.kernels.cross_entropy import LossInputs, LossOutput


@dataclass(frozen=True)
class ExpectedLoss:
    """Loss and gradients in float64."""

    loss_sum: Tensor
    nll_N: Tensor
    grad_hidden: Tensor
    grad_head: Tensor


def compute_expected(
    hidden: Tensor, head: Tensor, loss_inputs: LossInputs, softcap: float | None = None
) -> ExpectedLoss:
    """Loop over positions and tokens; positions of weight 0 take no part in loss and gradient."""
    hidden, head = (tensor.detach().double().requires_grad_() for tensor in (hidden, head))
    logits_NV = hidden @ head.T
    if softcap is not None:
        logits_NV = softcap * torch.tanh(logits_NV / softcap)
    allowed = [token for token in range(len(head)) if token != loss_inputs.excluded_token]
    losses, nlls = [logits_NV.sum() * 0.0], []
    positions = zip(logits_NV, loss_inputs.targets_N.tolist(), loss_inputs.weights_N.double(), strict=True)
    for logits_V, target, weight in positions:
        logsumexp = logits_V[allowed].logsumexp(0)
        target_logit = logits_V[target] if target in allowed else logits_V.new_tensor(-torch.inf)
        nll, uniform = logsumexp - target_logit, logsumexp - logits_V[allowed].mean()
        if weight:
            loss = (1 - loss_inputs.label_smoothing) * nll + loss_inputs.label_smoothing * uniform
            losses.append(weight * (loss + loss_inputs.z_loss * logsumexp**2))
        nlls.append(nll)
    loss_sum = torch.stack(losses).sum()
    gradients = torch.autograd.grad(loss_sum, (hidden, head))
    nll_N = torch.stack(nlls).detach() if nlls else logits_NV.new_zeros(0)
    return ExpectedLoss(loss_sum.detach(), nll_N, *gradients)


def make_inputs(
    num_positions: int, vocab: int, width: int, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[Tensor, Tensor, LossInputs]:
    """Hidden states, head and loss inputs; every third weight is 0, and no target is the excluded token."""
    rng = torch.Generator().manual_seed(num_positions + 1000 * vocab)
    hidden = torch.randn(num_positions, width, generator=rng, dtype=torch.float64).to(dtype).requires_grad_()
    head = torch.randn(vocab, width, generator=rng, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (num_positions,), generator=rng)
    excluded = options.pop("excluded_token", None)
    if excluded is not None:
        targets[targets == excluded] = (excluded + 1) % vocab
    weights = torch.rand(num_positions, generator=rng, dtype=torch.float64)
    weights[2::3] = 0.0
    return hidden, head, LossInputs(targets, weights, excluded, **options)


def assert_loss_close(
    output: LossOutput, hidden: Tensor, head: Tensor, expected: ExpectedLoss, tolerance: float
) -> None:
    """Compare loss, log-likelihoods and gradients; gradients relative to their largest element."""
    torch.testing.assert_close(
        output.loss_sum, expected.loss_sum, rtol=tolerance, atol=tolerance, check_dtype=False, check_device=False
    )
    torch.testing.assert_close(
        output.nll_N, expected.nll_N, rtol=tolerance, atol=tolerance, check_dtype=False, check_device=False
    )
    factor = 0.7
    gradients = torch.autograd.grad(output.loss_sum * factor, (hidden, head), retain_graph=True)
    for gradient, reference in zip(gradients, (expected.grad_hidden, expected.grad_head), strict=True):
        scale = float(reference.abs().max()) if reference.numel() else 0.0
        torch.testing.assert_close(
            gradient.double().cpu(), factor * reference, rtol=0.0, atol=tolerance * (scale + 1e-3)
        )
