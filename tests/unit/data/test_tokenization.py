"""Tokenizer processes: errors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from diffusionlm.data.tokenization import open_text_encoder
from tokenizer import train_bpe

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_a_process_that_fails_to_start_is_an_error(tmp_path: Path) -> None:
    """A script without a main guard fails in its children; nothing waits for them forever."""
    script = tmp_path / "unguarded.py"
    script.write_text(
        "from diffusionlm.data.tokenization import open_text_encoder\n"
        "from tokenizer import Tokenizer\n"
        "many = {f'<special token number {number}>': 256 + number for number in range(10_000)}\n"
        "tokenizer = Tokenizer({bytes([byte]): byte for byte in range(256)}, [], many, 'qwen')\n"
        "with open_text_encoder(tokenizer, 2) as encoder:\n"
        "    encoder.submit(['a'])()\n"
    )
    result = subprocess.run(
        [sys.executable, script],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 1
    assert "ValueError: a tokenizer process ended" in result.stderr


def test_text_without_a_utf8_form_is_an_error_with_and_without_processes() -> None:
    tokenizer = train_bpe(["the cat sat on the mat"], vocab_size=262)
    for num_processes in (0, 1):
        with open_text_encoder(tokenizer, num_processes) as encoder:
            with pytest.raises(ValueError, match="surrogate"):
                encoder.submit(["one", "\ud800"])()
            assert [len(tokens) for tokens in encoder.submit(["", "a"])()] == [0, 1]
