"""Runs as their directories tell them, whole and damaged."""

from __future__ import annotations

import fcntl
import json
import math
from pathlib import Path
from typing import Any

import pytest

from logger.report import build_page, read_run, read_runs


def write(folder: Path, records: list[Any], end: str = "\n") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + end, encoding="utf-8", errors="surrogateescape")
    return folder


def step(number: int, **metrics: Any) -> dict[str, Any]:
    return {"step": number, "metrics": metrics}


def event(number: int, kind: str, text: str = "") -> dict[str, Any]:
    return {"step": number, "event": kind, "text": text}


def values(run: Any, key: str) -> list[tuple[float, float]]:
    series = run.numbers[key]
    return list(zip(series.steps_N.tolist(), series.values_N.tolist(), strict=True))


def test_numbers_events_config_and_summary(tmp_path: Path) -> None:
    run_directory = write(
        tmp_path / "run", [event(0, "data", "where"), step(1, loss=3.0, lr=1), step(2, loss=2.0, **{"a/b": 7})]
    )
    (run_directory / "config.toml").write_text('[training]\nmax_steps = 2\n[data.source]\nkind = "files"\n')
    (run_directory / "summary.json").write_text(json.dumps({"step": 2, "evaluation": {"fills": [{"fraction": 0.15}]}}))
    run = read_run(run_directory)
    assert values(run, "loss") == [(1.0, 3.0), (2.0, 2.0)]
    assert values(run, "a/b") == [(2.0, 7.0)]
    assert [(event.step, event.kind, event.text) for event in run.events] == [(0, "data", "where")]
    assert run.config == {"training.max_steps": 2, "data.source.kind": "files"}
    assert run.result("evaluation", "fills", 0, "fraction") == 0.15
    assert run.result("evaluation", "fills", 1, "fraction") is None
    assert run.result("evaluation", "missing") is None
    assert (run.name, run.last_step, run.max_steps, run.state, run.notes) == ("run", 2, 2, "complete", [])


def test_former_names_of_metrics_are_read(tmp_path: Path) -> None:
    record = [
        step(1, **{"val_first_guess/0.15": 0.4, "loss_fill": 0.3, "val_fill_nats_per_token": 0.2}),
        step(2, **{"val_top1_accuracy/0.15": 0.5}),
    ]
    folder = write(tmp_path / "run", record)
    fill = {"fraction": 0.15, "first_guess": 0.5, "first_five": 0.75, "commonest": 0.1}
    (folder / "summary.json").write_text(json.dumps({"step": 2, "evaluation": {"fills": [fill]}}))
    run = read_run(folder)
    assert values(run, "val_top1_accuracy/0.15") == [(1.0, 0.4), (2.0, 0.5)]
    assert values(run, "loss_eos_padding") + values(run, "val_eos_padding_nats_per_token") == [(1.0, 0.3), (1.0, 0.2)]
    names = ("top1_accuracy", "top5_accuracy", "majority_baseline")
    assert [run.result("evaluation", "fills", 0, name) for name in names] == [0.5, 0.75, 0.1]


def test_lines_that_are_no_records_are_counted(tmp_path: Path) -> None:
    bad: list[Any] = [
        "nonsense",
        "[1, 2]",
        '{"metrics": {}}',
        '{"step": "3"}',
        "\0\0\0",
        "",
        '{"step": true}',
        "[" * 100_000,
    ]
    bad += ["\udcff\udcfe", step(2, loss=1.0), '{"step": 3, "metr']
    run = read_run(write(tmp_path / "run", [step(1, loss=3.0), *bad], end=""))
    assert values(run, "loss") == [(1.0, 3.0), (2.0, 1.0)]
    assert [note for note in run.notes if "that cannot be read and are not shown: 8." in note]


def test_values_that_are_no_numbers(tmp_path: Path) -> None:
    odd = [
        '{"step": 1, "metrics": {"loss": NaN, "big": 1e999, "kind": "warm"}}',
        '{"step": 2, "metrics": {"loss": null, "big": 1' + "0" * 400 + ', "flag": true}}',
        step(3, loss=2.5),
    ]
    run = read_run(write(tmp_path / "run", odd))
    assert [math.isnan(value) for _, value in values(run, "loss")] == [True, True, False]
    assert run.numbers["big"].last is None
    assert values(run, "flag") == [(2.0, 1.0)]
    assert run.numbers["kind"].last is None


def test_a_step_that_was_run_again_counts_once(tmp_path: Path) -> None:
    again = [step(1, loss=3.0), step(2, loss=2.0), step(3, loss=9.0), step(2, loss=1.5), step(3, loss=1.0)]
    assert values(read_run(write(tmp_path / "run", again)), "loss") == [(1.0, 3.0), (2.0, 1.5), (3.0, 1.0)]


@pytest.mark.parametrize(
    ("records", "summary", "state"),
    [
        ([step(8, loss=1.0)], {"step": 8}, "complete"),
        ([step(9, loss=1.0)], {"step": 8}, "ended"),
        ([step(3, loss=1.0)], None, "ended"),
        ([step(3, loss=1.0), event(3, "failed", "no")], None, "failed"),
        ([step(3, loss=1.0), event(3, "stopped")], None, "stopped"),
        ([step(3, loss=1.0), event(3, "stopped"), event(3, "environment"), step(4, loss=1.0)], None, "ended"),
    ],
)
def test_status_of_a_run(tmp_path: Path, records: list[Any], summary: Any, state: str) -> None:
    folder = write(tmp_path / "run", records)
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    run = read_run(folder)
    assert run.state == state
    assert any("the run went on" in note for note in run.notes) == (state == "ended" and summary is not None)
    assert ("no" in build_page([run]).notes) == (state == "failed")


def test_a_run_that_a_process_has_is_going(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", [step(3, loss=1.0)])
    with (folder / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert read_run(folder).state == "going"
    assert read_run(folder).state == "ended"
    with (folder / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # reading left it free


def test_damaged_files_are_noted(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", [event(0, "data")])
    (folder / "config.toml").write_text("[training\n")
    (folder / "summary.json").write_text("{")
    run = read_run(folder)
    assert (run.config, run.summary) == ({}, {})
    for phrase in ("metrics.jsonl has no numbers yet", "config.toml cannot be read", "summary.json cannot be read"):
        assert any(phrase in note for note in run.notes), phrase
    (folder / "summary.json").write_text("[]")
    assert any("expected a JSON object" in note for note in read_run(folder).notes)


def test_names_tell_runs_apart_and_each_is_there_once(tmp_path: Path) -> None:
    one, two = (write(tmp_path / name / "run", [step(1, loss=1.0)]) for name in ("a", "b"))
    assert [run.name for run in read_runs([one, two, two / ".." / "run"])] == [str(one), str(two / ".." / "run")]
    assert [run.name for run in read_runs([one])] == ["run"]
