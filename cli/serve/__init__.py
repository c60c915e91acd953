"""``diffusionlm-serve``: a server with OpenAI's API. The arguments of the command."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from typing import Any

from cli.arguments import add_overrides, add_shorthand, parse_command, toml_string
from cli.entry import exit_with_usage_error, friendly_errors, usage_errors
from config.serving.server import ServeConfig

NAME = "diffusionlm-serve"

EXAMPLE = f"""  {NAME} --model runs/quickstart
  {NAME} --model DIR --host 0.0.0.0 --api-keys-file keys.txt --cache-memory 8GiB
  {NAME} --model DIR --adapter sql=adapters/sql --adapter chat=adapters/chat
  {NAME} --config config/resources/serve.toml
  curl http://127.0.0.1:8000/v1/completions -H "Content-Type: application/json" -d '{{"prompt": "def "}}'"""

_PACKAGES = ("starlette", "uvicorn")

_SHORTHANDS = (
    ("model", "DIR", "model.path={string}", "model directory, checkpoint or run, or org/name on the Hub"),
    ("host", "ADDRESS", "serve.host={string}", "address to listen at; 127.0.0.1 is this machine only"),
    ("port", "N", "serve.port={text}", "port to listen at"),
    ("model-name", "NAME", "serve.model_name={string}", "name of the model in requests"),
    ("api-keys-file", "FILE", "serve.api_keys_file={string}", "keys of clients, one per line"),
    ("cache-memory", "SIZE", "serve.cache_memory={string}", "memory of keys and values, such as 2GiB"),
)
"""Argument, metavar, override and help; see `add_shorthand`."""


@friendly_errors(NAME, "lower serve.cache_memory or serve.max_rows")
def main(argv: Sequence[str] | None = None) -> None:
    config, _ = parse_command(
        ServeConfig,
        name=NAME,
        description="Serve a masked diffusion language model with OpenAI's API.",
        example=EXAMPLE,
        config_required=False,
        add_arguments=_add_shorthands,
        argv=argv,
    )
    if config.model.path is None:
        exit_with_usage_error(NAME, "no model given: add --model DIR, or path to [model] of the config")
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        exit_with_usage_error(
            NAME,
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed: add them with uv sync "
            f"--extra serve, or run uv run --extra serve {NAME}",
        )
    # Imported here, so that --help and config errors do not wait for them.
    from cli.serve.preparation import prepare_server

    with usage_errors(NAME):
        prepared = prepare_server(config)
    from cli.serve.session import serve

    serve(prepared)


def _add_shorthands(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(adapters=[])
    group = parser.add_argument_group("shorthands for --set")
    for name, metavar, override, text in _SHORTHANDS:
        add_shorthand(group, f"--{name}", override, metavar=metavar, help=text)
    group.add_argument(
        "--adapter",
        metavar="NAME=DIR",
        action=_AdapterAction,
        help="serve this PEFT adapter (LoRA) under a name of its own; repeatable",
    )


class _AdapterAction(argparse.Action):
    """Append an adapter; together they replace those of the config."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        name, separator, path = values.partition("=")
        if not (name and separator and path):
            parser.error(f"argument --adapter: {values!r} must be NAME=DIR")
        namespace.adapters = [*namespace.adapters, f"{{name={toml_string(name)}, path={toml_string(path)}}}"]
        add_overrides(namespace, f"adapters=[{', '.join(namespace.adapters)}]")
