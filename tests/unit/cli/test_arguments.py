"""Arguments of the commands with a config."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import pytest

from cli.arguments import parse_command
from config.base import PositiveInt, Section


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


def test_a_config_may_be_optional(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse("--set", "inner.name=y", config_required=False)[0] == Config(inner=Inner(name="y"))
    assert "add --config FILE.toml" in failure(capsys, 2)


def test_overrides_of_arguments_give_way_to_set(capsys: pytest.CaptureFixture[str]) -> None:
    def list_overrides(arguments: Namespace) -> list[str]:
        if not arguments.name:
            raise ValueError("--name is empty")
        return [f"inner.name={arguments.name}", "inner.steps=7"]

    def add_arguments(parser: ArgumentParser) -> None:
        parser.set_defaults(list_overrides=list_overrides)
        parser.add_argument("--name")

    options: dict[str, Any] = {"add_arguments": add_arguments, "config_required": False}
    assert parse("--set", "inner.steps=8", "--name", "a", **options)[0] == Config(inner=Inner(steps=8, name="a"))
    assert "dlm-run: error: --name is empty" in failure(capsys, 2, "--name", "", **options)


def test_bad_config(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    assert failure(capsys, 2, "--config", file, "--set", "inner.steps=0", "--set", "inner.stps=1") == (
        f"dlm-run: error: {file} is not a valid Config: 2 problems\n"
        "--set inner.steps=0: must be greater than 0\n"
        "--set inner.stps=1: unknown key (did you mean steps?)\n"
    )
