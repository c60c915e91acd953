"""A sweep's processes: small programs stand in for the runs, so that torch is not loaded."""

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
from cli.sweep import run as sweep_run
from cli.sweep.commands import SWEEP_COMMANDS
from cli.sweep.record import read_record

RUN = """
import json, os, pathlib, signal, sys, time, tomllib
config = tomllib.loads(pathlib.Path(sys.argv[1]).read_text())
place = pathlib.Path(config["run"]["directory"])
place.mkdir(parents=True, exist_ok=True)
rate = config["optimizer"]["learning_rate"]
print("rate", rate, *sys.argv[2:], "on", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
if rate == 3.0 and not os.environ.get("MENDED"):
    sys.exit("learning_rate is too high\\n\\n")
if rate == 5.0 and not (place / "checkpoints").exists():
    def stop(number, frame):
        (place / "checkpoints").mkdir()
        sys.exit(128 + number)
    signal.signal(signal.SIGINT, stop)
    print("ready", flush=True)
    time.sleep(60)
if rate != 7.0:
    evaluation = {"nats_per_token": rate, "standard_error": 0.1, "bits_per_byte": rate / 2}
    (place / "summary.json").write_text(json.dumps({"evaluation": evaluation, "step": 10}))
"""


@pytest.fixture
def base(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A config; runs of it are the program above."""

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
    before = signal.getsignal(signal.SIGINT)
    yield base
    assert signal.getsignal(signal.SIGINT) == before


def run(base: Path, rates: str, *more: str) -> int:
    return main(["--config", str(base), "--set", f"optimizer.learning_rate={rates}", *more])


def statuses(path: Path) -> dict[str, str]:
    return {name: each.status for name, each in read_record(path, SWEEP_COMMANDS["train"]).runs.items()}


def starts(path: Path, name: str) -> int:
    return (path / "logs" / f"{name}.log").read_text().count("\nrate ")


def test_a_failure_is_recorded_and_the_sweep_goes_on(
    base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Path("runs/sweeps/base")
    assert run(base, "2.0,3.0,1.0,7.0") == 1
    output = capsys.readouterr()
    assert statuses(place) == {
        "learning_rate-2.0": "done",
        "learning_rate-3.0": "failed",
        "learning_rate-1.0": "done",
        "learning_rate-7.0": "failed",
    }
    assert "run 2 of 4 FAILED with exit code 1" in output.err
    assert "    learning_rate is too high\n" in output.err
    assert "run 3 of 4 is done" in output.err
    rows = [json.loads(line) for line in (place / "sweep.jsonl").read_text().splitlines()]
    assert [row["name"] for row in rows[:2]] == ["learning_rate-1.0", "learning_rate-2.0"]
    assert rows[0]["is_best"]
    assert rows[2]["error"] == ["rate 3.0 on None", "learning_rate is too high"]
    assert rows[3]["error"] == ["rate 7.0 on None"]  # it ended well, and left no result
    assert "done, best" in output.out
    assert (place / "sweep.md").exists() and (place / "sweep.html").exists()

    monkeypatch.setenv("MENDED", "1")
    assert run(base, "2.0,3.0,1.0") == 0
    assert "2 of 3 runs are done already" in capsys.readouterr().err
    assert [starts(place, f"learning_rate-{rate}") for rate in ("2.0", "3.0", "1.0")] == [1, 2, 1]
    assert statuses(place)["learning_rate-7.0"] == "failed"


def when_ready(log: Path, act: Callable[[], None]) -> threading.Thread:
    """Act once the run has written that it is ready."""

    def wait() -> None:
        end = time.monotonic() + 30.0
        while time.monotonic() < end and not (log.exists() and "ready" in log.read_text()):
            time.sleep(0.01)
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_an_interrupted_sweep_goes_on(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = Path("runs/sweeps/base")
    log = place / "logs" / "learning_rate-5.0.log"
    thread = when_ready(log, lambda: os.kill(os.getpid(), signal.SIGINT))
    assert run(base, "2.0,5.0,1.0") == 130
    thread.join()
    assert statuses(place) == {
        "learning_rate-2.0": "done",
        "learning_rate-5.0": "interrupted",
        "learning_rate-1.0": "waiting",
    }
    assert "run 2 of 3 was interrupted" in capsys.readouterr().err
    assert run(base, "2.0,5.0,1.0") == 0
    assert set(statuses(place).values()) == {"done"}
    assert [starts(place, f"learning_rate-{rate}") for rate in ("2.0", "5.0", "1.0")] == [1, 2, 1]


def test_nothing_goes_on_when_the_record_cannot_be_written(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run that is under way is asked to stop, and saves."""
    place = Path("runs/sweeps/base")
    log = place / "logs" / "learning_rate-5.0.log"

    def fail(self: runner.SweepRunner) -> None:
        if log.exists() and "ready" in log.read_text():
            raise OSError(28, "No space left on device", "sweep.json")

    monkeypatch.setattr(runner.SweepRunner, "_print_progress", fail)
    with pytest.raises(SystemExit) as caught:
        run(base, "5.0,2.0")
    assert caught.value.code == 1
    assert (place / "runs" / "learning_rate-5.0" / "checkpoints").is_dir()


def test_two_beside_each_other_share_the_cores(base: Path) -> None:
    assert run(base, "1.0,2.0", "--jobs", "2") == 0
    for rate in ("1.0", "2.0"):
        log = Path(f"runs/sweeps/base/logs/learning_rate-{rate}.log").read_text()
        assert f"rate {rate} run.threads=4" in log
    assert run(base, "1.0,4.0", "--jobs", "2", "--set", "run.threads=3", "--directory", "other") == 0
    assert "run.threads=4" not in Path("other/logs/learning_rate-4.0.log").read_text()


def test_two_beside_each_other_take_a_gpu_each(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "visible_gpus", lambda: ["3", "GPU-5"])
    assert run(base, "1.0,2.0", "--jobs", "2") == 0
    logs = [Path(f"runs/sweeps/base/logs/learning_rate-{rate}.log").read_text() for rate in ("1.0", "2.0")]
    assert [log.split()[-1] for log in logs] == ["3", "GPU-5"]
    assert run(base, "1.0,4.0") == 0  # alone it has them all
    assert Path("runs/sweeps/base/logs/learning_rate-4.0.log").read_text().split()[-1] == "None"


def test_gpus_that_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "drivers", lambda: ["580, A", "580, B"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert processes.visible_gpus() == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,MIG-7")
    assert processes.visible_gpus() == ["2", "MIG-7"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert processes.visible_gpus() == []


def test_values_extend_a_sweep_and_nothing_else_does(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = Path("runs/sweeps/base")
    assert run(base, "1.0,2.0") == 0
    assert run(base, "1.0,2.0", "--set", "training.batch_size=4,8") == 0
    # Those of the first grid had a batch of 4, so they are points of the second.
    assert list(statuses(place)) == [
        "learning_rate-1.0",
        "learning_rate-2.0",
        "learning_rate-1.0_batch_size-8",
        "learning_rate-2.0_batch_size-8",
    ]
    assert starts(place, "learning_rate-1.0") == 1
    table = (place / "sweep.md").read_text()
    assert "| 1.0 | 4 |" in table.replace("**", "")
    capsys.readouterr()
    assert run(base, "1.0,2.0", "--set", "training.max_steps=11") == 2
    error = capsys.readouterr().err
    assert "runs/sweeps/base holds a sweep of another config" in error
    assert "training.max_steps: 10 -> 11" in error
    assert main(["--command", "infer", "--directory", str(place), "--set", "input.seed=1,2"]) == 2
    assert "holds a sweep of --command train, not infer" in capsys.readouterr().err


def test_nothing_is_started_where_something_is_wrong(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(base, "1.0,-2.0") == 2
    assert "optimizer.learning_rate=-2.0:\n  --set" in capsys.readouterr().err
    assert run(base, "1.0,2.0", "--jobs", "0") == 2
    assert run(base, "1.0,2.0", "--dry-run") == 0
    shown = capsys.readouterr().out
    assert "learning_rate-1.0" in shown and "nothing was started" in shown
    assert not Path("runs").exists()
    Path("foreign").mkdir()
    Path("foreign/thesis.tex").touch()
    assert run(base, "1.0,2.0", "--directory", "foreign") == 2
    assert "is not empty and no sweep (it holds thesis.tex)" in capsys.readouterr().err
    Path("broken").mkdir()
    Path("broken/sweep.json").write_text("{")
    assert run(base, "1.0,2.0", "--directory", "broken") == 2
    assert "broken/sweep.json cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lock", "message"),
    [(".lock", "is in use by another sweep"), ("runs/learning_rate-2.0/.lock", "by a process of an earlier sweep")],
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


def test_a_killed_sweep_leaves_no_run_that_seems_to_go_on(base: Path) -> None:
    place = Path("runs/sweeps/base")
    assert run(base, "1.0,2.0") == 0
    record = json.loads((place / "sweep.json").read_text())
    record["runs"][0]["status"] = "running"
    (place / "sweep.json").write_text(json.dumps(record))
    assert run(base, "2.0,4.0") == 0
    assert statuses(place)["learning_rate-1.0"] == "interrupted"


def test_how_a_run_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """With this project's code, whatever lies in the working directory."""
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


def test_sections_of_a_sweep_are_those_of_its_command() -> None:
    assert sweep_run.SWEEP_COMMANDS.keys() == {"train", "infer"}
