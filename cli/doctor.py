"""``diffusionlm-doctor``: report what is broken or slow on this machine, with a remedy. Works without torch."""

from __future__ import annotations

import importlib
import json
import os
import platform
import re
import resource
import shutil
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from cli.entry import build_parser, friendly_errors, path_argument
from files.terminal_text import print_line
from profiling.cores import affinity_cores, cgroup_cpu_quota, read_small_file, usable_cores
from profiling.machine import find_file_system, read_memory, read_processor_model
from profiling.torch_setup import drivers, find_compile_problem, has_native_bfloat16
from profiling.triton_setup import find_triton_problem

NAME = "diffusionlm-doctor"

EXAMPLE = f"""  {NAME}
  {NAME} --quick --directory /scratch/runs
  {NAME} --json | jq '.checks[] | select(.status == "slow")'"""

Status = Literal["ok", "note", "slow", "broken"]

VARIABLES = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_PROC_BIND", "PYTORCH_ALLOC_CONF", "LD_PRELOAD",
    "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HF_HUB_OFFLINE", "WANDB_MODE",
    "DIFFUSIONLM_NVTX",
)  # fmt: skip
"""Environment variables that change how a run behaves."""
TRITON_TOLERANCE = 1e-4
"""Largest accepted difference between the losses of Triton and PyTorch, in nats."""
GIB = 1 << 30
LOW_MEMORY_BYTES = 2 * GIB
LOW_SHARED_MEMORY_BYTES = 128 << 20
CRITICAL_DISK_BYTES, LOW_DISK_BYTES = 1 * GIB, 10 * GIB
"""Bytes on the disk of the runs below which a checkpoint of even a small model, or of a large one, is at risk."""
MIN_OPEN_FILES = 1024
NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "fuse", "fuse.sshfs", "9p")


@dataclass(frozen=True)
class Check:
    """A fact about the machine; if it is a problem, with its reason and remedy."""

    name: str
    value: str
    status: Status = "ok"
    """broken: something will not work. slow: it works, but slower than necessary. note: good to know."""
    remedy: str = ""


@friendly_errors(NAME)
def main(argv: Sequence[str] | None = None) -> int:
    """Print the checks. Returns 1 if something is broken."""
    parser = build_parser(NAME, "Report what is broken or slow on this machine, and the remedy.", EXAMPLE)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--quick", action="store_true", help="do not try the Triton kernel")
    parser.add_argument(
        "--directory",
        metavar="DIR",
        type=path_argument,
        default=Path("runs"),
        help="where runs are written (default: runs)",
    )
    arguments = parser.parse_args(argv)
    checks = list(examine(arguments.directory, is_quick=arguments.quick))
    is_broken = any(check.status == "broken" for check in checks)
    if arguments.json:
        value = {"checks": [asdict(check) for check in checks], "broken": is_broken}
        print(json.dumps(value, indent=1, ensure_ascii=False))
    else:
        print_line(format_checks(checks))
    return 1 if is_broken else 0


def judge(name: str, value: str, *problems: tuple[bool, Status, str]) -> Check:
    """Return a fact with the status and the remedy of the first problem that is there."""
    status, remedy = next(((status, remedy) for is_there, status, remedy in problems if is_there), ("ok", ""))
    return Check(name, value, status, remedy)


def format_checks(checks: Sequence[Check]) -> str:
    """Format a line for each check, its remedy below it, and a summary."""
    column = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{check.status:<6}  {check.name:<{column}}  {check.value}")
        if check.remedy:
            lines.append(f"{'':<{column + 10}}{check.remedy}")
    counts = {status: sum(check.status == status for check in checks) for status in ("broken", "slow")}
    return "\n".join([*lines, "", ", ".join(f"{count or 'nothing'} {status}" for status, count in counts.items())])


def examine(runs: Path, *, is_quick: bool = False) -> Iterator[Check]:
    """Check the machine; ``runs`` is the directory of runs, and may be missing. Quick: without the Triton kernel."""
    yield Check("system", f"{platform.platform()}, Python {platform.python_version()} ({sys.executable})")
    torch, problem = _import_torch()
    yield from check_packages(problem)
    if torch is not None:
        yield from check_torch(torch)
        yield from check_gpus(torch, drivers())
        yield check_triton(has_gpu=torch.cuda.is_available(), is_quick=is_quick)
    yield from check_processor(None if torch is None else torch.get_num_threads())
    yield from check_memory(0 if torch is None else torch.cuda.device_count())
    yield from check_storage(runs)
    yield from check_network()
    yield from check_services(Path.home())


def _import_torch() -> tuple[Any, str]:
    """Torch, or None and the reason."""
    try:
        torch = importlib.import_module("torch")
        torch.cuda.is_available()
    except Exception as error:  # a broken installation raises anything
        return None, f"{type(error).__name__}: {error}".splitlines()[0]
    return torch, ""


def check_packages(torch_problem: str) -> Iterator[Check]:
    """Check that the required packages are installed; ``torch_problem``: why torch cannot be imported."""
    requirements = metadata.requires("diffusionlm") or [] if _find_version("diffusionlm") else []
    required = [re.split("[^A-Za-z0-9-]", text)[0] for text in requirements if "extra ==" not in text]
    missing = [name for name in required if _find_version(name) is None]
    if missing:
        yield Check("packages", f"missing: {', '.join(missing)}", "broken", "uv sync")
    if torch_problem and "torch" not in missing:
        remedy = "uv sync --reinstall-package torch; --reinstall also replaces what torch needs"
        yield Check("torch", torch_problem, "broken", remedy)
    variables = [f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ]
    yield Check("environment", ", ".join(variables) or "nothing set")


def _find_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_torch(torch: Any) -> Iterator[Check]:
    """Check torch's build and what it computes on the processor."""
    hip = getattr(torch.version, "hip", None)
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {hip}" if hip else "CPU"
    bfloat16 = "in hardware" if has_native_bfloat16("cpu") else "emulated: training.precision = auto takes float32"
    kernels = f"{torch.backends.cpu.get_cpu_capability()} kernels, bfloat16 products {bfloat16}"
    yield Check("torch", f"{torch.__version__}, built for {build}; on the processor {kernels}")
    if problem := find_compile_problem(str(torch.__version__), "cpu"):
        why, _, remedy = problem.partition(": ")
        yield Check("compilation", f'runtime.compile = "blocks" is refused on the CPU: it {why}', "note", remedy)


def check_gpus(torch: Any, driver_lines: Sequence[str]) -> Iterator[Check]:
    """Check the GPUs that torch finds against those of the driver: ``driver, name`` of each."""
    if not torch.cuda.is_available():
        if driver_lines:
            remedy = "a torch build and a driver that fit each other, or CUDA_VISIBLE_DEVICES unset"
            yield Check("GPU", f"none is used, and the driver knows {'; '.join(driver_lines)}", "slow", remedy)
        else:
            why = "models train on the processor, and runtime.compile = auto leaves blocks uncompiled"
            yield Check("GPU", f"none: {why}", "note", "none needed for small models")
        return
    try:
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            with torch.cuda.device(index):
                free, total = torch.cuda.mem_get_info()
                has_bfloat16 = has_native_bfloat16("cuda")
            capability = f"capability {properties.major}.{properties.minor}"
            less = "" if has_bfloat16 else ", no bfloat16"
            value = f"{properties.name}, {capability}{less}, {format_bytes(free)} of {format_bytes(total)} free"
            in_float32 = "training.precision = auto takes float32: a GPU of capability 8.0 or more is faster"
            in_use = "it is in use: CUDA_VISIBLE_DEVICES, or training.micro_batch_size"
            yield judge(
                f"GPU {index}", value, (not has_bfloat16, "slow", in_float32), (free < total / 2, "note", in_use)
            )
    except RuntimeError as error:
        problem = f"torch cannot use it: {str(error).splitlines()[0]}"
        yield Check("GPU", problem, "broken", "see nvidia-smi; or run.device = cpu")


def check_triton(*, has_gpu: bool, is_quick: bool) -> Check:
    """Check that Triton computes the loss of PyTorch; it compiles on a GPU, and is interpreted elsewhere."""
    version = _find_version("triton")
    if version is None:
        remedy = "the loss of a large vocabulary runs in torch's operators: install it with torch's build for the GPU"
        return Check("Triton", "not installed", "slow", remedy) if has_gpu else Check("Triton", "not installed")
    if has_gpu and (problem := find_triton_problem()):
        why, _, remedy = problem.partition(": ")
        return Check("Triton", f"{version} cannot compile its kernels: it {why}", "slow", remedy)
    if is_quick:
        return Check("Triton", f"{version}, not tried (--quick)")
    try:
        # Imported here: without torch the doctor still runs and reports that it is missing.
        from diffusionlm.kernels.triton_check import max_difference_to_eager

        difference = max_difference_to_eager()
        if not difference <= TRITON_TOLERANCE:
            raise ValueError(f"its losses and those of PyTorch differ by {difference:.2g} nats")
    except Exception as error:  # a compiler may raise anything
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
        remedy = "uv sync --reinstall-package triton, and a C compiler and Python.h for it"
        return Check("Triton", f"{version} does not work: {problem}", "broken" if has_gpu else "note", remedy)
    mode = "compiles" if has_gpu else "runs interpreted (it compiles only on a GPU)"
    return Check("Triton", f"{version}: the loss kernel {mode}; it differs from PyTorch by {difference:.1g} nats")


def check_processor(threads: int | None) -> Iterator[Check]:
    """Check the cores that this process may use against torch's threads (None: there is no torch)."""
    usable, quota = usable_cores(), cgroup_cpu_quota()
    limit = "" if quota is None else f", {quota:g} by the quota of the control group"
    yield Check("processor", f"{read_processor_model()}: {os.cpu_count()} cores, {affinity_cores()} usable{limit}")
    if threads is not None and threads != usable:
        value = f"{threads} of torch, and {usable} usable cores"
        remedy = f"OMP_NUM_THREADS={usable}, or model.threads = {usable} for inference"
        yield Check("threads", value, "slow", remedy)


def check_memory(num_gpus: int, root: Path = Path("/")) -> Iterator[Check]:
    """Check the free memory, and the shared memory that joins several GPUs."""
    memory = read_memory(root)
    if memory.free is not None and memory.total is not None:
        why = "a larger run is ended by the system without a message"
        remedy = f"{why}: lower training.micro_batch_size, or runtime.activation_checkpointing = full"
        value = f"{format_bytes(memory.free)} of {format_bytes(memory.total)} free"
        yield judge("memory", value, (memory.free < LOW_MEMORY_BYTES, "slow", remedy))
    shared = root / "dev/shm"
    if num_gpus > 1 and shared.is_dir() and (size := shutil.disk_usage(shared).total) < LOW_SHARED_MEMORY_BYTES:
        remedy = "NCCL joins the GPUs of a machine through it: docker run --shm-size=1g, or NCCL_SHM_DISABLE=1"
        yield Check("/dev/shm", format_bytes(size), "broken", remedy)


def check_storage(runs: Path, root: Path = Path("/")) -> Iterator[Check]:
    """Check the disk that runs are written to, and how many files may be open."""
    path, kind = find_file_system(runs, root)
    free = shutil.disk_usage(path).free
    is_writable = os.access(path, os.W_OK | os.X_OK)
    size = "checkpoints take 8 to 12 bytes a parameter, keep_last + 1 times"
    network = "saving waits for the network, and locks of a run may not hold between machines"
    yield judge(
        "runs",
        f"{path} ({kind}), {format_bytes(free)} free",
        (not is_writable, "broken", "it is not writable: run.directory elsewhere"),
        (free < CRITICAL_DISK_BYTES, "broken", f"{size}: run.directory elsewhere"),
        (free < LOW_DISK_BYTES, "note", f"{size}: run.directory elsewhere, or checkpoint.keep_last = 1"),
        (kind in NETWORK_FILE_SYSTEMS, "slow", f"{network}: run.directory on a local disk"),
        (kind in ("tmpfs", "ramfs"), "note", "runs take memory, and are gone after a restart: run.directory on a disk"),
    )
    open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= open_files < MIN_OPEN_FILES:  # negative: no limit
        why = "each shard of data, and each worker, is an open file"
        yield Check("open files", f"{open_files} at once", "note", f"{why}: ulimit -n 65536")


def check_network() -> Iterator[Check]:
    """Check the address by which ranks find each other."""
    name, has_interface = socket.gethostname(), bool(os.environ.get("GLOO_SOCKET_IFNAME"))
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = "which cannot be resolved"
    lo = "ranks may not find each other: GLOO_SOCKET_IFNAME=lo for one machine, or a line in /etc/hosts"
    interfaces = ", ".join(name for _, name in socket.if_nameindex() if name != "lo") or "the interfaces"
    one_of = f"ranks on other machines cannot reach it: GLOO_SOCKET_IFNAME, one of {interfaces}"
    yield judge(
        "network",
        f"{name}, {address}",
        (not address[0].isdigit() and not has_interface, "slow", lo),
        (address.startswith("127.") and not has_interface, "note", one_of),
    )


def check_services(home: Path) -> Iterator[Check]:
    """List the cache of the Hub, and whether keys are present, but never a key."""
    hub = Path(os.environ.get("HF_HOME") or home / ".cache" / "huggingface")
    has_token = bool(os.environ.get("HF_TOKEN")) or (hub / "token").is_file()
    yield Check("Hugging Face", f"cache {hub}, {'a' if has_token else 'no'} token")
    has_key = bool(os.environ.get("WANDB_API_KEY")) or "api.wandb.ai" in read_small_file(home / ".netrc")
    version = _find_version("wandb") or "not installed"
    yield Check("Weights & Biases", f"wandb {version}, {'a' if has_key else 'no'} key")


def format_bytes(value: float) -> str:
    """Format bytes with a binary unit: ``3.2 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:,.1f} TiB"
