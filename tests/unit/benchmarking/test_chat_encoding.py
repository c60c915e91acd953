"""The benchmark of encoding conversations: both ways run, and only that of a file starts a process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarking.finetune.chat_encoding import main


def test_both_ways_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"question": f"What is {i}?", "answer": f"It is {i}."}) for i in range(20)))
    main(["--data", str(path), "--conversations", "5", "--rounds", "1", "--vocab", "270"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["in a file", "built in"]
    assert all("conversations/s" in line for line in lines)
