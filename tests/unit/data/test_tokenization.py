"""Processes that tokenise: what they say when they cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from diffusionlm.data.tokenization import open_text_encoder
from tokenizer import train_bpe

ROOT = Path(__file__).parents[3]


def test_a_process_that_does_not_even_start_is_told(tmp_path: Path) -> None:
    """As in a script that has forgotten that it is run again by each process; nothing waits for it for ever."""
    script = tmp_path / "unguarded.py"
    script.write_text(
        "from diffusionlm.data.tokenization import TokenizerPool\n"
        "from tokenizer import Tokenizer\n"
        "many = {f'<special token number {number}>': 256 + number for number in range(10_000)}\n"
        "with TokenizerPool(Tokenizer({bytes([byte]): byte for byte in range(256)}, [], many, 'qwen'), 2) as pool:\n"
        "    pool.submit(['a'])()\n"
    )
    done = subprocess.run(
        [sys.executable, script],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "ValueError: a tokenizer process ended (exit code 1)" in done.stderr


def test_text_without_a_utf8_form_is_an_error_of_its_process_too() -> None:
    tokenizer = train_bpe(["the cat sat on the mat"], vocab_size=262)
    for num_processes in (0, 1):
        with open_text_encoder(tokenizer, num_processes) as encoder:
            with pytest.raises(ValueError, match="surrogate"):
                encoder.submit(["one", "\ud800"])()
            assert [len(each) for each in encoder.submit(["", "a"])()] == [0, 1]
