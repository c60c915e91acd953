"""Measure the memory of this process: resident bytes on a CPU, allocated bytes on a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def resident_bytes() -> int:
    """Return the resident set size in bytes; its peak, on systems without /proc."""
    return _status_bytes("VmRSS")


def peak_resident_bytes() -> int:
    """Return the largest resident set size since the start or `reset_peak_resident`, in bytes."""
    return _status_bytes("VmHWM")


def reset_peak_resident() -> bool:
    """Reset the peak to the current resident set. Return whether the system supports it (Linux does)."""
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        return False
    return True


def release_freed_memory() -> None:
    """Return freed memory to the system, so that later growth is visible. Only glibc supports it."""
    gc.collect()
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def keep_freed_memory() -> None:
    """Let the CPU allocator reuse freed memory in the next step. Only glibc supports it.

    By default glibc maps each tensor of 32 MiB or more anew and returns the end of its heap, so the system zeroes the
    same pages again in every step.
    """
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(_M_MMAP_THRESHOLD, 1 << 30)
            mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def _status_bytes(field: str) -> int:
    if _STATUS.exists():
        for line in _STATUS.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class PeakGrowth:
    """Measures how far memory rises above its use at construction.

    Use it once, in a new process: an allocator keeps freed memory, so a second measurement would be too small.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        if device == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        else:
            reset_peak_resident()
            self.before = resident_bytes()

    def bytes(self) -> int:
        """Return the peak since construction minus the use at construction, in bytes."""
        if self.device == "cuda":
            import torch

            return torch.cuda.max_memory_allocated() - self.before
        return max(0, peak_resident_bytes() - self.before)


def peak_memory(device: str | None = None) -> dict[str, int]:
    """Return peak memory since the start or a reset, in bytes.

    Keys are ``peak_allocated`` and ``peak_reserved`` on CUDA, ``peak_resident`` on a CPU. ``device`` None: CUDA if it
    is in use.
    """
    if not _uses_cuda(device):
        return {"peak_resident": peak_resident_bytes()}
    import torch

    return {
        "peak_allocated": torch.cuda.max_memory_allocated(),
        "peak_reserved": torch.cuda.max_memory_reserved(),
    }


def count_tensor_bytes(tensors: Iterable[Any]) -> int:
    """Return the bytes of the tensors' storages, each shared one counted once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _uses_cuda(device: str | None) -> bool:
    if device is not None:
        return device == "cuda"
    # Torch is not imported here: if it is not loaded, CUDA is not in use.
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_available()) and bool(torch.cuda.is_initialized())
