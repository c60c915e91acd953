"""Files on their way to and from a real SSH server, which drops the connection in the middle."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.operate.machine import BIG, SECRET, Remote, cut, partial_files, stand_in, until

pytestmark = pytest.mark.operate

STRANGE = ["-n", "a'b", "a\\b", "$HOME", "ü *", "tab\there", "line\nbreak", ".hidden", "# no comment", " x "]


@pytest.fixture
def folder(ready: Remote) -> Iterator[Path]:
    """A new folder there; what was fetched of it here goes afterwards."""
    path = ready.root / "runs" / "a b"
    path.mkdir(parents=True)
    yield path
    shutil.rmtree(path)
    shutil.rmtree(ready.tree / "runs", ignore_errors=True)


@pytest.mark.parametrize(
    ("which", "recipe"), [("output", ["fetch", "any_file=runs/a b"]), ("input", ["data-remote", "path=runs/a b"])]
)
def test_interrupted_copy_leaves_no_partial_file_and_resumes(
    ready: Remote, folder: Path, which: str, recipe: list[str]
) -> None:
    here = ready.tree / "runs" / "a b"
    source, target = (folder, here) if which == "output" else (here, folder)
    source.mkdir(parents=True, exist_ok=True)
    (source / "a small one").write_text("whole", encoding="utf-8")
    (source / "model.safetensors").write_bytes(BIG)
    there = cut(ready, which, 1_500_000)
    assert "the same command continues" in ready.fails(*recipe, code=255)
    assert not there.exists()
    assert (target / "a small one").read_text(encoding="utf-8") == "whole"
    assert not (target / "model.safetensors").exists()
    until(lambda: partial_files(target), "the end of rsync")
    (part,) = partial_files(target)
    assert 1_000_000 < part.stat().st_size < len(BIG)
    assert BIG.startswith(part.read_bytes())

    there = cut(ready, which, len(BIG) - part.stat().st_size + 100_000)
    ready.works(*recipe)
    assert there.exists()
    there.unlink()
    assert (target / "model.safetensors").read_bytes() == BIG
    assert not partial_files(target)
    before = (target / "model.safetensors").stat().st_ino
    ready.works(*recipe)
    assert (target / "model.safetensors").stat().st_ino == before


def test_names_links_and_places(ready: Remote, folder: Path) -> None:
    names = [*STRANGE, os.fsdecode(b"\xff.bin")]
    for name in names:
        (folder / name).write_text(ascii(name), encoding="utf-8")
    (folder / "empty").touch()
    (folder / "latest").symlink_to("empty")
    (folder / "away").symlink_to("/etc/hostname")
    (folder / "up").symlink_to("../../pyproject.toml")
    done = ready.just("fetch", "runs/a b")
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r'"(\w+)" -> "[^"]+"', done.stderr)) == ["away", "up"]
    here = ready.tree / "runs" / "a b"
    assert sorted(os.listdir(here)) == sorted([*names, "empty", "latest"])
    assert all((here / name).read_text(encoding="utf-8") == ascii(name) for name in names)
    assert os.readlink(here / "latest") == "empty"

    shutil.rmtree(folder)
    ready.works("data-remote", "path=runs/a b")
    assert sorted(os.listdir(folder)) == sorted([*names, "empty", "latest"])
    assert all((folder / name).read_text(encoding="utf-8") == ascii(name) for name in names)
    assert os.readlink(folder / "latest") == "empty"

    outside = ready.home / "trace.json"
    outside.write_text("{}", encoding="utf-8")
    ready.works("fetch", f"any_file={outside}")
    assert (ready.tree / "runs" / "fetched" / str(outside).lstrip("/")).read_text(encoding="utf-8") == "{}"
    ready.works("fetch", "any_file=runs/a b/latest")
    assert not (here / "latest").is_symlink()


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


def kept_here(machine: Remote) -> list[tuple[str, str]]:
    """What fetches moved aside: its place and its text."""
    files = [path for path in (machine.tree / "runs" / ".replaced").rglob("*") if path.is_file()]
    start = len(machine.tree.parts) + 3
    return sorted(("/".join(path.parts[start:]), path.read_text(encoding="utf-8")) for path in files)


def test_local_files_are_preserved_by_a_fetch(ready: Remote, folder: Path) -> None:
    for name in ("one", "two"):
        (folder / name).write_text(f"{name} there", encoding="utf-8")
    (folder / "latest").symlink_to("one")
    here = ready.tree / "runs" / "a b"
    (here / "two").mkdir(parents=True)
    (here / "two" / "notes").write_text("mine", encoding="utf-8")
    (here / "one").write_text("one here", encoding="utf-8")
    (here / "latest").symlink_to("two")
    done = ready.just("fetch", "runs/a b")
    assert done.returncode == 0
    kept = re.findall(r"kept in runs/\.replaced/[\d-]+: (.*)", done.stderr)
    assert sorted(", ".join(kept).split(", ")) == ["runs/a b/one", "runs/a b/two/notes"]
    assert kept_here(ready) == [("runs/a b/one", "one here"), ("runs/a b/two/notes", "mine")]
    assert (here / "two").read_text(encoding="utf-8") == "two there"
    assert os.readlink(here / "latest") == "one"


def test_fetch_of_an_active_run_copies_complete_files(ready: Remote, folder: Path) -> None:
    for name in ("first", ".lock", "steps/2.tmp-old/model", "summary.json.tmp-0123abcd", "later", "of theirs.tmp-x"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name, encoding="utf-8")
    (folder / "metrics.jsonl").write_text("1", encoding="utf-8")
    (folder / "latest").symlink_to("first")
    # After the first copy one file grows, and another is new.
    changes = "[[ -e new ]] || { echo 2 >>metrics.jsonl; touch new; }"
    with stand_in(ready, f'#!/bin/bash\n{shutil.which("rsync")} "$@"; code=$?\n{changes}\nexit $code\n'):
        ready.works("fetch", "runs/a b")
    here = ready.tree / "runs" / "a b"
    listed = ["first", "later", "latest", "metrics.jsonl", "new", "of theirs.tmp-x", "steps"]
    assert sorted(os.listdir(here)) == listed
    assert (here / "metrics.jsonl").read_text(encoding="utf-8") == "12\n"


def test_a_config_that_lies_only_here_is_sent_along(ready: Remote, tmp_path: Path) -> None:
    programs = ready.root / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "python").symlink_to(sys.executable)
    for name in ("diffusionlm-make-data", "diffusionlm-infer"):
        (programs / name).write_text('#!/bin/bash\nprintf "%s\\n" "$@"; cat "$2"\n', encoding="utf-8")
        (programs / name).chmod(0o755)
    (ready.tree / "mine.toml").write_text("first", encoding="utf-8")
    text = ready.works("infer", "command=diffusionlm-make-data", "args=--config mine.toml --set a=b")
    assert text == "--config\nmine.toml\n--set\na=b\nfirst"
    (ready.tree / "mine.toml").write_text("second", encoding="utf-8")
    assert ready.works("infer", "--config", "mine.toml") == "--config\nmine.toml\nsecond"
    (tmp_path / "other.toml").write_text("third", encoding="utf-8")
    text = ready.works("infer", "--set", "mine.toml", f"--config={tmp_path / 'other.toml'}")
    assert text == "--set\nmine.toml\n--config=.remote/configs/other.toml\nsecond"
    assert (ready.root / ".remote" / "configs" / "other.toml").read_text(encoding="utf-8") == "third"
    assert "config = nowhere.toml" in ready.fails("infer", "args=--config nowhere.toml")
    shutil.rmtree(ready.root / ".venv")
    (ready.tree / "mine.toml").unlink()


def test_secrets_are_for_their_owner_on_every_way(ready: Remote, tmp_path: Path) -> None:
    here, there = (tree / "env" / "wandb.env" for tree in (ready.tree, ready.root))
    here.chmod(0o600)
    ready.works("sync-env")
    there.chmod(0o644)
    # What stands in command lines here, and so there.
    words = tmp_path / "words"
    (tmp_path / "ssh").write_text(
        f'#!/bin/bash\nprintf "%s\\n" "$@" >>"{words}"\nexec {shutil.which("ssh")} "$@"\n', encoding="utf-8"
    )
    (tmp_path / "ssh").chmod(0o755)
    path = f"{tmp_path}:{ready.environment['PATH']}"
    ready.works("sync-env", PATH=path)
    assert stat.S_IMODE(there.stat().st_mode) == 0o600
    assert SECRET not in words.read_text(encoding="utf-8")
    for name in ("env", "env/wandb.env"):
        assert "just sync-env sends env/*.env" in ready.fails("data-remote", f"path={name}")

    aside = here.rename(ready.tree / "wandb.aside")
    assert "cp env/wandb.env.example env/wandb.env" in ready.works("sync-env")
    aside.rename(here)

    mine = here.read_bytes()
    there.write_bytes(b"A=" + BIG)
    here.unlink()
    cut(ready, "output", 1_500_000)
    ready.fails("fetch", "env/wandb.env", code=255)
    (part,) = partial_files(ready.tree / "env")
    assert stat.S_IMODE(part.stat().st_mode) == 0o600
    status = subprocess.run(["git", "status", "--porcelain", "env"], cwd=ready.tree, capture_output=True, text=True)
    assert status.stdout == ""
    there.write_bytes(b"A=1")
    there.chmod(0o644)
    ready.works("fetch", "env/wandb.env")
    assert here.read_bytes() == b"A=1"
    assert stat.S_IMODE(here.stat().st_mode) == 0o600
    assert not partial_files(ready.tree / "env")
    here.write_bytes(mine)
