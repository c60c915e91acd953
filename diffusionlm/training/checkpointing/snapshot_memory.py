"""Memory on the CPU that snapshots are copied to."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

LOGGER = logging.getLogger(__name__)

ALIGNMENT = 64
"""Copies begin at multiples of this many bytes: a cache line."""


class SnapshotMemory:
    """Copies tensors into one buffer on the CPU.

    A buffer for tensors of a GPU is pinned, so that copies are fast, and is kept for the next snapshot: pinning takes
    seconds. It has the bytes of one snapshot; torch's own pinned memory is rounded up to powers of two. Without a GPU
    each snapshot has a buffer of its own, which is freed with it.
    """

    def __init__(self, *, pins: bool = True) -> None:
        """``pins``: whether to pin memory for tensors of a GPU."""
        self._pins = pins
        self._pinned = torch.empty(0, dtype=torch.uint8)
        self._unpin: weakref.finalize[..., Any] | None = None

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy tensors, and wait until the copies are done. Those of a GPU overwrite the ones of the call before, so
        what they were made for must have ended. A tensor on ``meta`` gets its memory, which the caller fills."""
        sizes = [values.numel() * values.element_size() for values in tensors.values()]
        *offsets, num_bytes = accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0)
        has_gpu = any(values.is_cuda for values in tensors.values())
        buffer = self._allocate(num_bytes, is_pinned=has_gpu and self._pins)
        copies = {}
        for (name, values), offset, size in zip(tensors.items(), offsets, sizes, strict=True):
            copies[name] = buffer[offset : offset + size].view(values.dtype).view(values.shape)
            if not values.is_meta:
                copies[name].copy_(values.detach(), non_blocking=True)
        if has_gpu:
            torch.cuda.current_stream().synchronize()
        return copies

    def close(self) -> None:
        """Unpin the memory and let go of it; copies in it stay valid."""
        if self._unpin is not None:
            self._unpin()  # at most once; it happens by itself before the memory is freed
        self._pinned, self._unpin = torch.empty(0, dtype=torch.uint8), None

    def _allocate(self, num_bytes: int, *, is_pinned: bool) -> Tensor:
        """A new buffer, or the pinned one, which is made anew if it is too small."""
        if not is_pinned:
            return torch.empty(num_bytes, dtype=torch.uint8)
        if self._pinned.numel() < num_bytes:
            self.close()
            buffer = torch.empty(num_bytes, dtype=torch.uint8)
            cuda: Any = torch.cuda
            if code := int(cuda.cudart().cudaHostRegister(buffer.data_ptr(), num_bytes, 0)):
                LOGGER.warning(
                    "checkpoints are copied to memory that is not pinned, which is slower: CUDA cannot pin %.1f GB "
                    "(error %d)", num_bytes / 1e9, code
                )  # fmt: skip
                self._pins = False
                _clear_cuda_error()
                return buffer
            self._pinned, self._unpin = buffer, weakref.finalize(self, _unpin, buffer)
        return self._pinned


def _clear_cuda_error() -> None:
    """Let torch report the last error of CUDA, which the next kernel would raise."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def _unpin(buffer: Tensor) -> None:
    cuda: Any = torch.cuda
    if code := int(cuda.cudart().cudaHostUnregister(buffer.data_ptr())):
        # Not raised: after an error that stays, each call returns it again, and the first one is what a user needs.
        LOGGER.warning("CUDA cannot unpin the memory of checkpoints (error %d)", code)
