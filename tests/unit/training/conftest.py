"""A tiny run."""

from __future__ import annotations

from pathlib import Path

import pytest

from config.load import load_config
from config.train import TrainConfig


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    """Eight steps of masked diffusion over short paragraphs, packed into rows of 16."""
    text = "\n\n".join(f"the cat {i} sat on the mat {i * i}" for i in range(300))
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    path = tmp_path / "train.toml"
    path.write_text(
        f"""
[run]
directory = "{tmp_path / "run"}"
device = "cpu"
threads = 1
[model]
hidden_size = 16
num_hidden_layers = 1
num_attention_heads = 1
num_key_value_heads = 1
head_dim = 16
intermediate_size = 16
max_position_embeddings = 16
[tokenizer]
vocab_size = 280
[data.source]
kind = "files"
paths = ["{tmp_path / "a.txt"}"]
sample_by = "paragraph"
validation_fraction = 0.2
[training]
batch_size = 4
max_steps = 8
precision = "float32"
[validation]
every_steps = 0
final_rows = 8
ngrams = false
[checkpoint]
every_steps = 2
[logging]
every_steps = 1
progress = "lines"
""",
        encoding="utf-8",
    )
    return load_config(TrainConfig, path)
