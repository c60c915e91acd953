"""Arguments and the config of ``diffusionlm-serve``."""

from __future__ import annotations

import asyncio
import importlib.util
import socket
import tomllib
from pathlib import Path

import pytest

from cli.infer.inputs import describe_model
from cli.serve import main, prepare, serve
from config.load import ConfigError, load_config
from config.serving.server import ServeConfig
from diffusionlm.checkpoints.base_fingerprint import BaseFingerprint
from diffusionlm.checkpoints.huggingface import load_model
from diffusionlm.models.row_adapters import share_weights
from diffusionlm.models.transformer import Transformer
from diffusionlm.serving.http.server import ApiServer
from diffusionlm.vision.processor import save_processor
from tests.image_chats import MODEL_KEYS, PROCESSOR, TOKENIZER
from tests.unit.cli.conftest import Fails, MakeDirectory
from tests.unit.serving.test_adapters import write_adapter
from tokenizer import CHAT_TEMPLATES, ChatTemplate


def test_arguments_are_overrides(fails: Fails) -> None:
    arguments = (
        "--model", "m", "--host", "::1", "--port", "0", "--cache-memory", "1.5GiB", "--model-name", "x",
        "--api-keys-file", "k", "--adapter", "a=b=c", "--adapter", "d=e", "--chat-template", "t.jinja",
    )  # fmt: skip
    printed = tomllib.loads(fails(main, *arguments, "--print-config", code=0))
    assert printed["model"]["path"] == "m" and printed["serve"] | {
        "host": "::1", "port": 0, "cache_memory": 3 << 29, "model_name": "x", "api_keys_file": "k",
        "chat_template": "t.jinja",
    } == printed["serve"]  # fmt: skip
    assert printed["adapters"] == [{"name": "a", "path": "b=c"}, {"name": "d", "path": "e"}]


def test_a_chat_template_of_a_name_or_a_file(make_directory: MakeDirectory, tmp_path: Path) -> None:
    """A file's special tokens are those of the model's tokenizer."""
    model = make_directory()
    source = "{{ messages[0].content }}{{ eos_token }}"
    (tmp_path / "t.jinja").write_text(source, encoding="utf-8")
    for name, expected in (("qwen3", CHAT_TEMPLATES["qwen3"]), (str(tmp_path / "t.jinja"), None)):
        config = load_config(ServeConfig, None, [f"model.path='{model}'", f"serve.chat_template='{name}'"])
        _, template, _ = describe_model(config.model, config.serve.chat_template)
        assert template == (expected or ChatTemplate(source, {"eos_token": "<|endoftext|>"}))


def test_a_model_with_vision_reads_images_as_its_directory_says(fails: Fails, make_directory: MakeDirectory) -> None:
    model = make_directory(TOKENIZER, **MODEL_KEYS)
    assert "has no preprocessor_config.json" in fails(main, "--model", model)
    save_processor(PROCESSOR, model)
    for path, has_vision in ((model, True), (make_directory(), False)):
        preparer, _, bound = prepare(load_config(ServeConfig, None, [f"model.path='{path}'", "serve.port=0"]))
        bound.close()
        assert preparer.context.has_vision == has_vision
        assert preparer._processor == (PROCESSOR if has_vision else None)


@pytest.mark.parametrize(("text", "size"), [("12", 12), ("2kB", 2000), ("1.5 GiB", 3 << 29), ("1TB", 10**12)])
def test_sizes(text: str, size: int) -> None:
    assert load_config(ServeConfig, None, [f'serve.cache_memory="{text}"']).serve.cache_memory == size


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["serve.cache_memory=2XB"], "could not interpret byte unit: XB"),
        (["serve.cache_memory=0"], "greater than 0"),
        (["serve.port=70000"], "at most 65535"),
        (["model.attention_backend=flex"], "has no cached form"),
        (["generation.max_new_tokens=3"], "serve.default_max_tokens"),
        (['adapters=[{name="a", path="b"}, {name="a", path="c"}]'], "given twice"),
        (['adapters=[{name="a", path="b"}]', "model.path=m", "model.adapter=c"], "exclude each other"),
        (
            ["serve.adapter_directory=b", "model.path=m", "model.adapter=c"],
            "serve.adapter_directory exclude each other",
        ),
    ],
)
def test_contradictions(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(ServeConfig, None, overrides)
    assert message in str(caught.value)


def test_a_missing_directory_of_adapters(fails: Fails, tmp_path: Path) -> None:
    message = fails(main, "--model", tmp_path, "--set", "serve.adapter_directory=nothing")
    assert "serve.adapter_directory = nothing is no directory" in message


def test_a_missing_extra(monkeypatch: pytest.MonkeyPatch, fails: Fails, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    errors = fails(main, "--model", tmp_path)
    assert errors.count("\n") == 1
    assert "starlette and uvicorn cannot be imported" in errors and "uv sync --extra serve" in errors


def test_the_weights_are_hashed_once_for_all_adapters(
    tmp_path: Path, make_directory: MakeDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the config and those that are loaded later: of a large model it takes half a minute."""
    folder = make_directory()
    model = load_model(folder)
    for seed, name in enumerate("abc"):
        write_adapter(share_weights(model), tmp_path / name, seed, {"rank": 1})
    models: list[Transformer] = []
    compute = BaseFingerprint.from_model

    def from_model(model: Transformer) -> BaseFingerprint:
        models.append(model)
        return compute(model)

    async def load(server: ApiServer) -> None:
        await server._service.load_adapter("c", "c", replaces=False)
        assert server._service.engine.adapter_names == ("a", "b", "c")

    def run(server: ApiServer, bound: socket.socket) -> None:
        asyncio.run(load(server))
        server._service.close()
        bound.close()

    monkeypatch.setattr(BaseFingerprint, "from_model", from_model)
    monkeypatch.setattr(ApiServer, "run", run)
    for name in ("cli.serve._configure_log", "sys.setswitchinterval", "gc.freeze"):
        monkeypatch.setattr(name, lambda *_: None)
    open_files: list[tuple[int, int]] = []
    monkeypatch.setattr("resource.getrlimit", lambda _: (256, 5000))
    monkeypatch.setattr("resource.setrlimit", lambda _, limits: open_files.append(limits))
    adapters = [{"name": name, "path": str(tmp_path / name)} for name in "ab"]
    limits = {"port": 0, "max_connections": 1000, "cache_memory": 1 << 18, "adapter_directory": str(tmp_path)}
    values = {"model": {"path": str(folder)}, "adapters": adapters, "serve": limits}
    config = ServeConfig.model_validate(values)
    serve(config, *prepare(config))
    assert len(models) == 1 and open_files == [(2024, 5000)]
