"""Memory of this process: resident bytes on a CPU, allocated bytes on a GPU."""

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
    """Resident set of this process now; where there is no /proc, its peak."""
    return _status_bytes("VmRSS")


def peak_resident_bytes() -> int:
    """Largest resident set since the process began, or since `reset_peak_resident`."""
    return _status_bytes("VmHWM")


def reset_peak_resident() -> bool:
    """Let the peak begin anew at the present resident set. Whether the system can do that (Linux can)."""
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        return False
    return True


def release_freed_memory() -> None:
    """Give back what the allocator kept: it would hold what comes next, and hide it. Only glibc can be told."""
    gc.collect()
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def keep_freed_memory() -> None:
    """Let the allocator keep what a step frees for the next one, on the CPU. Only glibc can be told.

    By default glibc maps each tensor of 32 MiB and more anew, and gives back the end of its heap: the system then fills
    with zeros, page by page, what was there a moment ago.
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
    """How far memory rose above what was in use when this was made.

    For one measurement in a fresh process: an allocator keeps what it once had, so a later measurement in the same
    process would come out too small.
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
        """Peak since then, minus what was in use then."""
        if self.device == "cuda":
            import torch

            return torch.cuda.max_memory_allocated() - self.before
        return max(0, peak_resident_bytes() - self.before)


def peak_memory(device: str | None = None) -> dict[str, int]:
    """Largest use of memory so far, or since `reset_peak_memory`, in bytes: ``peak_allocated`` and ``peak_reserved`` on CUDA,
    ``peak_resident`` on a CPU. None: CUDA where it is in use."""
    if not _uses_cuda(device):
        return {"peak_resident": peak_resident_bytes()}
    import torch

    return {
        "peak_allocated": torch.cuda.max_memory_allocated(),
        "peak_reserved": torch.cuda.max_memory_reserved(),
    }


def reset_peak_memory(device: str | None = None) -> None:
    """Let `peaks` begin anew."""
    if not _uses_cuda(device):
        reset_peak_resident()
        return
    import torch

    torch.cuda.reset_peak_memory_stats()


def summary() -> str:
    """What CUDA's allocator says of itself; empty without CUDA."""
    if not _uses_cuda(None):
        return ""
    import torch

    return str(torch.cuda.memory_summary())


def start_history(max_entries: int = 100_000) -> bool:
    """Record each allocation on CUDA, for `dump_snapshot`. Whether there is anything to record."""
    if not _uses_cuda(None):
        return False
    import torch

    torch.cuda.memory._record_memory_history(max_entries=max_entries)
    return True


def dump_snapshot(path: Path) -> bool:
    """Write what was recorded, for https://pytorch.org/memory_viz, and stop recording. Whether anything was written.

    Raises:
        OSError: the file cannot be written.
    """
    if not _uses_cuda(None):
        return False
    import torch

    torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
    torch.cuda.memory._record_memory_history(enabled=None)
    return True


def count_tensor_bytes(tensors: Iterable[Any]) -> int:
    """What tensors hold, one that several share counted once."""
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values())


def split_peak_memory(
    weights: Iterable[Any], gradients: Iterable[Any], optimizer: Iterable[Any], peak: int
) -> dict[str, int]:
    """A measured peak, in bytes: what tensors hold, and ``activations``, which is the rest."""
    parts = {
        "weights": count_tensor_bytes(weights),
        "gradients": count_tensor_bytes(gradients),
        "optimizer": count_tensor_bytes(optimizer),
    }
    return {**parts, "activations": max(0, peak - sum(parts.values()))}


def _uses_cuda(device: str | None) -> bool:
    if device is not None:
        return device == "cuda"
    # Not imported for the question: without torch nobody uses CUDA.
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_available()) and bool(torch.cuda.is_initialized())
