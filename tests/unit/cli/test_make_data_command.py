"""``diffusionlm-make-data``: output, exit codes, interruption and continuation."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.make_data import main
from tests.unit.cli.conftest import Fails

ROOT = Path(__file__).parents[3]
RESOURCES = ROOT / "config" / "resources"
MARKOV = [
    "source=markov",
    "source.documents_per_epoch=300",
    "source.validation_documents=40",
    "tokenizer.vocab_size=258",
]
SHARDS = ["output.shard_tokens=1000"]
"""Ten shards for the 9,600 training tokens."""

GATED_COMMAND = """
import signal, sys, time
from pathlib import Path
import cli.make_data
from diffusionlm.data import make_data
from logger.console import ProgressMeter
from tests.unit.cli.conftest import Fails

# Ctrl-C is ignored where the tests run in the background of a shell, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
directory, num_shards, gate = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
show_progress = ProgressMeter.set

def show_progress_and_wait(meter, done):
    show_progress(meter, done)
    if len(list(directory.glob("train-*.idx"))) >= num_shards:
        gate.touch()
        time.sleep(300)

ProgressMeter.set = show_progress_and_wait
cli.make_data.main(sys.argv[4:])
"""
"""The command in small chunks. Once it has written so many shards it creates a file and waits to be killed."""


def arguments(directory: Path, *overrides: str) -> list[str]:
    values = [*MARKOV, f"output.directory={directory}", "output.workers=0", *overrides]
    return [part for value in values for part in ("--set", value)]


def digest(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_output(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "with space"
    main(["--config", str(RESOURCES / "make_data.toml"), *arguments(directory)])
    output = capsys.readouterr()
    lines = output.out.splitlines()
    assert lines[0].split() == ["documents", "tokens", "bytes", "of", "text", "bytes/token", "files", "MiB"]
    assert lines[1].split() == ["train", "300", "9,600", "9,600", "1.00", "2", "0.0"]
    assert lines[2].split() == ["validation", "40", "1,280", "1,280", "1.00", "2", "0.0"]
    assert lines[3:5] == ["left out or mended, train: nothing", "left out or mended, validation: nothing"]
    assert lines[5] == f"written to {directory}: uint16, 258 ids; index.json lists the files"
    assert "train: 9,600 bytes, " in output.err and ", 300 documents, 9,600 tokens" in output.err
    main(["--config", str(RESOURCES / "make_data.toml"), *arguments(directory)])
    again = capsys.readouterr()
    assert again.out == output.out
    assert again.err == f"{directory} is complete; comparing its files with their checksums ...\n"


@pytest.mark.parametrize(
    ("overrides", "code", "words"),
    [
        (["source=shards"], 2, 'kind = "shards" has tokens, not text'),
        (["tokenizer.path=nowhere"], 1, "nowhere: "),
    ],
)
def test_errors(
    overrides: list[str], code: int, words: str, tmp_path: Path, fails: Fails, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    values = [f"output.directory={tmp_path / 'made'}", *overrides]
    if not any(override.startswith("source") for override in overrides):
        values = ["source=markov", *values]
    error = fails(main, "--config", os.devnull, *(part for value in values for part in ("--set", value)), code=code)
    assert error.startswith("diffusionlm-make-data: error: ") and words in error
    assert not (tmp_path / "made").exists()


@contextlib.contextmanager
def command_at_gate(directory: Path, num_shards: int, gate: Path) -> Iterator[subprocess.Popen[str]]:
    """The command with two workers, which waits after ``num_shards`` shards."""
    options = ["--config", os.devnull, *arguments(directory, *SHARDS, "output.workers=2")]
    process = subprocess.Popen(
        [sys.executable, "-c", GATED_COMMAND, str(directory), str(num_shards), str(gate), *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 120
        while not gate.exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def group_members(group: int) -> list[int]:
    """Processes of a group that have not ended."""
    members = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            _, _, fields = path.read_text().rpartition(") ")
            state, _, number = fields.split()[:3]
            if int(number) == group and state != "Z":
                members.append(int(path.parent.name))
    return members


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are counted in /proc")
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_interruptions_leave_no_processes(number: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C in a terminal, which reaches all processes, and the end of the main process alone."""
    directory = tmp_path / "made"
    with command_at_gate(directory, 2, tmp_path / "gate") as process:
        assert len(group_members(process.pid)) >= 3
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (130 if number == signal.SIGINT else -number, "")
        deadline = time.monotonic() + 60
        while group_members(process.pid):
            assert time.monotonic() < deadline, group_members(process.pid)
            time.sleep(0.02)
    if number == signal.SIGINT:
        assert "Traceback" not in err
        assert err.endswith("diffusionlm-make-data: interrupted\n")
        assert "stopped; 4 shards are complete. Repeat the command to continue\n" in err
    main(["--config", os.devnull, *arguments(directory, *SHARDS)])
    main(["--config", os.devnull, *arguments(tmp_path / "uninterrupted", *SHARDS)])
    assert digest(directory) == digest(tmp_path / "uninterrupted")
