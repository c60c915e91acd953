"""CPU cores that this process may use: its affinity and the quota of its control group."""

from __future__ import annotations

import os
from pathlib import Path


def usable_cores() -> int:
    """Return the number of cores that this process can keep busy: its affinity, or a lower quota of its cgroup."""
    quota = cgroup_cpu_quota()
    cores = affinity_cores()
    return cores if quota is None else max(1, min(cores, round(quota)))


def affinity_cores() -> int:
    """Return the number of cores in the process's affinity; all cores where the system has none."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cgroup_cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the lowest CPU quota, in cores, of the control group and its parents; None: no limit.

    Args:
        root: root of the system's files (tests use a directory of their own).
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
    """Return the directories of this process's control group and its parents, for cgroup v1 or v2."""
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
        # In a container the group's own directory is mounted as the root, so the root is included.
        folders += [inner, *(parent for parent in inner.parents if base in parent.parents), base]
    return list(dict.fromkeys(folders))


def read_small_file(path: Path) -> str:
    """Read a small system file; return "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def read_number(path: Path) -> int | None:
    """Read the integer in a small system file; None: it has none."""
    text = read_small_file(path).strip()
    return int(text) if text.lstrip("-").isdecimal() else None
