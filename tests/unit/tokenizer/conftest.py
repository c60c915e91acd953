"""Corpora and tokenizers that the tokenizer tests share; everything is made here, nothing is downloaded."""

import os
import unicodedata
from pathlib import Path

import pytest

from tokenizer import Tokenizer, train_bpe


@pytest.fixture(scope="session")
def sources() -> list[str]:
    """About 500 kB of the standard library's source."""
    names = ("ast.py", "json/__init__.py", "textwrap.py", "argparse.py", "tarfile.py", "datetime.py", "subprocess.py",
             "typing.py")  # fmt: skip
    return [(Path(os.__file__).parent / name).read_text(encoding="utf-8") for name in names]


@pytest.fixture(scope="session")
def nasty() -> list[str]:
    """Texts chosen to break tokenizers."""
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
def tokenizer(sources: list[str], nasty: list[str]) -> Tokenizer:
    """A tokenizer of 1,000 ids with the pattern of Qwen."""
    return train_bpe([*sources[:4], *nasty], vocab_size=1000, pattern="qwen")
