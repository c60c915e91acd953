"""Facts read from a machine that is laid out in files."""

from __future__ import annotations

from pathlib import Path

import pytest

from profiling import cores, machine, torch_setup
from profiling.machine import Memory


def lay_out(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


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


MEMINFO = "MemTotal: 1000 kB\nMemAvailable: 800 kB\nHugePages_Total: 0\n"
GROUP = {"sys/fs/cgroup/a/memory.max": "500000", "sys/fs/cgroup/a/memory.current": "200000"}
CACHED = {"sys/fs/cgroup/a/memory.stat": "anon 20000\nactive_file 7\ninactive_file 150000\n"}
VERSION_1 = {
    "proc/self/cgroup": "4:memory:/a\n",
    "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "500000",
    "sys/fs/cgroup/memory/a/memory.usage_in_bytes": "200000",
    "sys/fs/cgroup/memory/a/memory.stat": "inactive_file 1\ntotal_inactive_file 150000\n",
}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, Memory(1_024_000, 819_200)),
        (GROUP, Memory(500_000, 300_000)),
        (GROUP | CACHED, Memory(500_000, 450_000)),
        (GROUP | {"sys/fs/cgroup/a/memory.max": "9223372036854771712"}, Memory(1_024_000, 819_200)),  # no limit
        (VERSION_1, Memory(500_000, 450_000)),
    ],
)
def test_memory_of_machine_and_control_group(tmp_path: Path, files: dict[str, str], expected: Memory) -> None:
    lay_out(tmp_path, {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/a\n"} | files)
    assert machine.read_memory(tmp_path) == expected
    assert machine.read_memory(tmp_path / "absent") == Memory(None, None)


def test_processor_and_file_system(tmp_path: Path) -> None:
    cpu = "processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: Fast CPU\n\nprocessor\t: 1\nmodel name: other\n"
    mounts = f"root / ext4 rw 0 0\nserver {tmp_path.parent} nfs4 rw 0 0\nx /elsewhere tmpfs rw 0 0\n"
    lay_out(tmp_path, {"proc/cpuinfo": cpu, "proc/mounts": mounts})
    assert machine.read_processor_model(tmp_path) == "Fast CPU"
    assert machine.read_processor_vendor(tmp_path) == "AuthenticAMD"
    assert machine.read_processor_vendor(tmp_path / "absent") == ""
    assert machine.find_file_system(tmp_path / "not" / "there", tmp_path) == (tmp_path, "nfs4")
    assert machine.find_file_system(tmp_path, tmp_path / "absent") == (tmp_path, "unknown")


def test_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_setup, "_DRIVER_QUERY", ("no-such-program-anywhere",))
    assert torch_setup.drivers() == []
    monkeypatch.setattr(torch_setup, "_DRIVER_QUERY", ("echo", "580.1, NVIDIA X"))
    assert torch_setup.drivers() == ["580.1, NVIDIA X"]
