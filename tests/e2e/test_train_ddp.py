"""Two ranks as a person runs them: fresh processes, signals, a rank that dies, and the numbers of one rank."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_run import wait_for_gate, write_code_config

ROOT = Path(__file__).parents[2]
STEPS = 40
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny run with AdamW, whose update does not depend on the sharding of the optimizer state."""
    return write_code_config(
        tmp_path_factory.mktemp("ranks"),
        training={"batch_size": 8, "micro_batch_size": 2, "max_steps": STEPS},
        optimizer={"kind": "adamw"},
        validation={"final_rows": 16, "num_mc_samples": 2},
        samples={"every_steps": 0},
    )


def start(
    module: str, config: Path, directory: Path, *arguments: str, gate_step: int | None = None
) -> subprocess.Popen[str]:
    """Start a run, which stops at a gate after `gate_step`; None: there is no gate."""
    gate = {} if gate_step is None else {"GATE": str(gate_of(directory, gate_step)), "GATE_STEP": str(gate_step)}
    command = [
        sys.executable,
        "-m",
        *(["tests.e2e.gated_train", module] if gate else ["cli", module.removeprefix("cli.").replace("_", "-")]),
        "--config",
        str(config),
        "--set",
        f"run.directory={os.path.relpath(directory, ROOT)}",
    ]
    return subprocess.Popen(
        [*command, *arguments],
        cwd=ROOT,
        env={**os.environ, **gate},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def start_and_wait(config: Path, directory: Path, step: int, *arguments: str) -> subprocess.Popen[str]:
    """Start two ranks, or go on, and wait until they stop at a gate after a step."""
    process = start("cli.train_ddp", config, directory, *arguments, gate_step=step)
    wait_for_gate(process, gate_of(directory, step))
    return process


def gate_of(directory: Path, step: int) -> Path:
    return directory.with_name(f"{directory.name}-gate-{step}")


def losses(directory: Path) -> list[tuple[int, float]]:
    """Step and loss of each step; of one that was done again after a failure, the last."""
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records: list[dict[str, Any]] = [json.loads(line) for line in lines]
    loss_by_step = {
        record["step"]: record["metrics"]["loss"] for record in records if "loss" in record.get("metrics", {})
    }
    return sorted(loss_by_step.items())


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    stderr = process.communicate(timeout=240)[1]
    return process.returncode, stderr


def ranks_of(launcher: int) -> list[int]:
    """Processes that a launcher started for its ranks."""
    process_ids = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text(encoding="ascii").rpartition(")")[2].split()[1])
            is_rank = b"spawn_main" in (path / "cmdline").read_bytes()
        except OSError:
            continue
        if parent == launcher and is_rank:
            process_ids.append(int(path.name))
    return process_ids


@pytest.fixture(scope="module")
def uninterrupted(config: Path) -> Path:
    directory = config.parent / "two"
    code, stderr = finish(start("cli.train_ddp", config, directory))
    assert code == 0, stderr
    assert "2 ranks" in stderr and stderr.count("parameters on cpu") == 1, "one rank speaks"
    return directory


def test_signal_saves_and_the_command_resumes(config: Path, uninterrupted: Path) -> None:
    """From a terminal, which tells the whole group, and to the launcher alone; the rest is the same bit for bit."""
    directory = config.parent / "stopped"
    for step, number, to_all in ((4, signal.SIGINT, True), (15, signal.SIGUSR1, False), (24, signal.SIGTERM, False)):
        process = start_and_wait(config, directory, step)
        (os.killpg if to_all else os.kill)(process.pid, number)
        code, stderr = finish(process)
        assert code == 128 + number, stderr
        assert "Traceback" not in stderr and "stopped after step" in stderr
    assert finish(start("cli.train_ddp", config, directory))[0] == 0
    assert losses(directory) == losses(uninterrupted)


def test_a_rank_that_dies_is_replaced(config: Path, uninterrupted: Path) -> None:
    directory = config.parent / "killed"
    process = start_and_wait(config, directory, 12, "--set", "parallel.max_restarts=1")
    ranks = ranks_of(process.pid)
    assert len(ranks) == 2
    wait_for_gate(process, directory / "checkpoints" / "latest")  # written in the background
    os.kill(ranks[1], signal.SIGKILL)
    code, stderr = finish(process)
    assert code == 0, stderr
    assert "restarting all ranks, 1 of 1 times" in stderr and "going on from" in stderr
    assert losses(directory) == losses(uninterrupted)
    process = start_and_wait(config, config.parent / "lost", 2)
    os.kill(ranks_of(process.pid)[0], signal.SIGKILL)
    code, stderr = finish(process)
    assert code == 1 and "rank" in stderr


def test_ranks_outlive_their_launcher_until_they_have_saved(config: Path) -> None:
    directory = config.parent / "orphans"
    process = start_and_wait(config, directory, 3)
    process.kill()
    code, stderr = finish(process)  # waits for the ranks, who have the pipe as well
    assert code == -signal.SIGKILL and "stopped after step" in stderr


def test_error_of_all_ranks_is_printed_once(config: Path) -> None:
    diverging = ["--set", "optimizer.learning_rate=1e30", "--set", "training.max_nonfinite_steps=2"]
    code, stderr = finish(start("cli.train_ddp", config, config.parent / "none", *diverging))
    assert code == 1
    assert stderr.count("The last checkpoint is intact") == 1 and "Traceback" not in stderr
