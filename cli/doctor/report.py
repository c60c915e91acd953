"""The report of ``diffusionlm-doctor``: facts about the machine, and what is broken or slow on it."""

from __future__ import annotations

import json
import os
import shutil
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cli.doctor.findings import Finding, find_problems, format_bytes
from profiling.machine import Machine, read_machine
from profiling.quick_checks import MeasuredSpeeds, measure_speeds
from profiling.torch_setup import TorchInfo, drivers, installed_version, missing_packages, read_torch
from profiling.triton_setup import find_triton_problem

MachineFacts = dict[str, dict[str, str]]
"""Section -> name -> value."""

TITLES = {"broken": "broken", "slow": "slow here", "note": "to know"}
_TOOLS = ("git", "just", "tmux", "ssh")


@dataclass(frozen=True)
class DoctorReport:
    """The facts about a machine and the problems found on it."""

    facts: MachineFacts
    findings: list[Finding]

    @property
    def is_broken(self) -> bool:
        """True if a finding is ``broken``."""
        return any(finding.weight == "broken" for finding in self.findings)

    def to_json(self) -> str:
        """Return the report as a JSON object."""
        value = {
            "facts": self.facts,
            "findings": [asdict(finding) for finding in self.findings],
            "broken": self.is_broken,
        }
        return json.dumps(value, indent=1, ensure_ascii=False)


def examine(runs: Path, *, is_quick: bool, check_kernel: Callable[[], str]) -> DoctorReport:
    """Read all facts, measure speeds and find problems.

    Args:
        runs: directory that runs are written to; it may be missing.
        is_quick: skip measurements and the kernel.
        check_kernel: runs the Triton kernel and describes the result; raises if it is wrong.
    """
    machine, torch = read_machine(runs), read_torch()
    driver_lines, missing = drivers(), missing_packages()
    has_torch = torch.version is not None
    speeds = (
        MeasuredSpeeds()
        if is_quick
        else measure_speeds(machine.storage.path, machine.processor.num_usable_cores, has_torch)
    )
    findings = find_problems(machine, torch, missing, driver_lines, speeds)
    triton, problem = ("not tried (--quick)", None) if is_quick else _try_kernel(torch, check_kernel)
    if problem is not None:
        findings = sorted([problem, *findings], key=lambda finding: finding.weight != "broken")
    facts = {
        "software": _software(machine, torch, triton),
        "processor": _processor(machine, torch),
        "memory": _memory(machine),
        "disk": _disk(machine),
        "GPU": _gpus(torch, driver_lines),
        "network": _network(machine),
        "services": describe_services(os.environ, Path.home()),
        **({} if speeds == MeasuredSpeeds() else {"measured": _measured(speeds)}),
    }
    return DoctorReport(facts, findings)


def _try_kernel(torch: TorchInfo, check_kernel: Callable[[], str]) -> tuple[str, Finding | None]:
    version = installed_version("triton")
    if torch.version is None:
        return version or "not installed", None
    if version is None:
        remedy = "install it with torch's build for the GPU"
        why = "the loss of a large vocabulary runs in torch's operators"
        return "not installed", Finding("slow", "triton is missing", why, remedy) if torch.gpus else None
    missing = find_triton_problem() if torch.gpus else None
    if missing is not None:
        why, _, remedy = missing.partition(": ")
        finding = Finding("slow", "Triton cannot compile its kernels", f"it {why}", remedy)
        return f"{version}, cannot compile", finding
    try:
        return f"{version}; {check_kernel()}", None
    except Exception as error:  # a compiler may raise anything
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        remedy = "uv sync --reinstall-package triton, and a C compiler and Python.h for it"
        weight = "broken" if torch.gpus else "note"
        return f"{version}, does not work", Finding(weight, "Triton's kernel does not work", why, remedy)  # type: ignore[arg-type]


def _software(machine: Machine, torch: TorchInfo, triton: str) -> dict[str, str]:
    return {
        "Python": machine.python,
        "uv": machine.uv or "not found",
        "torch": f"{torch.version}, built for {torch.build}" if torch.version else f"cannot be used: {torch.problem}",
        "Triton": triton,
        "system": machine.system,
        "allocator": machine.allocator,
        "tools": ", ".join(f"{name}{'' if shutil.which(name) else ' (missing)'}" for name in _TOOLS),
        "environment": ", ".join(f"{key}={value}" for key, value in machine.variables.items()) or "nothing set",
    }


def _processor(machine: Machine, torch: TorchInfo) -> dict[str, str]:
    processor = machine.processor
    quota = "no limit" if processor.quota is None else f"{processor.quota:g} cores"
    facts = {
        "model": processor.model,
        "cores": f"{processor.cores}, {processor.usable} usable; quota of the control group: {quota}",
        "load": "unknown" if processor.load is None else f"{processor.load:.1f} over the last minute",
        "features": ", ".join(processor.features) or "none that matter here",
    }
    if torch.version:
        facts["torch's threads"] = f"{torch.threads} in an operator, {torch.interop_threads} between operators"
        facts["torch's kernels"] = (
            f"{torch.capability}; bfloat16 products in hardware: {_yes_or_no(torch.has_bfloat16)}"
        )
    return facts


def _memory(machine: Machine) -> dict[str, str]:
    memory = machine.memory
    return {
        "machine": f"{_format_optional_bytes(memory.total)}, {_format_optional_bytes(memory.available)} available",
        "control group": "no limit"
        if memory.limit is None
        else f"{_format_optional_bytes(memory.limit)}, {_format_optional_bytes(memory.used)} used",
        "/dev/shm": f"{_format_optional_bytes(memory.shared_total)}, {_format_optional_bytes(memory.shared_free)} free",
    }


def _disk(machine: Machine) -> dict[str, str]:
    storage = machine.storage
    return {
        "runs": f"{storage.path} ({storage.kind}){'' if storage.is_writable else ', not writable'}",
        "free": format_bytes(storage.free),
        "open files": "no limit" if machine.open_files < 0 else f"{machine.open_files:,} at once (ulimit -n)",
    }


def _gpus(torch: TorchInfo, driver_lines: list[str]) -> dict[str, str]:
    facts = {
        f"GPU {index}": f"{gpu.name}, {format_bytes(gpu.free)} of {format_bytes(gpu.memory)} free, capability "
        f"{gpu.capability[0]}.{gpu.capability[1]}, bfloat16: {_yes_or_no(gpu.has_bfloat16)}"
        for index, gpu in enumerate(torch.gpus)
    }
    if driver_lines:
        facts["driver"] = "; ".join(dict.fromkeys(line.partition(",")[0] for line in driver_lines))
    return facts or {"GPU": "none"}


def _network(machine: Machine) -> dict[str, str]:
    network = machine.network
    return {
        "name": f"{network.hostname}, {network.address or 'cannot be resolved'}",
        "interfaces": ", ".join(network.interfaces) or "unknown",
    }


def describe_services(environment: Mapping[str, str], home: Path) -> dict[str, str]:
    """Return caches, loggers and whether keys are present, but never a key."""
    hub = Path(environment.get("HF_HOME") or home / ".cache" / "huggingface")
    keys = {
        "Hugging Face token": bool(environment.get("HF_TOKEN")) or (hub / "token").is_file(),
        "Weights & Biases key": bool(environment.get("WANDB_API_KEY")) or _in_netrc(home, "api.wandb.ai"),
    }
    installed = [f"{name} {installed_version(name) or '(missing)'}" for name in ("wandb", "tensorboard")]
    return {
        "Hugging Face cache": f"{hub}{'' if hub.is_dir() else ' (not there yet)'}",
        **{name: "present" if is_there else "none" for name, is_there in keys.items()},
        "loggers": ", ".join(installed),
    }


def _in_netrc(home: Path, machine: str) -> bool:
    try:
        return machine in (home / ".netrc").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def _measured(speeds: MeasuredSpeeds) -> dict[str, str]:
    facts = {}
    if speeds.float32 is not None and speeds.bfloat16 is not None:
        facts["float32 products"] = f"{speeds.float32 / 1e9:,.0f} GFLOP/s on one thread"
        ratio = speeds.bfloat16 / speeds.float32
        facts["bfloat16 products"] = f"{speeds.bfloat16 / 1e9:,.0f} GFLOP/s on one thread, {ratio:.2f} of float32's"
        if speeds.float32_all is not None and speeds.threads > 1:
            gain = speeds.float32_all / speeds.float32
            facts["threads"] = f"{speeds.threads} do {gain:.2f} times the products of one"
    if speeds.bandwidth is not None:
        facts["memory"] = f"{speeds.bandwidth / 1e9:,.1f} GB/s read and written by a copy"
    if speeds.fsync is not None:
        facts["fsync"] = f"{1000 * speeds.fsync:.2g} ms for 4 KiB"
    return facts


def render(report: DoctorReport, width: int) -> str:
    """Render the report for a terminal with ``width`` columns."""
    column = max(len(name) for facts in report.facts.values() for name in facts)
    lines = []
    for section, facts in report.facts.items():
        lines += ["", section]
        for name, value in facts.items():
            lines += _wrap_lines(f"  {name:<{column}}  ", value, width)
    for weight, title in TITLES.items():
        chosen = [finding for finding in report.findings if finding.weight == weight]
        if not chosen:
            continue
        lines += ["", f"{title}:"]
        for finding in chosen:
            lines += _wrap_lines("  - ", finding.what, width)
            lines += _wrap_lines("      why:    ", finding.why, width)
            lines += _wrap_lines("      remedy: ", finding.remedy, width)
    if not report.is_broken:
        slow = sum(finding.weight == "slow" for finding in report.findings)
        lines += ["", "nothing is broken" + (f"; {slow} to mend for speed" if slow else ", nothing is slow")]
    return "\n".join(lines[1:])


def _wrap_lines(head: str, text: str, width: int) -> list[str]:
    """Wrap text behind a prefix, with continuation lines indented."""
    text_width = max(40, width - len(head))
    parts = textwrap.wrap(text, text_width, break_long_words=False, break_on_hyphens=False) or [""]
    return [f"{head if index == 0 else ' ' * len(head)}{part}" for index, part in enumerate(parts)]


def _format_optional_bytes(value: int | None) -> str:
    return "unknown" if value is None else format_bytes(value)


def _yes_or_no(value: Any) -> str:
    return "yes" if value else "no"
