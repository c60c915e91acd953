"""Masked spans in a text, the text of tokens, and stop strings and characters over the borders of tokens."""

from __future__ import annotations

import random

import pytest

from config.generation import GenerationConfig
from diffusionlm.inference.healing import encode_pieces, split_infill
from diffusionlm.inference.request_builder import suppress_ids_without_text
from diffusionlm.inference.text import AnswerText, AnswerToken, token_texts
from tests.conftest import MakeConfig
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


def test_ids_without_text_are_suppressed(tokenizer: Tokenizer, make_config: MakeConfig) -> None:
    size, config = tokenizer.vocab_size, GenerationConfig(suppress_token_ids=(2,))
    assert suppress_ids_without_text(config, tokenizer, make_config(vocab_size=size)) == config
    model = make_config(vocab_size=size + 2, vision_start_token_id=5, vision_end_token_id=7)
    assert suppress_ids_without_text(config, tokenizer, model).suppress_token_ids == (2, 5, 7, size, size + 1)


def test_texts_of_tokens_are_the_decoded_text_whatever_the_bytes(tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    for _ in range(200):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(12))]
        assert "".join(token_texts(tokenizer, ids)) == tokenizer.decode(ids)


def push_all(text: AnswerText, ids: list[int]) -> str:
    """Push tokens one by one; returns what was sendable on the way, which must never shrink or change."""
    sent, sent_tokens = "", list[AnswerToken]()
    for token in ids:
        text.push(token, -1.0)
        piece, tokens = text.take_new()
        sent, sent_tokens = sent + piece, sent_tokens + tokens
        assert text.text.startswith(sent) and len(sent) == text.sendable_length
    text.finish()
    piece, tokens = text.take_new()
    assert sent + piece == text.text == "".join(token.text for token in sent_tokens + tokens)
    assert sent_tokens + tokens == text.visible_tokens()
    return sent


def reference(tokenizer: Tokenizer, ids: list[int], stop: list[str]) -> tuple[str, int]:
    """Text and number of tokens: after each token the whole text is searched."""
    for length in range(1, len(ids) + 1):
        text = tokenizer.decode_bytes(ids[:length])
        try:
            decoded = text.decode()
        except UnicodeDecodeError as error:
            decoded = text.decode(errors="replace") if error.reason != "unexpected end of data" else ""
        starts = [decoded.find(item) for item in stop if item in decoded]
        if starts:
            return decoded[: min(starts)], length
    return tokenizer.decode_bytes(ids).decode(errors="replace"), len(ids)


def test_any_stop_strings_of_any_texts(tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    num_stopped = 0
    for _ in range(300):
        data = "".join(rng.choice(["the ", "cat", "ab", "a", "é", "日本", "."]) for _ in range(rng.randrange(1, 9)))
        ids = tokenizer.encode(data)
        stop = ["".join(rng.choice("abt e日é.") for _ in range(rng.randrange(1, 4))) for _ in range(rng.randrange(3))]
        text = AnswerText(tokenizer, stop)
        push_all(text, ids)
        assert (text.text, len(text.tokens)) == reference(tokenizer, ids, stop), (data, stop)
        assert not any(item in text.text for item in stop)
        num_stopped += text.is_stopped
        assert all(token.start < len(text.text) for token in text.visible_tokens()) or not text.is_stopped
    assert 50 < num_stopped < 250


def test_the_beginning_of_a_stop_string_is_held_back(tokenizer: Tokenizer) -> None:
    text = AnswerText(tokenizer, ["abcd", "bx"])
    for character, sendable in (("a", ""), ("b", ""), ("c", ""), ("b", "abc"), ("y", "abcby"), ("a", "abcby")):
        text.push(tokenizer.vocab[character.encode()], 0.0)
        assert text.text[: text.sendable_length] == sendable
    text.finish()
    assert text.text == "abcbya" and text.sendable_length == 6


@pytest.mark.parametrize("stop", [[], ["zz"]])
def test_incomplete_characters(tokenizer: Tokenizer, stop: list[str]) -> None:
    first, second = (tokenizer.vocab[bytes([byte])] for byte in "é".encode())
    text = AnswerText(tokenizer, stop)
    text.push(first, 0.0)
    assert text.text == ""
    text.push(second, 0.0)
    assert text.text == "é"
    text.push(first, 0.0)
    text.finish()
    assert text.text == "é\ufffd" and [token.start for token in text.tokens] == [0, 0, 1]
    assert [token.text for token in text.visible_tokens()] == ["", "é", "\ufffd"]


def test_a_token_that_begins_a_character_waits_for_its_end(tokenizer: Tokenizer) -> None:
    byte = tokenizer.vocab[b"a"], tokenizer.vocab["é".encode()[:1]]
    text = AnswerText(tokenizer)
    assert push_all(text, [*byte, byte[1], byte[1]]) == "a\ufffd\ufffd"
    text = AnswerText(tokenizer)
    for token, num_sendable in ((byte[0], 1), (byte[1], 0), (byte[0], 2)):
        text.push(token, 0.0)
        assert len(text.take_new()[1]) == num_sendable


def test_repeated_bytes_belong_to_the_prompt(tokenizer: Tokenizer) -> None:
    text = AnswerText(tokenizer, num_repeated_bytes=2)
    ids = tokenizer.encode("the cat")
    for token in ids:
        text.push(token, 0.0)
    assert text.text == "e cat"
    first, *others = text.visible_tokens()
    assert tokenizer.token_bytes(first.token_id)[first.num_repeated_bytes :] == first.text.encode()
    assert first.num_repeated_bytes == 2 and {token.num_repeated_bytes for token in others} == {0}
