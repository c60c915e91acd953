"""A byte tokenizer and tiny models whose answers are known, or random."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

from config.evaluation.tasks import TaskConfig
from diffusionlm.evaluation.tasks.items import read_task_items
from diffusionlm.evaluation.tasks.preparation import prepare_items
from diffusionlm.models.transformer import Transformer
from tests.conftest import MakeModel
from tests.unit.data.chat_cases import chat_tokenizer
from tests.unit.evaluation.conftest import token_ids
from tokenizer import Tokenizer

TASK: TypeAdapter[Any] = TypeAdapter(TaskConfig)
MakeTask = Callable[..., Any]


@pytest.fixture(scope="session")
def byte_tokenizer() -> Tokenizer:
    return chat_tokenizer()


@pytest.fixture(scope="session")
def random_model(byte_tokenizer: Tokenizer, tiny_model: MakeModel) -> Transformer:
    """In fp64, so that a batch does not change the last bits that decide."""
    return tiny_model(torch.float64, **token_ids(byte_tokenizer), max_position_embeddings=256).eval()


@pytest.fixture(scope="session")
def biased_model(byte_tokenizer: Tokenizer, tiny_model: MakeModel) -> Callable[[dict[str, float]], Transformer]:
    """``biased_model({"y": 3.0})``: the logit of each token is given, 0 for all others, whatever the model reads."""

    def make(logits: dict[str, float]) -> Transformer:
        ids = token_ids(byte_tokenizer)
        model = tiny_model(torch.float64, **ids, max_position_embeddings=256, tie_word_embeddings=False)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
            model.model.embed_tokens.weight.fill_(1.0)
            model.model.norm.weight.fill_(1.0)
            hidden = model.config.hidden_size * (1.0 + model.config.rms_norm_eps) ** -0.5
            for text, logit in logits.items():
                model.lm_head.weight[byte_tokenizer.vocab[text.encode()]] = logit / hidden
        return model.eval()

    return make


@pytest.fixture
def make_task(tmp_path: Path, byte_tokenizer: Tokenizer, random_model: Transformer) -> MakeTask:
    """``make_task(kind, records, **options)``: the task prepared for a model of these sizes."""

    def make(kind: str, records: list[dict[str, Any]], **options: Any) -> Any:
        path = tmp_path / "items.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        task = TASK.validate_python({"kind": kind, "data": path, **options})
        return prepare_items(task, read_task_items(task), byte_tokenizer, random_model.config)

    return make
