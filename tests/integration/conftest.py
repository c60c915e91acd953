"""The fixture of tiny runs with [rl]."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from diffusionlm.checkpoints.huggingface import save_model_directory
from tests.conftest import MakeModel
from tests.reinforcement_run import QUESTIONS, Configure, write_config
from tests.unit.data.chat_cases import chat_tokenizer


@pytest.fixture
def configure(tmp_path: Path, tiny_model: MakeModel) -> Configure:
    """``configure(name, **sections)``: four steps of 8 answers, 4 to each prompt, in blocks of 4, of a random model."""
    tokenizer = chat_tokenizer()
    vocabulary = {"vocab_size": tokenizer.vocab_size, "mask_token_id": tokenizer.mask_token_id}
    ends = dict.fromkeys(("eos_token_id", "pad_token_id"), tokenizer.eos_token_id)
    model = tiny_model(scale=0.3, max_position_embeddings=32, block_length=4, **vocabulary, **ends)
    save_model_directory(model, tokenizer, tmp_path / "base")
    rows = [{"question": text, "id": text} for text in ("too long " * 4, *QUESTIONS)]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return partial(write_config, tmp_path)
