"""Files on their way to and from a real SSH server, which drops the connection in the middle."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.operate.machine import Remote, cut

pytestmark = pytest.mark.operate

BIG = bytes(range(256)) * 2000  # longer than what is read at once


@pytest.fixture
def folder(ready: Remote) -> Iterator[Path]:
    """A new folder there; what was fetched of it here goes afterwards."""
    path = ready.root / "runs" / "a b"
    path.mkdir(parents=True)
    yield path
    shutil.rmtree(path)
    shutil.rmtree(ready.tree / "runs", ignore_errors=True)


def parts(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.part"))


def test_interrupted_fetch_leaves_no_partial_file_and_resumes(ready: Remote, folder: Path) -> None:
    (folder / "a small one").write_text("whole", encoding="utf-8")
    (folder / "model.safetensors").write_bytes(BIG)
    there = cut(ready, "output", 300_000)
    line = ready.fails("fetch", "any_file=runs/a b", code=255)
    assert "was lost after 1 of 2 files; the same command goes on where it stopped" in line
    assert not there.exists()
    here = ready.tree / "runs" / "a b"
    assert (here / "a small one").read_text(encoding="utf-8") == "whole"
    assert not (here / "model.safetensors").exists()
    (part,) = parts(here)
    assert part.read_bytes() == BIG[:300_000]

    there = cut(ready, "output", 300_000)  # of 512,000 bytes 212,000 are left
    assert "fetched 2 files" in ready.works("fetch", "any_file=runs/a b")
    assert there.exists()
    there.unlink()
    assert (here / "model.safetensors").read_bytes() == BIG
    assert not parts(here)


def test_changed_file_is_fetched_from_the_start(ready: Remote, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(BIG)
    cut(ready, "output", 300_000)
    ready.fails("fetch", "runs/a b", code=255)
    (folder / "model.safetensors").write_bytes(BIG[::-1])
    ready.works("fetch", "runs/a b")
    here = ready.tree / "runs" / "a b"
    assert (here / "model.safetensors").read_bytes() == BIG[::-1]
    assert not parts(here)


def test_existing_files_are_not_fetched_again(ready: Remote, folder: Path) -> None:
    (folder / "one").write_text("1", encoding="utf-8")
    (folder / "two").write_text("2", encoding="utf-8")
    ready.works("fetch", "runs/a b")
    here = ready.tree / "runs" / "a b"
    before = {name: (here / name).stat().st_ino for name in ("one", "two")}
    (folder / "two").write_text("3", encoding="utf-8")
    ready.works("fetch", "runs/a b/")
    after = {name: (here / name).stat().st_ino for name in ("one", "two")}
    assert after["one"] == before["one"]
    assert after["two"] != before["two"]
    assert (here / "two").read_text(encoding="utf-8") == "3"


def test_names_links_and_places(ready: Remote, folder: Path) -> None:
    strange = ["-n", "a'b", 'a"b', "a\\b", "$HOME", "ü *", "tab\there", ".hidden"]
    for name in strange:
        (folder / name).write_text(name, encoding="utf-8")
    (folder / "empty").touch()
    (folder / "latest").symlink_to("empty")
    (folder / "away").symlink_to("/etc/hostname")
    (folder / "later").symlink_to("none")
    done = ready.just("fetch", "runs/a b")
    assert done.returncode == 0, done.stderr
    assert done.stderr == (
        "away -> /etc/hostname is left out: it points elsewhere\n"
        "later -> none is left out: what it names is not there, or not yet\n"
    )
    here = ready.tree / "runs" / "a b"
    assert sorted(os.listdir(here)) == sorted([*strange, "empty", "latest"])
    assert all((here / name).read_text(encoding="utf-8") == name for name in strange)
    assert os.readlink(here / "latest") == "empty"

    outside = ready.home / "trace.json"
    outside.write_text("{}", encoding="utf-8")
    ready.works("fetch", f"any_file={outside}")
    assert (ready.tree / "runs" / "fetched" / str(outside).lstrip("/")).read_text(encoding="utf-8") == "{}"
    text = ready.works("fetch", f"any_file={folder / 'empty'}")  # from / and yet under the root
    assert text == f"fetched 1 files, 0 B, to {here / 'empty'}\n"
    ready.works("fetch", "any_file=runs/a b/latest")
    assert not (here / "latest").is_dir()


def test_names_that_are_not_utf_8(ready: Remote, folder: Path, tmp_path: Path) -> None:
    name = os.fsdecode(b"\xff.bin")
    # The tests' server takes commands of UTF-8 alone: there the byte is written out.
    (tmp_path / "ssh").write_text(
        f"#!{sys.executable}\nimport os, sys\n"
        """words = [os.fsencode(word).replace(b"\\xff", b"'$'\\\\xff''") for word in sys.argv]\n"""
        f'os.execv("{shutil.which("ssh")}", words)\n',
        encoding="utf-8",
    )
    (tmp_path / "ssh").chmod(0o755)
    path = f"{tmp_path}:{ready.environment['PATH']}"
    (folder / name).write_bytes(b"1")
    assert "fetched 1 files" in ready.works("fetch", "runs/a b", PATH=path)
    assert (ready.tree / "runs" / "a b" / name).read_bytes() == b"1"
    (ready.tree / "runs" / "a b" / name).write_bytes(b"2")
    (folder / name).unlink()
    assert "sent 1 files" in ready.works("data-remote", "path=runs/a b", PATH=path)
    assert (folder / name).read_bytes() == b"2"


def test_a_folder_of_the_root_with_the_name_of_the_root(ready: Remote) -> None:
    (ready.home / "diffusionlm").symlink_to(ready.root)
    path = ready.tree / "diffusionlm" / "models" / "transformer.py"
    text = ready.works("fetch", "any_file=diffusionlm/models/transformer.py", REMOTE_ROOT="diffusionlm")
    assert text.startswith("fetched 1 files")
    assert text.endswith(f"to {path}\n")
    (ready.home / "diffusionlm").unlink()


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
    assert re.fullmatch(
        r"replaced 3 files here that did not come from there, kept in runs/\.replaced/[\d-]+: "
        r"runs/a b/one, runs/a b/two, runs/a b/latest\n",
        done.stderr,
    )
    assert kept_here(ready) == [("runs/a b/one", "one here"), ("runs/a b/two/notes", "mine")]
    (replaced_link,) = (ready.tree / "runs" / ".replaced").glob("*/runs/a b/latest")
    assert os.readlink(replaced_link) == "two"
    assert (here / "two").read_text(encoding="utf-8") == "two there"
    assert os.readlink(here / "latest") == "one"

    # What came from there, and is as it came, is replaced; what was edited since is not lost.
    (folder / "one").write_text("one there again", encoding="utf-8")
    done = ready.just("fetch", "runs/a b")
    assert (done.returncode, done.stderr) == (0, "")
    assert (here / "one").read_text(encoding="utf-8") == "one there again"
    (here / "one").write_text("edited", encoding="utf-8")
    assert "replaced 1 file here" in ready.just("fetch", "runs/a b").stderr
    assert (here / "one").read_text(encoding="utf-8") == "one there again"
    assert ("runs/a b/one", "edited") in kept_here(ready)
    assert len(kept_here(ready)) == 3


def test_auto_train_does_not_begin_what_would_replace_a_run_of_this_machine(ready: Remote) -> None:
    metrics = ready.tree / "runs" / "mine" / "metrics.jsonl"
    metrics.parent.mkdir(parents=True)
    metrics.write_text("{}", encoding="utf-8")
    before = (ready.root / ".remote" / "tree").stat().st_mtime_ns
    line = ready.fails("auto-train", "tiny.toml", "--set", "run.directory=runs/mine")
    assert "run.directory = runs/mine is here already, and it is not as it was fetched from someone@127.0.0.1" in line
    (ready.tree / "runs" / "a tiny one").mkdir()
    (ready.tree / "runs" / "a tiny one" / "anything").touch()
    assert "run.directory = runs/a tiny one is here already" in ready.fails("auto-train", "tiny.toml")
    assert (ready.root / ".remote" / "tree").stat().st_mtime_ns == before
    shutil.rmtree(ready.tree / "runs")


def test_fetch_of_an_active_run_copies_complete_files(ready: Remote, folder: Path) -> None:
    for name in ("first", "steps/2.tmp-old/model", "summary.json.tmp-0123abcd", "later", "of theirs.tmp-x"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name, encoding="utf-8")
    (folder / "latest").symlink_to("first")
    # One file goes while it is listed, another after it was.
    stand_in = ready.root / ".tools" / "bin" / "head"
    head = shutil.which("head")
    stand_in.write_text(
        "#!/bin/bash\ncase $* in *first) rm 'runs/a b/first';; *theirs*) rm 'runs/a b/later';; esac\n"
        f'exec {head} "$@"\n',
        encoding="utf-8",
    )
    stand_in.chmod(0o755)
    line = ready.fails("fetch", "runs/a b")
    stand_in.unlink()
    assert "changed or gone on someone@127.0.0.1 while it was fetched: runs/a b/later; the rest is here" in line
    here = ready.tree / "runs" / "a b"
    assert os.listdir(here) == ["of theirs.tmp-x"]
    (folder / "first").touch()
    assert "fetched 3 files" in ready.works("fetch", "runs/a b")
    assert sorted(os.listdir(here)) == ["first", "latest", "of theirs.tmp-x"]


def test_unwritable_folder_is_reported_in_one_line(ready: Remote, folder: Path) -> None:
    (folder / "one").touch()
    (ready.tree / "runs").mkdir()
    (ready.tree / "runs" / "a b").touch()
    assert "a b" in ready.fails("fetch", "runs/a b")


def test_interrupted_data_transfer_resumes(ready: Remote) -> None:
    source = ready.tree / "data" / "more" / "tokens.bin"
    source.parent.mkdir()
    source.write_bytes(BIG)
    target = ready.root / "data" / "more" / "tokens.bin"
    there = cut(ready, "input", 300_000)
    assert "was lost after 0 of 1 files" in ready.fails("data-remote", "path=data/more", code=255)
    assert not there.exists()
    assert not target.exists()
    (part,) = parts(ready.root / "data")
    assert part.read_bytes() == BIG[: 300_000 - 65]  # the SHA-256 in a line comes first

    there = cut(ready, "input", 300_000)
    assert "sent 1 files" in ready.works("data-remote", "data/more")
    assert there.exists()
    there.unlink()
    assert target.read_bytes() == BIG
    assert not parts(ready.root / "data")
    assert "sent 0 files, 0 B" in ready.works("data-remote", "data/more")
    assert "sent 0 files, 0 B" in ready.works("data-remote", "data/more/tokens.bin")


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
    (tmp_path / "nothing").symlink_to("no such")
    done = ready.just("data-remote", "path=data/linked")
    assert done.returncode == 0
    assert (
        done.stderr == "left out, since they are neither files nor links to any: data/linked/nothing, data/linked/up\n"
    )
    there = ready.root / "data" / "linked"
    files = {path.relative_to(there).as_posix(): path.read_text() for path in there.rglob("*") if path.is_file()}
    assert files == {"corpus/deep/text": "1", "step 1/model": "2", "away/text": "3"}
    assert os.readlink(there / "latest") == "step 1"
    assert not any(path.is_symlink() for path in (there, there / "away", there / "corpus"))
    (there / "latest").unlink()
    (there / "latest").mkdir()
    assert "is a file or folder there and a link here" in ready.just("data-remote", "data/linked").stderr
    (there / "latest").rmdir()
    assert "sent 1 files, 0 B" in ready.works("data-remote", "data/linked")
    source.unlink()


def test_a_part_that_is_damaged_or_of_another_send(ready: Remote) -> None:
    source = ready.tree / "data" / "tokens"
    source.write_bytes(BIG)
    target = ready.root / "data" / "tokens"
    part = target.with_name(f"tokens.{hashlib.sha256(BIG).hexdigest()[:12]}.part")
    part.write_bytes(BIG[::-1])
    assert "did not come whole: run the same again" in ready.fails("data-remote", "data/tokens")
    assert not target.exists()
    assert "sent 1 files" in ready.works("data-remote", "data/tokens")
    assert target.read_bytes() == BIG

    target.unlink()
    over = threading.Event()
    with part.open("ab", buffering=0) as other:
        fcntl.flock(other, fcntl.LOCK_EX)

        def grow() -> None:
            while not over.wait(0.01):
                other.write(b"1")

        writer = threading.Thread(target=grow)
        writer.start()
        line = ready.fails("data-remote", "data/tokens")
        over.set()
        writer.join()
        assert "is sent by another just now" in line
        assert set(part.read_bytes()) == {ord("1")}
        # One that gets no more, since its connection was lost, is in nobody's way.
        part.write_bytes(BIG[:1000])
        assert "sent 1 files" in ready.works("data-remote", "data/tokens")
    assert target.read_bytes() == BIG
    target.unlink()
    target.mkdir()
    assert "is a folder there and a file here" in ready.fails("data-remote", "data/tokens")
    target.rmdir()
    source.unlink()


def test_a_config_that_lies_only_here_is_sent_along(ready: Remote, tmp_path: Path) -> None:
    programs = ready.root / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "python").symlink_to(sys.executable)
    for name in ("diffusionlm-make-data", "diffusionlm-infer"):
        (programs / name).write_text('#!/bin/bash\nprintf "%s\\n" "$@"; cat "$2"\n', encoding="utf-8")
        (programs / name).chmod(0o755)
    (ready.tree / "mine.toml").write_text("first", encoding="utf-8")
    text = ready.works("data-remote", "config=mine.toml", "extra=--set a=b")
    assert text.endswith("\n--config\nmine.toml\n--set\na=b\nfirst")
    (ready.tree / "mine.toml").write_text("second", encoding="utf-8")
    assert ready.works("infer", "--config", "mine.toml") == "--config\nmine.toml\nsecond"
    (tmp_path / "other.toml").write_text("third", encoding="utf-8")
    text = ready.works("infer", "--set", "mine.toml", f"--config={tmp_path / 'other.toml'}")
    assert text == "--set\nmine.toml\n--config=.remote/configs/other.toml\nsecond"
    assert (ready.root / ".remote" / "configs" / "other.toml").read_text(encoding="utf-8") == "third"
    assert "nowhere.toml is neither here nor in" in ready.fails("infer", "args=--config nowhere.toml")
    shutil.rmtree(ready.root / ".venv")
    (ready.tree / "mine.toml").unlink()


def test_settings_are_for_their_owner_only(ready: Remote) -> None:
    local = ready.tree / "env" / "wandb.env"
    local.chmod(0o644)
    done = ready.just("sync-env")
    assert done.returncode == 0
    assert "others may read env/wandb.env: chmod 600" in done.stderr
    assert stat.S_IMODE((ready.root / "env" / "wandb.env").stat().st_mode) == 0o600
    ignored = subprocess.run(["git", "check-ignore", "env/wandb.env"], cwd=ready.tree, capture_output=True, text=True)
    assert ignored.stdout == "env/wandb.env\n"
    aside = local.rename(ready.tree / "wandb.aside")
    assert "cp env/wandb.env.example env/wandb.env" in ready.works("sync-env")
    aside.rename(local)


def test_secrets_are_for_their_owner_on_every_way(ready: Remote, tmp_path: Path) -> None:
    here, there = (tree / "env" / "wandb.env" for tree in (ready.tree, ready.root))
    here.chmod(0o600)
    hash_of = hashlib.sha256(here.read_bytes()).hexdigest()
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
    assert hash_of in (ready.root / ".remote" / "sent").read_text(encoding="utf-8").splitlines()
    assert stat.S_IMODE((ready.root / ".remote" / "sent").stat().st_mode) == 0o600
    stderr_text = words.read_text(encoding="utf-8")
    assert "wandb.env" in stderr_text
    assert hash_of[:12] not in stderr_text
    for name in ("env", "env/wandb.env"):
        assert "just sync-env sends env/*.env" in ready.fails("data-remote", f"path={name}")

    mine = here.read_bytes()
    there.write_bytes(b"A=" + BIG)
    here.unlink()
    cut(ready, "output", 300_000)
    ready.fails("fetch", "env/wandb.env", code=255)
    (part,) = parts(ready.tree / "env")
    assert part.name == "wandb.env.000000000000.part"
    assert stat.S_IMODE(part.stat().st_mode) == 0o600
    status = subprocess.run(["git", "status", "--porcelain", "env"], cwd=ready.tree, capture_output=True, text=True)
    assert status.stdout == ""
    there.write_bytes(b"A=1")
    ready.works("fetch", "env/wandb.env")
    assert here.read_bytes() == b"A=1"
    assert stat.S_IMODE(here.stat().st_mode) == 0o600
    assert not parts(ready.tree / "env")
    here.write_bytes(mine)


def test_runs_of_all_kinds_are_listed(ready: Remote) -> None:
    assert "has no runs yet" in ready.works("list-runs")
    runs = {
        "cut": '{"step": 7, "metrics": {"loss": 2.5}}\n{"step": 8, "metr',
        "empty": "",
        "deep/er": '{"step": 1, "event": "data", "text": "x"}\nnull\n7\n',
    }
    for name, metrics in runs.items():
        path = ready.root / "runs" / name / "metrics.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text(metrics, encoding="utf-8")
    (ready.root / "runs" / "nothing").mkdir()
    rows = [line.split()[:5] for line in ready.works("list-runs").splitlines()[1:]]
    assert rows == [
        ["runs/cut", "7", "2.5000", "-", "-"],
        ["runs/deep/er", "1", "-", "-", "-"],
        ["runs/empty", "0", "-", "-", "-"],
    ]
