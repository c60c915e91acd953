"""Tensors between the host and the device."""

from __future__ import annotations

import torch
from torch import Tensor


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy of a tensor on the CPU, without waiting for the device; on a CPU the tensor itself."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # a copy of pageable memory may wait for the device
    return tensor.to(device, non_blocking=True)
