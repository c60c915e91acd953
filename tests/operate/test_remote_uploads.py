"""Data on their way to a real SSH server, which drops the connection in the middle."""

from __future__ import annotations

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
