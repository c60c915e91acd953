"""What this machine is and grants this process, read from its files and environment. No torch.

The system's files are looked for below ``root``, so that a test can lay out another machine. Sizes are in bytes.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from profiling.cores import affinity_cores, cgroup_cpu_quota, cgroup_folders, read_number, read_small_file

FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "asimd", "bf16", "sve")
"""Of a processor, by the names of /proc/cpuinfo, that torch's matrix products use; the last three are ARM's."""
VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "OMP_PROC_BIND",
    "KMP_AFFINITY",
    "GOMP_CPU_AFFINITY",
    "MALLOC_ARENA_MAX",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "LD_PRELOAD",
    "CUDA_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "HF_HUB_OFFLINE",
    "WANDB_MODE",
    "DIFFUSIONLM_NVTX",
)
"""Of the environment, that change how a run runs."""
_NO_LIMIT = 1 << 60


@dataclass(frozen=True)
class Processor:
    """Cores and what they can do."""

    model: str
    cores: int
    usable: int
    """By the process's affinity."""
    quota: float | None
    """Cores' worth of time that the control group grants; None: no limit."""
    features: tuple[str, ...]
    load: float | None
    """Processes that wanted a core, on average over the last minute."""

    @property
    def num_usable_cores(self) -> int:
        """Cores that a process can really keep busy."""
        return max(1, min(self.usable, round(self.quota))) if self.quota else self.usable


@dataclass(frozen=True)
class Memory:
    """Of the machine, and of this process's control group."""

    total: int | None
    available: int | None
    limit: int | None
    """Of the control group; None: none below the machine's."""
    used: int | None
    """By the control group, without the copies of files that it would give back."""
    shared_total: int | None
    """Of /dev/shm, through which NCCL joins the GPUs of a machine."""
    shared_free: int | None

    @property
    def free(self) -> int | None:
        """What a run can still take."""
        left = None if self.limit is None or self.used is None else max(0, self.limit - self.used)
        known = [value for value in (self.available, left) if value is not None]
        return min(known) if known else None


@dataclass(frozen=True)
class Storage:
    """Where runs are written."""

    path: Path
    """The directory itself, or the nearest one above it that exists."""
    kind: str
    """Of the file system, as /proc/mounts names it."""
    free: int
    is_writable: bool


@dataclass(frozen=True)
class Network:
    """What the ranks of a distributed run look for."""

    hostname: str
    address: str | None
    """What the name stands for; None: nobody knows it."""
    interfaces: tuple[str, ...]


@dataclass(frozen=True)
class Machine:
    """All of it."""

    system: str
    python: str
    version: tuple[int, int]
    """Of Python."""
    uv: str | None
    allocator: str
    processor: Processor
    memory: Memory
    storage: Storage
    network: Network
    open_files: int
    """Files that a process may have open at once."""
    variables: Mapping[str, str]
    """Those of `VARIABLES` that are set."""


def read_machine(runs: Path, root: Path = Path("/")) -> Machine:
    """The machine as it is now; runs would be written to ``runs``."""
    return Machine(
        system=platform.platform(),
        python=f"{platform.python_implementation()} {platform.python_version()} ({sys.executable})",
        version=(sys.version_info.major, sys.version_info.minor),
        uv=shutil.which("uv"),
        allocator=allocator(os.environ),
        processor=read_processor(root),
        memory=read_memory(root),
        storage=read_storage(runs, root),
        network=read_network(),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        variables={name: os.environ[name] for name in VARIABLES if name in os.environ},
    )


def read_processor(root: Path) -> Processor:
    """From /proc and the control group."""
    info = read_small_file(root / "proc/cpuinfo")
    flags: set[str] = set()
    model = ""
    for line in info.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features") and not flags:
            flags = set(value.split())
        if name.strip() == "model name" and not model:
            model = value.strip()
    try:
        load = os.getloadavg()[0]
    except OSError:
        load = None
    return Processor(
        model=model or platform.processor() or platform.machine(),
        cores=os.cpu_count() or 1,
        usable=affinity_cores(),
        quota=cgroup_cpu_quota(root),
        features=tuple(name for name in FEATURES if name in flags),
        load=load,
    )


def read_memory(root: Path) -> Memory:
    """From /proc, the control group and /dev/shm."""
    known = {}
    for line in read_small_file(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if value.split()[1:] == ["kB"]:
            known[name] = 1024 * int(value.split()[0])
    limits = []
    for folder in cgroup_folders(root, "memory"):
        for limit_name, used_name, given_back in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, used = read_number(folder / limit_name), read_number(folder / used_name)
            if limit is not None and limit < min(_NO_LIMIT, known.get("MemTotal", _NO_LIMIT)):
                # Of files that were read or written it keeps copies in memory, and gives that to whoever wants it.
                copies = dict(line.split(maxsplit=1) for line in read_small_file(folder / "memory.stat").splitlines())
                used = None if used is None else max(0, used - int(copies.get(given_back, 0)))
                limits.append((limit, used))
    limit, used = min(limits, key=lambda pair: pair[0]) if limits else (None, None)
    shared = root / "dev/shm"
    room = shutil.disk_usage(shared) if shared.is_dir() else None
    return Memory(
        total=known.get("MemTotal"),
        available=known.get("MemAvailable"),
        limit=limit,
        used=used,
        shared_total=None if room is None else room.total,
        shared_free=None if room is None else room.free,
    )


def read_storage(runs: Path, root: Path) -> Storage:
    """Of the file system that the directory is on, or will be."""
    path = runs.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    kind, longest = "", -1
    for line in read_small_file(root / "proc/mounts").splitlines():
        words = line.split()
        if len(words) > 2 and len(words[1]) > longest:
            mounted = Path(words[1].replace("\\040", " "))
            if mounted == path or mounted in path.parents:
                kind, longest = words[2], len(words[1])
    return Storage(path, kind or "unknown", shutil.disk_usage(path).free, os.access(path, os.W_OK | os.X_OK))


def read_network() -> Network:
    """This machine's name, and whether it leads anywhere."""
    hostname = socket.gethostname()
    try:
        address: str | None = socket.gethostbyname(hostname)
    except OSError:
        address = None
    try:
        interfaces = tuple(name for _, name in socket.if_nameindex())
    except OSError:
        interfaces = ()
    return Network(hostname, address, interfaces)


def allocator(environment: Mapping[str, str]) -> str:
    """Of memory on the CPU: one that is loaded before the program, else the system's."""
    for word in environment.get("LD_PRELOAD", "").replace(":", " ").split():
        for name in ("jemalloc", "tcmalloc", "mimalloc"):
            if name in Path(word).name:
                return name
    name, version = platform.libc_ver()
    return f"{name} {version}" if name else "the system's"
