"""Whether Triton's kernel works here: compiled on a GPU, interpreted without one."""

from __future__ import annotations

import os

import torch

from diffusionlm.kernels.cross_entropy import LossInputs, linear_cross_entropy

TRITON_TOLERANCE = 1e-4


def check_triton() -> str:
    """Score some rows with Triton's kernel and with torch, and compare.

    Where there is no GPU it sets TRITON_INTERPRET in this process, so nothing must have loaded Triton before.

    Returns:
        How the kernel ran, and how far apart the two were.

    Raises:
        ValueError: Triton is not installed, or the losses differ.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 8, generator=generator).to(device)
    head = torch.randn(33, 8, generator=generator).to(device)
    loss_inputs = LossInputs(torch.arange(5, device=device), torch.ones(5, device=device))
    with torch.no_grad():
        losses = [
            linear_cross_entropy(hidden, head, loss_inputs, backend=backend).nll_N.double().cpu()
            for backend in ("triton", "eager")
        ]
    apart = float((losses[0] - losses[1]).abs().max())
    if not apart <= TRITON_TOLERANCE:
        raise ValueError(f"the losses of Triton's kernel and of torch are {apart:.2g} nats apart")
    how = "compiles" if device == "cuda" else "runs interpreted (it compiles on a GPU alone)"
    return f"the cross-entropy kernel {how}; {apart:.1g} nats from torch"
