"""Which ids end a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from config.model import ModelConfig
from diffusionlm.families.model_directory import read_model_config

BASE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 56,
    "max_position_embeddings": 64,
    "vocab_size": 200_000,
}


def read(folder: Path, **values: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(BASE | values))
    return read_model_config(folder)


@pytest.mark.parametrize(
    ("values", "generation", "expected"),
    [
        ({"eos_token_id": 7}, {}, (7, ())),
        ({"eos_token_id": [7]}, {"eos_token_id": [9, 7, 3]}, (7, (7, 9, 3))),
        ({}, {"eos_token_id": [9, 7]}, (9, (9, 7))),
        ({"eos_token_id": None}, {"eos_token_id": 9}, (9, ())),
        ({"eos_token_id": 7}, {"eos_token_id": None, "temperature": 0.6}, (7, ())),
        ({"model_type": "gemma2"}, {"eos_token_id": [1, 107]}, (1, (1, 107))),
        ({"model_type": "sdar"}, {"eos_token_id": 151643}, (151643, ())),
        ({"model_type": "sdar"}, {"eos_token_id": 3, "_from_model_config": True}, (151645, (151645, 151643))),
    ],
)
def test_ends_of_text_are_those_of_both_files(values: Any, generation: Any, expected: Any, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    config = read(tmp_path, **{"model_type": "llama"} | values)
    assert (config.eos_token_id, config.stop_token_ids) == expected


def test_ends_of_families_where_the_files_are_silent(tmp_path: Path) -> None:
    sdar = read(tmp_path, model_type="sdar", eos_token_id=151643)
    assert (sdar.eos_token_id, sdar.stop_token_ids) == (151643, (151643, 151645))
    assert read(tmp_path, model_type="sdar", eos_token_id=5).stop_token_ids == ()
    assert read(tmp_path, model_type="sdar", eos_token_id=None).eos_token_id is None
    small = read(tmp_path, model_type="sdar", vocab_size=151_645, mask_token_id=1)
    assert (small.eos_token_id, small.stop_token_ids) == (None, ())


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("[]", "expected a JSON object"),
        ('{"eos_token_id": "<|end|>"}', "'<|end|>'"),
        ('{"eos_token_id": [7, -1]}', r"\[7, -1\] must be a token id"),
        ('{"eos_token_id": [7, 200000]}', "200000 is outside the vocabulary of 200000"),
    ],
)
def test_a_broken_generation_config_is_named(content: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ValueError, match=rf"generation_config\.json.*{named}"):
        read(tmp_path, model_type="llama", eos_token_id=7)
