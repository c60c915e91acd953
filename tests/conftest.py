"""What all tests share: tiny models, torch's global state put back, and no network."""

from __future__ import annotations

import gc
import os
import re
import socket
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

# Before any test imports `datasets` or `transformers`: they read these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

# Before torch is imported. This process, the workers of xdist and the processes that tests start would each compile
# every module again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
if sys.dont_write_bytecode:
    sys.dont_write_bytecode = False

import pytest
import torch

# Triton decides while it is imported, as by torch's compiler: so before any test. What torch compiles for a CPU does
# not mind.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from config.load import load_config
from config.model import ModelConfig
from config.train import TrainConfig
from diffusionlm.models.init import init_weights
from diffusionlm.models.transformer import Transformer
from tests.tiny_run import write_train_config
from tokenizer import Tokenizer, train_bpe

MakeConfig = Callable[..., ModelConfig]
MakeModel = Callable[..., Transformer]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-golden", action="store_true", help="write the golden files of pages instead of comparing")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with the file of this name in ``golden/`` beside the test; ``--write-golden`` writes it.

    Of an HTML page the styles and scripts are left out.
    """

    def compare(name: str, text: str) -> None:
        path = request.path.parent / "golden" / name
        if path.suffix == ".html":
            text = re.sub(r"(?s)<style>.*?</style>\n?|<script>.*?</script>\n?", "", text)
            text = re.sub(r"\s*\n\s*", "\n", text.replace("><", ">\n<"))
        if request.config.getoption("--write-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8"), f"if this is right: pytest --write-golden {request.path}"

    return compare


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect the tests without garbage collections: nearly all objects that are made stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.fixture(autouse=True, scope="session")
def _frozen_objects() -> Iterator[None]:
    """The garbage collector traverses neither modules nor tests: each training run would spend 0.5 s on it."""
    gc.freeze()
    functions = {name: getattr(gc, name) for name in ("collect", "disable", "enable", "isenabled")}
    keep_frozen = dict.fromkeys(("freeze", "unfreeze"), lambda: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("diffusionlm.training.loop.gc", SimpleNamespace(**functions, **keep_frozen))
        yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _torch_state() -> Iterator[None]:
    """One thread and a known seed for each test; whatever it changes globally is undone."""
    dtype, threads, deterministic = (
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
    )
    state = torch.get_rng_state()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    yield
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)
    if torch.are_deterministic_algorithms_enabled() != deterministic:  # the call imports the compiler: seconds
        torch.use_deterministic_algorithms(deterministic)
    torch.set_rng_state(state)


@pytest.fixture(autouse=True)
def _default_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training in this process leaves its allocator as it was: that cannot be undone, and others measure memory."""
    monkeypatch.setattr("profiling.memory.keep_freed_memory", lambda: None)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sockets connect within this machine's file system only."""

    def guard(original: Callable[..., Any]) -> Callable[..., Any]:
        def connect(self: socket.socket, address: Any) -> Any:
            if self.family != socket.AF_UNIX:
                raise AssertionError(f"a test tried to reach {address!r} over the network")
            return original(self, address)

        return connect

    def resolve(*args: Any, **kwargs: Any) -> NoReturn:
        raise AssertionError(f"a test tried to resolve {args[:2]!r}")

    monkeypatch.setattr(socket.socket, "connect", guard(socket.socket.connect))
    monkeypatch.setattr(socket.socket, "connect_ex", guard(socket.socket.connect_ex))
    monkeypatch.setattr(socket, "getaddrinfo", resolve)


@pytest.fixture(scope="session")
def make_config() -> MakeConfig:
    """``make_config(**overrides)``: two small layers with grouped queries, and values that are no defaults."""

    def make(**overrides: Any) -> ModelConfig:
        values: dict[str, Any] = {
            "hidden_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 6,
            "intermediate_size": 40,
            "max_position_embeddings": 64,
            "rms_norm_eps": 1e-3,
            "rope_theta": 100.0,
            "vocab_size": 19,
            "mask_token_id": 18,
            "eos_token_id": 17,
            "pad_token_id": 17,
        }
        return ModelConfig(**{**values, **overrides})

    return make


@pytest.fixture(scope="session")
def tiny_model(make_config: MakeConfig) -> MakeModel:
    """``tiny_model(dtype=..., seed=..., scale=..., backend=..., **config)``: a model with no parameter at its default.

    Weights come from `init_weights`, then every parameter is moved: norm gains from one, biases and output
    projections from zero.
    """

    def make(
        dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 0.3, backend: Any = "auto", **overrides: Any
    ) -> Transformer:
        model = Transformer(make_config(**overrides), attention_backend=backend)
        init_weights(model, seed)
        generator = torch.Generator().manual_seed(seed + 1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
        return model.to(dtype)

    return make


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """270 ids: bytes, a few words, end of text and mask."""
    return train_bpe(["the cat sat on the mat and the dog sat too"] * 2, vocab_size=270)


@pytest.fixture
def train_config(tmp_path: Path) -> TrainConfig:
    """Eight steps of masked diffusion over short paragraphs, packed into rows of 16."""
    return load_config(TrainConfig, write_train_config(tmp_path))


@pytest.fixture
def config(train_config: TrainConfig) -> TrainConfig:
    """The tiny run, where tests have no other config."""
    return train_config
