"""docs/reliability.md names a test for each promise: all of them exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
GUIDE = ROOT / "docs/reliability.md"


def names_in(path: Path) -> set[str]:
    """``test`` and ``Class::test`` of a file."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        names |= {prefix + definition.name for definition in inside if isinstance(definition, ast.FunctionDef)}
    return names


def test_every_test_that_the_guide_names_exists() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+\.py)::([\w:]+)`", text)
    assert len(named) > 40
    names_by_path = {path: names_in(ROOT / "tests" / path) for path, _ in named if (ROOT / "tests" / path).is_file()}
    assert [f"{path}::{name}" for path, name in named if name not in names_by_path.get(path, set())] == []
    # Nothing is written so that it escapes the check.
    assert len(named) == text.count(".py::")
