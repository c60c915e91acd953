"""Corpora and tokenizers that the tokenizer tests share; everything is made here, nothing is downloaded."""

import ast
import json
import os
import textwrap
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest

from tokenizer import Tokenizer, train_bpe

MakeTokenizer = Callable[[str], Tokenizer]


def _stdlib_sources() -> list[str]:
    root = Path(os.__file__).parent
    paths = [Path(module.__file__ or "") for module in (ast, json, textwrap)]
    paths += [root / name for name in ("argparse.py", "tarfile.py", "datetime.py", "subprocess.py", "typing.py")]
    return [path.read_text(encoding="utf-8") for path in paths]


def _nasty_texts() -> list[str]:
    # Characters of Unicode 3.2: their classes are the same in every library's tables by now.
    assigned = [chr(i) for i in range(0x110000) if unicodedata.ucd_3_2_0.category(chr(i)) not in ("Cn", "Cs", "Co")]
    sample = assigned[:3000] + assigned[3000::37] + [chr(i) for i in (0xE000, 0xFFFE, 0xFFFF, 0xF0000, 0x10FFFF)]
    runs = [
        "a" * 3000,
        "-" * 999,
        " " * 1001 + "x",
        "\n" * 700,
        "\t \n" * 300,
        "0123456789" * 60,
        "é" * 500,
        "'s" * 300,
    ]
    contractions = "I'm we're they'LL don't 'S '\u017f 'T'Ve o'clock ''s '1's it's\u2019s \u212a'\u212a"
    return [
        "",
        " ",
        "\x00",
        "".join(chr(i) for i in range(0x180)),
        "".join(sample),
        " ".join(sample),
        "\n".join(sample[::3]),
        *runs,
        contractions,
        "<|endoftext|><|mask|> <|mask|>mask|> <|mask <|endoftext|>\n<|mask|>",
        "e\u0301 \u1100\u1161\u11a8 \u0958 A\u030a\u0323 \ufb01 \u2126 \U0001d15e",
        "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f3f3\ufe0f\u200d\U0001f308 \u202eright-to-left\u202c",
        "\u00a0\u2003\u3000\u0085\u2028 \x1c\x1d\x1e\x1f \r\n \r \n\r  \r\n\r\n x",
        "  leading,\ttabs  and trailing  \n   ",
        "x=1_000;y=0xFFee+3.14e-10//2**7 # ##  #\n#version: 0.2\n",
    ]


@pytest.fixture(scope="session")
def sources() -> list[str]:
    """About 500 kB of the standard library's source."""
    return _stdlib_sources()


@pytest.fixture(scope="session")
def nasty() -> list[str]:
    """Texts chosen to break tokenizers."""
    return _nasty_texts()


@pytest.fixture(scope="session")
def make_tokenizer(sources: list[str], nasty: list[str]) -> MakeTokenizer:
    """A tokenizer of 1,000 ids by pattern name; each is trained once."""
    tokenizers: dict[str, Tokenizer] = {}

    def make(pattern: str) -> Tokenizer:
        if pattern not in tokenizers:
            tokenizers[pattern] = train_bpe([*sources[:4], *nasty], vocab_size=1000, pattern=pattern)
        return tokenizers[pattern]

    return make


@pytest.fixture(scope="session")
def tokenizer(make_tokenizer: MakeTokenizer) -> Tokenizer:
    """The default tokenizer of these tests."""
    return make_tokenizer("qwen")
