"""The processes of a sweep; a small program replaces the runs, so that torch is not loaded."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from cli.sweep import main, processes, runner
from cli.sweep.commands import SWEEP_COMMANDS
from cli.sweep.record import read_record

RUN = """
import json, os, pathlib, signal, sys, time, tomllib
config = tomllib.loads(pathlib.Path(sys.argv[1]).read_text())
directory = pathlib.Path(config["run"]["directory"])
directory.mkdir(parents=True, exist_ok=True)
rate = config["optimizer"]["learning_rate"]
print("rate", rate, *sys.argv[2:], "on", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
if rate == 3.0 and not os.environ.get("MENDED"):
    sys.exit("learning_rate is too high\\n\\n")
if rate == 5.0 and not (directory / "checkpoints").exists():
    def stop(number, frame):
        (directory / "checkpoints").mkdir()
        sys.exit(128 + number)
    signal.signal(signal.SIGINT, stop)
    print("ready", flush=True)
    time.sleep(60)
if rate != 7.0:
    evaluation = {"nats_per_token": rate, "standard_error": 0.1, "bits_per_byte": rate / 2}
    (directory / "summary.json").write_text(json.dumps({"evaluation": evaluation, "step": 10}))
"""


@pytest.fixture
def base(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A config whose runs are the program above."""
    program = tmp_path / "program.py"
    program.write_text(RUN)

    def build_command(module: str, config: Path, overrides: Sequence[str] = ()) -> list[str]:
        return [sys.executable, "-I", "-S", str(program), str(config), *overrides]

    monkeypatch.setattr(runner, "build_command", build_command)
    monkeypatch.setattr(runner, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(runner, "usable_cores", lambda: 8)
    monkeypatch.setattr(runner, "visible_gpus", lambda: [])
    monkeypatch.delenv("MENDED", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.chdir(tmp_path)
    handler = signal.getsignal(signal.SIGINT)
    yield base
    assert signal.getsignal(signal.SIGINT) == handler


def run(base: Path, rates: str, *more: str) -> int:
    return main(["--config", str(base), "--set", f"optimizer.learning_rate={rates}", *more])


def statuses(path: Path) -> dict[str, str]:
    return {name: run.status for name, run in read_record(path, SWEEP_COMMANDS["train"]).runs.items()}


def starts(path: Path, name: str) -> int:
    return (path / "logs" / f"{name}.log").read_text().count("\nrate ")


def test_a_failure_is_recorded_and_the_sweep_continues(
    base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = Path("runs/sweeps/base")
    assert run(base, "2.0,3.0,1.0,7.0") == 1
    output = capsys.readouterr()
    assert statuses(directory) == {
        "learning_rate-2.0": "done",
        "learning_rate-3.0": "failed",
        "learning_rate-1.0": "done",
        "learning_rate-7.0": "failed",
    }
    assert "learning_rate is too high" in output.err
    rows = [json.loads(line) for line in (directory / "sweep.jsonl").read_text().splitlines()]
    assert [row["name"] for row in rows[:2]] == ["learning_rate-1.0", "learning_rate-2.0"]
    assert rows[0]["is_best"]
    assert rows[2]["error"] == ["rate 3.0 on None", "learning_rate is too high"]
    assert rows[3]["error"] == ["rate 7.0 on None"]  # exit code 0, but no result
    assert "done, best" in output.out
    assert (directory / "sweep.md").exists() and (directory / "sweep.html").exists()

    monkeypatch.setenv("MENDED", "1")
    assert run(base, "2.0,3.0,1.0") == 0
    assert [starts(directory, f"learning_rate-{rate}") for rate in ("2.0", "3.0", "1.0")] == [1, 2, 1]
    assert statuses(directory)["learning_rate-7.0"] == "failed"


def when_ready(log: Path, act: Callable[[], None]) -> threading.Thread:
    """Call ``act`` after the run has printed "ready"."""

    def wait() -> None:
        end = time.monotonic() + 30.0
        while time.monotonic() < end and not (log.exists() and "ready" in log.read_text()):
            time.sleep(0.01)
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_an_interrupted_sweep_is_continued(base: Path) -> None:
    directory = Path("runs/sweeps/base")
    log = directory / "logs" / "learning_rate-5.0.log"
    thread = when_ready(log, lambda: os.kill(os.getpid(), signal.SIGINT))
    assert run(base, "2.0,5.0,1.0") == 130
    thread.join()
    assert statuses(directory) == {
        "learning_rate-2.0": "done",
        "learning_rate-5.0": "interrupted",
        "learning_rate-1.0": "waiting",
    }
    assert run(base, "2.0,5.0,1.0") == 0
    assert set(statuses(directory).values()) == {"done"}
    assert [starts(directory, f"learning_rate-{rate}") for rate in ("2.0", "5.0", "1.0")] == [1, 2, 1]


def test_active_runs_save_when_the_record_cannot_be_written(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = Path("runs/sweeps/base")
    log = directory / "logs" / "learning_rate-5.0.log"

    def fail(self: runner.SweepRunner) -> None:
        if log.exists() and "ready" in log.read_text():
            raise OSError(28, "No space left on device", "sweep.json")

    monkeypatch.setattr(runner.SweepRunner, "_print_progress", fail)
    with pytest.raises(SystemExit) as caught:
        run(base, "5.0,2.0")
    assert caught.value.code == 1
    assert (directory / "runs" / "learning_rate-5.0" / "checkpoints").is_dir()


def test_concurrent_runs_share_the_cores(base: Path) -> None:
    assert run(base, "1.0,2.0", "--jobs", "2") == 0
    for rate in ("1.0", "2.0"):
        log = Path(f"runs/sweeps/base/logs/learning_rate-{rate}.log").read_text()
        assert f"rate {rate} run.threads=4" in log
    assert run(base, "1.0,4.0", "--jobs", "2", "--set", "run.threads=3", "--directory", "other") == 0
    assert "run.threads=4" not in Path("other/logs/learning_rate-4.0.log").read_text()


def test_concurrent_runs_use_different_gpus(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "visible_gpus", lambda: ["3", "GPU-5"])
    assert run(base, "1.0,2.0", "--jobs", "2") == 0
    logs = [Path(f"runs/sweeps/base/logs/learning_rate-{rate}.log").read_text() for rate in ("1.0", "2.0")]
    assert [log.split()[-1] for log in logs] == ["3", "GPU-5"]
    assert run(base, "1.0,4.0") == 0  # a single run uses all of them
    assert Path("runs/sweeps/base/logs/learning_rate-4.0.log").read_text().split()[-1] == "None"


def test_visible_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "drivers", lambda: ["580, A", "580, B"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert processes.visible_gpus() == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,MIG-7")
    assert processes.visible_gpus() == ["2", "MIG-7"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert processes.visible_gpus() == []


def test_only_values_extend_a_sweep(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = Path("runs/sweeps/base")
    assert run(base, "1.0,2.0") == 0
    assert run(base, "1.0,2.0", "--set", "training.batch_size=4,8") == 0
    # The batch size of the first grid was 4, so its runs are points of the second grid.
    assert list(statuses(directory)) == [
        "learning_rate-1.0",
        "learning_rate-2.0",
        "learning_rate-1.0_batch_size-8",
        "learning_rate-2.0_batch_size-8",
    ]
    assert starts(directory, "learning_rate-1.0") == 1
    table = (directory / "sweep.md").read_text()
    assert "| 1.0 | 4 |" in table.replace("**", "")
    capsys.readouterr()
    assert run(base, "1.0,2.0", "--set", "training.max_steps=11") == 2
    assert "training.max_steps: 10 -> 11" in capsys.readouterr().err
    assert main(["--command", "infer", "--directory", str(directory), "--set", "input.seed=1,2"]) == 2
    assert "--command train" in capsys.readouterr().err


def test_errors_are_found_before_a_run_starts(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(base, "1.0,-2.0") == 2
    assert "optimizer.learning_rate=-2.0:\n  --set" in capsys.readouterr().err
    assert run(base, "1.0,2.0", "--jobs", "0") == 2
    assert run(base, "1.0,2.0", "--dry-run") == 0
    assert "learning_rate-1.0" in capsys.readouterr().out
    assert not Path("runs").exists()
    Path("foreign").mkdir()
    Path("foreign/thesis.tex").touch()
    assert run(base, "1.0,2.0", "--directory", "foreign") == 2
    assert "thesis.tex" in capsys.readouterr().err
    Path("broken").mkdir()
    Path("broken/sweep.json").write_text("{")
    assert run(base, "1.0,2.0", "--directory", "broken") == 2
    assert "broken/sweep.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lock", "message"),
    [(".lock", "base is in use"), ("runs/learning_rate-2.0/.lock", "learning_rate-2.0 is in use")],
)
def test_a_directory_in_use(base: Path, capsys: pytest.CaptureFixture[str], lock: str, message: str) -> None:
    path = Path("runs/sweeps/base") / lock
    path.parent.mkdir(parents=True)
    if lock != ".lock":
        path.parents[2].joinpath("sweep.json").write_text('{"command": "train", "runs": []}')
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert run(base, "2.0,1.0") == 2, "nothing was started"
    assert message in capsys.readouterr().err


def test_runs_of_a_killed_sweep_are_interrupted(base: Path) -> None:
    directory = Path("runs/sweeps/base")
    assert run(base, "1.0,2.0") == 0
    record = json.loads((directory / "sweep.json").read_text())
    record["runs"][0]["status"] = "running"
    (directory / "sweep.json").write_text(json.dumps(record))
    assert run(base, "2.0,4.0") == 0
    assert statuses(directory)["learning_rate-1.0"] == "interrupted"


def test_runs_use_the_code_of_this_project(monkeypatch: pytest.MonkeyPatch) -> None:
    command = processes.build_command("cli.train", Path("a.toml"), ["run.threads=2"])
    assert command == [sys.executable, "-P", "-m", "cli.train", "--config", "a.toml", "--set", "run.threads=2"]
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    ours, theirs = processes.build_environment()["PYTHONPATH"].split(os.pathsep)
    assert (Path(ours) / "cli" / "train.py").is_file()
    assert theirs == "/theirs"


def test_last_lines_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"old\n$ command\n  1 %\r 50 %\r\n\nerror: \xff " + b"x" * 400 + b"\n\n")
    one, two, three = processes.last_lines(log, 5, begin=4)
    assert (one, two) == ("  1 %", " 50 %")
    assert three.startswith("error: \ufffd xxx") and three.endswith("x...") and len(three) == 303
    assert processes.last_lines(tmp_path / "missing", 5) == []
