"""The gap of prompts: answers keep their targets, and the bounds are those of rows that are put together by hand."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from config.eval import EvalConfig
from diffusionlm.checkpoints.huggingface import save_model
from diffusionlm.data.loader import collate_rows
from diffusionlm.data.packing import Row
from diffusionlm.evaluation.text_likelihood import OpenedText, evaluate_likelihood, exchange_prompts
from diffusionlm.evaluation.validation import evaluate
from diffusionlm.models.transformer import Transformer
from tests.unit.data.chat_cases import chat, chat_tokenizer
from tokenizer import save_tokenizer


def row(prompt: list[int], answer: list[int], padding: int = 0, length: int = 10) -> Row:
    size = len(prompt) + len(answer) + padding
    tokens = [*prompt, *answer, *[9] * (length - len(prompt) - len(answer))]
    kinds = np.repeat([0, 1, 2, 3], [len(prompt), len(answer), padding, length - size])
    ids = np.where(kinds == 3, -1, 0).astype(np.int32)
    is_target = (kinds == 1) | (kinds == 2)
    return Row(np.array(tokens, np.int32), ids, is_target, ids.copy(), kinds == 2)


def test_answers_get_the_next_prompt_that_fits() -> None:
    rows = [row([1, 2], [3, 4], 1), row([1, 2], [5, 6, 7]), row([8] * 6, [4, 3]), row([2, 1, 2, 1], [7] * 4, 1)]
    exchanged, count = exchange_prompts(rows)
    expected = [
        row([8] * 6, [3, 4], 1),
        row([8] * 6, [5, 6, 7]),
        row([2, 1, 2, 1], [4, 3]),
        row([1, 2], [7] * 4, 1),
    ]
    assert count == 4
    for one, other in zip(exchanged, expected, strict=True):
        for field in dataclasses.fields(Row):
            np.testing.assert_array_equal(getattr(one, field.name), getattr(other, field.name))
    assert exchange_prompts(rows[:2]) == (rows[:2], 0)


def test_the_gap_is_the_difference_of_two_bounds(tiny_model: Callable[..., Transformer], tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    model = tiny_model(vocab_size=tokenizer.vocab_size, mask_token_id=257, max_position_embeddings=96)
    (tmp_path / "model").mkdir()
    save_model(model, tmp_path / "model")
    save_tokenizer(tokenizer, tmp_path / "model")
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(json.dumps(chat("q" * (index + 1), f"a{index}")) for index in range(6)))
    values: dict[str, Any] = {
        "model": {"path": tmp_path / "model", "device": "cpu"},
        "data": {
            "source": {"kind": "files", "paths": [str(path)], "chat": {"eos_padding": "length:6"}},
            "split": "all",
            "rows": "padded",
        },
        "likelihood": {"kind": "nelbo", "prompt_gap": True, "num_mc_samples": 2},
    }
    text = OpenedText(EvalConfig.model_validate(values))
    rows = text.rows
    gap = evaluate_likelihood(text, model).prompt_gap
    assert gap is not None and gap.num_rows == len(rows) == 6
    bounds = [
        evaluate(model, tokenizer, collate_rows(some), num_mc_samples=2, batch_size=3).nats_per_token
        for some in (rows, exchange_prompts(rows)[0])
    ]
    np.testing.assert_allclose(gap.nats_per_token, bounds[1] - bounds[0], rtol=1e-4)
    assert 0 < gap.standard_error < 1
    values["data"]["rows"] = "packed"
    with pytest.raises(ValueError, match="prompt_gap = true needs rows of one conversation"):
        EvalConfig.model_validate(values)
