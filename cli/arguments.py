"""Arguments of the commands with a config: ``--config``, ``--set`` and the like."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from cli.entry import build_parser, path_argument, print_error
from config.base import Section
from config.dump import to_toml
from config.load import ConfigError, json_schema, load_config
from files.usage_error import UsageError

T = TypeVar("T", bound=Section)


class Shorthand(NamedTuple):
    """An argument that stands for an override of the config, so that --print-config shows its effect."""

    name: str
    metavar: str | None
    """None: a flag."""
    override: str
    """`section.key=value`; {text} in it is the value of the argument as typed, {string} the same as a TOML string."""
    help: str


MODEL = Shorthand("--model", "DIR", "model.path={string}", "model directory, checkpoint or run, or org/name on the Hub")
ADAPTER = Shorthand("--adapter", "DIR", "model.adapter={string}", "PEFT adapter (LoRA) of the model")


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
        description, example: first and last text of `--help`.
        config_required: `--config` must be given. False: the defaults alone are a config.
        add_arguments: adds arguments of the command's own. Its default for `list_overrides` is a function of the parsed
            arguments, whose overrides give way to `--set` and to shorthands, and whose ValueError is a usage error.
        shorthands: arguments that stand for overrides.
        argv: arguments. None: those of the process.

    Returns:
        The config and the parsed arguments. Exits with 2 and a message if the config is invalid.
    """
    parser = build_parser(name, description, example)
    _add_config_arguments(parser)
    if add_arguments is not None:
        add_arguments(parser)
    group = parser.add_argument_group("shorthands for --set") if shorthands else parser
    for option, metavar, override, text in shorthands:
        options: dict[str, Any] = {"nargs": 0} if metavar is None else {"metavar": metavar}
        group.add_argument(option, action=_Override, const=override, help=text, **options)
    arguments = parser.parse_args(argv)
    if arguments.schema:
        sys.stdout.write(json_schema(config_class) + "\n")
        parser.exit(0)
    if arguments.config is None and config_required:
        parser.error("--config is missing: add --config FILE.toml")
    try:
        overrides = [*arguments.list_overrides(arguments), *arguments.overrides]
        config = load_config(config_class, arguments.config, overrides)
    except ConfigError as error:
        print_error(name, str(error))
        raise SystemExit(2) from None
    except ValueError as error:
        parser.error(str(error))
    if arguments.print_config:
        sys.stdout.write(to_toml(config))
        parser.exit(0)
    return config, arguments


def _add_config_arguments(parser: argparse.ArgumentParser) -> None:
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
    text = "print the JSON schema of the config, and exit"
    parser.add_argument("--schema", action="store_true", help=text)
    parser.set_defaults(list_overrides=lambda _: ())


def require_model(path: Path | None) -> Path:
    """Return the path of the model.

    Raises:
        UsageError: there is none.
    """
    if path is None:
        raise UsageError("no model: add --model DIR, or path to [model] of the config")
    return path


class _Override(argparse.Action):
    """Adds an override as if given by --set."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        text = self.const.format(text=values, string=toml_string(values))
        namespace.overrides = [*namespace.overrides, text]  # a new list, because the first one is the default


def toml_string(text: str) -> str:
    """Format a basic string of TOML. JSON differs in one character."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_strings(texts: Iterable[str]) -> str:
    """Format an array of strings of TOML."""
    return f"[{', '.join(map(toml_string, texts))}]"


def positive_int(text: str) -> int:
    """The number of an argument.

    Raises:
        ArgumentTypeError: it is not a positive integer.
    """
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)
