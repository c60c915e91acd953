"""Loss masks of conversations against an independent one, read off the text of ChatML."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from config.finetune.chat import ChatRowsConfig
from diffusionlm.data.chat.encoder import ChatEncoder, ChatRecords
from diffusionlm.data.chat.formats import ChatRowParser
from diffusionlm.data.packing import Document
from diffusionlm.data.sources.record_source import BadRecord
from tests.unit.data.chat_cases import EOS, chat, chat_tokenizer
from tokenizer import Tokenizer

ANSWER = re.compile(r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", re.DOTALL)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return chat_tokenizer()


def expected_masks(document: Document, tokenizer: Tokenizer) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Targets, EOS padding and segments by the characters of the text."""
    pieces = [tokenizer.decode([token]) for token in document.tokens.tolist()]
    ends = np.cumsum([len(piece) for piece in pieces])
    text = "".join(pieces)
    spans = [match.span(1) for match in ANSWER.finditer(text)]
    is_answer = np.array([any(start < end <= stop for start, stop in spans) for end in ends])
    is_eos_padding = np.array([piece == EOS for piece in pieces])
    last_segment = len(spans) - 1
    segments = np.array([min(last_segment, sum(end > stop for _, stop in spans)) for end in ends])
    return is_answer | is_eos_padding, is_eos_padding, segments


def is_right(document: Document, tokenizer: Tokenizer) -> bool:
    expected = expected_masks(document, tokenizer)
    found = (document.loss_mask, document.is_eos_padding, document.segment_ids)
    return all(np.array_equal(a, b) for a, b in zip(expected, found, strict=True))


def documents(tokenizer: Tokenizer, seed: int, **options: Any) -> list[Document]:
    rng = np.random.default_rng(seed)
    words = ["a", "assistant", "\n", "user\n", " im_end ", "x" * 9]
    texts = ["w" + "".join(rng.choice(words, int(rng.integers(4)))) for _ in range(2 * int(rng.integers(1, 4)))]
    block_length = options.pop("block_length", None)
    encoder = ChatEncoder(ChatRecords(ChatRowsConfig(**options), "chat", "raise"), tokenizer, 1_000, block_length)
    conversation = ChatRowParser(encoder.config)(chat(*texts))
    assert not isinstance(conversation, BadRecord), conversation
    return encoder.encode(conversation)[0]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "options",
    [
        {"turns": "all", "eos_padding": "none"},
        {"block_length": 4},
        {"block_length": 7},
        {"turns": "last", "eos_padding": "length:30"},
    ],
    ids=str,
)
def test_masks_equal_those_of_the_text(seed: int, options: dict[str, Any], tokenizer: Tokenizer) -> None:
    for document in documents(tokenizer, seed, **options):
        if options.get("turns") != "last":
            assert is_right(document, tokenizer)
            continue
        expected, is_eos_padding, segments = expected_masks(document, tokenizer)
        assert np.array_equal(document.loss_mask, expected & (segments == segments[-1]))
        assert np.array_equal(document.is_eos_padding, is_eos_padding) and not document.segment_ids.any()
