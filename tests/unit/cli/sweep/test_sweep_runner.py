"""The runs of a sweep; a small program replaces them, so that torch is not loaded."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import optuna
import pytest

from cli.sweep import main, processes, runner, study
from cli.sweep.commands import SWEEP_COMMANDS
from cli.sweep.grid import PointLoader
from config.train import TrainConfig
from tests.unit.cli.sweep.small_runs import (
    build_plan,
    run,
    starts,
    statuses,
    when_ready,
)

pytestmark = pytest.mark.usefixtures("small_runs")


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


@pytest.mark.slow
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
    assert not [*plan.processes_path.iterdir()], "the refused process has left nothing"


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


@pytest.mark.slow
@pytest.mark.parametrize("names", [["q?1", "q?2"], ["a{b}"], ["p%20q", "p q"], ["h#1", "h#2"]])
def test_every_directory_has_its_own_study(base: Path, names: list[str]) -> None:
    plans = [replace(build_plan(base, "1.0,2.0"), directory=Path(name)) for name in names]
    for plan in plans:
        with study.open_study(plan) as opened:
            assert opened.runs() == []
            opened.add(plan.load_point.load_all())
    assert all((plan.directory / "study.db").is_file() for plan in plans)


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
