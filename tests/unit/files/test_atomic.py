"""Small files, whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from files.atomic import write_bytes_atomic, write_text_atomic


def test_text_is_replaced_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_text_atomic(path, "one")
    write_text_atomic(path, "zwö\r\n\n")
    assert path.read_bytes() == "zwö\r\n\n".encode()
    assert os.listdir(tmp_path) == ["summary.json"]


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_full_disk_keeps_the_previous_file(fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "summary.json"
    write_bytes_atomic(path, b"old")

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, fails, full)
    with pytest.raises(OSError, match="No space") as caught:
        write_bytes_atomic(path, b"new")
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["summary.json"]


def test_a_process_that_dies_while_it_writes_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_bytes_atomic(path, b"old")
    child = os.fork()
    if not child:
        os.fsync = lambda descriptor: os._exit(9)  # type: ignore[assignment]
        write_bytes_atomic(path, b"new")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert path.read_bytes() == b"old"
    temporary_files = [name for name in os.listdir(tmp_path) if name != "summary.json"]
    assert len(temporary_files) == 1 and temporary_files[0].startswith("summary.json.tmp-")
