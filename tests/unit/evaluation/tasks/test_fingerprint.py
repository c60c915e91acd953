"""A model's fingerprint covers every byte of its files."""

from __future__ import annotations

from pathlib import Path

import pytest

from config.infer import InferModelConfig
from diffusionlm.evaluation.tasks.runner import fingerprint_model

SIZE = 300_000


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer_config.json"])
def test_a_changed_byte_in_the_middle_changes_the_fingerprint(name: str, tmp_path: Path) -> None:
    for folder in ("a", "b", "copy"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "model.safetensors").write_bytes(bytes(SIZE))
        (tmp_path / folder / name).write_bytes(bytes(SIZE))
    with (tmp_path / "b" / name).open("r+b") as file:
        file.seek(SIZE // 2)
        file.write(b"x")
    model = InferModelConfig(path=tmp_path / "a")
    first, second, copy = (fingerprint_model(model, tmp_path / folder) for folder in ("a", "b", "copy"))
    assert first == copy != second
