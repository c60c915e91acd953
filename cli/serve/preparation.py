"""Everything of a server that is checked before the model is loaded. No torch, starlette or uvicorn."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from config.serving.server import ServeConfig
from diffusionlm.checkpoints.adapter_config import read_adapter_config
from diffusionlm.checkpoints.model_files import ModelDescription, check_weight_files, read_model_description
from diffusionlm.inference.settings import resolve_settings
from diffusionlm.serving.http.keys import ApiKeys
from diffusionlm.serving.http.listening import bind_socket
from tokenizer import CHAT_TEMPLATES, ChatTemplate, load_chat_template


@dataclass(frozen=True)
class PreparedServer:
    """A server whose config fits its files."""

    config: ServeConfig
    model: ModelDescription
    template: ChatTemplate | None
    """Of chats; None: the checkpoint has none."""
    keys: ApiKeys | None
    names: tuple[str, ...]
    """Names in requests: of the model, then of its adapters."""
    bound: socket.socket
    """Has the address, and does not listen yet."""


def prepare_server(config: ServeConfig) -> PreparedServer:
    """Read the files of the model, except the weights, and the keys, and take the address.

    Raises:
        ValueError: one of them is wrong, the settings do not fit the model, or the address is in use.
        OSError: a file cannot be read.
    """
    path, serve = config.model.path, config.serve
    assert path is not None
    keys = None if serve.api_keys_file is None else ApiKeys.read(serve.api_keys_file)
    model = read_model_description(path)
    if serve.chat_template is not None:
        template: ChatTemplate | None = CHAT_TEMPLATES[serve.chat_template]
    else:
        template = load_chat_template(path) or load_chat_template(model.directory)
    resolve_settings(config.generation, model.config)
    check_weight_files(path)
    adapters = [adapter.path for adapter in config.adapters]
    for adapter in [*adapters, config.model.adapter]:
        if adapter is not None:
            read_adapter_config(adapter)
    name = serve.model_name or path.resolve().name
    names = [adapter.name for adapter in config.adapters]
    if name in names:
        raise ValueError(
            f"the model and an adapter are both named {name!r}: set serve.model_name, or rename the adapter"
        )
    return PreparedServer(config, model, template, keys, (name, *names), bind_socket(serve.host, serve.port))
