"""Memory of this process: resident bytes on a CPU, allocated bytes on a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


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
