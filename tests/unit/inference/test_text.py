"""Masked spans in a text, and the text of tokens."""

from __future__ import annotations

import random

import pytest

from config.generation import GenerationConfig
from diffusionlm.inference.healing import encode_pieces, split_infill
from diffusionlm.inference.request_builder import suppress_ids_without_text
from diffusionlm.inference.text import token_texts
from tokenizer import Tokenizer, train_bpe


def test_spans_become_masks(tokenizer: Tokenizer) -> None:
    mask = tokenizer.mask_token_id
    assert mask is not None
    expected = [*tokenizer.encode("the "), *[mask] * 3, *tokenizer.encode(" sat"), mask, mask]
    assert list(encode_pieces(tokenizer, split_infill("the [MASK:3] sat[MASK:1][MASK:1]")).token_ids) == expected
    assert list(encode_pieces(tokenizer, split_infill("[MASK:2]"), mask_token_id=7).token_ids) == [7, 7]


def test_special_tokens_written_in_a_text_stay_text(tokenizer: Tokenizer) -> None:
    ids = list(encode_pieces(tokenizer, split_infill("<|mask|> [MASK] <|endoftext|>[MASK:2]")).token_ids)
    assert [token for token in ids if token in tokenizer.special_tokens.values()] == [tokenizer.mask_token_id] * 2
    assert tokenizer.decode(ids[:-2]) == "<|mask|> [MASK] <|endoftext|>"


@pytest.mark.parametrize("number", ["0", "00", "-1", "", "x", "1.5", " 2", "70000", "9" * 5000, "٣"])
def test_spans_without_a_valid_number(tokenizer: Tokenizer, number: str) -> None:
    with pytest.raises(ValueError, match=r"is not a masked span: write \[MASK:n\] with n from 1 to 65536") as caught:
        list(encode_pieces(tokenizer, split_infill(f"a [MASK:1] b [MASK:{number}]")).token_ids)
    assert len(str(caught.value)) < 140


def test_no_span_and_no_mask_token(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"'abc' has no masked span: write \[MASK:n\]"):
        list(encode_pieces(tokenizer, split_infill("abc")).token_ids)
    plain = train_bpe(["abc"], vocab_size=257, special_tokens=["<e>"], mask_token=None, eos_token="<e>")
    with pytest.raises(ValueError, match="no mask token"):
        list(encode_pieces(plain, split_infill("[MASK:1]")).token_ids)


def test_ids_without_text_are_suppressed(tokenizer: Tokenizer) -> None:
    size, config = tokenizer.vocab_size, GenerationConfig(suppress_token_ids=(2,))
    assert suppress_ids_without_text(config, tokenizer, size) == config
    assert suppress_ids_without_text(config, tokenizer, size + 2).suppress_token_ids == (2, size, size + 1)


def test_the_text_of_each_token(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the cat äö")
    texts = token_texts(tokenizer, ids)
    assert len(texts) == len(ids) and "".join(texts) == "the cat äö"
    assert token_texts(tokenizer, []) == []


def test_texts_of_tokens_are_the_decoded_text_whatever_the_bytes(tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    for _ in range(200):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(12))]
        assert "".join(token_texts(tokenizer, ids)) == tokenizer.decode(ids)
