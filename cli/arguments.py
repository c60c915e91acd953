"""Arguments of the commands with a config: ``--config``, ``--set`` and the like."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from cli.entry import build_parser, exit_with_usage_error, path_argument
from config.base import Section
from config.dump import to_toml
from config.load import ConfigError, json_schema, load_config

T = TypeVar("T", bound=Section)


class Shorthand(NamedTuple):
    """An argument that stands for an override of the config; see `add_shorthand`."""

    name: str
    metavar: str | None
    """None: a flag."""
    override: str
    help: str


def parse_command(
    config_class: type[T],
    *,
    name: str,
    description: str,
    example: str,
    config_required: bool = True,
    add_arguments: Callable[[argparse.ArgumentParser], None] | None = None,
    shorthands: Sequence[Shorthand] = (),
    argv: Sequence[str] | None = None,
) -> tuple[T, argparse.Namespace]:
    """Parse the command line of a command and load its config.

    Args:
        config_class: class of the whole config.
        name: of the command.
        description: first text of `--help`.
        example: last text of `--help`.
        config_required: `--config` must be given. False: the defaults alone are a config.
        add_arguments: adds arguments of the command's own.
        shorthands: arguments that stand for overrides.
        argv: arguments. None: those of the process.

    Returns:
        The config and the parsed arguments. Exits with 2 and a message if the config is invalid.
    """
    parser = build_parser(name, description, example)
    parser.add_argument("--config", metavar="FILE.toml", type=path_argument, help="TOML file of the config")
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="SECTION.KEY=VALUE",
        action="append",
        default=[],
        help="override a value of the config; repeatable, the last one wins",
    )
    parser.add_argument("--print-config", action="store_true", help="print the config with all defaults, and exit")
    parser.add_argument(
        "--schema",
        action=_PrintSchema,
        nargs=0,
        const=config_class,
        help="print the JSON schema of the config, and exit",
    )
    if add_arguments is not None:
        add_arguments(parser)
    _add_shorthands(parser, shorthands)
    arguments = parser.parse_args(argv)
    if arguments.config is None and config_required:
        parser.error("--config is missing: add --config FILE.toml")
    try:
        config = load_config(config_class, arguments.config, arguments.overrides)
    except ConfigError as error:
        exit_with_usage_error(name, str(error))
    if arguments.print_config:
        sys.stdout.write(to_toml(config))
        parser.exit(0)
    return config, arguments


def _add_shorthands(parser: argparse.ArgumentParser, shorthands: Sequence[Shorthand]) -> None:
    if shorthands:
        group = parser.add_argument_group("shorthands for --set")
        for name, metavar, override, text in shorthands:
            options = {} if metavar is None else {"metavar": metavar}
            add_shorthand(group, name, override, help=text, **options)


def add_shorthand(parser: Any, name: str, *overrides: str, **options: Any) -> None:
    """Add an argument that stands for `--set` overrides, so that --print-config shows its effect.

    Args:
        parser: a parser or a group of arguments.
        name: name of the argument.
        overrides: each `section.key=value`; {text} in it is the value of the argument as typed, {string} the same as a
            TOML string.
        options: those of `ArgumentParser.add_argument`. An argument without metavar is a flag.
    """
    if "metavar" not in options:
        options["nargs"] = 0
    parser.add_argument(name, action=_Shorthand, const=overrides, **options)


class _Shorthand(argparse.Action):
    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        add_overrides(namespace, *(text.format(text=values, string=toml_string(values)) for text in self.const))


def add_overrides(namespace: argparse.Namespace, *overrides: str) -> None:
    """Add overrides as if given by `--set`."""
    namespace.overrides = [*namespace.overrides, *overrides]  # a new list, because the first one is the default


def toml_string(text: str) -> str:
    """Format a basic string of TOML. JSON differs in one character."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


class _PrintSchema(argparse.Action):
    """Prints the schema during parsing, so that no other argument is required."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        sys.stdout.write(json_schema(self.const) + "\n")
        parser.exit(0)
