"""Names of paths for others."""

from __future__ import annotations

from pathlib import Path

import pytest

from files.portable_path import portable_path


def test_portable_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "work"
    directory.mkdir()
    monkeypatch.chdir(directory)
    monkeypatch.setenv("HOME", str(tmp_path))
    names: dict[str | Path, str] = {
        "texts/*.jsonl": "texts/*.jsonl",
        directory / "texts" / "a.txt": "texts/a.txt",
        tmp_path / "a.txt": "a.txt",
        "../models/tiny/": "tiny",
        "~/models/tiny": "tiny",
        ".": "work",
    }
    for path, name in names.items():
        assert portable_path(path) == name
