"""The runs of a sweep: failures, interruptions, several processes, sampled values and pruning."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import optuna
import pytest

from cli import child_process
from cli.sweep import main, runner, study
from cli.sweep.study import SweepStudy, open_study
from files.lock import lock_directory
from tests.unit.cli.sweep.conftest import SmallSweep


def interrupt_when_ready(small: SmallSweep, rate: str) -> None:
    def interrupt() -> None:
        small.wait_for(rate)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()


def test_a_failure_is_recorded_and_retried_by_the_next_command(
    small: SmallSweep, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert small.run("2.0,3.0,1.0,7.0") == 1
    output = capsys.readouterr()
    assert small.statuses() == {"2.0": "done", "3.0": "failed", "1.0": "done", "7.0": "failed"}
    assert "learning_rate is too high" in output.err and "done, best" in output.out
    errors = {row["name"]: row["error"] for row in small.rows()}
    assert errors["learning_rate-3.0"] == ["rate 3.0 on None", "learning_rate is too high"]
    assert errors["learning_rate-7.0"] == ["rate 7.0 on None"]  # exit code 0, but no result
    monkeypatch.setenv("MENDED", "1")
    assert small.run("2.0,3.0,1.0") == 0
    assert small.starts("2.0", "3.0", "1.0", "7.0") == [1, 2, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--sampler", "random", "--trials", "2")])
def test_an_interrupted_sweep_is_continued(small: SmallSweep, more: tuple[str, ...]) -> None:
    rates = "2.0,5.0" if more else "2.0,5.0,1.0"
    interrupt_when_ready(small, "5.0")
    assert small.run(rates, *more) == 130
    statuses = small.statuses()
    assert statuses["5.0"] == "interrupted" and statuses.get("1.0", "waiting") == "waiting"
    assert small.run(rates, *more) == 0
    assert small.statuses() == dict.fromkeys(rates.split(","), "done")
    assert small.starts("2.0", "5.0") == [1, 2]
    attempts = [trial for trial in small.load_study().trials if trial.user_attrs["run"]["name"].endswith("5.0")]
    assert [trial.state.name for trial in attempts] == ["FAIL", "COMPLETE"]
    assert attempts[0].params == attempts[1].params == ({"optimizer.learning_rate": "5.0"} if more else {})


def test_active_runs_save_when_the_study_cannot_be_written(
    small: SmallSweep, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(self: SweepStudy, trial: optuna.Trial | optuna.trial.FrozenTrial) -> None:
        if isinstance(trial, optuna.trial.FrozenTrial):
            return  # it is claimed
        small.wait_for("5.0")
        raise optuna.exceptions.StorageInternalError("database or disk is full")

    monkeypatch.setattr(SweepStudy, "beat", fail)
    small.refuse("5.0,2.0")
    assert "study.db: database or disk is full" in capsys.readouterr().err
    assert (small.directory / "runs" / "learning_rate-5.0" / "checkpoints").is_dir()


def test_concurrent_runs_share_cores_and_gpus(small: SmallSweep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5")
    assert small.run("1.0,2.0", "--jobs", "2") == 0
    lines = [small.log(rate).read_text().splitlines()[-1] for rate in ("1.0", "2.0")]
    gpus = {
        line.removeprefix(f"rate {rate} run.threads=4 on ") for rate, line in zip(("1.0", "2.0"), lines, strict=True)
    }
    assert gpus == {"3", "GPU-5"}
    assert small.run("1.0,4.0") == 0  # a single run uses all of them
    assert small.log("4.0").read_text().splitlines()[-1] == "rate 4.0 on 3,GPU-5"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(runner, "drivers", lambda: ["580, A", "580, B"])
    assert runner.visible_gpus() == ["0", "1"]


def test_only_values_extend_a_sweep(small: SmallSweep, capsys: pytest.CaptureFixture[str]) -> None:
    assert small.run("1.0,2.0") == 0
    study = small.load_study()
    config = study.user_attrs["config"]
    assert "keep_last" in config
    study.set_user_attr("config", re.sub("keep_last = .*", "", config))  # of a version without this key
    assert small.run("1.0,4.0") == 0
    assert list(small.statuses()) == ["1.0", "2.0", "4.0"] and small.starts("1.0") == [1]
    for setting, message in (
        ("training.max_steps=11", "training.max_steps: 10 -> 11"),
        ("training.batch_size=4,8", "keys: optimizer.learning_rate -> optimizer.learning_rate, training.batch_size"),
    ):
        capsys.readouterr()
        small.refuse("1.0,2.0", "--set", setting)
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["optimizer.learning_rate=1.0,-2.0"], "optimizer.learning_rate=-2.0, 1 in all:\n  --set"),
        (["optimizer.learning_rate=1.0,2.0", "--jobs", "0"], "--jobs: '0' is not"),
        (["optimizer.learning_rate=0.1..0.2", "--sampler", "grid"], "optimizer.learning_rate: a grid"),
        (["optimizer.learning_rate=0.1..0.2"], "--trials is missing"),
        (["optimizer.learning_rate=0.1,0.2", "--trials", "3"], "--trials: a grid"),
        (["run.seed=1,2", "--prune", "--set", "validation.every_steps=10"], "validation.every_steps = 10"),
        (["run.seed=1,2", "--directory", "broken"], "sqlite:///broken/study.db: "),
        (["run.seed=1,2", "--storage", "postgresql://me:secret@nowhere/x"], "postgresql://me:***@nowhere/x: "),
        (["run.seed=1,2", "--storage", "nowhere"], "--storage nowhere: expected a URL"),
    ],
)
def test_errors_are_found_before_a_run_starts(
    small: SmallSweep, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    Path("broken").mkdir()
    Path("broken/study.db").write_text("{" * 4096)
    with pytest.raises(SystemExit) as caught:
        main(["--config", str(small.base), "--set", *arguments])
    error = capsys.readouterr().err
    assert caught.value.code == 2 and message in error and "secret" not in error
    assert not list(Path().rglob("configs"))


def test_a_dry_run_writes_nothing(small: SmallSweep, capsys: pytest.CaptureFixture[str]) -> None:
    assert small.run("1.0,2.0", "--dry-run") == 0
    output = capsys.readouterr().out
    assert "optimizer.learning_rate=1.0" in output and "2 runs in runs/sweeps/base" in output
    assert not Path("runs").exists()


def test_a_directory_in_use_and_a_missing_extra(
    small: SmallSweep, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "LOCK_SECONDS", 0.0)
    with lock_directory(small.directory):
        small.refuse("2.0,1.0", code=1)
    monkeypatch.setitem(sys.modules, "optuna", None)
    small.refuse("1.0,2.0")
    error = capsys.readouterr().err
    assert "base: in use by another process" in error and "uv sync --extra sweep" in error


def test_a_directory_may_have_characters_that_urls_quote(small: SmallSweep) -> None:
    sweep = replace(small.define("1.0,2.0"), directory=Path("p%20q#1?{SCHEMA_VERSION}"))
    with open_study(sweep, sweep.load_points()) as opened:
        opened.add()
    assert (sweep.directory / "study.db").is_file() and not Path("study.db").exists()


@pytest.mark.slow
def test_two_processes_share_a_sweep(small: SmallSweep) -> None:
    rates = ["1.0", "5.0", "1.5", "6.0", "2.0", "2.5"]
    sweeps = [small.start(",".join(rates)) for _ in range(2)]
    for rate in ("5.0", "6.0"):  # each process has reached a run that waits for the other
        small.wait_for(rate)
    for rate in ("5.0", "6.0"):
        small.release(rate)
    assert [sweep.wait(60) for sweep in sweeps] == [0, 0]
    assert small.starts(*rates) == [1] * 6
    assert set(small.statuses().values()) == {"done"}


@pytest.mark.slow
def test_a_killed_sweep_is_continued(small: SmallSweep, capsys: pytest.CaptureFixture[str]) -> None:
    """Its run ends with it, and is continued once its heartbeat has stopped for the grace period."""
    sweep = small.start("1.0,5.0,2.0")
    small.wait_for("5.0")
    sweep.kill()
    sweep.wait()
    (small.directory / "runs" / "learning_rate-5.0" / "checkpoints").mkdir()
    assert small.run("5.0,2.0") == 0
    assert small.starts("1.0", "5.0", "2.0") == [1, 2, 1]
    assert set(small.statuses().values()) == {"done"}
    errors = capsys.readouterr().err
    assert "waiting for the runs of other processes" in errors and "learning_rate-5.0 continues" in errors


@pytest.mark.slow
def test_a_run_that_was_taken_over_is_ended(
    small: SmallSweep, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As when a process was suspended longer than the grace period."""
    monkeypatch.setattr(study, "HEARTBEAT_SECONDS", 1)

    def take_over() -> None:
        small.wait_for("5.0")
        (small.directory / "runs" / "learning_rate-5.0" / "checkpoints").mkdir()
        small.load_study().tell(0, state=optuna.trial.TrialState.FAIL)

    threading.Thread(target=take_over).start()
    assert small.run("5.0,2.0") == 0
    assert "learning_rate-5.0 was taken over by another process" in capsys.readouterr().err
    assert small.starts("5.0", "2.0") == [2, 1]


@pytest.mark.slow
def test_a_run_whose_process_died_at_its_claim_is_continued(small: SmallSweep) -> None:
    """A trial that was running without a first heartbeat would never fail."""
    sweep = small.define("1.0,2.0")
    with open_study(sweep, sweep.load_points()) as opened:
        opened.add()
        claimed = [opened.claim(pytest.fail)]
        deadline = time.monotonic() + 60
        while len(claimed) < 3 and time.monotonic() < deadline:
            claimed += filter(None, [opened.claim(pytest.fail)])
            time.sleep(0.1)
    names = [trial and trial.user_attrs["run"]["name"] for trial in claimed]
    assert names == ["learning_rate-1.0", "learning_rate-2.0", "learning_rate-1.0"]


@pytest.mark.slow
def test_machines_share_a_database_but_no_files(small: SmallSweep, tmp_path: Path) -> None:
    storage = ["--storage", f"sqlite:///{tmp_path / 'shared.db'}"]
    assert small.run("1.0,2.0", *storage, "--directory", "one/rates") == 0
    assert small.run("1.0,2.0,4.0", *storage, "--directory", "two/rates") == 0
    assert [path.name for path in Path("two/rates/logs").iterdir()] == ["learning_rate-4.0.log"]
    assert [(row["bound"], row["status"]) for row in small.rows("two/rates")] == [
        (1.0, "done"),
        (2.0, "done"),
        (4.0, "done"),
    ]
    assert small.run("8.0,9.0", *storage, "--directory", "two/others") == 0  # another study of the database
    assert len(small.rows("two/others")) == 2


@pytest.mark.slow
def test_drawn_values_are_reproducible_and_extend_a_sweep(small: SmallSweep) -> None:
    drawn = []
    for directory, trials in (("one", 3), ("two", 2), ("two", 2), ("two", 3)):
        assert small.run("log:1e-4..0.9", "--trials", str(trials), "--directory", directory) == 0
        values = [trial.user_attrs["run"]["values"] for trial in small.load_study(directory).trials]
        drawn.append([float(value["optimizer.learning_rate"]) for value in values])
    assert len({*drawn[0]}) == 3 and all(1e-4 <= rate <= 0.9 for rate in drawn[0])
    assert drawn == [drawn[0], drawn[0][:2], drawn[0][:2], drawn[0]]


def test_no_values_are_drawn_twice(small: SmallSweep) -> None:
    sweep = small.define("1.0,2.0", "random", 9, "sqlite:///:memory:")
    with open_study(sweep, sweep.load_points()) as opened:
        claimed = [opened.claim(pytest.fail) for _ in range(3)]
    assert {trial and trial.user_attrs["run"]["name"] for trial in claimed} == {
        "learning_rate-1.0", "learning_rate-2.0", None,
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("exit_line", "status"),
    [
        ("sys.exit(128 + number)", "pruned"),
        ("sys.exit(1)", "failed"),  # it could not save
        ("(directory / 'summary.json').write_text('{\"step\": 10}'); sys.exit(128 + number)", "done"),
    ],
)
def test_bad_runs_are_pruned_at_a_rung(
    small: SmallSweep, exit_line: str, status: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second run waits at its first validation, which is worse than that of the first run."""
    program = Path("program.py")
    program.write_text(program.read_text().replace("sys.exit(128 + number)", exit_line))
    more = ["--prune", "--set", "validation.every_steps=1"]
    assert small.run("2.0,6.0,1.0", *more) == (status == "failed")
    assert small.statuses() == {"2.0": "done", "6.0": status, "1.0": "done"}
    if status == "pruned":
        assert "learning_rate-6.0 is pruned after" in capsys.readouterr().err
        pruned = small.load_study().trials[1]
        assert (pruned.value, pruned.intermediate_values) == (6.0, {1: 6.0})
        assert small.run("2.0,6.0,1.0", *more) == 0
        assert small.starts("6.0") == [1]


def test_children_use_the_code_of_this_project(monkeypatch: pytest.MonkeyPatch) -> None:
    command = child_process.build_command("train", Path("a.toml"), ["run.threads=2"])
    assert command[1:] == [
        "-P", "-m", "cli.child_process", "train", "--config", "a.toml", "--set", "run.threads=2",
    ]  # fmt: skip
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    ours, theirs = child_process.build_environment({})["PYTHONPATH"].split(os.pathsep)
    assert (Path(ours) / "cli" / "train.py").is_file() and theirs == "/theirs"


def test_last_lines_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"$ old\nold\n")
    code = "import sys; sys.stdout.buffer.write(b'  1 %\\r 50 %\\r\\n\\nerror: \\xff ' + b'x' * 400 + b'\\n\\n')"
    assert child_process.run_child([sys.executable, "-c", code], [], handles_all_signals=True, log=log) == 0
    one, two, three = child_process.read_last_lines(log, 5)
    assert (one, two) == ("  1 %", " 50 %")
    assert three.startswith("error: \ufffd xxx") and three.endswith("x...") and len(three) == 303


def test_of_two_equal_trials_that_machines_queued_the_first_counts(small: SmallSweep) -> None:
    sweep = small.define("1.0,2.0")
    points = sweep.load_points()
    with open_study(sweep, points) as opened:
        opened.add()
        for trial in opened.study.get_trials():
            opened.study.enqueue_trial({}, user_attrs=trial.user_attrs)
        claimed = [opened.claim(pytest.fail) for _ in range(3)]
    assert [None if trial is None else trial.number for trial in claimed] == [0, 1, None]
