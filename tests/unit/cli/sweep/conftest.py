"""A config that grids are laid over."""

from __future__ import annotations

from pathlib import Path

import pytest

BASE = """
[run]
directory = "x"
[model]
hidden_size = 8
num_hidden_layers = 1
num_attention_heads = 1
num_key_value_heads = 1
head_dim = 8
intermediate_size = 8
max_position_embeddings = 8
[data]
source = "python-stdlib"
[training]
batch_size = 4
max_steps = 10
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A valid one, ``base.toml``; nothing is trained by it."""
    path = tmp_path / "base.toml"
    path.write_text(BASE)
    return path
