"""AdamW and Lion with moments of 8 bits (Dettmers et al. 2022, arXiv:2110.02861), by the package bitsandbytes."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

MIN_QUANTIZED_SIZE = 4_096
"""Numbers of a parameter; the moments of one with fewer have 32 bits."""
BLOCKWISE_STATE_KEYS = ("qmap1", "absmax1", "qmap2", "absmax2")
"""State that does not have the shape of its parameter: the 256 values, and the scale of each block of numbers."""


def find_unavailable_reason(kind: str, device: torch.device) -> str | None:
    """Why ``kind``, adamw8bit or lion8bit, cannot be had on this device; None: it can, a step of it was made."""
    try:
        package = importlib.import_module("bitsandbytes")
        probe = nn.Parameter(torch.zeros(MIN_QUANTIZED_SIZE, device=device))
        probe.grad = torch.zeros_like(probe)
        _find_class(package, kind)([probe], min_8bit_size=MIN_QUANTIZED_SIZE).step()
    except ModuleNotFoundError as error:
        return f'optimizer.kind = "{kind}" needs the package bitsandbytes, which is not installed ({error})'
    except Exception as error:  # without a library for this device, importing as well as stepping may raise anything
        return f'optimizer.kind = "{kind}": the package bitsandbytes does not work on {device} here ({error!r})'
    return None


def build_eight_bit(kind: str, params: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The package's optimizer of this ``kind``, for groups that have all their settings."""
    make = _find_class(importlib.import_module("bitsandbytes"), kind)
    optimizer: torch.optim.Optimizer = make(params, min_8bit_size=MIN_QUANTIZED_SIZE)
    return optimizer


def _find_class(package: Any, kind: str) -> Any:
    return {"adamw8bit": package.optim.AdamW8bit, "lion8bit": package.optim.Lion8bit}[kind]


def state_keys(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> list[str]:
    """What the package's optimizer keeps of a parameter."""
    numbers = (1,) if type(optimizer).__name__ == "Lion8bit" else (1, 2)
    names = ("state",) if parameter.numel() < MIN_QUANTIZED_SIZE else ("state", "qmap", "absmax")
    return ["step", *(f"{name}{number}" for number in numbers for name in names)]
