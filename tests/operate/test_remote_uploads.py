"""Data on their way to a real SSH server, which drops the connection in the middle."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.operate.machine import BIG, Remote, cut, partial_files, stand_in, until

pytestmark = pytest.mark.operate


WITHHOLDING_RSYNC = f"""#!{sys.executable}
import os, subprocess, sys
with subprocess.Popen([{shutil.which("rsync")!r}, *sys.argv[1:]], stdin=subprocess.PIPE) as process:
    count = 0
    while data := os.read(0, 50_000):
        if count < 1_000_000:
            process.stdin.write(data)
            process.stdin.flush()
        count += len(data)
"""


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


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_upload_that_is_ended_continues(ready: Remote, number: signal.Signals, code: int) -> None:
    source = ready.tree / "data" / "long.bin"
    contents = random.Random(1).randbytes(10_000_000)
    source.write_bytes(contents)
    target = ready.root / "data" / "long.bin"
    with stand_in(ready, WITHHOLDING_RSYNC):  # the sender waits for an end that cannot come
        words = [sys.executable, "scripts/remote", "data-remote", "data/long.bin"]
        with subprocess.Popen(
            words, cwd=ready.tree, env=ready.environment, stderr=subprocess.PIPE, text=True, start_new_session=True
        ) as process:
            until(lambda: [path for path in target.parent.glob(".long.bin.*") if path.stat().st_size > 500_000], "data")
            if number == signal.SIGINT:  # Ctrl-C reaches all processes of a terminal
                os.killpg(process.pid, number)
            else:
                process.send_signal(number)
            _, stderr = process.communicate(timeout=60)
        assert process.returncode == code, stderr
        assert "Traceback" not in stderr
        until(lambda: partial_files(target.parent), "the end of rsync there")
    assert not target.exists()
    (part,) = partial_files(target.parent)
    there = cut(ready, "input", len(contents) - part.stat().st_size + 100_000)
    ready.works("data-remote", "data/long.bin")
    there.unlink()
    assert target.read_bytes() == contents
    target.unlink()
    source.unlink()


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


def test_what_is_in_the_place_of_data_stays(ready: Remote) -> None:
    (ready.tree / "data" / "tokens").write_text("a file", encoding="utf-8")
    target = ready.root / "data" / "tokens"
    target.mkdir()
    (target / "theirs").touch()
    line = ready.fails("data-remote", "data/tokens")
    assert "tokens" in line
    assert "run the same again" in line
    assert (target / "theirs").exists()
    (ready.root / "data" / "in the way").touch()
    (ready.tree / "data" / "in the way").mkdir()
    line = ready.fails("data-remote", "data/in the way")
    assert "data/in the way" in line
    assert "move away" in line
    (ready.tree / "data" / "tokens").unlink()
