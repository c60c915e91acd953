"""Read facts about this machine from system files and the environment. No torch.

System files are read below ``root``, so that tests can use other machines' files. Sizes are in bytes.
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
"""CPU features that torch's matrix products use, as in /proc/cpuinfo; the last three are ARM's."""
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
"""Environment variables that change how a run behaves."""
_NO_LIMIT = 1 << 60


@dataclass(frozen=True)
class Processor:
    model: str
    cores: int
    usable: int
    """Cores in the process's affinity."""
    quota: float | None
    """CPU quota of the control group, in cores; None: no limit."""
    features: tuple[str, ...]
    load: float | None
    """Load average over the last minute."""

    @property
    def num_usable_cores(self) -> int:
        """Cores that this process can keep busy."""
        return max(1, min(self.usable, round(self.quota))) if self.quota else self.usable


@dataclass(frozen=True)
class Memory:
    """Memory of the machine and of this process's control group, in bytes."""

    total: int | None
    available: int | None
    limit: int | None
    """Limit of the control group; None: the machine's memory is the limit."""
    used: int | None
    """Use by the control group, without reclaimable file cache."""
    shared_total: int | None
    """Size of /dev/shm, which NCCL uses between the GPUs of a machine."""
    shared_free: int | None

    @property
    def free(self) -> int | None:
        """Memory that a run can still allocate."""
        remaining = None if self.limit is None or self.used is None else max(0, self.limit - self.used)
        limits = [value for value in (self.available, remaining) if value is not None]
        return min(limits) if limits else None


@dataclass(frozen=True)
class Storage:
    """The file system that runs are written to."""

    path: Path
    """The directory of runs, or its nearest existing parent."""
    kind: str
    """Type of the file system, as in /proc/mounts."""
    free: int
    is_writable: bool


@dataclass(frozen=True)
class Network:
    """Names and addresses that ranks of a distributed run use."""

    hostname: str
    address: str | None
    """Address of the host name; None: it cannot be resolved."""
    interfaces: tuple[str, ...]


@dataclass(frozen=True)
class Machine:
    """Facts about this machine."""

    system: str
    python: str
    version: tuple[int, int]
    """Version of Python."""
    uv: str | None
    allocator: str
    processor: Processor
    memory: Memory
    storage: Storage
    network: Network
    open_files: int
    """Limit of open files of a process."""
    variables: Mapping[str, str]
    """The `VARIABLES` that are set."""


def read_machine(runs: Path, root: Path = Path("/")) -> Machine:
    """Read the facts about this machine; ``runs`` is the directory that runs are written to."""
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
    """Read /proc/cpuinfo and the control group."""
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


def read_processor_vendor(root: Path) -> str:
    """``vendor_id`` of the first core in /proc/cpuinfo, such as ``GenuineIntel``; empty on other processors."""
    for line in read_small_file(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "vendor_id":
            return value.strip()
    return ""


def read_memory(root: Path) -> Memory:
    """Read /proc/meminfo, the control group and /dev/shm."""
    meminfo = {}
    for line in read_small_file(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if value.split()[1:] == ["kB"]:
            meminfo[name] = 1024 * int(value.split()[0])
    limits = []
    for folder in cgroup_folders(root, "memory"):
        for limit_name, used_name, reclaimable_name in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, used = read_number(folder / limit_name), read_number(folder / used_name)
            if limit is not None and limit < min(_NO_LIMIT, meminfo.get("MemTotal", _NO_LIMIT)):
                # The file cache counts as used, but is reclaimed on demand.
                copies = dict(line.split(maxsplit=1) for line in read_small_file(folder / "memory.stat").splitlines())
                used = None if used is None else max(0, used - int(copies.get(reclaimable_name, 0)))
                limits.append((limit, used))
    limit, used = min(limits, key=lambda pair: pair[0]) if limits else (None, None)
    shared = root / "dev/shm"
    shared_usage = shutil.disk_usage(shared) if shared.is_dir() else None
    return Memory(
        total=meminfo.get("MemTotal"),
        available=meminfo.get("MemAvailable"),
        limit=limit,
        used=used,
        shared_total=None if shared_usage is None else shared_usage.total,
        shared_free=None if shared_usage is None else shared_usage.free,
    )


def read_storage(runs: Path, root: Path) -> Storage:
    """Read the file system that the directory is on, or would be created on."""
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
    """Read host name, its address and the network interfaces."""
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
    """Return the name of the CPU allocator: one in LD_PRELOAD, else the system's."""
    for word in environment.get("LD_PRELOAD", "").replace(":", " ").split():
        for name in ("jemalloc", "tcmalloc", "mimalloc"):
            if name in Path(word).name:
                return name
    name, version = platform.libc_ver()
    return f"{name} {version}" if name else "the system's"
