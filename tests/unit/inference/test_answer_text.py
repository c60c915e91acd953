"""Stop strings and characters over the borders of tokens."""

from __future__ import annotations

import random

import pytest

from diffusionlm.inference.text import AnswerText, AnswerToken
from tokenizer import Tokenizer, train_bpe


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return train_bpe(["the cat sat on the mat. the dog sat on the cat, and the mat was flat.\n"] * 4, vocab_size=300)


def push_all(text: AnswerText, ids: list[int]) -> str:
    """Push tokens one by one; returns what was sendable on the way, which must never shrink or change."""
    sent = ""
    sent_tokens: list[AnswerToken] = []
    for token in ids:
        text.push(token, -1.0)
        sendable = text.text[: text.sendable_length]
        assert sendable.startswith(sent)
        sent = sendable
        sent_tokens += text.sendable_tokens(len(sent_tokens))
    text.finish()
    assert text.text.startswith(sent) and text.sendable_length == len(text.text)
    tokens = text.visible_tokens()
    assert sent_tokens + text.sendable_tokens(len(sent_tokens)) == tokens
    assert "".join(token.text for token in tokens) == text.text
    return sent


def reference(words: Tokenizer, ids: list[int], stop: list[str]) -> tuple[str, int]:
    """Text and number of tokens: after each token the whole text is searched."""
    for length in range(1, len(ids) + 1):
        text = words.decode_bytes(ids[:length])
        try:
            decoded = text.decode()
        except UnicodeDecodeError as error:
            decoded = text.decode(errors="replace") if error.reason != "unexpected end of data" else ""
        starts = [decoded.find(item) for item in stop if item in decoded]
        if starts:
            return decoded[: min(starts)], length
    return words.decode_bytes(ids).decode(errors="replace"), len(ids)


def test_any_stop_strings_of_any_texts(words: Tokenizer) -> None:
    rng = random.Random(0)
    num_stopped = 0
    for _ in range(300):
        data = "".join(rng.choice(["the ", "cat", "ab", "a", "é", "日本", "."]) for _ in range(rng.randrange(1, 9)))
        ids = words.encode(data)
        stop = ["".join(rng.choice("abt e日é.") for _ in range(rng.randrange(1, 4))) for _ in range(rng.randrange(3))]
        text = AnswerText(words, stop)
        push_all(text, ids)
        assert (text.text, len(text.tokens)) == reference(words, ids, stop), (data, stop)
        assert not any(item in text.text for item in stop)
        num_stopped += text.is_stopped
        assert all(token.start < len(text.text) for token in text.visible_tokens()) or not text.is_stopped
    assert 50 < num_stopped < 250


def test_the_beginning_of_a_stop_string_is_held_back(words: Tokenizer) -> None:
    text = AnswerText(words, ["abcd", "bx"])
    for character, sendable in (("a", ""), ("b", ""), ("c", ""), ("b", "abc"), ("y", "abcby"), ("a", "abcby")):
        text.push(words.vocab[character.encode()], 0.0)
        assert text.text[: text.sendable_length] == sendable
    text.finish()
    assert text.text == "abcbya" and text.sendable_length == 6


@pytest.mark.parametrize("stop", [[], ["zz"]])
def test_incomplete_characters(words: Tokenizer, stop: list[str]) -> None:
    first, second = (words.vocab[bytes([byte])] for byte in "é".encode())
    text = AnswerText(words, stop)
    text.push(first, 0.0)
    assert text.text == ""
    text.push(second, 0.0)
    assert text.text == "é"
    text.push(first, 0.0)
    text.finish()
    assert text.text == "é\ufffd" and [token.start for token in text.tokens] == [0, 0, 1]
    assert [token.text for token in text.visible_tokens()] == ["", "é", "\ufffd"]


def test_a_token_that_begins_a_character_waits_for_its_end(words: Tokenizer) -> None:
    byte = words.vocab[b"a"], words.vocab["é".encode()[:1]]
    text = AnswerText(words)
    assert push_all(text, [*byte, byte[1], byte[1]]) == "a\ufffd\ufffd"
    text = AnswerText(words)
    for token, num_sendable in ((byte[0], 1), (byte[1], 0), (byte[0], 3)):
        text.push(token, 0.0)
        assert len(text.sendable_tokens()) == num_sendable


def test_repeated_bytes_belong_to_the_prompt(words: Tokenizer) -> None:
    text = AnswerText(words, num_repeated_bytes=2)
    ids = words.encode("the cat")
    for token in ids:
        text.push(token, 0.0)
    assert text.text == "e cat"
    first, *others = text.visible_tokens()
    assert words.token_bytes(first.token_id)[first.num_repeated_bytes :] == first.text.encode()
    assert first.num_repeated_bytes == 2 and {token.num_repeated_bytes for token in others} == {0}
