"""Every sink of the registry: its options, a missing package; and the thread that keeps their errors from the run."""

from __future__ import annotations

import importlib.util
import threading
from pathlib import Path
from typing import Any

import pytest

from config.training.logging import LoggingConfig
from logger import LoggerGroup, open_sinks
from logger.run_logger import Metrics
from logger.sinks import SINKS, BackgroundLogger

ON: dict[str, dict[str, Any]] = {"tensorboard": {"enabled": True}, "wandb": {"mode": "offline"}}
"""Options that open a sink whose table alone does not, or not in a test."""


def open_sink(name: str, folder: Path) -> tuple[list[Any], list[str]]:
    messages: list[str] = []
    config = LoggingConfig.model_validate({name: ON.get(name, {})})
    return open_sinks(config, folder, 0, {}, lambda at, text: messages.append(text)), messages


def test_no_sink_is_on_by_default(tmp_path: Path) -> None:
    assert open_sinks(LoggingConfig(), tmp_path, 0, {}, print) == []


@pytest.mark.parametrize("name", [name for name, sink in SINKS.items() if sink.package is not None])
def test_missing_package_names_its_extra(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    sinks, [message] = open_sink(name, tmp_path)
    assert sinks == [] and f"[logging.{name}]" in message and f"uv sync --extra {SINKS[name].package}" in message


@pytest.mark.parametrize("name", SINKS)
def test_options_are_described(name: str) -> None:
    field = LoggingConfig.model_fields[name]
    assert field.default is None and field.description and SINKS[name].title
    assert all(option.description for option in SINKS[name].model_fields.values())


class Recorder(LoggerGroup):
    """Remembers its calls, and fails at steps that it is given."""

    def __init__(self, bad_steps: tuple[int, ...] = ()) -> None:
        self.calls: list[Any] = []
        self.bad_steps = bad_steps

    def metrics(self, step: int, values: Any) -> None:
        if step in self.bad_steps:
            raise OSError(f"no room at {step}\nand more")
        self.calls.append((step, dict(values)))

    def event(self, step: int, kind: str, text: str, values: Metrics | None = None) -> None:
        self.calls.append((step, kind, text))

    def close(self, exit_code: int = 0) -> None:
        self.calls.append(exit_code)


class Messages(list[tuple[int, str]]):
    def __call__(self, step: int, text: str) -> None:
        assert threading.current_thread() is threading.main_thread(), "the record is not written by two threads"
        self.append((step, text))


def test_records_arrive_unchanged_and_in_order() -> None:
    inner, messages = Recorder(), Messages()

    def start(say: Any) -> Recorder:
        say("nobody there")
        return inner

    logger = BackgroundLogger("a sink", start, messages)
    values = {"loss": 1.0}
    logger.metrics(1, values)
    values["loss"] = 2.0
    logger.event(1, "sample", "text")
    logger.progress(2, values)
    logger.metrics(2, values)
    logger.close(143)
    assert inner.calls == [(1, {"loss": 1.0}), (1, "sample", "text"), (2, {"loss": 2.0}), 143]
    assert [text for _, text in messages] == ["nobody there"]


def test_failure_is_reported_once_and_later_calls_are_tried() -> None:
    inner, messages = Recorder(bad_steps=(1, 3)), Messages()
    logger = BackgroundLogger("a sink", lambda say: inner, messages)
    for step in range(1, 5):
        logger.metrics(step, {})
    logger.close()
    assert inner.calls == [(2, {}), (4, {}), 0]
    assert [text for _, text in messages] == [
        "a sink: OSError: no room at 1; the run continues, and metrics.jsonl has all",
        "a sink failed 2 times; metrics.jsonl has all",
    ]


@pytest.mark.parametrize("error", [ValueError(), SystemExit(3), KeyboardInterrupt("stop")])
def test_failed_start_does_not_end_the_run(error: BaseException) -> None:
    def start(say: Any) -> Recorder:
        raise error

    messages = Messages()
    logger = BackgroundLogger("a sink", start, messages)
    logger._thread.join()
    logger.progress(7, {})
    logger.metrics(8, {})
    logger.close()
    (at, text), *more = messages
    assert not more and at == 7 and text.startswith(f"a sink: {type(error).__name__}")


def test_one_that_hangs_is_left_alone() -> None:
    messages, release = Messages(), threading.Event()

    def start(say: Any) -> Recorder:
        release.wait()
        return Recorder()

    logger = BackgroundLogger("a sink", start, messages, finish_seconds=0.01)
    logger.metrics(5, {})
    logger.close()
    release.set()
    [(step, text)] = messages
    assert step == 5 and "a sink" in text and "0.01 s" in text and "metrics.jsonl" in text
