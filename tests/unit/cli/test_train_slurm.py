"""``scripts/train.slurm`` with stand-ins of Slurm's commands: what it starts, and what it does with its end."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "scripts" / "train.slurm"


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """An environment in which Slurm's commands write down how they are called, and the launcher is srun itself."""
    stand_ins = {
        "srun": 'echo "srun $*" >> calls\necho "$NCCL_DEBUG" > setting\nexit "${END:-0}"',
        "scontrol": 'echo "scontrol $*" >> calls\n[[ $1 == show ]] && printf "n7\\nn8\\n"\nexit 0',
        "diffusionlm-train-ddp": "exit 3",
    }
    for name, body in stand_ins.items():
        path = tmp_path / name
        path.write_text(f"#!/usr/bin/env bash\n{body}\n", encoding="utf-8")
        path.chmod(0o755)
    (tmp_path / "bin").symlink_to(tmp_path)
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "cluster.env").write_text("NCCL_DEBUG=WARN\n", encoding="utf-8")
    return {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_ID": "70123",
        "SLURM_JOB_NODELIST": "n[7-8]",
        "SLURM_NNODES": "2",
        "DIFFUSIONLM_VENV": str(tmp_path),
    }


def submit(cluster: dict[str, str], *arguments: str, **more: str) -> tuple[int, list[str], str]:
    done = subprocess.run(
        ["bash", str(SCRIPT), *arguments], env={**cluster, **more}, capture_output=True, text=True, timeout=30
    )
    calls = Path(cluster["SLURM_SUBMIT_DIR"]) / "calls"
    return done.returncode, calls.read_text(encoding="utf-8").splitlines() if calls.exists() else [], done.stderr


def test_launched_command(cluster: dict[str, str]) -> None:
    """The launcher gets all cores that the job has asked for; a job without a number of cores names none."""
    folder = cluster["SLURM_SUBMIT_DIR"]
    for index, (cores, option) in enumerate((("64", "--cpus-per-task=64 "), ("", ""))):
        code, calls, _ = submit(cluster, "train.toml", "--set", "run.seed=1", SLURM_CPUS_PER_TASK=cores)
        assert code == 0
        assert calls[2 * index :] == [
            "scontrol show hostnames n[7-8]",
            f"srun --kill-on-bad-exit=1 {option}{folder}/bin/diffusionlm-train-ddp --config train.toml --nodes 2 "
            "--rendezvous n7:20123 --set parallel.max_restarts=3 --set run.seed=1",
        ]
    assert (Path(folder) / "setting").read_text(encoding="utf-8") == "WARN\n"


@pytest.mark.parametrize(("end", "code", "requeued"), [(138, 0, True), (1, 1, False), (143, 143, False)])
def test_timed_out_job_is_requeued_and_resumes(cluster: dict[str, str], end: int, code: int, requeued: bool) -> None:
    got, calls, _ = submit(cluster, "train.toml", END=str(end), DIFFUSIONLM_MAX_RESTARTS="0")
    assert got == code and "parallel.max_restarts=0" in calls[1]
    assert ("scontrol requeue 70123" in calls) == requeued


def test_missing_requirements_are_reported(cluster: dict[str, str]) -> None:
    assert submit(cluster)[0] == 2
    code, calls, stderr = submit(cluster, "train.toml", DIFFUSIONLM_VENV="/nowhere")
    assert code == 2 and not calls and "run uv sync" in stderr
