"""``diffusionlm-serve``: a server with OpenAI's API."""

from __future__ import annotations

import argparse
import gc
import logging
import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import TYPE_CHECKING

from cli.arguments import MODEL, Shorthand, parse_command, require_model, toml_string
from cli.entry import friendly_errors, require_extra, usage_errors
from config.serving.server import ServeConfig
from files.terminal_text import print_line

if TYPE_CHECKING:
    import socket

    from diffusionlm.serving.http.access import ApiKeys
    from diffusionlm.serving.http.preparation import RequestPreparer

NAME = "diffusionlm-serve"
EXTRA = ("serve", "starlette", "uvicorn")
"""An extra and its packages."""

EXAMPLE = f"""  {NAME} --model runs/quickstart
  {NAME} --model DIR --host 0.0.0.0 --api-keys-file keys.txt --cache-memory 8GiB
  {NAME} --model DIR --adapter sql=adapters/sql --adapter chat=adapters/chat
  {NAME} --config config/resources/serve.toml
  curl http://127.0.0.1:8000/v1/completions -H "Content-Type: application/json" -d '{{"prompt": "def "}}'"""

_SHORTHANDS = (
    MODEL,
    Shorthand("--host", "ADDRESS", "serve.host={string}", "address to listen at; 127.0.0.1 is this machine only"),
    Shorthand("--port", "N", "serve.port={text}", "port to listen at"),
    Shorthand("--model-name", "NAME", "serve.model_name={string}", "name of the model in requests"),
    Shorthand("--api-keys-file", "FILE", "serve.api_keys_file={string}", "keys of clients, one per line"),
    Shorthand("--chat-template", "NAME|FILE", "serve.chat_template={string}", "built-in chat template, or Jinja file"),
    Shorthand("--tensor-parallel", "N", "serve.tensor_parallel={text}", "processes, or GPUs, that divide the model"),
    Shorthand("--cache-memory", "SIZE", "serve.cache_memory={string}", "memory of keys and values, such as 2GiB"),
)

_SWITCH_SECONDS = 0.0005
"""Operators of torch release the interpreter's lock. The thread of the model would get it back after 5 ms, Python's
default, whenever another thread formats responses."""


@friendly_errors(NAME, "lower serve.cache_memory or serve.max_num_batched_tokens")
def main(argv: Sequence[str] | None = None) -> None:
    config, _ = parse_command(
        ServeConfig,
        name=NAME,
        description="Serve a masked diffusion language model with OpenAI's API.",
        example=EXAMPLE,
        config_required=False,
        add_arguments=_add_arguments,
        shorthands=_SHORTHANDS,
        argv=argv,
    )
    require_model(config.model.path)
    require_extra(*EXTRA)
    with usage_errors():
        preparer, keys, bound = prepare(config)
    serve(config, preparer, keys, bound)


def prepare(config: ServeConfig) -> tuple[RequestPreparer, ApiKeys | None, socket.socket]:
    """Read the files of the model, except the weights, and the keys, and take the address.

    Returns:
        What makes requests for the model, the keys of clients, and a socket that does not listen yet.

    Raises:
        ValueError: a file is wrong, the settings do not fit the model, or the address is in use.
        OSError: a file cannot be read.
    """
    # Imported here, so that --help and config errors do not wait for torch.
    from cli.infer.inputs import describe_model
    from diffusionlm.serving.http.access import ApiKeys, bind_socket
    from diffusionlm.serving.http.preparation import RequestPreparer

    path, limits = config.model.path, config.serve
    assert path is not None
    keys = None if limits.api_keys_file is None else ApiKeys.read(limits.api_keys_file)
    if limits.adapter_directory is not None and not limits.adapter_directory.is_dir():
        raise ValueError(f"serve.adapter_directory = {limits.adapter_directory} is no directory: create it")
    names = (limits.model_name or path.resolve().name, *(adapter.name for adapter in config.adapters))
    if names[0] in names[1:]:
        raise ValueError(
            f"the model and an adapter are both named {names[0]!r}: set serve.model_name, or rename the adapter"
        )
    adapter_paths = [adapter.path for adapter in config.adapters]
    model, template, processor = describe_model(config.model, limits.chat_template, adapter_paths)
    preparer = RequestPreparer(model.config, model.tokenizer, template, config.generation, limits, names, processor)
    return preparer, keys, bind_socket(limits.host, limits.port)


def serve(config: ServeConfig, preparer: RequestPreparer, keys: ApiKeys | None, bound: socket.socket) -> None:
    """Load the model, and serve until SIGTERM or Ctrl-C.

    Raises:
        ValueError: the weights are damaged, or the memory does not hold a page.
    """
    from diffusionlm.checkpoints.adapter_files import read_adapter
    from diffusionlm.checkpoints.base_fingerprint import BaseFingerprint
    from diffusionlm.checkpoints.huggingface import load_configured_model
    from diffusionlm.serving.engine import Engine
    from diffusionlm.serving.http.access import format_url, is_loopback
    from diffusionlm.serving.http.server import ApiServer
    from diffusionlm.serving.http.service import Service
    from profiling.torch_setup import select_device, select_dtype

    sys.setswitchinterval(_SWITCH_SECONDS)
    _configure_log()
    logger, limits = logging.getLogger("diffusionlm.serve"), config.serve
    (num_files, most_files), num_needed = resource.getrlimit(resource.RLIMIT_NOFILE), limits.max_connections + 1024
    with suppress(ValueError):  # macOS allows fewer than it says
        if 0 <= num_files < num_needed:  # a connection is an open file
            most = num_needed if most_files == resource.RLIM_INFINITY else min(num_needed, most_files)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most_files))
    device = None
    if limits.tensor_parallel > 1:  # each process copies its part from the files
        device = select_device(config.model.device, "model.device")
        section = {"device": "cpu", "dtype": select_dtype(config.model.dtype, device)}
        config = config.model_copy(update={"model": config.model.model_copy(update=section)})
    model = load_configured_model(config.model)
    # The fingerprint reads all weights, so it is computed at most once.
    read = partial(read_adapter, model, get_fingerprint=cache(partial(BaseFingerprint.from_model, model)))
    adapters = {adapter.name: read(adapter.path) for adapter in config.adapters}
    engine = Engine(model, limits, adapters=adapters, device=device)
    gc.freeze()  # collections that a large constraint causes hold up the decoding: let them skip what stays
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    url = format_url(limits.host, bound.getsockname()[1])
    line = (
        f"serving {' and '.join(preparer.names)} ({num_parameters:,} parameters, {engine.status.num_pages:,} cache "
        f"pages) at {url}/v1"
    )
    if keys is None and not is_loopback(limits.host):
        logger.warning("everybody who reaches %s can use this server: set serve.api_keys_file", limits.host)
    service = Service(engine, preparer, limits, keys, read)
    ApiServer(service, partial(print_line, line)).run(bound)


def _configure_log() -> None:
    """Write the log of the server to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("diffusionlm")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(list_overrides=_list_overrides)
    text = "serve this PEFT adapter (LoRA) under a name of its own; repeatable"
    parser.add_argument("--adapter", metavar="NAME=DIR", action="append", default=[], help=text)


def _list_overrides(arguments: argparse.Namespace) -> Iterator[str]:
    """The adapters replace those of the config."""
    tables = []
    for text in arguments.adapter:
        name, _, path = text.partition("=")
        if not (name and path):
            raise ValueError(f"argument --adapter: {text!r} must be NAME=DIR")
        tables.append(f"{{name={toml_string(name)}, path={toml_string(path)}}}")
    if tables:
        yield f"adapters=[{', '.join(tables)}]"
