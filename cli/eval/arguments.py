"""The arguments of ``diffusionlm-eval`` that stand for keys of the config, depending on each other."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import get_args

from cli.arguments import toml_string, toml_strings
from config.evaluation.presets import describe_kind, get_preset
from config.evaluation.tasks import AnyTask
from diffusionlm.evaluation.tasks.perplexity import PerplexityTask
from files.toml_text import parse_toml

TASK_KINDS = tuple(kind.model_fields["kind"].default for kind in get_args(AnyTask))
PERPLEXITY = PerplexityTask.model_fields["kind"].default


def add_eval_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model, the task and what is compared."""
    parser.set_defaults(list_overrides=_list_overrides)
    group = parser.add_argument_group("what is evaluated")
    for name, metavar, text in (
        ("--model", "DIR", "model, checkpoint or run, or org/name on the Hub; repeatable"),
        ("--vary", "SECTION.KEY=VALUE,VALUE...", "compare these values; repeatable"),
    ):
        group.add_argument(name, metavar=metavar, action="append", default=[], help=text)
    group.add_argument("--task", metavar="KIND", choices=TASK_KINDS, help="evaluate a task")
    group.add_argument("--preset", metavar="NAME", help="evaluate a task by a published protocol")
    text = "items of the task; without one a file, directory or glob of text"
    group.add_argument("--data", metavar="FILE", help=text)
    group.add_argument("--limit", metavar="N", help="evaluate a random subset of N items")


def _list_overrides(arguments: argparse.Namespace) -> Iterator[str]:
    """The overrides that the arguments stand for.

    Raises:
        ValueError: an argument is wrong, or does not fit another one; names it.
    """
    yield from _list_models(arguments.model)
    kind, data = arguments.task, arguments.data
    if arguments.preset is not None:
        kind = get_preset(arguments.preset).kind
        if kind is None:
            raise ValueError(f"--preset {arguments.preset}: {describe_kind(arguments.preset)}")
        yield f"tasks.0.preset={toml_string(arguments.preset)}"
    if kind is not None:
        yield f"tasks.0.kind={toml_string(kind)}"
    if data is not None and kind is not None:
        yield f"tasks.0.data={toml_string(data)}"
    elif data is not None:
        yield from ("data.source=files", f"data.source.paths={toml_strings([data])}", 'data.split="all"')
    if arguments.limit is not None:
        if kind == PERPLEXITY:
            raise ValueError(
                f"--limit {arguments.limit} selects items, and --task {kind} reads a text: use --set "
                f"tasks.0.text.max_rows={arguments.limit}"
            )
        yield f"tasks.0.limit={arguments.limit}"
    for text in arguments.vary:
        key, _, values = text.partition("=")
        if not key.strip() or not values.strip():
            raise ValueError(f"--vary {text}: expected SECTION.KEY=VALUE,VALUE...")
        array = ", ".join(_to_toml_value(value.strip()) for value in values.split(","))
        yield f"vary.{toml_string(key.strip())}=[{array}]"


def _list_models(models: Sequence[str]) -> Iterator[str]:
    """The first model is that of [model]; of several each is a variant."""
    if len(set(models)) < len(models):
        raise ValueError(f"--model {max(models, key=models.count)} is named twice: remove one of them")
    yield from (f"model.path={toml_string(model)}" for model in models[:1])
    yield from (
        f"variants.{index}.model={toml_string(model)}" for index, model in enumerate(models if len(models) > 1 else [])
    )


def _to_toml_value(text: str) -> str:
    """A number or a boolean as it is, any other text as a string."""
    try:
        table = parse_toml(f"v={text}")
    except ValueError:
        return toml_string(text)
    return text if list(table) == ["v"] else toml_string(text)
