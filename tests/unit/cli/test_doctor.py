"""The doctor: problems of a machine, and their remedies."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cli import doctor
from cli.doctor import Check, main
from diffusionlm.kernels import triton_check
from profiling.machine import Memory

GIB = 1 << 30


def gpu_torch(*, free: int = 79 * GIB, count: int = 1, problem: str = "", version: str = "2.9") -> Any:
    """What the doctor reads of a torch with GPUs."""

    def memory() -> tuple[int, int]:
        if problem:
            raise RuntimeError(problem)
        return free, 80 * GIB

    cuda = SimpleNamespace(
        is_available=lambda: count > 0,
        device_count=lambda: count,
        get_device_properties=lambda index: SimpleNamespace(name="NVIDIA H100", major=9, minor=0),
        device=lambda index: contextlib.nullcontext(),
        mem_get_info=memory,
    )
    cpu = SimpleNamespace(get_cpu_capability=lambda: "AVX512")
    return SimpleNamespace(
        __version__=version, version=SimpleNamespace(cuda="13"), cuda=cuda, backends=SimpleNamespace(cpu=cpu)
    )


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A healthy machine with eight cores."""
    for name in doctor.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(doctor, "drivers", lambda: ["580, NVIDIA H100"])
    monkeypatch.setattr(doctor, "has_native_bfloat16", lambda device: True)
    monkeypatch.setattr(doctor, "usable_cores", lambda: 8)
    monkeypatch.setattr(doctor, "read_memory", lambda root: Memory(64 * GIB, 60 * GIB))
    monkeypatch.setattr(doctor, "find_file_system", lambda path, root: (path, "ext4"))
    monkeypatch.setattr(doctor, "find_triton_problem", lambda: None)
    monkeypatch.setattr(doctor, "_find_version", lambda name: "1.0")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=GIB, free=100 * GIB))
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (4096, 4096))
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.0.0.7")
    monkeypatch.setattr(triton_check, "max_difference_to_eager", lambda: 1e-6)


def problems(checks: Iterable[Check]) -> list[Check]:
    return [check for check in checks if check.status != "ok"]


def examine_gpu_machine(tmp_path: Path) -> list[Check]:
    return [
        *doctor.check_packages(""),
        *doctor.check_torch(gpu_torch()),
        *doctor.check_gpus(gpu_torch(), ["580, NVIDIA H100"]),
        doctor.check_triton(has_gpu=True, is_quick=False),
        *doctor.check_processor(8),
        *doctor.check_memory(2),
        *doctor.check_storage(tmp_path),
        *doctor.check_network(),
        *doctor.check_services(tmp_path),
    ]


def raise_os_error(name: str) -> str:
    raise OSError(name)


def fail(text: str) -> Callable[[], float]:
    def run() -> float:
        raise RuntimeError(text)

    return run


@pytest.mark.parametrize(
    ("replaced", "status", "problem", "remedy"),
    [
        (
            {"doctor._find_version": lambda name: None if name == "zstandard" else "1"},
            "broken",
            "missing: zstandard",
            "uv sync",
        ),
        ({"doctor.has_native_bfloat16": lambda device: device == "cpu"}, "slow", "no bfloat16", "8.0"),
        ({"doctor._find_version": lambda name: None if name == "triton" else "1"}, "slow", "not installed", "torch's"),
        ({"doctor.find_triton_problem": lambda: "needs gcc: get it"}, "slow", "it needs gcc", "get it"),
        ({"triton_check.max_difference_to_eager": fail("no gcc\nlong")}, "broken", "Error: no gcc", "C compiler"),
        ({"triton_check.max_difference_to_eager": lambda: 0.5}, "broken", "0.5 nats", "reinstall-package triton"),
        ({"doctor.usable_cores": lambda: 16}, "slow", "8 of torch, and 16 usable", "OMP_NUM_THREADS=16"),
        ({"doctor.read_memory": lambda root: Memory(4 * GIB, GIB)}, "slow", "1 GiB of 4 GiB free", "micro_batch_size"),
        ({"doctor.LOW_SHARED_MEMORY_BYTES": 2 * GIB}, "broken", "1 GiB", "--shm-size"),
        ({"os.access": lambda path, mode: False}, "broken", "(ext4)", "not writable: run.directory"),
        ({f"doctor.{size}_DISK_BYTES": 200 * GIB for size in ("CRITICAL", "LOW")}, "broken", "100 GiB free", "run"),
        ({"doctor.LOW_DISK_BYTES": 200 * GIB}, "note", "100 GiB free", "keep_last"),
        ({"doctor.find_file_system": lambda path, root: (path, "nfs4")}, "slow", "(nfs4)", "local disk"),
        ({"doctor.find_file_system": lambda path, root: (path, "tmpfs")}, "note", "(tmpfs)", "run.directory"),
        ({"resource.getrlimit": lambda kind: (256, 256)}, "note", "256 at once", "ulimit -n"),
        ({"socket.gethostbyname": raise_os_error}, "slow", "cannot be resolved", "GLOO_SOCKET_IFNAME=lo"),
        ({"socket.gethostbyname": lambda name: "127.0.1.1"}, "note", "127.0.1.1", "GLOO_SOCKET_IFNAME, one of"),
    ],
)
def test_problems_of_a_machine(
    replaced: dict[str, Any], status: str, problem: str, remedy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    modules = {"doctor": doctor, "triton_check": triton_check, "os": os, "resource": resource, "socket": socket}
    assert problems(examine_gpu_machine(tmp_path)) == []
    for name, value in replaced.items():
        module, _, attribute = name.partition(".")
        monkeypatch.setattr(modules[module], attribute, value)
    [check] = problems(examine_gpu_machine(tmp_path))
    assert (check.status, problem in check.value, remedy in check.remedy) == (status, True, True), check


@pytest.mark.parametrize(
    ("torch", "drivers", "status", "problem", "remedy"),
    [
        (gpu_torch(count=0), ["580, X"], "slow", "the driver knows 580, X", "a torch build"),
        (gpu_torch(count=0), [], "note", "none", "none needed"),
        (gpu_torch(free=GIB), [], "note", "1 GiB of 80 GiB free", "it is in use: CUDA_VISIBLE_DEVICES"),
        (gpu_torch(problem="driver too old\nmore"), [], "broken", "torch cannot use it: driver too old", "nvidia-smi"),
    ],
)
def test_problems_of_gpus(torch: Any, drivers: list[str], status: str, problem: str, remedy: str) -> None:
    [check] = doctor.check_gpus(torch, drivers)
    assert (check.status, problem in check.value, remedy in check.remedy) == (status, True, True), check


def test_problems_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    [check] = problems(doctor.check_torch(gpu_torch(version="2.11.0+cu130")))
    assert check.status == "note" and "runtime.compile" in check.value and "another version" in check.remedy
    # `uv sync` leaves alone what is installed, whole or not.
    [damaged] = problems(doctor.check_packages("OSError: libcudart"))
    assert damaged.status == "broken" and damaged.remedy.startswith("uv sync --reinstall-package torch;")
    monkeypatch.setattr(doctor, "_find_version", lambda name: None if name == "torch" else "1.0")
    [missing] = problems(doctor.check_packages("no module"))
    assert (missing.status, missing.value, missing.remedy) == ("broken", "missing: torch", "uv sync")


def test_a_kernel_that_fails_without_a_gpu_is_only_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "runs interpreted" in doctor.check_triton(has_gpu=False, is_quick=False).value
    monkeypatch.setattr(triton_check, "max_difference_to_eager", fail("no compiler"))
    assert doctor.check_triton(has_gpu=False, is_quick=False).status == "note"
    assert doctor.check_triton(has_gpu=False, is_quick=True).status == "ok"


def test_the_command_as_json_and_its_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a secret")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    arguments = ["--quick", "--directory", str(tmp_path)]
    assert main(["--json", *arguments]) == 0
    text = capsys.readouterr().out
    values = {check["name"]: check["value"] for check in json.loads(text)["checks"]}
    assert "a secret" not in text and values["Weights & Biases"].endswith("a key")
    assert values["Hugging Face"] == f"cache {tmp_path}, no token"
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "torch", None)
        assert main(arguments) == 1
    lines = capsys.readouterr().out.splitlines()
    assert next(line for line in lines if " torch " in line).startswith("broken  torch")
    assert lines[-1].startswith("1 broken, ")


def test_it_needs_no_package() -> None:
    code = "import sys\nsys.modules.update(pydantic=None, torch=None, numpy=None, rich=None)\n"
    code += "from cli.doctor import examine, format_checks\nfrom pathlib import Path\n"
    code += "print(format_checks(list(examine(Path('.'), is_quick=True))))"
    root = Path(doctor.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, timeout=60)
    assert "1 broken" in done.stdout, done.stderr
