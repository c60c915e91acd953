"""Every sink of the registry: its options, a missing package, and errors that never end a run."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from config.training.logging import LoggingConfig
from logger import open_sinks
from logger.sinks import SINKS

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
def test_a_sink_that_cannot_be_opened_is_reported(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*arguments: Any) -> None:
        raise IsADirectoryError("no room")

    monkeypatch.setattr(importlib.util, "find_spec", lambda package: object())
    monkeypatch.setattr(SINKS[name], "__init__", fail)
    [sink], messages = open_sink(name, tmp_path)
    sink.metrics(1, {"loss": 2.5})
    sink.close()
    assert messages == [
        f"{SINKS[name].title}: IsADirectoryError: no room; the run continues, and metrics.jsonl has all"
    ]


@pytest.mark.parametrize("name", SINKS)
def test_options_are_described(name: str) -> None:
    field = LoggingConfig.model_fields[name]
    assert field.default is None and field.description and SINKS[name].title
    assert all(option.description for option in SINKS[name].options.model_fields.values())
