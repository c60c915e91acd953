"""``diffusionlm-sweep`` with real runs: two that train, then two that decode with the better one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.sweep import main

BASE = """
[run]
directory = "x"
threads = 1
[model]
hidden_size = 16
num_hidden_layers = 1
num_attention_heads = 1
num_key_value_heads = 1
head_dim = 16
intermediate_size = 16
max_position_embeddings = 32
[tokenizer]
vocab_size = 300
[data]
source = "python-stdlib"
[training]
batch_size = 4
max_steps = 4
[validation]
rows = 4
final_rows = 4
num_mc_samples = 1
ngrams = false
[samples]
every_steps = 4
infills = ["a [MASK:1]"]
"""


@pytest.mark.slow  # four processes that load torch
def test_training_and_inference_are_swept(tmp_path: Path) -> None:
    base = tmp_path / "base.toml"
    base.write_text(BASE)
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
