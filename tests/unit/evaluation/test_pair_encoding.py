"""Contexts and continuations as token ids: spaces, seams within tokens, empty contexts, prefixes."""

from __future__ import annotations

import pytest

from diffusionlm.evaluation.pair_encoding import EncodedPair, PairEncoder
from tests.conftest import MakeConfig
from tokenizer import Tokenizer, TokenOptions

MERGES = [(b"a", b"b"), (b" ", b"c"), (b"ab", b"c"), (b"d", b"d")]
SPECIAL = {"<s>": 300, "</s>": 301}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """All bytes, and: ab 256, " c" 257, abc 258, dd 259."""
    vocab = {bytes([byte]): byte for byte in range(256)}
    vocab |= {first + second: 256 + index for index, (first, second) in enumerate(MERGES)}
    return Tokenizer(vocab, MERGES, SPECIAL, "gpt2", eos_token="</s>")


def encoder_of(tokenizer: Tokenizer, make_config: MakeConfig, *, adds_bos: bool = False) -> PairEncoder:
    options = TokenOptions(bos_token="<s>", adds_bos=True) if adds_bos else TokenOptions()
    return PairEncoder(tokenizer.with_options(options), make_config(vocab_size=400, eos_token_id=301))


@pytest.mark.parametrize(
    ("context", "continuation", "expected"),
    [
        ("d", " c", EncodedPair((100,), (257,))),
        ("d ", "c", EncodedPair((100,), (257,))),  # the space moves to the continuation
        ("d  \n", "c", EncodedPair((100,), (32, 32, 10, 99))),
        ("ab", "c", EncodedPair((256,), (99,))),  # one token holds both: the continuation by itself
        ("xa", "bc", EncodedPair((120, 97), (98, 99))),  # x, abc: two tokens of the context leave nothing
        ("ad", "dx", EncodedPair((97, 100), (120,))),  # a, dd, x: the seam is within dd
        ("d", "", EncodedPair((100,), ())),
        ("", "ab", EncodedPair((301,), (256,))),
        (" ", "c", EncodedPair((301,), (257,))),
        ("", "</s>d", EncodedPair((301,), (100,))),  # not twice
        ("", "</s>", EncodedPair((301,), (301,))),
        ("<s>d", "</s>", EncodedPair((300, 100), (301,))),  # special tokens of a rendered chat
        ("é", "e\u0301", EncodedPair((0xC3, 0xA9), (101, 0xCC, 0x81))),
    ],
)
def test_pairs(
    context: str, continuation: str, expected: EncodedPair, tokenizer: Tokenizer, make_config: MakeConfig
) -> None:
    assert encoder_of(tokenizer, make_config).encode_pair(context, continuation) == expected


def test_the_prefix_is_written_once(tokenizer: Tokenizer, make_config: MakeConfig) -> None:
    encoder = encoder_of(tokenizer, make_config, adds_bos=True)
    assert encoder.encode("d") == encoder.encode("<s>d") == (300, 100)
    assert encoder.encode_pair("d", " c") == encoder.encode_pair("<s>d", " c") == EncodedPair((300, 100), (257,))
    assert encoder.encode_pair("", "d") == encoder.encode_pair("", "<s>d") == EncodedPair((300,), (100,))


def test_a_model_that_begins_texts_with_the_end_of_text(tokenizer: Tokenizer, make_config: MakeConfig) -> None:
    config = make_config(vocab_size=400, eos_token_id=301, begin_with_eos=True)
    assert PairEncoder(tokenizer, config).encode("d") == (301, 100)


def test_an_empty_context_needs_a_token(tokenizer: Tokenizer, make_config: MakeConfig) -> None:
    bare = Tokenizer(dict(tokenizer.vocab), list(tokenizer.merges), {}, "gpt2")
    encoder = PairEncoder(bare, make_config(vocab_size=400, eos_token_id=None, pad_token_id=None))
    with pytest.raises(ValueError, match="empty context"):
        encoder.encode_pair("", "d")
