"""Frozen weights in four bits: NormalFloat of QLoRA (Dettmers et al. 2023), from the package bitsandbytes."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

BLOCK_SIZE = 64
"""Weights that share one scale."""


class NF4Weight:
    """A weight [out, in] in blocks of four-bit values with a float32 scale each."""

    def __init__(self, weight: Tensor) -> None:
        """Quantize a weight, on its device.

        Raises:
            ValueError: bitsandbytes does not work here.
        """
        try:
            self._functional: Any = importlib.import_module("bitsandbytes.functional")
            self.packed, self._state = self._functional.quantize_4bit(
                weight.detach().contiguous(), blocksize=BLOCK_SIZE, quant_type="nf4"
            )
        except Exception as error:  # without a library for this device, the import and the call may raise anything
            raise ValueError(
                f'lora.base = "nf4": the package bitsandbytes does not work on {weight.device} here ({error!r}): set '
                'lora.base = "bfloat16"'
            ) from error
        self.shape = weight.shape

    def to(self, dtype: torch.dtype) -> Tensor:
        """Dequantize to a dense weight, [out, in]."""
        dense: Tensor = self._functional.dequantize_4bit(self.packed, self._state)
        return dense.to(dtype)
