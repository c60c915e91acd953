"""Requests of lm-evaluation-harness without the harness."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class FakeInstance:
    """What the adapter reads of an Instance."""

    args: tuple[Any, ...]
    doc: Any = field(default_factory=dict)
    idx: int = 0
    task_name: str | None = "task"
    repeats: int | None = 1
    doc_id: int = 0
