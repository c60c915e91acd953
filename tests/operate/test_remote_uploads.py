"""Data on their way to a real SSH server, which drops the connection in the middle."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.operate.machine import BIG, Remote, cut, partial_files, until

pytestmark = pytest.mark.operate


def test_interrupted_data_transfer_resumes(ready: Remote) -> None:
    source = ready.tree / "data" / "more" / "tokens.bin"
    source.parent.mkdir()
    source.write_bytes(BIG)
    target = ready.root / "data" / "more" / "tokens.bin"
    there = cut(ready, "input", 1_500_000)
    assert "the same command continues" in ready.fails("data-remote", "path=data/more", code=255)
    assert not there.exists()
    assert not target.exists()
    until(lambda: partial_files(ready.root / "data"), "the end of rsync there")
    (part,) = partial_files(ready.root / "data")
    assert 1_000_000 < part.stat().st_size < len(BIG)

    there = cut(ready, "input", len(BIG) - part.stat().st_size + 100_000)
    ready.works("data-remote", "data/more")
    assert there.exists()
    there.unlink()
    assert target.read_bytes() == BIG
    assert not partial_files(ready.root / "data")
    before = target.stat().st_ino
    ready.works("data-remote", "data/more")
    ready.works("data-remote", "data/more/tokens.bin")
    assert target.stat().st_ino == before


def test_links_of_a_folder_that_is_sent(ready: Remote, tmp_path: Path) -> None:
    (tmp_path / "corpus" / "deep").mkdir(parents=True)
    (tmp_path / "corpus" / "deep" / "text").write_text("1", encoding="utf-8")
    source = ready.tree / "data" / "linked"
    source.symlink_to(tmp_path)
    (tmp_path / "step 1").mkdir()
    (tmp_path / "step 1" / "model").write_text("2", encoding="utf-8")
    (tmp_path / "latest").symlink_to("step 1")
    elsewhere = ready.home / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "text").write_text("3", encoding="utf-8")
    (tmp_path / "away").symlink_to(elsewhere)
    (tmp_path / "up").symlink_to("..")
    assert "up links to a folder that holds it" in ready.fails("data-remote", "path=data/linked")
    (tmp_path / "up").unlink()
    ready.works("data-remote", "path=data/linked")
    there = ready.root / "data" / "linked"
    files = {path.relative_to(there).as_posix(): path.read_text() for path in there.rglob("*") if path.is_file()}
    assert files == {"corpus/deep/text": "1", "step 1/model": "2", "away/text": "3"}
    assert os.readlink(there / "latest") == "step 1"
    assert not any(path.is_symlink() for path in (there, there / "away", there / "corpus"))
    (there / "corpus" / "deep" / "text").unlink()
    (there / "corpus" / "deep" / "text").symlink_to(elsewhere / "text")
    ready.works("data-remote", "data/linked")
    assert not (there / "corpus" / "deep" / "text").is_symlink()
    assert (elsewhere / "text").read_text(encoding="utf-8") == "3"
    source.unlink()
