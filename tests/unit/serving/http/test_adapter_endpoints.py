"""Adapters that clients load and unload while the server answers, with vLLM's endpoints."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from diffusionlm.checkpoints.adapter_files import load_adapter
from diffusionlm.inference.generate import generate
from diffusionlm.models.row_adapters import share_weights
from diffusionlm.models.transformer import Transformer
from tests.conftest import MakeModel
from tests.unit.serving.http.conftest import NAME, RunningServer, StartServer, decoding_config, wait_until
from tests.unit.serving.test_adapters import write_adapter

PROMPT = [1, 2, 3, 4, 5]


@pytest.fixture(scope="module")
def folder(served_model: Transformer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of adapters, beside one that is not below it."""
    folder = tmp_path_factory.mktemp("adapters")
    (folder / "served").mkdir()
    for seed, name in enumerate(("served/a-1", "served/a-2", "served/b", "beside")):
        write_adapter(share_weights(served_model), folder / name, seed, {"rank": 2, "trainable_tokens": (seed,)})
    return folder / "served"


@pytest.fixture(scope="module")
def loading(start_server: StartServer, folder: Path) -> RunningServer:
    return start_server(adapter_directory=str(folder), max_adapters=2, deterministic=True)


def decode_alone(server: RunningServer, directory: Path | None) -> tuple[int, ...]:
    """The answer of `generate` with one adapter."""
    model = share_weights(server.model)
    if directory is not None:
        load_adapter(model, directory)
    return generate(model, [PROMPT], decoding_config(server, max_new_tokens=8))[0].token_ids


def test_no_answer_under_load_is_of_another_adapter(loading: RunningServer, folder: Path) -> None:
    expected = {name: decode_alone(loading, folder / name) for name in ("a-1", "a-2", "b")}
    expected[NAME] = decode_alone(loading, None)
    assert len({*expected.values()}) == 4
    client = openai.OpenAI(base_url=loading.url, api_key="none", max_retries=0)
    answers: dict[str, list[tuple[int, ...] | None]] = {NAME: [], "a": [], "b": []}
    is_over = threading.Event()

    def ask(name: str) -> None:
        while not is_over.is_set():
            answer: tuple[int, ...] | None = None
            try:
                options: Any = {"max_tokens": 8, "extra_body": {"return_token_ids": True}}
                choice: Any = client.completions.create(model=name, prompt=PROMPT, **options).choices[0]
                answer = tuple(choice.token_ids)
            except openai.NotFoundError:
                assert name == "b"
            answers[name].append(answer)

    def wait_for_answer(name: str) -> tuple[int, ...] | None:
        """Wait for the answer to a request that began after this."""
        count = len(answers[name])
        wait_until(lambda: len(answers[name]) >= count + 2)
        return answers[name][-1]

    def load(name: str, path: str) -> None:
        body = {"lora_name": name, "lora_path": path, "load_inplace": True}
        text = client.post("/load_lora_adapter", cast_to=str, body=body)
        assert text == f"Success: LoRA adapter '{name}' added successfully."
        assert wait_for_answer(name) == expected[path]

    client.post("/load_lora_adapter", cast_to=str, body={"lora_name": "a", "lora_path": "a-1"})
    with ThreadPoolExecutor(4) as threads:
        futures = [threads.submit(ask, name) for name in (NAME, "a", "b")]
        try:
            for path in ("a-2", "a-1"):
                load("b", "b")
                assert [model.id for model in client.models.list()] == [NAME, "a", "b"]
                load("a", path)
                client.post("/unload_lora_adapter", cast_to=str, body={"lora_name": "b"})
                assert wait_for_answer("b") is None
        finally:
            is_over.set()
        for future in futures:
            future.result(30)
    assert {*answers[NAME]} == {expected[NAME]} and {*answers["b"]} == {expected["b"], None}
    assert {*answers["a"]} == {expected["a-1"], expected["a-2"]}
    assert [(model.id, model.parent) for model in client.models.list()] == [(NAME, None), ("a", NAME)]  # type: ignore[attr-defined]
    assert 'vllm:request_generation_tokens_count{model_name="a"' in loading.request("GET", "/metrics")[2]
    client.post("/unload_lora_adapter", cast_to=str, body={"lora_name": "a"})
    loading.wait_until_idle()


def test_what_is_wrong_is_named_and_the_server_goes_on(
    loading: RunningServer, folder: Path, tiny_model: MakeModel
) -> None:
    def post(path: str = "load", **body: Any) -> tuple[int, str, str | None]:
        status, _, answer = loading.request("POST", f"/v1/{path}_lora_adapter", body)
        return (
            (status, answer, None) if status == 200 else (status, answer["error"]["message"], answer["error"]["param"])
        )

    (folder / "link").symlink_to(folder.parent / "beside")
    shutil.copytree(folder / "b", folder / "damaged")
    (folder / "damaged" / "adapter_model.safetensors").write_bytes(b"nothing")
    write_adapter(tiny_model(vocab_size=19, mask_token_id=18), folder / "foreign", 0, {"rank": 1})
    beside = str(folder.parent / "beside")
    for path, words in (
        ("nothing", "has no adapter_config.json: name the directory of a PEFT adapter"),
        ("../beside", "not below serve.adapter_directory"),
        (beside, "not below serve.adapter_directory"),
        ("link", "not below serve.adapter_directory"),
        ("damaged", "adapter_model.safetensors: cannot be read as safetensors"),
        ("foreign", "was trained on another base than this model"),
        ("a\0b", "lora_path = "),
        ("x" * 300, "lora_path = "),
    ):
        status, message, param = post(lora_name="a", lora_path=path)
        assert (status, param) == (400, "lora_path") and words in message and str(folder) not in message, message
    for body, words in (
        ({"lora_name": "a b", "lora_path": "b"}, "lora_name = 'a b'"),
        ({"lora_name": NAME, "lora_path": "b"}, "is loaded already: send another name, or load_inplace = true"),
        ({"lora_path": "b"}, "lora_name is missing"),
        ({"lora_name": "a", "lora_path": "b", "inplace": True}, "did you mean load_inplace?"),
    ):
        status, message, _ = post(**body)
        assert status == 400 and words in message, message
    assert post(lora_name="a", lora_path=str(folder / "a-1"))[0] == 200  # an absolute path below the directory
    assert "load_inplace = true to replace" in post(lora_name="a", lora_path="b")[1]
    unused: dict[str, Any] = {
        "load_inplace": None,
        "base_model_name": None,
        "lora_int_id": 1,
    }  # as vLLM's clients send them
    assert post(lora_name="b", lora_path="b", **unused)[0] == 200
    assert "2 adapters are loaded (serve.max_adapters = 2)" in post(lora_name="c", lora_path="b")[1]
    for name in "ab":
        assert post("unload", lora_name=name)[0] == 200
        assert post("unload", lora_name=name)[::2] == (404, "lora_name")
    assert loading.request("POST", "/v1/completions", {"model": "a", "prompt": "the"})[0] == 404
    assert loading.request("POST", "/v1/completions", {"prompt": PROMPT, "max_tokens": 4})[0] == 200


def test_without_the_setting_nothing_is_loaded(server: RunningServer) -> None:
    for path in ("load", "unload"):
        status, _, answer = server.request("POST", f"/v1/{path}_lora_adapter", {"lora_name": "a", "lora_path": "b"})
        assert status == 403 and "--set serve.adapter_directory=DIR" in answer["error"]["message"]
