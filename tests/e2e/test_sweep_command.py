"""``diffusionlm-sweep`` with real runs: two that train, and a pruned one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.sweep import main
from tests.tiny_run import write_train_config


@pytest.mark.slow  # two processes that load torch
def test_training_is_swept(tmp_path: Path) -> None:
    base = write_train_config(
        tmp_path,
        "base",
        training={"max_steps": 4},
        validation={"every_steps": 1_000, "rows": 4, "final_rows": 4, "num_mc_samples": 1},
        samples={"every_steps": 4, "infills": ["a [MASK:1]"]},
    )
    directory = tmp_path / "train"
    assert main(["--config", str(base), "--set", "run.seed=0,1", "--directory", str(directory)]) == 0
    best, other = (json.loads(line) for line in (directory / "sweep.jsonl").read_text().splitlines())
    assert best["is_best"]
    assert best["bound"] <= other["bound"]
    assert best["tokens_per_second"] > 0
    page = (directory / "sweep.html").read_text()
    assert 'a <span class="hole">1</span>' in page and ", best, step 4" in page


@pytest.mark.slow
def test_a_training_that_does_not_learn_is_pruned(tmp_path: Path) -> None:
    """The second run has 250 more steps when its first validation is compared."""
    validation = {"every_steps": 50, "rows": 4, "final_rows": 4, "num_mc_samples": 1}
    base = write_train_config(tmp_path, "base", training={"max_steps": 300}, validation=validation)
    directory = tmp_path / "sweep"
    command = ["--config", str(base), "--set", "optimizer.learning_rate=1e-2,1e-9", "--directory", str(directory)]
    assert main([*command, "--prune"]) == 0
    best, pruned = (json.loads(line) for line in (directory / "sweep.jsonl").read_text().splitlines())
    assert (best["status"], best["step"]) == ("done", 300)
    assert pruned["status"] == "pruned" and 50 <= pruned["step"] < 300
    assert pruned["bound"] > best["bound"]
    checkpoints = directory / "runs" / pruned["name"] / "checkpoints"
    assert any(path.name.endswith(str(pruned["step"])) for path in checkpoints.iterdir())
