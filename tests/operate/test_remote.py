"""The remote recipes against a real SSH server: each is called with `just`, as a person does.

The server is a process of its own with a home in a temporary folder; the tree that is sent is a copy of this one.
``stub`` is a command that stands for a training where nothing needs to be trained.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import diffusionlm
from diffusionlm.checkpoints.manifest import verify_directory
from tests.operate.machine import SECRET, TREE, Remote, cut, install_stub, stub

pytestmark = pytest.mark.operate


@pytest.fixture(scope="module")
def trained(remote: Remote) -> tuple[Remote, subprocess.CompletedProcess[str], list[str]]:
    """After `auto-train`: what it said, and whose environment and command line held the secret meanwhile."""
    exposures: set[str] = set()
    over = threading.Event()
    before = set(Path("/proc").iterdir())

    def watch() -> None:
        while not over.wait(0.1):
            for process in set(Path("/proc").glob("[0-9]*")) - before:
                for name in ("cmdline", "environ"):
                    try:
                        if SECRET.encode() in (process / name).read_bytes():
                            command = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
                            exposures.add(f"{name} of {Path(command[1] if len(command) > 1 else '').name}")
                    except OSError:
                        continue

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        done = remote.just("auto-train", "config=tiny.toml", "extra=--set run.seed=3 --set 'run.device=\"cpu\"'")
    finally:
        over.set()
        watcher.join()
    return remote, done, sorted(exposures)


@pytest.fixture(scope="module")
def stubbed(trained: tuple[Remote, subprocess.CompletedProcess[str], list[str]]) -> Remote:
    """With a command that stands for a training."""
    machine = trained[0]
    install_stub(machine.root)
    return machine


# --- all in one


def test_auto_train_ends_with_a_checkpoint_here(
    trained: tuple[Remote, subprocess.CompletedProcess[str], list[str]],
) -> None:
    machine, done, _ = trained
    assert done.returncode == 0, done.stdout + done.stderr
    for part in ("step 9/9", "Validation, nats per token", "sent tiny.toml to", "exit code 0"):
        assert part in done.stdout
    run = machine.tree / "runs" / "a tiny one"
    checkpoints = [path.name for path in (run / "checkpoints").iterdir() if not path.is_symlink()]
    assert checkpoints == ["step-00000009"]  # the older ones are there
    assert (machine.root / "runs" / "a tiny one" / "checkpoints" / "step-00000008").is_dir()
    newest = run / "checkpoints" / "latest"
    assert newest.is_symlink()
    verify_directory(newest, must_have_manifest=True)
    model = diffusionlm.load_model(newest)
    assert model.config.hidden_size == 16
    assert sum(parameter.numel() for parameter in model.parameters()) > 0
    last = json.loads((run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    assert last["step"] == 9
    for name in ("config.toml", "summary.json", "metrics.jsonl"):
        there = machine.root / "runs" / "a tiny one" / name
        assert (run / name).read_bytes() == there.read_bytes()
    assert "seed = 3" in (run / "config.toml").read_text(encoding="utf-8")
    assert not list(run.rglob("*.part"))


def test_the_secret_is_in_the_run_and_in_no_command_line(
    trained: tuple[Remote, subprocess.CompletedProcess[str], list[str]],
) -> None:
    machine, done, exposures = trained
    assert exposures == ["environ of diffusionlm-train"]
    assert SECRET not in done.stdout + done.stderr
    sent = machine.root / "env" / "wandb.env"
    assert stat.S_IMODE(sent.stat().st_mode) == 0o600
    for path in (machine.root / ".remote").rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes()


def test_auto_train_prints_its_results(trained: tuple[Remote, subprocess.CompletedProcess[str], list[str]]) -> None:
    machine, _, _ = trained
    (row,) = [line for line in machine.works("list-runs").splitlines() if line.startswith("runs/a tiny one")]
    assert re.match(r"runs/a tiny one +9 +\d+\.\d+ +\d+\.\d+ +step-00000009 +\d{4}-", row)
    text = machine.works("status")
    assert "diffusionlm does not run" in text
    assert "last run  diffusionlm-train --config tiny.toml --set run.seed=3 --set run.device=" in text
    assert "ended with exit code 0" in text
    assert "env       env/wandb.env" in text
    data = machine.root / "data" / "big one.bin"
    assert data.read_bytes() == (machine.tree / "data" / "big one.bin").read_bytes()


def test_auto_train_does_not_begin_what_would_replace_a_run_of_this_machine(stubbed: Remote) -> None:
    metrics = stubbed.tree / "runs" / "stub" / "metrics.jsonl"
    metrics.parent.mkdir(parents=True)
    metrics.write_text("{}", encoding="utf-8")
    done = stubbed.just("auto-train", *stub())
    assert done.returncode == 2
    assert "run.directory = runs/stub is here already" in done.stderr
    assert "just fetch any_file=runs/stub" in done.stderr
    assert stubbed.sessions() == "" and not (stubbed.root / "runs" / "stub").exists()
    shutil.rmtree(metrics.parent)


def test_auto_train_ends_as_the_run_does(stubbed: Remote) -> None:
    weights = random.Random(0).randbytes(2_000_000)
    (stubbed.root / "runs" / "stub").mkdir()
    (stubbed.root / "runs" / "stub" / "weights").write_bytes(weights)
    there = cut(stubbed, "output", 1_000_000)  # while the run is fetched
    done = stubbed.just("auto-train", *stub(end=3), "data=tiny.toml")
    assert done.returncode == 3, done.stderr
    assert not there.exists()
    assert "just fetch any_file=runs/stub" in done.stderr
    assert (stubbed.tree / "runs" / "stub" / "weights").read_bytes() == weights
    assert "the run ended with exit code 3" in done.stdout
    assert (stubbed.tree / "runs" / "stub" / "metrics.jsonl").is_file()
    done = stubbed.just("auto-train", "config=tiny.toml", "command=stub", "extra=nothing end=4")
    assert done.returncode == 4, done.stderr
    assert "has no runs/stub" in done.stderr


# --- settings and secrets


def with_settings(folder: Path, text: bytes) -> subprocess.CompletedProcess[bytes]:
    """A command that prints its environment, NUL between variables."""
    (folder / "env").mkdir()
    (folder / "env" / "a b.env").write_bytes(text)
    script = TREE / "scripts" / "remote" / "environment.py"
    words = [sys.executable, "-I", str(script), str(shutil.which("env")), "-0"]
    return subprocess.run(words, cwd=folder, env={"LC_ALL": "C"}, capture_output=True)


def test_settings_are_values_and_not_programs(tmp_path: Path) -> None:
    lines = {
        b"# a comment\r": b"",
        b"PLAIN=abc$sekrit`id`\\n\r": b"PLAIN=abc$sekrit`id`\\n",
        b"  export SINGLE='a  \"b\" $HOME' ": b'SINGLE=a  "b" $HOME',
        b'DOUBLE="it\'s #1"': b"DOUBLE=it's #1",
        b"NONE=''": b"NONE=",
        b"BYTES=\xff=\xc3\xbc": b"BYTES=\xff=\xc3\xbc",
    }
    done = with_settings(tmp_path, b"\n".join(lines))
    assert done.returncode == 0, done.stderr
    assert {*done.stdout.split(b"\0")} == {b"LC_ALL=C", *lines.values()}


@pytest.mark.parametrize("line", ["A=b sekrit", "A='sekrit", "A=sekrit # b", "A='x'sekrit", "sekrit", "1A=sekrit"])
def test_unknown_setting_is_reported_without_its_value(tmp_path: Path, line: str) -> None:
    done = with_settings(tmp_path, f"GOOD=1\n{line}\n".encode())
    assert done.returncode == 2
    assert done.stdout == b""
    assert done.stderr.startswith(b"env/a b.env:2 is not NAME=VALUE: ")
    assert b"sekrit" not in done.stderr


# --- arguments and settings


def test_arguments_arrive_as_they_are(stubbed: Remote) -> None:
    words = ["a  b", "*", "$HOME", "it's", 'say "no"', "`id`", "\\", ""]
    stubbed.works("train", "config=tiny.toml", "command=stub", "--set", "lines=0", *words)
    done = stubbed.just("follow-train")
    received = [line.removeprefix("argument: ") for line in done.stdout.splitlines() if line.startswith("argument")]
    assert received == ["--config", "tiny.toml", "--set", "lines=0", *words]
    text = stubbed.works("infer", "command=stub", "args=lines=1 end=0 'a  b' \"$HOME\" \\*")
    assert text.splitlines()[:5] == [f"argument: {word}" for word in ("lines=1", "end=0", "a  b", "$HOME", "*")]
    assert stubbed.just("infer", "command=stub", "--", "x", "lines=0", "end=5").returncode == 5
    line = stubbed.fails("infer", "command=nothing")
    assert "command = nothing" in line
    assert "diffusionlm-infer" in line  # those that are there


def test_help_needs_no_machine_and_does_nothing(remote: Remote) -> None:
    text = remote.works("train", "--help", REMOTE_HOST="")
    assert text.startswith("usage: just train [config=...] [extra=...] [command=...] [--option ...]\n")
    assert remote.works("sync-env", "-h", REMOTE_HOST="").startswith("usage: just sync-env\n")


@pytest.mark.parametrize(
    ("words", "key", "remedy"),
    [
        (["train"], "config=", "just train config="),
        (["train", "confg=tiny.toml"], "'confg=tiny.toml'", "config=, extra=, command="),
        (["train", "tiny.toml", "extra=--set 'a"], 'extra = "--set \'a"', "quotation"),
        (
            ["train", "config/resources/infer.toml", "command=diffusionlm-infer"],
            "command = diffusionlm-infer has no run.directory",
            "just infer",
        ),
        (["train", "nowhere.toml"], "config = nowhere.toml", "name a file"),
        (["fetch", "any_file=../other"], "any_file = '../other'", "name a file or folder"),
        (["fetch", "any_file=runs/nothing"], "runs/nothing", "just list-runs"),
        (["data-remote", "path=../other"], "other", "put it, or a link to it, into data/"),
        (["kill-train", "wait=soon"], "wait = 'soon'", "number of seconds"),
    ],
)
def test_usage_errors_take_one_line(stubbed: Remote, words: list[str], key: str, remedy: str) -> None:
    (stubbed.tree.parent / "other").touch()
    line = stubbed.fails(*words)
    assert key in line
    assert remedy in line


def test_a_bad_config_starts_nothing(stubbed: Remote) -> None:
    done = stubbed.just("train", "tiny.toml", "--set", "training.max_step=3")
    assert done.returncode == 2
    assert "training.max_step=3: unknown key (did you mean max_steps?)" in done.stderr
    assert stubbed.sessions() == ""


def test_a_machine_that_does_not_answer(remote: Remote) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
        line = remote.fails("status", code=255, REMOTE_PORT=port)
        assert "someone@127.0.0.1 cannot be reached" in line
        assert "Connection refused" in line
        listener.listen()  # it takes the connection and says nothing
        options = f"-o ConnectTimeout=1 {remote.environment['REMOTE_SSH_OPTIONS']}"
        line = remote.fails("status", code=255, REMOTE_PORT=port, REMOTE_SSH_OPTIONS=options)
        assert "timed out" in line


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("REMOTE_HOST", "", "export REMOTE_HOST=user@machine"),
        ("REMOTE_ROOT", "elsewhere", "just bootstrap-remote"),
        ("REMOTE_SSH_OPTIONS", "-i 'a", "quotation"),
        ("REMOTE_SESSION", "a:b", "use letters, digits, - and _"),
    ],
)
def test_bad_settings(remote: Remote, name: str, value: str, remedy: str) -> None:
    variables: dict[str, Any] = {name: value}
    line = remote.fails("status", **variables)
    assert name in line
    assert value in line
    assert remedy in line


def test_a_root_with_other_files_is_refused(remote: Remote) -> None:
    (remote.home / "thesis").mkdir()
    (remote.home / "thesis" / "chapter").touch()
    line = remote.fails("bootstrap-remote", REMOTE_ROOT="thesis")
    assert f"REMOTE_ROOT = {remote.home / 'thesis'}" in line and "name a new or empty directory" in line
    assert os.listdir(remote.home / "thesis") == ["chapter"]
