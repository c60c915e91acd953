"""Which ids end a text, and whether the tokenizer of a directory fits its model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from config.model import ModelConfig
from diffusionlm.checkpoints.huggingface import load_model, save_model
from diffusionlm.families.model_directory import read_model_config
from tests.conftest import MakeModel

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


# Ends of text.


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


# Tokenizers beside the model.


@pytest.fixture
def with_tokenizer(tiny_model: MakeModel, tmp_path: Path) -> Path:
    """A model of 19 rows whose mask token, 18, is an added one of a tokenizer of 19 ids."""
    save_model(tiny_model(), tmp_path)
    vocab = {chr(97 + token_id): token_id for token_id in range(17)}
    added = [{"id": 17, "content": "<end>"}, {"id": 18, "content": "<|MASK|>"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": added}))
    return tmp_path


def change_tokenizer(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    contents = json.loads((folder / "tokenizer.json").read_text())
    change(contents)
    (folder / "tokenizer.json").write_text(json.dumps(contents))


def as_ordinary(contents: dict[str, Any]) -> None:
    contents["model"]["vocab"]["mat"] = contents["added_tokens"].pop()["id"]


def test_a_tokenizer_that_fits(with_tokenizer: Path) -> None:
    load_model(with_tokenizer)
    change_tokenizer(with_tokenizer, lambda contents: contents["model"]["vocab"].pop("e"))
    load_model(with_tokenizer)
    change_tokenizer(with_tokenizer, lambda contents: contents["model"]["vocab"].update({"<|MASK|>": 18}))
    load_model(with_tokenizer)  # transformers lists added tokens in both places
    (with_tokenizer / "tokenizer.json").write_text("no JSON: a matter of the tokenizer")
    load_model(with_tokenizer)


def test_the_mask_token_is_no_ordinary_one(with_tokenizer: Path) -> None:
    change_tokenizer(with_tokenizer, as_ordinary)
    with pytest.raises(ValueError, match=r"mask_token_id = 18 is the ordinary token 'mat' .*correct mask_token_id"):
        load_model(with_tokenizer)
    unigrams = [[chr(97 + token_id), -1.0] for token_id in range(19)]
    change_tokenizer(with_tokenizer, lambda contents: contents["model"].update(vocab=unigrams))
    with pytest.raises(ValueError, match=r"mask_token_id = 18 is the ordinary token 's'"):
        load_model(with_tokenizer)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config.json", {"mask_token": {"content": "mat"}}),
        ("tokenizer_config.json", {"additional_special_tokens": ["mat"]}),
        ("tokenizer_config.json", {"extra_special_tokens": {"mask_token": "mat"}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"18": {"content": "mat"}}}),
        ("special_tokens_map.json", {"mask_token": "mat"}),
    ],
)
def test_special_tokens_of_other_files_are_read(file: str, content: dict[str, Any], with_tokenizer: Path) -> None:
    change_tokenizer(with_tokenizer, as_ordinary)
    (with_tokenizer / file).write_text(json.dumps(content))
    load_model(with_tokenizer)


def test_files_of_slow_classes(with_tokenizer: Path) -> None:
    contents = json.loads((with_tokenizer / "tokenizer.json").read_text())
    (with_tokenizer / "tokenizer.json").unlink()
    vocab, added = contents["model"]["vocab"], {token["content"]: token["id"] for token in contents["added_tokens"]}
    (with_tokenizer / "vocab.json").write_text(json.dumps(vocab))
    (with_tokenizer / "added_tokens.json").write_text(json.dumps(added))
    load_model(with_tokenizer)
    (with_tokenizer / "vocab.json").write_text(json.dumps({**vocab, "mat": 19}))
    with pytest.raises(ValueError, match=r"tokenizer has 20 ids, .*vocab_size = 19.*diffusionlm-convert"):
        load_model(with_tokenizer)
