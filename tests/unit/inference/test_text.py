"""Texts with holes."""

from __future__ import annotations

import random

import pytest

from diffusionlm.inference.text import (
    MASK_GLYPH,
    canvas_text_pieces,
    find_ids_without_text,
    parse_infill,
    render_canvas,
    token_texts,
)
from tokenizer import Tokenizer, train_bpe


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return train_bpe(["the cat sat on the mat, and the dog sat too. äöü [MASK:3]"] * 3, vocab_size=280)


def test_spans_become_masks(words: Tokenizer) -> None:
    mask = words.mask_token_id
    assert mask is not None
    expected = [*words.encode("the "), *[mask] * 3, *words.encode(" sat"), mask, mask]
    assert parse_infill("the [MASK:3] sat[MASK:1][MASK:1]", words) == expected
    assert parse_infill("[MASK:2]", words, mask_token_id=7) == [7, 7]


def test_special_tokens_written_in_a_text_stay_text(words: Tokenizer) -> None:
    ids = parse_infill("<|mask|> [MASK] <|endoftext|>[MASK:2]", words)
    assert [token for token in ids if token in words.special_tokens.values()] == [words.mask_token_id] * 2
    assert words.decode(ids[:-2]) == "<|mask|> [MASK] <|endoftext|>"


@pytest.mark.parametrize("number", ["0", "00", "-1", "", "x", "1.5", " 2", "70000", "9" * 5000, "٣"])
def test_holes_without_a_sensible_number(words: Tokenizer, number: str) -> None:
    with pytest.raises(ValueError, match=r"is no hole: write \[MASK:n\] with n from 1 to 65536") as caught:
        parse_infill(f"a [MASK:1] b [MASK:{number}]", words)
    assert len(str(caught.value)) < 140


def test_no_hole_and_no_mask_token(words: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"'abc' has no hole: write \[MASK:n\]"):
        parse_infill("abc", words)
    plain = train_bpe(["abc"], vocab_size=257, special_tokens=["<e>"], mask_token=None, eos_token="<e>")
    with pytest.raises(ValueError, match="no mask token"):
        parse_infill("[MASK:1]", plain)


def test_rendering(words: Tokenizer) -> None:
    ids = parse_infill("the [MASK:2] sat", words)
    masked = [token == words.mask_token_id for token in ids]
    assert render_canvas(ids, masked, words) == f"the {MASK_GLYPH}{MASK_GLYPH} sat"
    first = masked.index(True)
    ids[first], still = words.encode("c")[0], list(masked)
    still[first] = False
    assert render_canvas(ids, still, words) == f"the c{MASK_GLYPH} sat"
    assert canvas_text_pieces(ids, still, masked, words) == [
        ("the ", False),
        ("c", True),
        (MASK_GLYPH, True),
        (" sat", False),
    ]


def test_a_mask_token_that_is_final_is_shown_as_text(words: Tokenizer) -> None:
    assert words.mask_token_id is not None
    assert render_canvas([words.mask_token_id] * 2, [False, True], words) == f"<|mask|>{MASK_GLYPH}"


def test_ids_without_text(words: Tokenizer) -> None:
    size = words.vocab_size
    assert find_ids_without_text(words, size) == ()
    assert find_ids_without_text(words, size + 3) == (size, size + 1, size + 2)


def test_the_text_of_each_token(words: Tokenizer) -> None:
    ids = words.encode("the cat äö")
    texts = token_texts(words, ids)
    assert len(texts) == len(ids) and "".join(texts) == "the cat äö"
    assert token_texts(words, []) == []


def test_texts_of_tokens_are_the_decoded_text_whatever_the_bytes(words: Tokenizer) -> None:
    rng = random.Random(0)
    for _ in range(200):
        ids = [rng.randrange(words.vocab_size) for _ in range(rng.randrange(12))]
        assert "".join(token_texts(words, ids)) == words.decode(ids)
