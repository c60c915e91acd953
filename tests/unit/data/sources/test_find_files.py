"""Which files a source finds, and their formats."""

from __future__ import annotations

from pathlib import Path

import pytest

from diffusionlm.data.sources.local_files import detect_format, find_files


def test_find_files_sorts_and_does_not_repeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b/2.txt", "a/1.txt", "a/.hidden", ".git/x.txt", "c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    monkeypatch.chdir(tmp_path)
    paths = find_files((str(tmp_path / "**" / "*.txt"), str(tmp_path / "a"), "c.txt", "./c.txt"), "key")
    assert [path.relative_to(tmp_path).as_posix() for path in paths] == ["a/1.txt", "b/2.txt", "c.txt"]
    assert find_files((".",), "key") == paths
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_files(("~/a",), "key") == paths[:1]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.jsonl", "json"),
        ("a.json.zst", "json"),
        ("a.b.TXT.gz", "text"),
        ("a.parquet", "parquet"),
        ("a.gz", None),
        ("a", None),
        ("a.py", "text"),
    ],
)
def test_format_by_extension(name: str, expected: str | None) -> None:
    assert detect_format(Path(name)) == expected
