"""Arguments of the commands with a config."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest

from cli.arguments import parse_command
from config.base import PositiveInt, Section
from config.load import load_config


class Inner(Section):
    steps: PositiveInt = 3
    name: str = "x"


class Config(Section):
    inner: Inner = Inner()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "c.toml"
    path.write_text("[inner]\nsteps = 4\n")
    return path


def parse(*argv: object, **options: Any) -> Any:
    return parse_command(
        Config,
        name="dlm-run",
        description="Runs 100% of it.",
        example="  dlm-run --config a.toml --set inner.steps=9",
        argv=[str(item) for item in argv],
        **options,
    )


def failure(capsys: pytest.CaptureFixture[str], code: int, *argv: object, **options: Any) -> str:
    with pytest.raises(SystemExit) as caught:
        parse(*argv, **options)
    assert caught.value.code == code
    output = capsys.readouterr()
    assert "Traceback" not in output.err
    return output.out if code == 0 else output.err


def test_config_overrides_and_extra_arguments(file: Path) -> None:
    def add_arguments(parser: ArgumentParser) -> None:
        parser.add_argument("--resume", action="store_true")

    config, arguments = parse(
        "--config", file, "--set", "inner.name=7", "--set=inner.steps=5", "--resume", add_arguments=add_arguments
    )
    assert config == Config(inner=Inner(steps=5, name="7"))
    assert arguments.resume is True


def test_config_may_be_optional() -> None:
    assert parse("--set", "inner.name=y", config_required=False)[0] == Config(inner=Inner(name="y"))


def test_no_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert "add --config FILE.toml" in failure(capsys, 2)


def test_missing_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert failure(capsys, 2, "--config", "no.toml") == "dlm-run: error: no.toml: no such file\n"


def test_bad_config(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    assert failure(capsys, 2, "--config", file, "--set", "inner.steps=0", "--set", "inner.stps=1") == (
        f"dlm-run: error: {file} is not a valid Config: 2 problems\n"
        "--set inner.steps=0: must be greater than 0\n"
        "--set inner.stps=1: unknown key (did you mean steps?)\n"
    )


def test_print_config_prints_a_config_that_loads(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    text = failure(capsys, 0, "--config", file, "--print-config", "--set", "inner.name=z")
    file.write_text(text)
    assert load_config(Config, file) == Config(inner=Inner(steps=4, name="z"))


def test_schema_needs_no_other_argument(capsys: pytest.CaptureFixture[str]) -> None:
    def add_arguments(parser: ArgumentParser) -> None:
        parser.add_argument("--needed", required=True)

    assert json.loads(failure(capsys, 0, "--schema", add_arguments=add_arguments))["title"] == "Config"


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    text = failure(capsys, 0, "--help")
    assert text.endswith("example:\n  dlm-run --config a.toml --set inner.steps=9\n")
    assert "Runs 100% of it." in text
