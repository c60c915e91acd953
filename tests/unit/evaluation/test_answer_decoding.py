"""Answers with stop strings: where the text is cut, and what is counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from config.generation import GenerationConfig
from diffusionlm.evaluation.answer_decoding import DecodedAnswer, decode_answers
from diffusionlm.inference.generate import generate
from diffusionlm.inference.request_builder import prepare_request
from diffusionlm.inference.settings import resolve_settings
from diffusionlm.models.transformer import Transformer
from tokenizer import Tokenizer

WORDS = ["ab", "cd", "ef", "gh", "ij", "kl", "mn", "op", "qr", "st", "uv", "wx", "yz", " a", " b", " c", "0", "1", "2"]
PROMPT = (3, 1, 4)


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Transformer]) -> Transformer:
    """23 tokens in fp64: 21 is the end of text, 22 the mask."""
    return tiny_model(dtype=torch.float64, vocab_size=23, mask_token_id=22, eos_token_id=21, pad_token_id=21)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """The model's 23 tokens: words of one or two letters, and two special tokens besides end and mask. Bytes, which
    every tokenizer needs, have ids beyond them."""
    vocab = {bytes([byte]): 100 + byte for byte in range(256)}
    vocab |= {word.encode(): index for index, word in enumerate(WORDS)}
    merges = [(word[:1].encode(), word[1:].encode()) for word in WORDS if len(word) == 2]
    special = {"<x>": 19, "<y>": 20, "<end>": 21, "<mask>": 22}
    return Tokenizer(vocab, merges, special, "gpt2", mask_token="<mask>", eos_token="<end>")


def answer(model: Transformer, tokenizer: Tokenizer, stop: Sequence[str] = (), **options: Any) -> DecodedAnswer:
    config = GenerationConfig(**{"max_new_tokens": 12, "block_length": 4, "stop_token_ids": [], **options})
    request = prepare_request(resolve_settings(config, model.config), PROMPT, seed=0)
    [(_, result)] = decode_answers(model, tokenizer, [(request, tuple(stop))])
    return result


@pytest.mark.slow
def test_stop_strings_at_every_place(model: Transformer, tokenizer: Tokenizer) -> None:
    """Every piece of the text up to 5 characters: within a token, across tokens and blocks, at position 0."""
    config = GenerationConfig(max_new_tokens=12, block_length=4, stop_token_ids=[], suppress_token_ids=[19, 20, 21])
    (expected,) = generate(model, [PROMPT], config)
    text, starts = tokenizer.decode(expected.token_ids), [0]
    for token in expected.token_ids:
        starts.append(starts[-1] + len(tokenizer.token_bytes(token)))
    for start in range(len(text)):
        for length in (1, 3, 5):
            stop = text[start : start + length]
            end = text.find(stop)
            result = answer(model, tokenizer, [stop, "never"], suppress_token_ids=[19, 20, 21])
            assert result.text == text[:end] and result.finish_reason == "stop"
            assert len(result.token_ids) == sum(first < end for first in starts[:-1])
            # Decoding has ended with the block in which the stop string became final.
            last_token = sum(first < end + len(stop) for first in starts[:-1])
            assert result.num_forwards <= 4 * -(-last_token // 4)


def test_stop_tokens_and_special_tokens(model: Transformer, tokenizer: Tokenizer) -> None:
    (whole,) = generate(model, [PROMPT], GenerationConfig(max_new_tokens=12, block_length=4, stop_token_ids=[]))
    third = whole.token_ids[2]
    cut = answer(model, tokenizer, stop_token_ids=[third])
    assert cut.token_ids == whole.token_ids[: whole.token_ids.index(third)] and cut.finish_reason == "stop"
    only_special = answer(model, tokenizer, suppress_token_ids=[*range(19), 20, 21])
    assert only_special.text == "" and set(only_special.token_ids) == {19}
    assert (only_special.finish_reason, only_special.num_forwards) == ("length", whole.num_forwards)
    assert answer(model, tokenizer, ["<x>"], suppress_token_ids=[*range(19), 20, 21]).token_ids == ()
