"""The doctor: facts read from a machine that is laid out in files, and what is found in them."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from cli.doctor import findings, main, report
from cli.doctor.findings import Finding, find_problems
from profiling import cores, machine, quick_checks, torch_setup
from profiling.machine import Machine, Memory, Network, Processor, Storage
from profiling.quick_checks import MeasuredSpeeds
from profiling.torch_setup import GpuInfo, TorchInfo

GIB = 1 << 30
SOUND = Machine(
    system="Linux",
    python="CPython 3.11",
    version=(3, 11),
    uv="/usr/bin/uv",
    allocator="glibc 2.36",
    processor=Processor("a CPU", cores=8, usable=8, quota=None, features=("avx2",), load=0.5),
    memory=Memory(64 * GIB, 60 * GIB, None, None, GIB, GIB),
    storage=Storage(Path("/runs"), "ext4", 100 * GIB, True),
    network=Network("node", "10.0.0.7", ("lo", "eth0")),
    open_files=4096,
    variables={},
)
GPU = GpuInfo("NVIDIA H100", 80 * GIB, 79 * GIB, (9, 0), True)
TORCH = TorchInfo("2.9", "", "CUDA 13", threads=8, interop_threads=8, has_bfloat16=True, gpus=(GPU,))


def lay_out(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def findings_of(
    machine: Machine = SOUND,
    torch: TorchInfo = TORCH,
    missing: tuple[str, ...] = (),
    drivers: tuple[str, ...] = ("580, NVIDIA H100",),
    speeds: MeasuredSpeeds | None = None,
) -> list[Finding]:
    return find_problems(machine, torch, list(missing), list(drivers), speeds or MeasuredSpeeds())


def test_healthy_machine_has_no_findings() -> None:
    assert findings_of(speeds=MeasuredSpeeds(1e9, 5e9, 7.8e9, 8, 1e10, 0.001)) == []


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000"}, None),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "150000 100000"}, 1.5),
        ({"proc/self/cgroup": "0::/not/mounted\n", "sys/fs/cgroup/cpu.max": "200000 100000"}, 2.0),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/job\n2:memory:/job\n",
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "300000",
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000",
                "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "400000",
                "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            4.0,
        ),
        ({}, None),
    ],
    ids=["none", "of a parent", "of a container", "version 1", "no files"],
)
def test_quotas_of_control_groups(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    lay_out(tmp_path, files)
    assert cores.cgroup_cpu_quota(tmp_path) == quota


@pytest.mark.parametrize(("quota", "expected"), [(None, 6), (2.0, 2), (1.6, 2), (0.2, 1), (32.0, 6)])
def test_usable_cores(monkeypatch: pytest.MonkeyPatch, quota: float | None, expected: int) -> None:
    monkeypatch.setattr(cores, "affinity_cores", lambda: 6)
    monkeypatch.setattr(cores, "cgroup_cpu_quota", lambda: quota)
    assert cores.usable_cores() == expected


def test_memory_of_a_control_group(tmp_path: Path) -> None:
    meminfo = "MemTotal: 1000 kB\nMemAvailable: 800 kB\nHugePages_Total: 0\n"
    files = {"proc/meminfo": meminfo, "proc/self/cgroup": "0::/a\n"}
    lay_out(tmp_path, files)
    read = machine.read_memory(tmp_path)
    assert (read.total, read.available, read.limit, read.free) == (1_024_000, 819_200, None, 819_200)
    lay_out(tmp_path, {"sys/fs/cgroup/a/memory.max": "500000", "sys/fs/cgroup/a/memory.current": "200000"})
    read = machine.read_memory(tmp_path)
    assert (read.limit, read.used, read.free) == (500_000, 200_000, 300_000)
    lay_out(tmp_path, {"sys/fs/cgroup/a/memory.stat": "anon 20000\nactive_file 7\ninactive_file 150000\n"})
    assert (machine.read_memory(tmp_path).used, machine.read_memory(tmp_path).free) == (50_000, 450_000)
    lay_out(tmp_path, {"sys/fs/cgroup/a/memory.max": "9223372036854771712"})  # how version 1 says none
    assert machine.read_memory(tmp_path).limit is None


def test_memory_of_a_control_group_of_version_1(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory/a/memory"
    files = {
        "proc/meminfo": "MemTotal: 1000 kB\n",
        "proc/self/cgroup": "4:memory:/a\n",
        f"{group}.limit_in_bytes": "500000",
        f"{group}.usage_in_bytes": "200000",
        f"{group}.stat": "inactive_file 1\ntotal_inactive_file 150000\n",
    }
    lay_out(tmp_path, files)
    read = machine.read_memory(tmp_path)
    assert (read.limit, read.used, read.free) == (500_000, 50_000, 450_000)


def test_processor_and_storage(tmp_path: Path) -> None:
    cpu = "processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: Fast CPU\nflags\t\t: fpu avx2 avx512_bf16\n\n"
    cpu += "processor\t: 1\nflags\t: fpu\n"
    mounts = f"root / ext4 rw 0 0\nserver {tmp_path.parent} nfs4 rw 0 0\nx /elsewhere tmpfs rw 0 0\n"
    lay_out(tmp_path, {"proc/cpuinfo": cpu, "proc/mounts": mounts})
    read = machine.read_processor(tmp_path)
    assert (read.model, read.features) == ("Fast CPU", ("avx2", "avx512_bf16"))
    assert machine.read_processor_vendor(tmp_path) == "AuthenticAMD"
    assert machine.read_processor_vendor(tmp_path / "absent") == ""
    storage = machine.read_storage(tmp_path / "not" / "there", tmp_path)
    assert (storage.path, storage.kind, storage.is_writable) == (tmp_path, "nfs4", True)
    assert machine.allocator({"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"}) == "jemalloc"


def processor(**changes: Any) -> Machine:
    return replace(SOUND, processor=replace(SOUND.processor, **changes))


def storage(**changes: Any) -> Machine:
    return replace(SOUND, storage=replace(SOUND.storage, **changes))


def variables(**named: str) -> Machine:
    return replace(SOUND, variables=named)


ON_CPU = replace(TORCH, gpus=())


@pytest.mark.parametrize(
    ("facts", "weight", "problem", "remedy"),
    [
        ({"machine": replace(SOUND, version=(3, 10))}, "broken", "Python 3.10", "uv sync"),
        (
            {"torch": TorchInfo(None, "OSError: libcudart")},
            "broken",
            "torch cannot be used",
            "uv sync --reinstall-package",
        ),
        ({"torch": replace(TORCH, version="2.11.0+cu130")}, "note", "runtime.compile", "another version of torch"),
        ({"missing": ("torch", "numpy")}, "broken", "missing: numpy", "uv sync"),
        ({"machine": variables(DIFFUSIONLM_NVTX="loud")}, "broken", "DIFFUSIONLM_NVTX = 'loud'", "coarse, fine, verb"),
        ({"torch": replace(TORCH, gpus=(), gpu_problem="driver too old")}, "broken", "torch cannot use", "nvidia-smi"),
        ({"torch": replace(TORCH, gpus=(), build="CPU")}, "slow", "no GPU is used", "a torch build"),
        ({"torch": ON_CPU, "drivers": ()}, "note", "there is no GPU", "none needed"),
        ({"torch": replace(TORCH, gpus=(replace(GPU, has_bfloat16=False),))}, "slow", "no bfloat16", "8.0"),
        ({"torch": replace(TORCH, gpus=(replace(GPU, free=GIB),))}, "note", "GPU 0 is in use", "CUDA_VISIBLE_DEVICES"),
        (
            {"machine": processor(quota=2.0)},
            "slow",
            "torch starts 8 threads where 2 cores are granted",
            "OMP_NUM_THREADS=2",
        ),
        (
            {"machine": variables(OMP_NUM_THREADS="1"), "torch": replace(TORCH, threads=1)},
            "slow",
            "torch starts 1 thread where 8 cores",
            "model.threads = 8, or unset",
        ),
        ({"torch": replace(TORCH, threads=32)}, "slow", "torch starts 32 threads", "OMP_NUM_THREADS=8"),
        ({"machine": processor(load=20.0)}, "slow", "the machine is busy", "wait"),
        ({"machine": variables(OMP_PROC_BIND="true")}, "note", "OMP_PROC_BIND set", "unset for data.workers"),
        (
            {"torch": ON_CPU, "drivers": (), "speeds": MeasuredSpeeds(2e9, 1e9)},
            "slow",
            "bfloat16 products are slower",
            'training.precision = "float32"',
        ),
        (
            {"torch": replace(ON_CPU, has_bfloat16=False), "drivers": (), "speeds": MeasuredSpeeds(2e9, 1e9)},
            "note",
            "bfloat16 is emulated",
            '"auto"',
        ),
        (
            {"torch": ON_CPU, "drivers": (), "speeds": MeasuredSpeeds(1e9, 2e9, 2.2e9, 8)},
            "slow",
            "8 threads do 2.2 times",
            "run.threads = 2",
        ),
        (
            {"machine": replace(SOUND, memory=Memory(64 * GIB, 60 * GIB, 4 * GIB, 3 * GIB, GIB, GIB))},
            "slow",
            "1.0 GiB of memory are free",
            "micro_batch_size",
        ),
        (
            {
                "machine": replace(SOUND, memory=replace(SOUND.memory, shared_total=64 << 20)),
                "torch": replace(TORCH, gpus=(GPU, GPU)),
            },
            "broken",
            "/dev/shm has 64.0 MiB",
            "--shm-size",
        ),
        ({"machine": storage(is_writable=False)}, "broken", "/runs cannot be written", "run.directory"),
        ({"machine": storage(free=GIB // 2)}, "broken", "512 MiB are free", "run.directory"),
        ({"machine": storage(free=2 * GIB)}, "note", "2.0 GiB are free", "keep_last"),
        ({"machine": storage(kind="nfs4")}, "slow", "network file system (nfs4)", "checkpoint.background"),
        ({"machine": storage(kind="tmpfs")}, "note", "runs lie in memory", "run.directory"),
        ({"speeds": MeasuredSpeeds(fsync=0.2)}, "slow", "an fsync takes 200 ms", "checkpoint.every_steps"),
        ({"machine": replace(SOUND, open_files=256)}, "note", "256 files", "ulimit -n"),
        ({"machine": replace(SOUND, network=Network("n", None, ("lo",)))}, "slow", "not find each", "GLOO_SOCKET"),
        ({"machine": replace(SOUND, network=Network("n", "127.0.1.1", ("lo", "eth0")))}, "note", "127.0.1.1", "eth0"),
        ({"machine": variables(GLOO_SOCKET_IFNAME="ib0")}, "broken", "GLOO_SOCKET_IFNAME=ib0", "unset"),
        ({"machine": replace(SOUND, allocator="musl 1.2")}, "slow", "musl", "LD_PRELOAD"),
        ({"machine": replace(SOUND, uv=None)}, "note", "uv is not", "pip install uv"),
    ],
)
def test_single_findings(facts: dict[str, Any], weight: str, problem: str, remedy: str) -> None:
    [finding] = [
        candidate
        for candidate in findings_of(**facts)
        if candidate.what != "there is no GPU" or candidate.what == problem
    ]
    assert (finding.weight, problem in finding.what, remedy in finding.remedy) == (weight, True, True), finding
    assert finding.why


def test_busy_machine_has_no_core_finding() -> None:
    busy = processor(load=20.0)
    problems = [
        finding.what for finding in findings_of(busy, ON_CPU, drivers=(), speeds=MeasuredSpeeds(1e9, 2e9, 1e9, 8))
    ]
    assert problems == ["the machine is busy", "there is no GPU"]


def test_rates_take_turns_by_a_clock() -> None:
    """Two works, of 1 s and 4 s by a clock of our own."""
    now = [0.0]

    def work(seconds: float, amount: float) -> quick_checks.Work:
        def run() -> None:
            now[0] += seconds

        return quick_checks.Work(run, amount)

    assert quick_checks.measure_rates([work(1.0, 8.0), work(4.0, 4.0)], lambda: now[0]) == [8.0, 1.0]


@pytest.mark.parametrize(("seconds", "size"), [(0.0001, 768), (0.01, 192)])
def test_a_slow_bfloat16_product_is_measured_on_small_matrices(seconds: float, size: int) -> None:
    """By a clock of our own: 0.01 s for matrices of 192 would be 0.64 s for those of 768."""
    times = iter([0.0, seconds])
    sizes = SimpleNamespace(bfloat16=None, ones=lambda rows, columns, dtype: rows, mm=lambda left, right: left)
    work = quick_checks._bfloat16_product(sizes, lambda: next(times))
    assert (work.call(), work.amount) == (size, 2.0 * size**3)


def test_fsync_probe_in_an_unwritable_folder(tmp_path: Path) -> None:
    assert quick_checks.fsync_seconds(tmp_path / "missing") is None
    assert quick_checks.fsync_seconds(tmp_path) is not None
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No look at the real network or driver."""
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.0.0.7")
    monkeypatch.setattr(report, "drivers", list)


@pytest.mark.usefixtures("offline")
def test_the_command_as_json_and_its_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a secret")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("DIFFUSIONLM_NVTX", raising=False)
    monkeypatch.setattr(findings, "CRITICAL_DISK_BYTES", 0)
    assert main(["--json", "--quick", "--directory", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    report = json.loads(text)
    assert "a secret" not in text
    assert report["facts"]["services"]["Weights & Biases key"] == "present"
    assert report["facts"]["services"]["Hugging Face cache"] == str(tmp_path)
    assert "measured" not in report["facts"]
    assert "rsync" not in report["facts"]["software"]["tools"]
    assert not report["broken"]
    monkeypatch.setenv("DIFFUSIONLM_NVTX", "loud")
    assert main(["--quick", "--directory", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "broken:" in lines
    assert "  - DIFFUSIONLM_NVTX = 'loud'" in lines


@pytest.mark.usefixtures("offline")
def test_without_torch(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "torch", None)
        assert main(["--directory", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert "torch cannot be used" in text
    assert "Traceback" not in text


def test_missing_is_not_damaged() -> None:
    """``uv sync`` leaves alone what is installed, whole or not."""
    [missing] = findings_of(torch=TorchInfo(None, "no module"), missing=("torch",))
    [damaged] = findings_of(torch=TorchInfo(None, "no module"))
    assert (missing.what, missing.remedy) == ("torch is missing", "uv sync")
    assert damaged.remedy.startswith("uv sync --reinstall-package torch;")


def test_a_torch_that_is_not_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    shadow = ModuleType("torch")
    shadow.__version__, shadow.__file__ = "2.9", "/here/torch.py"  # type: ignore[attr-defined]
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "torch", shadow)
        read = torch_setup.read_torch()
    assert read.version is None
    assert read.problem == "/here/torch.py is incomplete: AttributeError: module 'torch' has no attribute 'cuda'"


def test_it_needs_no_package() -> None:
    code = "import sys\nsys.modules.update(pydantic=None, torch=None, numpy=None)\nimport cli.doctor\nprint('it')"
    root = Path(report.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, timeout=60)
    assert done.stdout == "it\n", done.stderr


@pytest.mark.parametrize(("gpus", "weight"), [((GPU,), "broken"), ((), "note")])
def test_a_kernel_that_fails(gpus: tuple[GpuInfo, ...], weight: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise RuntimeError("no compiler\nlong trace")

    monkeypatch.setattr(report, "find_triton_problem", lambda: None)
    line, finding = report._try_kernel(replace(TORCH, gpus=gpus), fail)
    assert finding is not None
    assert (finding.weight, finding.why) == (weight, "RuntimeError: no compiler")
    assert finding.remedy == "uv sync --reinstall-package triton, and a C compiler and Python.h for it"
    assert line.endswith("does not work")


def test_a_gpu_without_a_c_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "installed_version", lambda name: "3.9")
    monkeypatch.setattr(report, "find_triton_problem", lambda: "needs a C compiler, and there is none: install one")
    line, finding = report._try_kernel(replace(TORCH, gpus=(GPU,)), lambda: "not called")
    assert line == "3.9, cannot compile"
    assert finding is not None
    assert (finding.weight, finding.why, finding.remedy) == (
        "slow",
        "it needs a C compiler, and there is none",
        "install one",
    )
    assert report._try_kernel(replace(TORCH, gpus=()), lambda: "interpreted") == ("3.9; interpreted", None)


def test_measured_speeds_are_listed_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(report, "read_machine", lambda runs: SOUND)
    monkeypatch.setattr(report, "read_torch", lambda: TORCH)
    monkeypatch.setattr(report, "drivers", list)
    monkeypatch.setattr(report, "measure_speeds", lambda *args: MeasuredSpeeds(fsync=0.002))
    facts = report.examine(tmp_path, is_quick=False, check_kernel=lambda: "it runs").facts
    assert [section for section, named in facts.items() if "fsync" in named] == ["measured"]


def test_lines_are_aligned_and_no_wider_than_asked() -> None:
    facts = {"a": {"x": "short", "longer name": "word " * 40}}
    finished = report.DoctorReport(facts, [Finding("slow", "w " * 90, "y", "r")])
    lines = report.render(finished, 60).splitlines()
    assert max(map(len, lines)) <= 60
    assert lines[1] == "  x            short"
    assert lines[3].startswith(" " * 15 + "word")
    assert lines[-1] == "nothing is broken; 1 to mend for speed"


def test_drivers_and_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_setup, "_DRIVER_QUERY", ("no-such-program-anywhere",))
    assert torch_setup.drivers() == []
    monkeypatch.setattr(torch_setup, "_DRIVER_QUERY", ("echo", "580.1, NVIDIA X"))
    assert torch_setup.drivers() == ["580.1, NVIDIA X"]
    assert torch_setup.missing_packages(("torch", "no-such-package-anywhere")) == ["no-such-package-anywhere"]
