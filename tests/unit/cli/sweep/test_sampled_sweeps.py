"""Sweeps that draw the values of their runs, and that prune runs."""

from __future__ import annotations

import math
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from cli.sweep import study
from cli.sweep.commands import SWEEP_COMMANDS
from cli.sweep.grid import PointLoader, read_settings
from cli.sweep.plan import SweepPlan
from tests.unit.cli.sweep.small_runs import (
    build_plan,
    load_study,
    run,
    starts,
    statuses,
    when_ready,
)

pytestmark = pytest.mark.usefixtures("small_runs")


@pytest.mark.slow
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


@pytest.mark.slow
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
def test_no_values_are_drawn_twice(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "MAX_DRAWS", 20)
    more = ["--sampler", "random", "--trials", "9", "--set", "training.batch_size=2..3"]
    assert run(base, "1.0,2.0", *more) == 0
    points = [tuple(trial.user_attrs["run"]["values"].values()) for trial in load_study(Path("runs/sweeps/base")).trials
              if "run" in trial.user_attrs]  # fmt: skip
    assert len(points) == len({*points}) == 4  # all that there are


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_pruned_run_that_fails_to_save_has_failed(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = Path("program.py")
    program.write_text(program.read_text().replace("sys.exit(128 + number)", "sys.exit(1)"))
    assert run(base, "2.0,6.0", "--prune", "--set", "validation.every_steps=1") == 1
    directory = Path("runs/sweeps/base")
    assert statuses(directory) == {"learning_rate-2.0": "done", "learning_rate-6.0": "failed"}
    assert load_study(directory).get_trials()[1].state.name == "FAIL"


@pytest.mark.slow
def test_a_run_that_is_complete_when_it_is_pruned_is_done(base: Path) -> None:
    """As the run of a sweep that was killed after the run's end, and continues."""
    program = Path("program.py")
    evaluation = '{"evaluation": {"nats_per_token": 6.0, "standard_error": 0.1, "bits_per_byte": 3.0}, "step": 10}'
    write = f"(directory / 'summary.json').write_text('{evaluation}')"
    program.write_text(program.read_text().replace("sys.exit(128 + number)", f"{write}; sys.exit(128 + number)"))
    assert run(base, "2.0,6.0", "--prune", "--set", "validation.every_steps=1") == 0
    assert statuses(Path("runs/sweeps/base")) == {"learning_rate-2.0": "done", "learning_rate-6.0": "done"}
