"""Locks on directories."""

from __future__ import annotations

from pathlib import Path

import pytest

from files.lock import LOCK_FILE, DirectoryInUseError, is_locked, lock_directory


def test_one_holder_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "new" / "run"
    with lock_directory(path):
        assert is_locked(path)
        with pytest.raises(DirectoryInUseError, match=str(path)), lock_directory(path):
            pass
        assert is_locked(path)
    assert not is_locked(path)
    with lock_directory(path):
        pass


def test_is_locked_creates_no_file(tmp_path: Path) -> None:
    assert not is_locked(tmp_path) and not is_locked(tmp_path / "missing")
    assert not (tmp_path / LOCK_FILE).exists()
