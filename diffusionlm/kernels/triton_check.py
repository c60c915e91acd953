"""Comparison of the Triton kernel with the eager backend: compiled on a GPU, interpreted without one."""

from __future__ import annotations

import os

import torch

from diffusionlm.kernels.cross_entropy import LossInputs, linear_cross_entropy


def max_difference_to_eager() -> float:
    """Compute a small loss with Triton and with PyTorch; return the largest difference in nats.

    Without a GPU it sets TRITON_INTERPRET in this process, so Triton must not be imported before.

    Raises:
        ValueError: Triton is not installed.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 8, generator=generator).to(device)
    head = torch.randn(33, 8, generator=generator).to(device)
    loss_inputs = LossInputs(torch.arange(5, device=device), torch.ones(5, device=device))
    with torch.no_grad():
        triton_nll, eager_nll = (
            linear_cross_entropy(hidden, head, loss_inputs, backend=backend).nll_N.double().cpu()
            for backend in ("triton", "eager")
        )
    return float((triton_nll - eager_nll).abs().max())
