"""What a run leaves behind for people: its environment, how it ended, and its page."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cli.train import train_as_rank
from config.train import TrainConfig
from diffusionlm.training.loop import train
from diffusionlm.training.reporting import describe_commit
from logger.report import read_run
from tests.tiny_run import read_records


def events(config: TrainConfig) -> list[tuple[int, str, str]]:
    return [(record["step"], record["event"], record["text"]) for record in read_records(config, "event")]


def test_run_records_its_environment_and_writes_a_report(config: TrainConfig) -> None:
    train(config)
    page = (config.run.directory / "report.html").read_text(encoding="utf-8")
    assert "<li>complete, 8 of 8 steps</li>" in page
    (environment,) = [text for step, kind, text in events(config) if kind == "environment"]
    pieces = dict(piece.split(" ", 1) for piece in environment.removeprefix("environment: ").split("; "))
    assert {"started", "python", "torch", "device", "threads", "ranks", "precision", "system"} <= pieces.keys()
    assert (pieces["threads"], pieces["ranks"], pieces["precision"]) == ("1", "1", "float32")
    assert read_run(config.run.directory).state == "complete"


def test_failure_is_recorded_and_in_the_report(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise ValueError("the disk is <full>")

    monkeypatch.setattr("diffusionlm.training.loop.train_remaining_steps", fail)
    with pytest.raises(ValueError, match="the disk is <full>"):
        train(config)
    assert events(config)[-1] == (0, "failed", "failed after step 0: the disk is <full>")
    page = (config.run.directory / "report.html").read_text(encoding="utf-8")
    assert "<li>failed, 0 of 8 steps</li>" in page and "the disk is &lt;full&gt;" in page


@pytest.mark.slow
def test_extended_run_has_no_results_until_it_ends_again(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert train(config).summary is not None
    longer = config.model_copy(
        update={
            "training": config.training.model_copy(update={"max_steps": 10}),
            "checkpoint": config.checkpoint.model_copy(update={"config_change": "accept"}),
        }
    )
    with monkeypatch.context() as patch:
        patch.setattr("diffusionlm.training.loop.train_step", lambda *args: fail())
        with pytest.raises(ValueError, match="no more"):
            train(longer)
    run = read_run(config.run.directory)
    assert (run.summary, run.state) == ({}, "failed")
    ended = train(longer)
    assert ended.summary is not None and ended.summary.step == 10
    assert read_run(config.run.directory).result("step") == 10


def fail() -> None:
    raise ValueError("no more")


@pytest.mark.slow
def test_a_damaged_summary_is_named_with_the_remedy(config: TrainConfig) -> None:
    train(config)
    summary = config.run.directory / "summary.json"
    summary.write_text('{"step": 8', encoding="utf-8")
    with pytest.raises(ValueError, match=r"summary\.json cannot be read .*: remove it, and the same command"):
        train(config)
    summary.unlink()
    assert train(config).summary is not None


def test_closed_stderr_does_not_end_training(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        assert train_as_rank(config) == 0
    assert read_run(config.run.directory).state == "complete"


def test_a_page_that_cannot_be_written_is_an_event_and_not_the_end(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("diffusionlm.training.reporting.write_report", fail)
    config = config.model_copy(update={"training": config.training.model_copy(update={"max_steps": 2})})
    assert train(config).summary is not None
    text = "report.html could not be written: OSError: [Errno 28] No space left on device"
    assert events(config)[-1] == (2, "report", text)
    assert text in capsys.readouterr().err


def test_the_commit_of_a_checkout(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git("init", "-q")
    assert describe_commit(tmp_path) is None, "there is no commit yet"
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-qm", "first")
    assert describe_commit(tmp_path) == git("rev-parse", "--short=12", "HEAD")
    (tmp_path / "file").write_text("2")
    assert describe_commit(tmp_path) == git("rev-parse", "--short=12", "HEAD") + "-dirty"
    (tmp_path / "inside").mkdir()
    assert describe_commit(tmp_path / "inside") is None, "the checkout around it is another project"
