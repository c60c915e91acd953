"""Sections of tasks: defaults, and keys that contradict each other."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from cli.eval import TASK_KINDS
from config.evaluation.tasks import TaskConfig

TASK: TypeAdapter[Any] = TypeAdapter(TaskConfig)


@pytest.mark.parametrize("kind", TASK_KINDS)
def test_a_kind_and_a_file_are_a_task(kind: str) -> None:
    assert TASK.validate_python({"kind": kind, "data": "items.jsonl"}).kind == kind


def test_code_is_not_run_by_default() -> None:
    assert not TASK.validate_python({"kind": "humaneval", "data": "items.jsonl"}).run_code


@pytest.mark.parametrize(
    ("values", "keys"),
    [
        ({"kind": "gsm8k", "data": "a", "prompt": {"shots": 2}}, "shots_data"),
        ({"kind": "gsm8k", "data": "a", "prompt": {"shots_data": "b"}}, "shots"),
        ({"kind": "gsm8k", "data": "a", "prompt": {"system": "b"}}, 'format = "chat"'),
        ({"kind": "gsm8k", "data": "a", "item_ids": ["1", "1"]}, "item_ids"),
        ({"kind": "gsm8k", "data": "a", "extraction": []}, "extraction"),
        ({"kind": "perplexity"}, "text.source"),
        ({"kind": "perplexity", "data": "a", "text": {"source": {"kind": "python-stdlib"}}}, "text.source"),
        ({"kind": "trivia", "data": "a"}, "kind"),
        ({"kind": "gsm8k"}, "data is missing"),
        ({"kind": "exact_match", "data": "a", "source": {"kind": "chat_tasks"}}, "data and from source"),
        ({"kind": "exact_match", "data": "a", "split": "train"}, "split"),
    ],
)
def test_contradictions_are_named(values: dict[str, Any], keys: str) -> None:
    with pytest.raises(ValidationError, match=keys):
        TASK.validate_python(values)
