"""The processor that this process has."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Cores that this process may use; where the system does not tell, all there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
