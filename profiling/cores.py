"""The processor time that this process has: its cores, and what its control group grants."""

from __future__ import annotations

import os
from pathlib import Path


def usable_cores() -> int:
    """Cores that this process can keep busy: those that it may use, or fewer where its control group grants less."""
    quota = cgroup_cpu_quota()
    cores = affinity_cores()
    return cores if quota is None else max(1, min(cores, round(quota)))


def affinity_cores() -> int:
    """Cores that this process may use; where the system does not tell, all there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cgroup_cpu_quota(root: Path = Path("/")) -> float | None:
    """Cores' worth of time that the control group and those above it grant; None: no limit.

    Args:
        root: where the system's files are; a test lays out its own.
    """
    quotas = []
    for folder in cgroup_folders(root, "cpu"):
        words = read_small_file(folder / "cpu.max").split()
        if len(words) == 2 and words[0] != "max":
            quotas.append(int(words[0]) / int(words[1]))
        quota, period = read_number(folder / "cpu.cfs_quota_us"), read_number(folder / "cpu.cfs_period_us")
        if quota is not None and period and quota > 0:
            quotas.append(quota / period)
    return min(quotas) if quotas else None


def cgroup_folders(root: Path, controller: str) -> list[Path]:
    """Directories of this process's control group and those above it, whichever version the system has."""
    folders = []
    for line in read_small_file(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            base = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            base = root / "sys/fs/cgroup" / controller
        else:
            continue
        inner = base / path.lstrip("/")
        # In a container the group's own directory is the root of what is mounted, so that comes too.
        folders += [inner, *(parent for parent in inner.parents if base in parent.parents), base]
    return list(dict.fromkeys(folders))


def read_small_file(path: Path) -> str:
    """A small file of the system; empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def read_number(path: Path) -> int | None:
    """The number in a small file of the system; None where there is none."""
    text = read_small_file(path).strip()
    return int(text) if text.lstrip("-").isdecimal() else None
