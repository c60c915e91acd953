"""``diffusionlm-sweep`` with real runs: two that train, then two that decode with the better one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.sweep import main
from tests.tiny_run import write_train_config


@pytest.mark.slow  # four processes that load torch
def test_training_and_inference_are_swept(tmp_path: Path) -> None:
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
    assert "a [MASK:1]" in (directory / "sweep.html").read_text()
    run = directory / "runs" / best["name"]
    command = ["--command", "infer", "--set", f"model.path={run}", "--set", 'input.prompts=["a"]']
    decoding = ["--set", "generation.max_new_tokens=4", "--set", "generation.denoising_steps=1,2"]
    answers = tmp_path / "infer"
    assert main([*command, *decoding, "--set", "generation.block_length=4", "--directory", str(answers)]) == 0
    forwards = [json.loads(line)["forwards"] for line in (answers / "sweep.jsonl").read_text().splitlines()]
    assert forwards == [1.0, 2.0]
    assert (answers / "runs" / "denoising_steps-1" / "replay.html").is_file()
