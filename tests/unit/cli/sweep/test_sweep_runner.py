"""The runs of a sweep; a small program replaces them, so that torch is not loaded."""

from __future__ import annotations

import fcntl
import json
import math
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import optuna
import pytest

from cli.sweep import main, processes, runner, study
from cli.sweep.commands import SWEEP_COMMANDS
from cli.sweep.grid import PointLoader, read_settings
from cli.sweep.plan import Sampler, SweepPlan
from config.train import TrainConfig
from files.lock import is_locked

RUN = """
import json, math, os, pathlib, signal, sys, time, tomllib
config = tomllib.loads(pathlib.Path(sys.argv[1]).read_text())
directory = pathlib.Path(config["run"]["directory"])
directory.mkdir(parents=True, exist_ok=True)
(directory / "pid").write_text(str(os.getpid()))
rate = config["optimizer"]["learning_rate"]
print("rate", rate, *sys.argv[2:], "on", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
if rate == 3.0 and not os.environ.get("MENDED"):
    sys.exit("learning_rate is too high\\n\\n")
def log(step, **metrics):
    with open(directory / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": step, "metrics": metrics}) + "\\n")
log(1, loss=9.0, val_nats_per_token=rate, val_standard_error=0.1)
if rate in (5.0, 6.0) and not (directory / "checkpoints").exists():
    def stop(number, frame):
        (directory / "checkpoints").mkdir()
        sys.exit(128 + number)
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    print("ready", flush=True)
    while not (directory / "go").exists():
        time.sleep(0.01)
if rate != 7.0:
    bound = rate if rate >= 1.0 else 1.0 + math.log10(rate / 0.01) ** 2
    evaluation = {"nats_per_token": bound, "standard_error": 0.1, "bits_per_byte": rate / 2}
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


def build_plan(base: Path, rates: str, sampler: Sampler = "grid", storage: str = "") -> SweepPlan:
    command = SWEEP_COMMANDS["train"]
    settings = read_settings([f"optimizer.learning_rate={rates}"], command)
    trials = None if sampler == "grid" else 3
    return SweepPlan(PointLoader(command, base, settings), Path("runs/sweeps/base"), sampler, trials, storage=storage)


def statuses(path: Path) -> dict[str, str]:
    """Status by name, of the runs in the order of their first trials."""
    rows = [json.loads(line) for line in (path / "sweep.jsonl").read_text().splitlines()]
    names = dict.fromkeys(trial.user_attrs["run"]["name"] for trial in load_study(path).get_trials())
    return {name: row["status"] for name in names for row in rows if row["name"] == name}


def load_study(path: Path) -> optuna.Study:
    return optuna.load_study(study_name="sweep", storage=f"sqlite:///{path / 'study.db'}")


def starts(path: Path, name: str) -> int:
    return f"\n{(path / 'logs' / f'{name}.log').read_text()}".count("\nrate ")


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
    errors = {row["name"]: row["error"] for row in rows}
    assert errors["learning_rate-3.0"] == ["rate 3.0 on None", "learning_rate is too high"]
    assert errors["learning_rate-7.0"] == ["rate 7.0 on None"]  # exit code 0, but no result
    assert "done, best" in output.out
    assert (directory / "sweep.md").exists() and (directory / "sweep.html").exists()

    monkeypatch.setenv("MENDED", "1")
    assert run(base, "2.0,3.0,1.0") == 0
    assert [starts(directory, f"learning_rate-{rate}") for rate in ("2.0", "3.0", "1.0")] == [1, 2, 1]
    assert statuses(directory)["learning_rate-7.0"] == "failed"


def wait_for(path: Path) -> None:
    """Wait until a directory exists, or a run has printed "ready" to its log."""
    end = time.monotonic() + 60.0
    while not (path.is_dir() or (path.exists() and "ready" in path.read_text())):
        assert time.monotonic() < end, path
        time.sleep(0.01)


def when_ready(log: Path, act: Callable[[], None]) -> threading.Thread:
    """Call ``act`` after the run has printed "ready"."""

    def wait() -> None:
        wait_for(log)
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


def test_an_interrupted_draw_is_continued_with_its_values(base: Path) -> None:
    directory = Path("runs/sweeps/base")
    arguments = ["--sampler", "random", "--trials", "2"]
    thread = when_ready(directory / "logs" / "learning_rate-5.0.log", lambda: os.kill(os.getpid(), signal.SIGINT))
    assert run(base, "2.0,5.0", *arguments) == 130
    thread.join()
    assert run(base, "2.0,5.0", *arguments) == 0
    assert statuses(directory) == {"learning_rate-2.0": "done", "learning_rate-5.0": "done"}
    assert [starts(directory, f"learning_rate-{rate}") for rate in ("2.0", "5.0")] == [1, 2]
    attempts = [
        trial for trial in load_study(directory).get_trials() if trial.user_attrs["run"]["name"].endswith("5.0")
    ]
    assert [trial.params for trial in attempts] == [{"optimizer.learning_rate": "5.0"}] * 2
    assert [trial.state.name for trial in attempts] == ["FAIL", "COMPLETE"]


def test_active_runs_save_when_the_study_cannot_be_written(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = Path("runs/sweeps/base")
    log = directory / "logs" / "learning_rate-5.0.log"

    def fail(self: study.ClaimedRun, step: int, bound: float) -> bool:
        while "ready" not in log.read_text():
            time.sleep(0.01)
        raise optuna.exceptions.StorageInternalError("database or disk is full")

    monkeypatch.setattr(study.ClaimedRun, "report", fail)
    assert run(base, "5.0,2.0") == 2
    assert "study.db: database or disk is full" in capsys.readouterr().err
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
    model = Path("model")
    model.mkdir()
    (model / "config.json").write_text("{}")
    settings = [f"model.path={model}", "input.prompts=[a]", "input.seed=1,2"]
    arguments = [argument for setting in settings for argument in ("--set", setting)]
    assert main(["--command", "infer", "--directory", str(directory), *arguments]) == 2
    assert "--command train" in capsys.readouterr().err


def test_an_extension_keeps_the_objective(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = build_plan(base, "1.0,2.0")
    with study.open_study(plan):
        pass
    assert run(base, "1.0,2.0", "--set", "tokenizer.vocab_size=280,300") == 2
    error = capsys.readouterr().err
    assert "bits_per_byte" in error and "choose another --directory" in error


@pytest.mark.slow
def test_new_keys_with_defaults_change_no_sweep(
    base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class NewTrainConfig(TrainConfig):
        new_key: int = 1

    assert run(base, "1.0,2.0", "--set", "training.batch_size=4,8") == 0
    command, digest = SWEEP_COMMANDS["train"], PointLoader._digest
    with monkeypatch.context() as context:
        context.setattr(PointLoader, "_digest", lambda self, config: f"of another version: {digest(self, config)}")
        context.setitem(SWEEP_COMMANDS, "train", replace(command, config=NewTrainConfig))
        assert run(base, "1.0,2.0,4.0", "--set", "training.batch_size=4,8") == 0
    directory = Path("runs/sweeps/base")
    assert len(statuses(directory)) == 6
    for rate in ("1.0", "2.0", "4.0"):
        assert [starts(directory, f"learning_rate-{rate}_batch_size-{size}") for size in ("4", "8")] == [1, 1]

    class OtherTrainConfig(TrainConfig):
        new_key: int = 2

    monkeypatch.setitem(SWEEP_COMMANDS, "train", replace(command, config=OtherTrainConfig))
    capsys.readouterr()
    assert run(base, "4.0,5.0", "--set", "training.batch_size=4,8") == 2
    assert "new_key: 1 -> 2" in capsys.readouterr().err


def test_errors_are_found_before_a_run_starts(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(base, "1.0,-2.0") == 2
    assert "optimizer.learning_rate=-2.0:\n  --set" in capsys.readouterr().err
    assert run(base, "1.0,2.0", "--jobs", "0") == 2
    assert run(base, "1.0,2.0", "--dry-run") == 0
    assert "learning_rate=1.0  new" in capsys.readouterr().out
    assert not Path("runs").exists()
    Path("foreign").mkdir()
    Path("foreign/thesis.tex").touch()
    assert run(base, "1.0,2.0", "--directory", "foreign") == 2
    assert "thesis.tex" in capsys.readouterr().err
    Path("broken/processes").mkdir(parents=True)
    Path("broken/study.db").write_text("{" * 4096)
    assert run(base, "1.0,2.0", "--directory", "broken") == 2
    assert "sqlite:///broken/study.db: " in capsys.readouterr().err
    assert run(base, "1.0,2.0", "--storage", "postgresql://me:secret@nowhere/x") == 2
    error = capsys.readouterr().err
    assert "--storage postgresql://me:***@nowhere/x" in error and "secret" not in error
    assert "install the driver" in error
    assert run(base, "1.0,2.0", "--storage", "nowhere") == 2
    assert "--storage nowhere: expected a URL" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "optimizer.learning_rate=0.1..0.2", "--sampler", "grid"], "optimizer.learning_rate: a grid"),
        (["--set", "optimizer.learning_rate=0.1..0.2"], "--trials is missing"),
        (["--set", "optimizer.learning_rate=0.1,0.2", "--trials", "3"], "--trials: a grid"),
        (["--set", "optimizer.learning_rate=0.1..0.2", "--trials", "0"], "--trials 0"),
        (["--set", "optimizer.learning_rate=0.1,0.2", "--prune", "--set", "validation.every_steps=0"],
         "validation.every_steps = 0"),
        (["--set", "optimizer.learning_rate=0.1,0.2", "--prune", "--set", "validation.every_steps=10"],
         "validation.every_steps = 10"),
        (["--set", "training.batch_size=3..8:2", "--sampler", "tpe", "--trials", "2", "--set", "training.max_steps=-1"],
         "training.max_steps=-1"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit(
    base: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["--config", str(base), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not Path("runs").exists()


def test_the_missing_extra_is_named(
    base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("cli.sweep.study", "cli.sweep.runner"):
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert run(base, "1.0,2.0") == 2
    assert "uv sync --extra sweep" in capsys.readouterr().err
    assert run(base, "1.0,2.0", "--dry-run") == 0
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("lock", "message"),
    [(".lock", "base is in use"), ("runs/learning_rate-2.0/.lock", "learning_rate-2.0 is in use")],
)
def test_a_directory_in_use(
    base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, lock: str, message: str
) -> None:
    monkeypatch.setattr(study, "LOCK_SECONDS", 0.0)
    path = Path("runs/sweeps/base") / lock
    path.parent.mkdir(parents=True)
    Path("runs/sweeps/base/processes").mkdir()
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert run(base, "2.0,1.0") == 2, "nothing was started"
    assert message in capsys.readouterr().err


SWEEP = """
import pathlib, sys
from cli.sweep import main, runner
runner.build_command = lambda module, config, overrides=(): [
    sys.executable, "-I", "-S", "program.py", str(config), *overrides
]
runner.POLL_SECONDS = 0.01
sys.exit(main(sys.argv[1:]))
"""


def start_sweep(base: Path, rates: str, *more: str) -> subprocess.Popen[bytes]:
    """Start a sweep of the program in a process of its own."""
    arguments = ["--config", str(base), "--set", f"optimizer.learning_rate={rates}", *more]
    environment = processes.build_environment()
    return subprocess.Popen(
        [sys.executable, "-c", SWEEP, *arguments], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


@pytest.mark.slow
def test_two_processes_share_a_sweep(base: Path) -> None:
    directory = Path("runs/sweeps/base")
    rates = ["1.0", "5.0", "1.5", "6.0", "2.0", "2.5"]
    sweeps = [start_sweep(base, ",".join(rates)) for _ in range(2)]
    logs = [directory / "logs" / f"learning_rate-{rate}.log" for rate in ("5.0", "6.0")]
    for log in logs:  # each process has reached a run that waits for the other
        wait_for(log)
    for rate in ("5.0", "6.0"):
        (directory / "runs" / f"learning_rate-{rate}" / "go").touch()
    assert [sweep.wait(60) for sweep in sweeps] == [0, 0]
    assert [starts(directory, f"learning_rate-{rate}") for rate in rates] == [1] * 6
    assert set(statuses(directory).values()) == {"done"}
    owners = {trial.user_attrs["process"]["owner"] for trial in load_study(directory).get_trials()}
    assert len(owners) == 2
    assert not [*(directory / "processes").iterdir()]


def test_a_killed_sweep_is_continued(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = Path("runs/sweeps/base")
    sweep = start_sweep(base, "1.0,5.0,2.0")
    log = directory / "logs" / "learning_rate-5.0.log"
    wait_for(log)
    sweep.kill()
    sweep.wait()
    [owner] = (directory / "processes").iterdir()
    assert run(base, "5.0,2.0") == 0
    assert statuses(directory) == {
        "learning_rate-1.0": "done", "learning_rate-5.0": "running", "learning_rate-2.0": "done",
    }  # fmt: skip
    os.kill(int((directory / "runs" / "learning_rate-5.0" / "pid").read_text()), signal.SIGTERM)
    while is_locked(owner):  # by the run
        time.sleep(0.01)
    assert load_study(directory).get_trials()[1].state == optuna.trial.TrialState.RUNNING
    assert run(base, "1.0,5.0,2.0") == 0
    assert [starts(directory, f"learning_rate-{rate}") for rate in ("1.0", "5.0", "2.0")] == [1, 2, 1]
    assert set(statuses(directory).values()) == {"done"}
    assert "learning_rate-5.0 continues" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_of_another_machine_is_left_alone(base: Path) -> None:
    directory = Path("runs/sweeps/base")
    assert run(base, "1.0,2.0") == 0
    with sqlite3.connect(directory / "study.db") as connection:
        connection.execute("UPDATE trials SET state = 'RUNNING' WHERE number = 1")
    assert run(base, "1.0,2.0,4.0") == 0
    assert statuses(directory) == {
        "learning_rate-1.0": "done", "learning_rate-2.0": "running", "learning_rate-4.0": "done",
    }  # fmt: skip


@pytest.mark.slow
def test_machines_share_a_database_but_no_files(base: Path, tmp_path: Path) -> None:
    storage = ["--storage", f"sqlite:///{tmp_path / 'shared.db'}"]
    assert run(base, "1.0,2.0", *storage, "--directory", "one/rates") == 0
    assert run(base, "1.0,2.0,4.0", *storage, "--directory", "two/rates") == 0
    assert [path.name for path in Path("two/rates/logs").iterdir()] == ["learning_rate-4.0.log"]
    rows = [json.loads(line) for line in Path("two/rates/sweep.jsonl").read_text().splitlines()]
    assert [(row["bound"], row["status"]) for row in rows] == [(1.0, "done"), (2.0, "done"), (4.0, "done")]
    assert run(base, "8.0,9.0", *storage, "--directory", "two/others") == 0  # another study of the database
    assert len(Path("two/others/sweep.jsonl").read_text().splitlines()) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("sampler", "rates"), [("grid", "1.0,2.0,4.0"), ("random", "1.0..2.0")])
def test_a_run_just_taken_on_another_machine_is_left_alone(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampler: Sampler, rates: str
) -> None:
    """The other machine adds and claims runs before each attribute that a process records of a run it takes."""
    plan = build_plan(base, rates, sampler=sampler, storage=f"sqlite:///{tmp_path / 'shared.db'}")
    points = plan.load_point.load_all()
    set_user_attr = optuna.trial.Trial.set_user_attr
    with (
        study.open_study(replace(plan, directory=Path("one/rates"))) as one,
        study.open_study(replace(plan, directory=Path("two/rates"))) as two,
    ):
        wanted = one.add(points)
        others = []

        def interleave(trial: optuna.trial.Trial, key: str, value: object) -> None:
            if trial.study is one.study:
                two.add(points)
                others.append(two.claim(wanted, pytest.fail))
            set_user_attr(trial, key, value)

        monkeypatch.setattr(optuna.trial.Trial, "set_user_attr", interleave)
        claimed = [one.claim(wanted, pytest.fail), *others]
        assert len({run.run.digest for run in claimed if run is not None}) == len(claimed) > 1
        assert [run.status for run in one.runs()].count("running") == len(claimed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("others", "states"), [([], ["FAIL", "WAITING", "WAITING"]), (["elsewhere"], ["RUNNING", "WAITING"])]
)
def test_a_run_whose_process_died_as_it_took_it(
    base: Path, monkeypatch: pytest.MonkeyPatch, others: list[str], states: list[str]
) -> None:
    """It is made again, unless a process of another machine may have taken it."""

    def fail(*arguments: object) -> None:
        raise KeyboardInterrupt

    plan = build_plan(base, "1.0,2.0")
    points = plan.load_point.load_all()

    def take_and_die() -> None:
        with study.open_study(plan) as dying, monkeypatch.context() as context:
            wanted = dying.add(points)
            for other in others:
                dying.storage.set_trial_user_attr(1, f"candidate {other}", 1)
            context.setattr(optuna.trial.Trial, "set_user_attr", fail)
            dying.claim(wanted, pytest.fail)

    with pytest.raises(KeyboardInterrupt):
        take_and_die()
    with study.open_study(plan) as opened:
        opened.add(points)
    assert [trial.state.name for trial in load_study(plan.directory).get_trials()] == states


@pytest.mark.slow
def test_drawn_values_are_reproducible_and_extend_a_sweep(base: Path) -> None:
    drawn = []
    for directory, trials in (("one", 3), ("two", 2), ("two", 2), ("two", 3)):
        assert run(base, "log:1e-4..0.9", "--trials", str(trials), "--directory", directory) == 0
        attributes = [trial.user_attrs["run"] for trial in load_study(Path(directory)).trials]
        drawn.append([float(attribute["values"]["optimizer.learning_rate"]) for attribute in attributes])
    assert len({*drawn[0]}) == 3 and all(1e-4 <= rate <= 0.9 for rate in drawn[0])
    assert drawn == [drawn[0], drawn[0][:2], drawn[0][:2], drawn[0]]
    assert list(statuses(Path("two")).values()) == ["done"] * 3


def test_tpe_finds_the_minimum_of_a_function(base: Path) -> None:
    """A parabola of the logarithm of the rate, and a better and a worse kind; the first six draws are random."""
    command = SWEEP_COMMANDS["train"]
    settings = read_settings(["optimizer.learning_rate=log:1e-5..1.0", "optimizer.kind=adamw,muon"], command)
    plan = SweepPlan(PointLoader(command, base, settings), Path("tpe"), "tpe", 25, storage="sqlite:///:memory:")
    values = []
    with study.open_study(plan) as opened:
        while (claimed := opened.claim([], pytest.fail)) is not None:
            rate, kind = claimed.run.values.values()
            values.append((math.log10(float(rate)) + 2.0) ** 2 + (kind == "adamw"))
            claimed.finish("done", 1.0, (), values[-1])
        assert [run.value for run in opened.runs()] == values and len(values) == 25
    assert min(values) < min(0.02, min(values[:6]))


@pytest.mark.slow
@pytest.mark.parametrize(("trials", "num_random"), [(8, 4), (24, 6), (99, 10)])
def test_tpe_begins_with_a_quarter_of_random_runs(base: Path, trials: int, num_random: int) -> None:
    plan = replace(build_plan(base, "1.0..2.0", "tpe", "sqlite:///:memory:"), num_trials=trials)
    with study.open_study(plan) as opened:
        assert opened.claim([], pytest.fail) is not None
        assert vars(opened.study.sampler)["_n_startup_trials"] == num_random


@pytest.mark.slow
@pytest.mark.parametrize("names", [["q?1", "q?2"], ["a{b}"], ["p%20q", "p q"], ["h#1", "h#2"]])
def test_every_directory_has_its_own_study(base: Path, names: list[str]) -> None:
    plans = [replace(build_plan(base, "1.0,2.0"), directory=Path(name)) for name in names]
    for plan in plans:
        with study.open_study(plan) as opened:
            assert opened.runs() == []
            opened.add(plan.load_point.load_all())
    assert all((plan.directory / "study.db").is_file() for plan in plans)


@pytest.mark.slow
def test_no_values_are_drawn_twice(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "MAX_DRAWS", 20)
    more = ["--sampler", "random", "--trials", "9", "--set", "training.batch_size=2..3"]
    assert run(base, "1.0,2.0", *more) == 0
    points = [tuple(trial.user_attrs["run"]["values"].values()) for trial in load_study(Path("runs/sweeps/base")).trials
              if "run" in trial.user_attrs]  # fmt: skip
    assert len(points) == len({*points}) == 4  # all that there are


def test_bad_runs_are_pruned_at_a_rung(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second run waits at its first validation, which is worse than that of the first run."""
    more = ["--prune", "--set", "validation.every_steps=1"]
    assert run(base, "2.0,6.0,1.0", *more) == 0
    directory = Path("runs/sweeps/base")
    assert statuses(directory) == {
        "learning_rate-2.0": "done", "learning_rate-6.0": "pruned", "learning_rate-1.0": "done",
    }  # fmt: skip
    assert (directory / "runs" / "learning_rate-6.0" / "checkpoints").is_dir()
    pruned = load_study(directory).get_trials()[1]
    assert (pruned.value, pruned.intermediate_values) == (6.0, {1: 6.0})
    captured = capsys.readouterr()
    assert "learning_rate-6.0 is pruned at step 1" in captured.err and "pruned at step 1" in captured.out
    assert "pruned, at the last validation" in (directory / "sweep.html").read_text()
    assert run(base, "2.0,6.0,1.0", *more) == 0
    assert starts(directory, "learning_rate-6.0") == 1


def test_a_pruned_run_that_fails_to_save_has_failed(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = Path("program.py")
    program.write_text(program.read_text().replace("sys.exit(128 + number)", "sys.exit(1)"))
    assert run(base, "2.0,6.0", "--prune", "--set", "validation.every_steps=1") == 1
    directory = Path("runs/sweeps/base")
    assert statuses(directory) == {"learning_rate-2.0": "done", "learning_rate-6.0": "failed"}
    assert load_study(directory).get_trials()[1].state.name == "FAIL"


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
