"""Whether a directory can be written is known before the work, also to root; and names of paths for others."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from files.paths import check_can_write, portable_path


def test_existing_and_missing_directories_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for directory in (tmp_path, tmp_path / "a" / "b", Path("c/d"), Path()):
        check_can_write(directory, "key = x")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["file", "file/a/b", "dangling"])
def test_a_parent_that_is_no_directory(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    existing = tmp_path / Path(name).parts[0]
    with pytest.raises(ValueError, match=f"^key = x cannot be written: {existing} is not a directory; choose another"):
        check_can_write(tmp_path / name, "key = x")


def test_a_file_system_that_takes_nothing() -> None:
    """Permissions of /proc do not stop root."""
    with pytest.raises(ValueError, match=r"^key = x cannot be written: /proc: .*; choose another directory"):
        check_can_write(Path("/proc/diffusionlm/run"), "key = x")


@pytest.mark.parametrize(("number", "remedy"), [(errno.ENOSPC, "make room"), (errno.EROFS, "choose another directory")])
def test_the_remedy_fits_the_error(number: int, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> str:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("tempfile.mkdtemp", fail)
    with pytest.raises(ValueError, match=f"{tmp_path}: {os.strerror(number)}; {remedy}"):
        check_can_write(tmp_path, "key = x")


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
