"""Read facts about this machine from system files. No torch.

System files are read below ``root``, so that tests can use other machines' files. Sizes are in bytes.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

from profiling.cores import cgroup_folders, read_number, read_small_file

ROOT = Path("/")
_NO_LIMIT = 1 << 60


@dataclass(frozen=True)
class Memory:
    """Memory of this process, in bytes: of the machine, or of its control group if that grants less."""

    total: int | None
    free: int | None
    """Memory that a run can still allocate."""


def read_memory(root: Path = ROOT) -> Memory:
    """Read /proc/meminfo and the control group."""
    meminfo = {}
    for line in read_small_file(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if value.split()[1:] == ["kB"]:
            meminfo[name] = 1024 * int(value.split()[0])
    totals = [meminfo[name] for name in ("MemTotal",) if name in meminfo]
    free = [meminfo[name] for name in ("MemAvailable",) if name in meminfo]
    for folder in cgroup_folders(root, "memory"):
        for limit_name, used_name, reclaimable_name in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, used = read_number(folder / limit_name), read_number(folder / used_name)
            if limit is None or limit >= meminfo.get("MemTotal", _NO_LIMIT):
                continue
            totals.append(limit)
            # The file cache counts as used, but is reclaimed on demand.
            copies = dict(line.split(maxsplit=1) for line in read_small_file(folder / "memory.stat").splitlines())
            if used is not None:
                free.append(limit - max(0, used - int(copies.get(reclaimable_name, 0))))
    return Memory(min(totals, default=None), max(0, min(free)) if free else None)


def read_processor_model(root: Path = ROOT) -> str:
    """``model name`` of the first core in /proc/cpuinfo, else the name of the architecture."""
    return _read_cpuinfo(root, "model name") or platform.processor() or platform.machine()


def read_processor_vendor(root: Path = ROOT) -> str:
    """``vendor_id`` of the first core in /proc/cpuinfo, such as ``GenuineIntel``; empty on other processors."""
    return _read_cpuinfo(root, "vendor_id")


def _read_cpuinfo(root: Path, key: str) -> str:
    for line in read_small_file(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def find_file_system(path: Path, root: Path = ROOT) -> tuple[Path, str]:
    """The nearest existing parent of a path, and the type of its file system, as in /proc/mounts."""
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    mounts = [line.split() for line in read_small_file(root / "proc/mounts").splitlines()]
    kinds = {Path(words[1].replace("\\040", " ")): words[2] for words in mounts if len(words) > 2}
    folder = next((folder for folder in (path, *path.parents) if folder in kinds), None)
    return path, "unknown" if folder is None else kinds[folder]
