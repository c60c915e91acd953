"""Arguments and the config of ``diffusionlm-serve``."""

from __future__ import annotations

import importlib.util
import tomllib
from pathlib import Path
from typing import Any

import pytest

from cli.serve import main
from config.load import ConfigError, load_config
from config.serving.server import ServeConfig


def print_config(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    with pytest.raises(SystemExit) as caught:
        main([*arguments, "--print-config"])
    assert caught.value.code == 0
    return tomllib.loads(capsys.readouterr().out)


def test_arguments_are_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    printed = print_config(
        capsys, "--model", "m", "--host", "::1", "--port", "0", "--cache-memory", "1.5GiB", "--model-name", "x",
        "--api-keys-file", "k", "--adapter", "a=b=c", "--adapter", "d=e",
    )  # fmt: skip
    assert printed["model"]["path"] == "m" and printed["serve"] | {
        "host": "::1", "port": 0, "cache_memory": 3 << 29, "model_name": "x", "api_keys_file": "k",
    } == printed["serve"]  # fmt: skip
    assert printed["adapters"] == [{"name": "a", "path": "b=c"}, {"name": "d", "path": "e"}]


@pytest.mark.parametrize(("text", "size"), [("12", 12), ("2kB", 2000), ("1.5 GiB", 3 << 29), ("1TB", 10**12)])
def test_sizes(text: str, size: int) -> None:
    assert load_config(ServeConfig, None, [f'serve.cache_memory="{text}"']).serve.cache_memory == size


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["serve.cache_memory=2XB"], "a size such as"),
        (["serve.cache_memory=-1"], "greater than 0"),
        (["serve.port=70000"], "at most 65535"),
        (["model.attention_backend=flex"], "has no cached form"),
        (["generation.max_new_tokens=3"], "serve.default_max_tokens"),
        (['adapters=[{name="a", path="b"}, {name="a", path="c"}]'], "given twice"),
        (['adapters=[{name="a", path="b"}]', "serve.model_name=a"], "also the name of an adapter"),
        (['adapters=[{name="a", path="b"}]', "model.path=m", "model.adapter=c"], "exclude each other"),
    ],
)
def test_contradictions(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(ServeConfig, None, overrides)
    assert message in str(caught.value)


def test_a_missing_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as caught:
        main(["--model", str(tmp_path)])
    errors = capsys.readouterr().err
    assert caught.value.code == 2 and errors.count("\n") == 1
    assert "starlette and uvicorn are not installed" in errors and "uv sync --extra serve" in errors
