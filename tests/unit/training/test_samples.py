"""The texts that samples fill by default: passages of the validation text, or lines of Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from config.train import TrainConfig
from diffusionlm.data.packing import Row, RowFormat
from diffusionlm.training.samples import PYTHON_INFILLS, choose_example_input, choose_infills, find_infills
from tests.conftest import MakeConfig
from tests.tiny_run import MODEL
from tokenizer import Tokenizer, train_bpe

CONTEXT = 64


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Bytes without merges: a token is a character of ASCII."""
    return train_bpe(["text"], vocab_size=258)


def row_of(tokenizer: Tokenizer, *documents: str, num_cut: int = 0) -> Row:
    """A row of these documents, the first of which lacks its first ``num_cut`` tokens."""
    assert tokenizer.eos_token_id is not None
    row_format = RowFormat(100, tokenizer.eos_token_id)
    tokens = (np.array(tokenizer.encode(text), np.int32) for text in documents)
    return row_format.build_row(
        [row_format.append_eos(ids[0 if index else num_cut :]) for index, ids in enumerate(tokens)]
    )


def train_config(source: Any, **samples: Any) -> TrainConfig:
    sections = {"run": {"directory": "unused"}, "model": MODEL, "training": {"batch_size": 1, "max_steps": 9}}
    return TrainConfig.model_validate({**sections, "data": {"source": source}, "samples": samples})


FILES = {"kind": "files", "paths": ["unused"]}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("of a line\nA whole line of wor", "A whole[MASK:5] of"),
        ("artial word and another wor", "word and[MASK:8]"),
        ("First word, then a second; this is too far for thirty-two tokens", "word, then a[MASK:7]; this"),
        ("aaaabbbb", "aaaa[MASK:2]bb"),
    ],
    ids=["lines", "words", "length", "no spaces"],
)
def test_a_passage_has_whole_lines_or_words(text: str, expected: str, tokenizer: Tokenizer) -> None:
    assert list(find_infills([row_of(tokenizer, text)], tokenizer, CONTEXT)) == [expected]


def test_rows_without_a_passage_are_left_out(tokenizer: Tokenizer) -> None:
    rows = [row_of(tokenizer, text) for text in ("ab", "a [MASK:1] in a text", "", "one two three fo")]
    assert list(find_infills(rows, tokenizer, CONTEXT)) == ["two[MASK:6]"]
    assert list(find_infills(rows, tokenizer, 4)) == []


def test_a_passage_is_of_the_longest_document(tokenizer: Tokenizer) -> None:
    row = row_of(tokenizer, "the end", "here is a longer document", "begin")
    assert list(find_infills([row], tokenizer, CONTEXT)) == ["is a[MASK:7]"]
    row = row_of(tokenizer, "éaaaabbbb", num_cut=1)
    assert list(find_infills([row], tokenizer, CONTEXT)) == ["aaaa[MASK:2]bb"], "no parts of characters"


def test_default_infills_are_passages(tokenizer: Tokenizer, make_config: MakeConfig) -> None:
    model = make_config(max_position_embeddings=CONTEXT)
    rows = [row_of(tokenizer, f"{name} walked the dog now") for name in ("Ann", "Bob", "Cid", "Dan")]
    infills = choose_infills(train_config(FILES), model, tokenizer, rows)
    assert infills == ("walked the[MASK:4]",) * 3
    assert choose_example_input(train_config(FILES), (), model, tokenizer, rows) == "walked the"
    assert choose_infills(train_config(FILES, infills=["a[MASK:1]"]), model, tokenizer, rows) == ("a[MASK:1]",)
    assert choose_infills(train_config(FILES, infills=[]), model, tokenizer, rows) == ()
    next_token = make_config(block_length=1, logit_alignment="shifted")
    assert choose_infills(train_config(FILES), next_token, tokenizer, rows) == ()
    assert choose_example_input(train_config(FILES), (), model, tokenizer, []) == ""


def test_python_has_its_own_infills(tokenizer: Tokenizer, make_config: MakeConfig) -> None:
    config = train_config("python-stdlib")
    for context, expected in ((64, PYTHON_INFILLS), (36, PYTHON_INFILLS[::2]), (16, ())):
        model = make_config(max_position_embeddings=context)
        assert choose_infills(config, model, tokenizer, []) == expected
