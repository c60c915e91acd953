"""A sweep of several processes or machines, or after a kill."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import time
from dataclasses import replace
from pathlib import Path

import optuna
import pytest

from cli.sweep import study
from cli.sweep.plan import Sampler
from files.lock import is_locked
from tests.unit.cli.sweep.small_runs import (
    build_plan,
    load_study,
    run,
    start_sweep,
    starts,
    statuses,
    wait_for,
)

pytestmark = pytest.mark.usefixtures("small_runs")


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


@pytest.mark.slow
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


def test_braces_of_a_url_are_kept(base: Path, tmp_path: Path) -> None:
    """Optuna replaces {SCHEMA_VERSION}, and fails at other names."""
    for name in ("a{}", "a{b}", "a{SCHEMA_VERSION}"):
        with study.open_study(build_plan(base, "1.0,2.0", storage=f"sqlite:///{tmp_path / name}.db")):
            assert (tmp_path / f"{name}.db").exists()


def test_a_dry_run_of_a_sweep_writes_nothing(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = build_plan(base, "1.0,2.0")
    with study.open_study(plan) as opened:
        opened.add(plan.load_point.load_all())

    def read_files() -> dict[Path, bytes | None]:
        return {path: path.read_bytes() if path.is_file() else None for path in Path("runs").rglob("*")}

    before = read_files()
    assert plan.directory.is_dir()
    for path in Path("runs").rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    assert run(base, "1.0,2.0,3.0", "--dry-run") == 0
    output = capsys.readouterr().out
    assert read_files() == before
    assert [line.split()[1] for line in output.splitlines() if "learning_rate=" in line] == [
        "waiting", "waiting", "new",
    ]  # fmt: skip


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
