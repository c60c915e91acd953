"""The shorthands of ``diffusionlm-eval`` for ``--set``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, get_args

from cli.arguments import add_overrides, add_shorthand, toml_string
from config.evaluation.presets import describe_kind, get_preset
from config.evaluation.tasks import AnyTask
from diffusionlm.evaluation.tasks.perplexity import PerplexityTask
from files.toml_text import parse_toml

TASK_KINDS = tuple(kind.model_fields["kind"].default for kind in get_args(AnyTask))
PERPLEXITY = PerplexityTask.model_fields["kind"].default


def add_eval_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that stand for keys of the config, such as --task and --vary."""
    parser.set_defaults(models=[], task=None, data=None, limit=None)
    group = parser.add_argument_group("shorthands for --set")
    _add(group, "--model", _override_model, "DIR", "model, checkpoint or run, or org/name on the Hub; repeatable")
    add_shorthand(group, "--adapter", "model.adapter={string}", metavar="DIR", help="PEFT adapter (LoRA) of the model")
    _add(group, "--task", _override_task, "KIND", "evaluate a task", choices=TASK_KINDS)
    _add(
        group,
        "--preset",
        _override_preset,
        "NAME",
        "evaluate a task by a published protocol",
    )
    _add(group, "--data", _override_data, "FILE", "items of the task; without one a file, directory or glob of text")
    text = "file of the examples before each question"
    add_shorthand(group, "--shots-data", "tasks.0.prompt.shots_data={string}", metavar="FILE", help=text)
    _add(group, "--vary", _override_vary, "SECTION.KEY=VALUE,VALUE...", "compare these values; repeatable")
    _add(group, "--limit", _override_limit, "N", "evaluate a random subset of N items")
    add_shorthand(group, "--run-code", "tasks.0.run_code=true", help="allow to execute code that the model has written")
    add_shorthand(group, "--output", "output.directory={string}", metavar="DIR", help="folder of the results of tasks")
    add_shorthand(group, "--json", 'output.format="json"', help="one JSON object")


Override = Callable[[argparse.Namespace, str], None]


def _add(group: Any, name: str, override: Override, metavar: str, text: str, **options: Any) -> None:
    """Add an argument whose overrides depend on other arguments."""
    group.add_argument(name, action=_ShorthandOfOthers, const=override, metavar=metavar, help=text, **options)


class _ShorthandOfOthers(argparse.Action):
    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        try:
            self.const(namespace, values)
        except ValueError as error:
            parser.error(f"{option_string}: {error}")


def _override_model(namespace: argparse.Namespace, path: str) -> None:
    """The first model is that of [model]; from the second on each is a variant."""
    if path in namespace.models:
        raise ValueError(f"{path} is named twice: remove one of them")
    namespace.models = [*namespace.models, path]
    if len(namespace.models) == 1:
        add_overrides(namespace, f"model.path={toml_string(path)}")
    for index, model in enumerate(namespace.models if len(namespace.models) > 1 else ()):
        add_overrides(namespace, f"variants.{index}.model={toml_string(model)}")


def _override_task(namespace: argparse.Namespace, kind: str) -> None:
    namespace.task = kind
    _check_limit(namespace)
    namespace.overrides = [text for text in namespace.overrides if text not in _text_overrides(namespace.data)]
    add_overrides(namespace, f"tasks.0.kind={toml_string(kind)}")
    if namespace.data is not None:
        add_overrides(namespace, f"tasks.0.data={toml_string(namespace.data)}")


def _override_preset(namespace: argparse.Namespace, name: str) -> None:
    kind = get_preset(name).kind
    if kind is None:
        raise ValueError(f"{name}: {describe_kind(name)}")
    _override_task(namespace, kind)
    add_overrides(namespace, f"tasks.0.preset={toml_string(name)}")


def _override_limit(namespace: argparse.Namespace, number: str) -> None:
    namespace.limit = number
    _check_limit(namespace)
    add_overrides(namespace, f"tasks.0.limit={number}")


def _check_limit(namespace: argparse.Namespace) -> None:
    if namespace.limit is not None and namespace.task == PERPLEXITY:
        raise ValueError(
            f"--limit {namespace.limit} selects items, and --task {PERPLEXITY} reads a text: use --set "
            f"tasks.0.text.max_rows={namespace.limit}"
        )


def _override_data(namespace: argparse.Namespace, path: str) -> None:
    namespace.data = path
    if namespace.task is None:
        add_overrides(namespace, *_text_overrides(path))
    else:
        add_overrides(namespace, f"tasks.0.data={toml_string(path)}")


def _text_overrides(path: str | None) -> tuple[str, ...]:
    """What --data overrides without --task."""
    if path is None:
        return ()
    return "data.source=files", f"data.source.paths=[{toml_string(path)}]", 'data.split="all"'


def _override_vary(namespace: argparse.Namespace, text: str) -> None:
    key, equals, values = text.partition("=")
    if not equals or not key.strip() or not values.strip():
        raise ValueError(f"{text!r}: expected SECTION.KEY=VALUE,VALUE...")
    array = ", ".join(_to_toml_value(value.strip()) for value in values.split(","))
    add_overrides(namespace, f"vary.{toml_string(key.strip())}=[{array}]")


def _to_toml_value(text: str) -> str:
    """A number or a boolean as it is, any other text as a string."""
    try:
        table = parse_toml(f"v={text}")
    except ValueError:
        return toml_string(text)
    return text if list(table) == ["v"] else toml_string(text)
