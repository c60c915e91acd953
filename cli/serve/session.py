"""One call of ``diffusionlm-serve``: load the model, and serve it until a signal arrives."""

from __future__ import annotations

import gc
import logging
import sys
from functools import partial

from cli.serve.preparation import PreparedServer
from config.serving.server import ServeSection
from diffusionlm.checkpoints.adapter_files import read_adapter
from diffusionlm.checkpoints.huggingface import load_configured_model
from diffusionlm.serving.engine import Engine
from diffusionlm.serving.http.listening import fit_connections, format_url, is_loopback
from diffusionlm.serving.http.preparation import RequestPreparer
from diffusionlm.serving.http.server import ApiServer
from diffusionlm.serving.http.service import Service
from files.terminal_text import print_line

_SWITCH_SECONDS = 0.0005
"""Operators of torch release the interpreter's lock. The thread of the model would get it back after 5 ms, Python's
default, whenever another thread formats responses."""
LOG_FORMAT = "%(asctime)s %(levelname)s %(message)s"


def serve(prepared: PreparedServer) -> None:
    """Serve until SIGTERM or Ctrl-C.

    Raises:
        ValueError: the weights are damaged, or the memory does not hold a page.
    """
    config = prepared.config
    sys.setswitchinterval(_SWITCH_SECONDS)
    _configure_log()
    limits = _fit_limits(config.serve)
    preparer = RequestPreparer(
        prepared.model.config, prepared.model.tokenizer, prepared.template, config.generation, limits, prepared.names
    )
    model = load_configured_model(config.model)
    engine = Engine(
        model,
        cache_bytes=limits.cache_memory,
        max_requests=limits.max_requests,
        max_waiting=limits.max_waiting,
        max_rows=limits.max_rows,
        page_size=limits.page_size,
        has_prefix_cache=limits.prefix_cache,
        deterministic=limits.deterministic,
        adapters={adapter.name: read_adapter(model, adapter.path) for adapter in config.adapters},
    )
    gc.freeze()  # collections that a large constraint causes hold up the decoding: let them skip what stays
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    url = format_url(limits.host, prepared.bound.getsockname()[1])
    line = (
        f"serving {' and '.join(prepared.names)} ({num_parameters:,} parameters, {engine.status.num_pages:,} cache "
        f"pages) at {url}/v1"
    )
    if prepared.keys is None and not is_loopback(limits.host):
        logging.getLogger(__name__).warning(
            "everybody who reaches %s can use this server: set serve.api_keys_file", limits.host
        )
    ApiServer(Service(engine, preparer, limits, prepared.keys), partial(print_line, line)).run(prepared.bound)


def _fit_limits(limits: ServeSection) -> ServeSection:
    """Lower the number of connections if the process may not have so many."""
    num_connections = fit_connections(limits.max_connections)
    if num_connections < limits.max_connections:
        logging.getLogger(__name__).warning(
            "serve.max_connections = %d is %d here, because the process may not open more files: raise ulimit -n",
            limits.max_connections,
            num_connections,
        )
    return limits.model_copy(update={"max_connections": num_connections})


def _configure_log() -> None:
    """Write the log of the server to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    logger = logging.getLogger("diffusionlm")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
