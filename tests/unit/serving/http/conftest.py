"""A server with a tiny random model, at a real socket of this machine, shared by the tests of a module."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import openai
import pytest
import torch

from config.generation import GenerationConfig
from config.serving.server import ServeSection
from diffusionlm.checkpoints.adapter_files import read_adapter
from diffusionlm.checkpoints.base_fingerprint import BaseFingerprint
from diffusionlm.inference.request_builder import suppress_ids_without_text
from diffusionlm.models.row_adapters import ModelAdapter
from diffusionlm.models.transformer import Transformer
from diffusionlm.serving.engine import Engine
from diffusionlm.serving.http.access import ApiKeys, bind_socket
from diffusionlm.serving.http.preparation import RequestPreparer
from diffusionlm.serving.http.server import ApiServer
from diffusionlm.serving.http.service import Service
from diffusionlm.vision.processor import ImageProcessor
from tests.conftest import MakeModel
from tests.image_chats import MODEL_KEYS, PROCESSOR, TOKENIZER
from tokenizer import CHAT_TEMPLATES, Tokenizer, train_bpe

TEXT = "the cat sat on the mat. the dog sat on the cat, and the mat was flat.\n" * 4
NAME = "tiny"


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@dataclass(frozen=True)
class RunningServer:
    """A server, and what it was made of."""

    url: str
    port: int
    service: Service
    engine: Engine
    model: Transformer
    tokenizer: Tokenizer
    server: ApiServer
    thread: threading.Thread

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], Any]:
        """Send a request; returns status, headers and the JSON of the response."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
        response = connection.getresponse()
        text = response.read()
        connection.close()
        is_json = response.headers.get("content-type", "").startswith("application/json")
        return (
            response.status,
            {key.lower(): value for key, value in response.headers.items()},
            (json.loads(text) if is_json and text else text.decode()),
        )

    def events(self, path: str, body: Any) -> list[Any]:
        """The events of a stream, as JSON; the last one is "[DONE]"."""
        status, headers, text = self.request("POST", path, {**body, "stream": True})
        assert status == 200 and headers["content-type"].startswith("text/event-stream"), text
        events = text.split("\n\n")
        assert events.pop() == "" and all(event.startswith("data: ") for event in events)
        return [event[6:] if event == "data: [DONE]" else json.loads(event[6:]) for event in events]

    @property
    def connections(self) -> set[Any]:
        """Open connections, each a `GuardedProtocol`."""
        return self.server._server.server_state.connections

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    def wait_until_idle(self) -> None:
        """Wait until nobody is served, then check that no page is lost."""
        wait_until(lambda: not self.service.num_active)
        wait_until(lambda: not self.engine.status.num_running + self.engine.status.num_waiting)
        assert self.engine.status.num_owned_pages == 0


StartServer = Callable[..., RunningServer]


def decoding_config(server: RunningServer, **values: Any) -> GenerationConfig:
    """The config of decoding that a request with these settings has."""
    settings = GenerationConfig.model_validate({"stop_token_ids": (), **values})
    return suppress_ids_without_text(settings, server.tokenizer, server.model.config)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of the guard of all tests: sockets connect within this machine."""
    connect = socket.socket.connect

    def guard(self: socket.socket, address: Any) -> Any:
        assert self.family == socket.AF_UNIX or address[0] in ("127.0.0.1", "::1"), address
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guard)


@pytest.fixture(scope="session")
def words() -> Tokenizer:
    tokenizer = train_bpe([TEXT], vocab_size=300)
    return tokenizer.with_chat_template(CHAT_TEMPLATES["chatml"])


@pytest.fixture(scope="session")
def served_model(tiny_model: MakeModel, words: Tokenizer) -> Transformer:
    return tiny_model(
        torch.float32,
        vocab_size=words.vocab_size,
        mask_token_id=words.mask_token_id,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.eos_token_id,
        block_length=4,
        max_position_embeddings=256,
    ).eval()


@pytest.fixture(scope="module")
def start_server(served_model: Transformer, words: Tokenizer) -> Iterator[StartServer]:
    """``start_server(model=..., template=..., keys=..., **limits)``."""
    servers: list[RunningServer] = []

    def start(
        model: Transformer = served_model,
        *,
        tokenizer: Tokenizer = words,
        processor: ImageProcessor | None = None,
        template: Any = CHAT_TEMPLATES["chatml"],
        keys: tuple[str, ...] = (),
        generation: GenerationConfig | None = None,
        adapters: Mapping[str, ModelAdapter] | None = None,
        clock: Callable[[], float] = time.monotonic,
        **values: Any,
    ) -> RunningServer:
        limits = ServeSection.model_validate({"port": 0, "cache_memory": 1 << 20, "log_requests": False, **values})
        config = generation or GenerationConfig(stop_token_ids=())
        names = [NAME, *(adapters or ())]
        preparer = RequestPreparer(model.config, tokenizer, template, config, limits, names, processor)
        engine = Engine(model, limits, adapters=adapters, clock=clock)
        read = partial(read_adapter, model, get_fingerprint=cache(partial(BaseFingerprint.from_model, model)))
        service = Service(engine, preparer, limits, ApiKeys(keys) if keys else None, read)
        is_ready = threading.Event()
        server, bound = ApiServer(service, is_ready.set), bind_socket("127.0.0.1", 0)
        port = bound.getsockname()[1]
        thread = threading.Thread(target=server.run, args=(bound,), daemon=True)
        thread.start()
        assert is_ready.wait(20)
        servers.append(
            RunningServer(f"http://127.0.0.1:{port}/v1", port, service, engine, model, tokenizer, server, thread)
        )
        return servers[-1]

    yield start
    for running in servers:
        running.server.stop()
    for running in servers:
        running.thread.join(30)
        assert not running.thread.is_alive() and running.engine.status.num_owned_pages == 0


@pytest.fixture(scope="session")
def image_model(tiny_model: MakeModel) -> Transformer:
    """A model that reads images."""
    return tiny_model(torch.float32, block_length=4, **MODEL_KEYS).eval()


@pytest.fixture(scope="module")
def image_server(start_server: StartServer, image_model: Transformer) -> RunningServer:
    return start_server(image_model, tokenizer=TOKENIZER, processor=PROCESSOR, deterministic=True)


@pytest.fixture(scope="module")
def server(start_server: StartServer) -> RunningServer:
    return start_server()


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url, api_key="none", _strict_response_validation=True, max_retries=0)
