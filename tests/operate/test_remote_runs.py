"""Trainings there: started in tmux, followed, left and ended. A stub stands for each, so nothing is installed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.operate.machine import TINY, Remote, install_stub, stub, until

pytestmark = pytest.mark.operate


@pytest.fixture(scope="module")
def stubbed(remote: Remote) -> Remote:
    """With the tree, and of a build what a start needs."""
    remote.works("bootstrap-remote")
    programs = remote.root / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "python").symlink_to(sys.executable)
    install_stub(remote.root)
    (remote.root / "tiny.toml").write_text(TINY, encoding="utf-8")
    return remote


@pytest.fixture(autouse=True)
def no_session_is_left(stubbed: Remote) -> Iterator[None]:
    yield
    subprocess.run(["tmux", "kill-server"], env=stubbed.tmux, capture_output=True)


def is_over(number: int) -> bool:
    """Whether there is no such process, or what is left of it waits for its parent."""
    try:
        return Path(f"/proc/{number}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def format_command_line(process: Path) -> str:
    try:
        return (process / "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


@contextlib.contextmanager
def following(machine: Remote, *words: str, **more: str) -> Iterator[subprocess.Popen[str]]:
    """`follow-train` (or another recipe) of a stub that is held, once it shows what the stub says."""
    with subprocess.Popen(
        [sys.executable, "scripts/remote", *(words or ["follow-train"])],
        cwd=machine.tree,
        env={**machine.environment, **more},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def test_active_session_is_unchanged_until_killed(stubbed: Remote) -> None:
    stubbed.works("train", *stub(lines=3000))
    session = stubbed.sessions()
    assert session.startswith("diffusionlm ")
    for words in (["train", *stub()], ["bootstrap-remote"], ["build-remote"]):
        assert "tmux session diffusionlm runs already: just attach-train" in stubbed.fails(*words)
    assert "--dry-run is not an option" in stubbed.fails("kill-train", "--dry-run")
    assert "usage: just kill-train [wait=...]" in stubbed.works("kill-train", "--help")
    assert stubbed.sessions() == session
    assert "diffusionlm runs" in stubbed.works("status")
    text = stubbed.works("kill-train")
    assert "asked it to finish its step and save" in text
    assert "ended with exit code 143" in text
    until(lambda: not stubbed.sessions(), "the end of the session")
    done = stubbed.just("follow-train")
    assert done.returncode == 143
    assert done.stdout.splitlines()[-1] == "saved"
    assert f"no training runs in {stubbed.root}" in stubbed.works("kill-train")


def test_a_training_that_does_not_listen_is_killed_with_all_its_processes(stubbed: Remote) -> None:
    stubbed.works("train", "config=tiny.toml", "command=stub", "extra=deaf")
    rank = stubbed.root / "runs" / "stub" / "rank"
    until(lambda: rank.exists() and rank.read_text(encoding="utf-8"), "the training and a rank of it")
    pid = (stubbed.root / ".remote" / "launches" / "last" / "pid").read_text(encoding="utf-8")
    text = stubbed.works("kill-train", "wait=0")
    assert "it did not end in 0 s" in text
    assert "killed the training in tmux session diffusionlm" in text
    for number in (pid, rank.read_text(encoding="utf-8")):
        assert is_over(int(number))
    until(lambda: not stubbed.sessions(), "the end of the session")
    rank.unlink()
    assert "ended without an exit code" in stubbed.fails("follow-train", code=1)


def test_a_root_trains_in_one_session_and_a_session_is_of_one_root(stubbed: Remote) -> None:
    """Of another root there is what a start and an end need."""
    other = stubbed.home / "other"
    (other / ".remote" / "launches").mkdir(parents=True)
    for name in (".venv", "scripts", "tiny.toml"):
        (other / name).symlink_to(stubbed.root / name)
    stubbed.works("train", *stub(lines=3000))
    session = stubbed.sessions()
    for words in (["train", *stub()], ["bootstrap-remote"]):
        assert "session diffusionlm runs already: just attach" in stubbed.fails(*words, REMOTE_SESSION="b")
    for recipe in ("kill-train", "attach-train"):
        line = stubbed.fails(recipe, REMOTE_SESSION="b")
        assert "runs in tmux session diffusionlm, not in b: set REMOTE_SESSION=diffusionlm" in line
    line = stubbed.fails("train", *stub(), REMOTE_ROOT="other")
    assert f"tmux session diffusionlm, begun in {stubbed.root}, is there already and trains nothing of {other}" in line
    assert f"no training runs in {other}" in stubbed.works("kill-train", REMOTE_ROOT="other")
    assert stubbed.sessions() == session

    stubbed.works("train", *stub(lines=3000), REMOTE_ROOT="other", REMOTE_SESSION="b")
    assert session in stubbed.sessions()
    assert "ended with exit code 143" in stubbed.works("kill-train", REMOTE_ROOT="other", REMOTE_SESSION="b")
    until(lambda: stubbed.sessions() == session, "the end of the other session alone")
    assert "ended with exit code 143" in stubbed.works("kill-train")


def test_simultaneous_starts_run_only_once(stubbed: Remote) -> None:
    words = [sys.executable, "scripts/remote", "train", "config=tiny.toml", "command=stub", "extra=slow hold"]
    both = [
        subprocess.Popen(words, cwd=stubbed.tree, env=stubbed.environment, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    errors = [process.communicate(timeout=60)[1] for process in both]
    assert sorted(process.returncode for process in both) == [0, 2]
    assert ["session diffusionlm runs already" in text for text in errors] == [
        process.returncode == 2 for process in both
    ]
    assert "diffusionlm runs" in stubbed.works("status")
    assert "ended with exit code 143" in stubbed.works("kill-train")


def test_follow_reconnects_after_a_lost_connection(stubbed: Remote) -> None:
    stubbed.works("train", *stub(lines=15, end=7))
    (stubbed.folder / "cut-output").write_text("120", encoding="utf-8")
    done = stubbed.just("follow-train")
    assert done.returncode == 7
    assert "was lost, the run goes on there (just follow-train shows it again); again in 1 s" in done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("line")]
    assert lines == [f"line {line}" for line in range(1, 16)]
    assert not (stubbed.folder / "cut-output").exists()


def test_follow_ends_with_its_launch_after_a_lost_connection(stubbed: Remote) -> None:
    hold = ["config=tiny.toml", "command=stub", "extra=hold"]
    stubbed.works("train", *hold)
    with following(stubbed) as process:
        process.send_signal(signal.SIGSTOP)
        assert "ended with exit code 143" in stubbed.works("kill-train")
        stubbed.works("train", *hold)
        process.send_signal(signal.SIGCONT)
        process.communicate(timeout=60)
        assert process.returncode == 143
    with following(stubbed) as process:
        cut = stubbed.folder / "cut-output"
        cut.write_text("20", encoding="utf-8")  # more than what the run writes, less than what is said of its end
        (stubbed.root / "runs" / "stub" / "hold").touch()
        _, stderr = process.communicate(timeout=60)
        assert not cut.exists()
        assert "was lost, the run goes on there" in stderr
        assert process.returncode == 7
    (stubbed.root / "runs" / "stub" / "hold").unlink()


@pytest.fixture
def _hangups_end_processes() -> Iterator[None]:
    """Under nohup they are ignored, and children inherit that."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("_hangups_end_processes")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGHUP, 129), (signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_interrupted_follow_closes_the_connection_and_keeps_the_run(
    stubbed: Remote, number: signal.Signals, code: int
) -> None:
    stubbed.works("train", "config=tiny.toml", "command=stub", "extra=hold")
    session = stubbed.sessions()
    # A socket's path must be short.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, following(stubbed, TMPDIR=folder) as process:

        def connections() -> list[str]:
            lines = map(format_command_line, Path("/proc").glob("[0-9]*"))
            return [line for line in lines if f"={folder}/" in line and "ControlMaster=yes" in line]

        assert len(connections()) == 1
        process.send_signal(number)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == code
        until(lambda: not connections(), "the end of the connection")
        assert os.listdir(folder) == []
    message = "\nfollow-train: left; the run goes on: just follow-train shows it, just kill-train ends it\n"
    assert stderr == (message if number == signal.SIGINT else "")
    assert stubbed.sessions() == session
    stubbed.works("kill-train")


def test_attach_shows_the_session_and_leaves_it(stubbed: Remote) -> None:
    assert "no training runs in" in stubbed.fails("attach-train")
    stubbed.works("train", *stub(lines=3000))
    words = ["script", "--quiet", "--return", "--command", "just attach-train", "/dev/null"]
    environment = {**stubbed.environment, "TERM": "xterm"}
    with subprocess.Popen(
        words, cwd=stubbed.tree, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as terminal:
        clients = ["tmux", "list-clients", "-t", "diffusionlm"]
        until(lambda: subprocess.run(clients, env=stubbed.tmux, capture_output=True).stdout, "a client")
        subprocess.run(["tmux", "detach-client", "-s", "diffusionlm"], env=stubbed.tmux, check=True)
        output, _ = terminal.communicate(timeout=30)
    assert terminal.returncode == 0
    assert b"line 1" in output
    assert stubbed.sessions().startswith("diffusionlm ")
    stubbed.works("kill-train")
