"""AdamW and Lion with 8-bit moments (Dettmers et al. 2022, arXiv:2110.02861) from the package bitsandbytes."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

MIN_QUANTIZED_SIZE = 4_096
"""Parameters with fewer elements have 32-bit moments."""
BLOCKWISE_STATE_KEYS = ("qmap1", "absmax1", "qmap2", "absmax2")
"""State that does not have the shape of its parameter: the 256 quantization levels, and the scale of each block."""


def find_unavailable_reason(kind: str, device: torch.device) -> str | None:
    """Explain why ``kind``, adamw8bit or lion8bit, cannot be used on this device; None: a test step succeeded."""
    try:
        package = importlib.import_module("bitsandbytes")
        probe = nn.Parameter(torch.zeros(MIN_QUANTIZED_SIZE, device=device))
        probe.grad = torch.zeros_like(probe)
        _optimizer_class(package, kind)([probe], min_8bit_size=MIN_QUANTIZED_SIZE).step()
    except ModuleNotFoundError as error:
        return f'optimizer.kind = "{kind}" needs the package bitsandbytes, which is not installed ({error})'
    except Exception as error:  # without a library for this device, the import and the step may raise anything
        return f'optimizer.kind = "{kind}": the package bitsandbytes does not work on {device} here ({error!r})'
    return None


def build_eight_bit(kind: str, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Build the package's optimizer of this ``kind`` for groups with all their options."""
    optimizer_class = _optimizer_class(importlib.import_module("bitsandbytes"), kind)
    optimizer: torch.optim.Optimizer = optimizer_class(groups, min_8bit_size=MIN_QUANTIZED_SIZE)
    return optimizer


def _optimizer_class(package: Any, kind: str) -> Any:
    return {"adamw8bit": package.optim.AdamW8bit, "lion8bit": package.optim.Lion8bit}[kind]


def state_keys(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> tuple[str, ...]:
    """Keys of the state that the package's optimizer has for a parameter."""
    moments = (1,) if type(optimizer).__name__ == "Lion8bit" else (1, 2)
    names = ("state",) if parameter.numel() < MIN_QUANTIZED_SIZE else ("state", "qmap", "absmax")
    return ("step", *(f"{name}{moment}" for moment in moments for name in names))
