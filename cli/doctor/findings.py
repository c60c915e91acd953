"""Find what is broken or slow on a machine, and the setting that fixes it. Facts in, findings out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from profiling.machine import Machine
from profiling.nvtx import NVTX_VARIABLE, Level
from profiling.quick_checks import MeasuredSpeeds
from profiling.torch_setup import TorchInfo, find_compile_problem

Severity = Literal["broken", "slow", "note"]

GIB = 1 << 30
MIN_PYTHON = (3, 11)
CRITICAL_DISK_BYTES = 1 * GIB
"""Bytes on the runs' disk below which a checkpoint of even a small model is at risk."""
LOW_DISK_BYTES = 10 * GIB
LOW_MEMORY_BYTES = 2 * GIB
LOW_SHARED_MEMORY_BYTES = 128 << 20
MIN_OPEN_FILES = 1024
SLOW_FSYNC = 0.05
"""Seconds."""
NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "fuse", "fuse.sshfs", "9p")
BUSY_LOAD_PER_CORE = 1.25
"""Load divided by usable cores."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
POOR_SCALING = 0.6
"""Speed of all threads together, divided by their number times the speed of one."""


@dataclass(frozen=True)
class Finding:
    """A problem of the machine, its reason and its remedy."""

    weight: Severity
    """broken: something will not work. slow: it works, but slower than necessary. note: good to know."""
    what: str
    why: str
    remedy: str


def find_problems(
    machine: Machine, torch: TorchInfo, missing: list[str], drivers: list[str], speeds: MeasuredSpeeds
) -> list[Finding]:
    """Return all findings, broken ones first.

    Args:
        missing: required packages that are not installed.
        drivers: GPUs that the driver lists.
    """
    findings = [
        *_check_software(machine, torch, missing),
        *_check_gpus(torch, drivers),
        *_check_cores(machine, torch),
        *_check_speeds(machine, torch, speeds),
        *_check_memory(machine, torch),
        *_check_storage(machine, speeds),
        *_check_limits(machine),
        *_check_network(machine),
    ]
    return sorted(findings, key=lambda finding: get_args(Severity).index(finding.weight))


def _check_software(machine: Machine, torch: TorchInfo, missing: list[str]) -> Iterator[Finding]:
    if machine.version < MIN_PYTHON:
        yield Finding("broken", f"Python {machine.version[0]}.{machine.version[1]}", "3.11 is the oldest", "uv sync")
    if torch.version is None and "torch" in missing:
        yield Finding("broken", "torch is missing", torch.problem, "uv sync")
    elif torch.version is None:
        remedy = "uv sync --reinstall-package torch; --reinstall also replaces what torch needs"
        yield Finding("broken", "torch cannot be used", torch.problem, remedy)
    if torch.version is not None and (problem := find_compile_problem(torch.version, "cpu")):
        why, _, remedy = problem.partition(": ")
        yield Finding("note", 'runtime.compile = "blocks" is refused on the CPU', f"it {why}", remedy)
    packages = [name for name in missing if name != "torch"]
    if packages:
        yield Finding("broken", f"missing: {', '.join(packages)}", "the project depends on them", "uv sync")
    level = machine.variables.get(NVTX_VARIABLE, "")
    if level and level not in get_args(Level):
        levels = ", ".join(get_args(Level))
        yield Finding(
            "broken", f"{NVTX_VARIABLE} = {level!r}", "it is not a level, and a run rejects it", f"one of {levels}"
        )
    if machine.uv is None:
        yield Finding("note", "uv is not on the PATH", "the commands of the docs begin with it", "pip install uv")
    if "musl" in machine.allocator:
        why = "it gives memory back and takes it again in each step"
        yield Finding("slow", f"the allocator is {machine.allocator}", why, "LD_PRELOAD of jemalloc or mimalloc")


def _check_gpus(torch: TorchInfo, drivers: list[str]) -> Iterator[Finding]:
    if torch.version is None:
        return
    if torch.gpu_problem:
        yield Finding("broken", "torch cannot use the GPU", torch.gpu_problem, "see nvidia-smi; or run.device = cpu")
    if drivers and not torch.gpus and not torch.gpu_problem:
        why = f"the driver knows {len(drivers)}, and torch is built for {torch.build}"
        remedy = "a torch build and a driver that fit each other, or CUDA_VISIBLE_DEVICES unset"
        yield Finding("slow", "no GPU is used", why, remedy)
    if not drivers and not torch.gpus:
        why = "models train on the processor, and runtime.compile = auto leaves blocks uncompiled"
        yield Finding("note", "there is no GPU", why, "none needed for small models")
    for index, gpu in enumerate(torch.gpus):
        if not gpu.has_bfloat16:
            why = "training.precision = auto takes float32 there, without its matrix units"
            yield Finding("slow", f"GPU {index} ({gpu.name}) has no bfloat16", why, "a GPU of capability 8.0 or more")
        if gpu.free < gpu.memory / 2:
            why = f"{format_bytes(gpu.memory - gpu.free)} of {format_bytes(gpu.memory)} are taken"
            remedy = "CUDA_VISIBLE_DEVICES, or training.micro_batch_size"
            yield Finding("note", f"GPU {index} is in use", why, remedy)


def _check_cores(machine: Machine, torch: TorchInfo) -> Iterator[Finding]:
    processor = machine.processor
    num_usable_cores = processor.num_usable_cores
    cores = format_count(num_usable_cores, "core")
    problem = f"torch starts {format_count(torch.threads, 'thread')} where {cores} are granted"
    if torch.version is not None and torch.threads < num_usable_cores:
        settings = {name: machine.variables[name] for name in THREAD_VARIABLES if name in machine.variables}
        reason = ", ".join(f"{name}={value}" for name, value in settings.items()) or "torch's default"
        remedy = f"model.threads = {num_usable_cores}" + (", or unset the variable" if settings else "")
        why = f"{reason}; inference uses this number, and training uses OMP_NUM_THREADS"
        yield Finding("slow", problem, why, remedy)
    if torch.version is not None and torch.threads > num_usable_cores:
        quota = (
            "" if processor.quota is None else f"; the control group grants {processor.quota:g} cores' worth of time"
        )
        why = f"threads that share a core wait for each other; inference takes torch's number{quota}"
        remedy = f"OMP_NUM_THREADS={num_usable_cores}, or model.threads = {num_usable_cores}"
        yield Finding("slow", problem, why, remedy)
    if _is_busy(machine):
        why = f"{processor.load:.1f} processes wanted {cores} on average over the last minute"
        remedy = "wait; what is measured meanwhile is that of a busy machine"
        yield Finding("slow", "the machine is busy", why, remedy)
    bound = [name for name in ("KMP_AFFINITY", "GOMP_CPU_AFFINITY", "OMP_PROC_BIND") if name in machine.variables]
    if bound:
        why = "threads are tied to cores: several processes may be tied to the same ones"
        yield Finding(
            "note", f"{', '.join(bound)} set", why, "unset for data.workers, sweeps with --jobs and many ranks"
        )


def _is_busy(machine: Machine) -> bool:
    load = machine.processor.load
    return load is not None and load > BUSY_LOAD_PER_CORE * machine.processor.num_usable_cores


def _check_speeds(machine: Machine, torch: TorchInfo, speeds: MeasuredSpeeds) -> Iterator[Finding]:
    if speeds.float32 is None or speeds.bfloat16 is None or torch.gpus:
        return
    ratio = speeds.bfloat16 / speeds.float32
    if torch.has_bfloat16 and ratio < 1.0:
        why = f"measured {ratio:.2f} of float32's speed in one product, though the processor has instructions for it"
        yield Finding("slow", "bfloat16 products are slower than float32", why, 'training.precision = "float32"')
    elif not torch.has_bfloat16:
        measurement = f"measured {ratio:.2f} of float32's speed"
        why = f"the processor has no instructions for it: {measurement}; training.precision = auto takes float32"
        yield Finding("note", "bfloat16 is emulated", why, 'leave training.precision = "auto"')
    if speeds.float32_all is not None and speeds.threads > 1 and not _is_busy(machine):
        share = speeds.float32_all / (speeds.threads * speeds.float32)
        if share < POOR_SCALING:
            problem = f"{speeds.threads} threads do {share * speeds.threads:.1f} times the work of one"
            why = "cores are shared with others, or are two halves of one"
            yield Finding("slow", problem, why, f"run.threads = {max(1, round(share * speeds.threads))}")


def _check_memory(machine: Machine, torch: TorchInfo) -> Iterator[Finding]:
    memory = machine.memory
    if memory.free is not None and memory.free < LOW_MEMORY_BYTES:
        why = "the kernel's out-of-memory killer ends a larger run without a message"
        remedy = "training.micro_batch_size lower, runtime.activation_checkpointing = full"
        yield Finding("slow", f"{format_bytes(memory.free)} of memory are free", why, remedy)
    if len(torch.gpus) > 1 and memory.shared_total is not None and memory.shared_total < LOW_SHARED_MEMORY_BYTES:
        why = "NCCL joins the GPUs of a machine through it"
        remedy = "docker run --shm-size=1g, or NCCL_SHM_DISABLE=1"
        yield Finding("broken", f"/dev/shm has {format_bytes(memory.shared_total)}", why, remedy)


def _check_storage(machine: Machine, speeds: MeasuredSpeeds) -> Iterator[Finding]:
    storage = machine.storage
    if not storage.is_writable:
        yield Finding("broken", f"{storage.path} cannot be written to", "runs lie there", "run.directory elsewhere")
    if storage.free < LOW_DISK_BYTES:
        weight: Severity = "broken" if storage.free < CRITICAL_DISK_BYTES else "note"
        why = "checkpoints take weights and optimizer, 8 to 12 bytes a parameter, keep_last + 1 times"
        remedy = "run.directory elsewhere, checkpoint.keep_last = 1"
        yield Finding(weight, f"{format_bytes(storage.free)} are free for runs", why, remedy)
    if storage.kind in NETWORK_FILE_SYSTEMS:
        why = "saving waits for the network, and locks of a run may not hold between machines"
        remedy = "checkpoint.background = true (as it is), run.directory on a local disk"
        yield Finding("slow", f"runs lie on a network file system ({storage.kind})", why, remedy)
    if storage.kind in ("tmpfs", "ramfs"):
        why = "they take memory, and are gone when the machine starts anew"
        yield Finding("note", f"runs lie in memory ({storage.kind})", why, "run.directory on a disk")
    if speeds.fsync is not None and speeds.fsync > SLOW_FSYNC:
        why = "a checkpoint waits so long for each of its files"
        remedy = "checkpoint.every_steps higher, or run.directory on another disk"
        yield Finding("slow", f"an fsync takes {1000 * speeds.fsync:.0f} ms", why, remedy)


def _check_limits(machine: Machine) -> Iterator[Finding]:
    if 0 <= machine.open_files < MIN_OPEN_FILES:  # negative: no limit
        why = "each shard of data, and each worker, is an open file"
        yield Finding("note", f"{machine.open_files} files may be open", why, "ulimit -n 65536")


def _check_network(machine: Machine) -> Iterator[Finding]:
    network, variables = machine.network, machine.variables
    if network.address is None and "GLOO_SOCKET_IFNAME" not in variables:
        why = f"the host name {network.hostname}, which gloo looks up, cannot be resolved"
        remedy = "GLOO_SOCKET_IFNAME=lo for one machine, or a line in /etc/hosts"
        yield Finding("slow", "ranks may not find each other", why, remedy)
    if network.address is not None and network.address.startswith("127.") and "GLOO_SOCKET_IFNAME" not in variables:
        interfaces = [name for name in network.interfaces if name != "lo"]
        why = "ranks on other machines cannot reach this address; on one machine it is right"
        remedy = f"for several machines GLOO_SOCKET_IFNAME, one of {', '.join(interfaces) or 'the interfaces'}"
        yield Finding("note", f"the machine's name resolves to {network.address}", why, remedy)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        prefix = variables.get(name, "").lstrip("=^").split(",")[0]
        if prefix and network.interfaces and not any(interface.startswith(prefix) for interface in network.interfaces):
            why = f"there are {', '.join(network.interfaces)}"
            yield Finding("broken", f"{name}={variables[name]}: no such interface", why, f"unset {name}, or name one")


def format_count(number: int, noun: str) -> str:
    """``1 core``, ``2 cores``."""
    return f"{number} {noun}" + "s" * (number != 1)


def format_bytes(value: float) -> str:
    """Format bytes with a binary unit: ``3.2 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            return f"{value:.0f} {unit}" if value >= 100 or unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError
