"""The training command as a person runs it: fresh processes, real files, interrupted and resumed."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cli.train import main
from tests.tiny_run import wait_for_gate, write_code_config

ROOT = Path(__file__).parents[2]
STEPS = 80


def run_here(*args: object) -> subprocess.CompletedProcess[str]:
    """The command in this process, which has torch already."""
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            code = main([*map(str, args)])
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
    return subprocess.CompletedProcess([*map(str, args)], code, output.getvalue(), errors.getvalue())


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_code_config(
        tmp_path_factory.mktemp("train"),
        training={"batch_size": 6, "micro_batch_size": 3, "max_steps": STEPS, "ema_decay": 0.9},
        validation={"every_steps": 50, "rows": 8, "final_rows": 16, "num_mc_samples": 2, "ngrams": True},
        samples={"every_steps": 60, "infills": ["def f1(x):\n    return [MASK:2]\n"]},
    )


@pytest.fixture(scope="module")
def uninterrupted(config: Path) -> Path:
    result = run_here("--config", config)
    assert result.returncode == 0, result.stderr
    for part in (
        "Validation, nats per token",
        "bits per byte",
        "Unigram entropy",
        "Top-1 accuracy",
        "next: uv run diffusionlm-infer",
    ):
        assert part in result.stdout
    return config.parent / "run"


TIMES = (
    "tokens_per_second",
    "step_seconds",
    "seconds_left",
    "data/tokens_per_second",
    "data/wait_seconds",
    "data/buffered_steps",
    "memory/peak_resident",
)


PARTS = ("data", "environment", "stopped")
"""Events of the parts of a run."""


def numbers(directory: Path) -> list[dict[str, Any]]:
    """Every record, without what the clock decides, and without what each start and each stop say of themselves."""
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [record for record in map(json.loads, lines) if record.get("event") not in PARTS]
    for record in records:
        for key in TIMES:
            record.get("metrics", {}).pop(key, None)
    return records


def interrupt(config: Path, directory: Path, at_step: int, number: int, workers: int = 0) -> int:
    """Start or go on, send a signal after a step, and return the exit code."""
    gate = directory.with_name(f"gate-{at_step}")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GATE": str(gate), "GATE_STEP": str(at_step)}
    options = ["--config", config, "--set", f"run.directory={directory}", "--set", f"data.workers={workers}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.e2e.gated_train", "cli.train", *map(str, options)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    wait_for_gate(process, gate)
    # A terminal or a batch system tells the whole group; what is killed is one process.
    (os.kill if number == signal.SIGKILL else os.killpg)(process.pid, number)
    return process.wait(timeout=60)


@pytest.mark.slow
def test_interrupted_runs_give_the_same_numbers_bit_for_bit(config: Path, uninterrupted: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    assert interrupt(config, directory, 4, signal.SIGINT, workers=1) == 130
    assert interrupt(config, directory, 20, signal.SIGKILL, workers=2) == -signal.SIGKILL
    result = run_here("--config", config, "--set", f"run.directory={directory}")
    assert result.returncode == 0, result.stderr
    assert "going on from" in result.stderr
    assert numbers(directory) == numbers(uninterrupted)
    last = f"checkpoints/step-{STEPS:08d}"
    for name in ("model.safetensors", "training_state/.metadata", "training_state/__0_0.distcp"):
        assert (directory / last / name).read_bytes() == (uninterrupted / last / name).read_bytes(), name
    ours, theirs = (json.loads((d / "summary.json").read_text()) for d in (directory, uninterrupted))
    assert ours["evaluation"] == theirs["evaluation"]
    assert sorted(path.name for path in (directory / "checkpoints").iterdir()) == [
        "latest",
        "step-00000072",
        "step-00000080",
    ]


def test_a_complete_run_shows_its_summary_again(config: Path, uninterrupted: Path) -> None:
    result = run_here("--config", config)
    assert result.returncode == 0
    assert "is complete" in result.stderr
    assert "Validation, nats per token" in result.stdout


def test_changed_config_is_rejected_with_its_differences(config: Path, uninterrupted: Path) -> None:
    before = (uninterrupted / "config.toml").read_bytes()
    result = run_here("--config", config, "--set", "schedule.kind=cosine")
    assert result.returncode == 2
    assert "already holds a run with another config" in result.stderr
    assert 'schedule.kind: "linear" -> "cosine"' in result.stderr
    assert "Traceback" not in result.stderr
    assert (uninterrupted / "config.toml").read_bytes() == before


def test_a_damaged_checkpoint_falls_back_to_the_older(config: Path, uninterrupted: Path, tmp_path: Path) -> None:
    import shutil

    directory = tmp_path / "run"
    shutil.copytree(uninterrupted, directory, symlinks=True)
    (directory / "summary.json").unlink()
    weights = directory / f"checkpoints/step-{STEPS:08d}/model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    result = run_here("--config", config, "--set", f"run.directory={directory}")
    assert result.returncode == 0, result.stderr
    assert "checkpoint refused" in result.stderr and "model.safetensors" in result.stderr
    assert "going on from" in result.stderr
    assert (directory / f"checkpoints/damaged-step-{STEPS:08d}").is_dir()
    assert numbers(directory) == numbers(uninterrupted)


def test_a_warm_start_takes_weights_and_tokenizer(config: Path, uninterrupted: Path, tmp_path: Path) -> None:
    result = run_here(
        *("--config", config, "--set", f"run.directory={tmp_path / 'warm'}"),
        *("--set", f"model.init_from={uninterrupted}", "--set", "training.max_steps=2"),
    )
    assert result.returncode == 0, result.stderr
    first = numbers(tmp_path / "warm")[0]["metrics"]["loss"]
    assert first < numbers(uninterrupted)[0]["metrics"]["loss"] - 0.5
    assert (tmp_path / "warm/tokenizer/tokenizer.json").read_bytes() == (
        uninterrupted / "tokenizer/tokenizer.json"
    ).read_bytes()
