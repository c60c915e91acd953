"""Weights & Biases with a stand-in for its package, and once with the package itself, offline."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY, MagicMock, call

import pytest

from config.training.logging import LoggingConfig
from logger import open_sinks
from logger.weights_and_biases import RUN_ID_FILE, get_run_id


def make_package(fails_in: str = "", login: bool | Exception = True) -> MagicMock:
    """A stand-in for the package; a method of the run that ``init`` returns fails."""
    package = MagicMock(__spec__=SimpleNamespace(), Table=lambda columns, data: (columns, data))
    package.login.side_effect = [login]
    if fails_in:
        getattr(package.init.return_value, fails_in).side_effect = RuntimeError(f"{fails_in} failed")
    return package


def open_with(
    fake: Any, monkeypatch: pytest.MonkeyPatch, directory: Path, step: int = 0, **options: Any
) -> tuple[list[Any], list[str]]:
    monkeypatch.setitem(sys.modules, "wandb", fake)
    messages: list[str] = []
    config = LoggingConfig.model_validate({"wandb": options})
    return open_sinks(config, directory, step, {"run": {"seed": 3}}, lambda at, text: messages.append(text)), messages


def test_what_a_run_sends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "checkpoints/step-2").mkdir(parents=True)
    (tmp_path / "checkpoints/latest").symlink_to("step-2")
    (tmp_path / "tokenizer").mkdir()
    fake = make_package()
    artifacts = ("checkpoints", "tokenizer", "samples")
    sinks, messages = open_with(
        fake, monkeypatch, tmp_path, entity="team", tags=("a", "b"), artifacts=artifacts, mode="offline"
    )
    for sink in sinks:
        sink.metrics(1, {"loss": 2.5})
        sink.event(1, "data", "not sent")
        sink.event(2, "sample", "a cat")
        sink.metrics(2, {"val_nats_per_token": 2.0})
        sink.close(143)
    run_id = (tmp_path / RUN_ID_FILE).read_text().strip()
    names = {"project": "diffusionlm", "entity": "team", "name": tmp_path.name, "id": run_id, "tags": ["a", "b"]}
    rest = {"resume": "allow", "mode": "offline", "dir": str(tmp_path), "config": {"run": {"seed": 3}}}
    fake.init.assert_called_once_with(**names, **rest, settings=ANY)
    assert fake.init.return_value.mock_calls == [
        call.define_metric("*", step_metric="trainer/step"),
        call.log({"trainer/step": 1, "loss": 2.5}),
        call.log({"trainer/step": 2, "samples": (["step", "text"], [[2, "a cat"]])}),
        call.log({"trainer/step": 2, "val_nats_per_token": 2.0}),
        call.log_artifact(str(tmp_path / "checkpoints/step-2"), name=f"{run_id}-checkpoints", type="model"),
        call.log_artifact(str(tmp_path / "tokenizer"), name=f"{run_id}-tokenizer", type="tokenizer"),
        call.finish(exit_code=143),
    ]
    assert messages == []


def test_a_run_is_finished_although_an_upload_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    fake = make_package("log_artifact")
    (sink,), messages = open_with(fake, monkeypatch, tmp_path, mode="offline", artifacts=["tokenizer"])
    sink.close(0)
    assert len(messages) == 1 and "Weights & Biases: RuntimeError: log_artifact failed" in messages[0]
    assert fake.init.return_value.finish.called


@pytest.mark.parametrize(
    ("environment_mode", "options", "login", "mode", "problem"),
    [
        ("", {}, True, "online", None),
        ("offline", {}, True, "offline", None),
        ("offline", {"mode": "online"}, True, "online", None),
        ("", {}, False, "offline", "no key in WANDB_API_KEY"),
        ("online", {}, ConnectionError("nobody answers"), "offline", "nobody answers"),
    ],
)
def test_mode_is_offline_without_a_key_or_a_connection(
    environment_mode: str,
    options: dict[str, Any],
    login: bool | Exception,
    mode: str,
    problem: str | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("WANDB_MODE", environment_mode)
    fake = make_package(login=login)
    (sink,), messages = open_with(fake, monkeypatch, tmp_path, **options)
    assert open_with(fake, monkeypatch, tmp_path, mode="disabled") == ([], [])
    sink.close()
    assert fake.init.call_args.kwargs["mode"] == mode
    assert fake.login.call_args in (None, call(prompt=False))
    assert [str(problem) in text and "wandb sync" in text for text in messages] == [True] * (problem is not None)


def test_the_id_is_kept_where_a_run_goes_on(tmp_path: Path) -> None:
    first = get_run_id(tmp_path, 0)
    assert get_run_id(tmp_path, 500) == first
    second = get_run_id(tmp_path, 0)
    assert second != first, "it began anew"
    assert get_run_id(tmp_path, 1) == second and len(second) == 8


@pytest.mark.slow
def test_the_package_itself_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "vocab.json").write_text("{}")
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    (sink,), messages = open_with(wandb, monkeypatch, tmp_path, artifacts=("tokenizer", "samples"), mode="offline")
    sink.metrics(1, {"loss": 2.5, "lr/hidden": 0.1})
    sink.event(1, "sample", "a cat")
    sink.close(0)
    assert messages == []
    (log,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert log.stem == f"run-{(tmp_path / RUN_ID_FILE).read_text().strip()}"
    deadline = time.monotonic() + 100  # W&B writes in a process of its own
    while b"lr/hidden" not in log.read_bytes():
        assert time.monotonic() < deadline, log.read_bytes()
        time.sleep(0.05)
