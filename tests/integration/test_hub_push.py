"""`diffusionlm-convert --push` with the real client of the Hub, in other processes, against a Hub on this machine."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from config.convert import ConvertConfig
from config.finetune.lora import LoraConfig
from diffusionlm.checkpoints.adapter_files import save_adapter
from diffusionlm.checkpoints.huggingface import save_model_directory
from diffusionlm.models.lora import add_adapter
from tests.conftest import MakeModel
from tokenizer import train_bpe

TOKEN = "hf_secretsecretsecret"


class HubHandler(BaseHTTPRequestHandler):
    """The part of the Hub that an upload uses: repositories of `me`, large files by LFS, and commits."""

    private: dict[str, bool]
    """Repository -> whether it is private."""
    files: dict[str, dict[str, bytes]]
    """Repository -> name -> content."""
    objects: dict[str, bytes]
    """Of LFS, by their SHA-256."""
    endpoint: str

    def do_GET(self) -> None:
        match self.path.partition("?")[0].strip("/").split("/"):
            case ["api", "models", owner, name] if f"{owner}/{name}" in self.private:
                self.answer({"id": f"{owner}/{name}", "private": self.private[f"{owner}/{name}"]})
            case ["api", "models", owner, name, "tree", "main"]:
                files = self.files[f"{owner}/{name}"].items()
                self.answer(
                    [{"type": "file", "path": path, "size": len(text), "oid": "0" * 40} for path, text in files]
                )
            case _:
                self.answer({}, 404)

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        assert hashlib.sha256(content).hexdigest() == self.path.rpartition("/")[2]
        self.objects[self.path.rpartition("/")[2]] = content
        self.answer({})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            return self.answer({"error": "Invalid credentials"}, 401)
        match self.path.partition("?")[0].strip("/").split("/"):
            case ["api", "repos", "create"]:
                self.create(json.loads(body))
            case ["api", "validate-yaml"]:
                self.answer({"errors": [], "warnings": []})
            case ["api", "models", _, _, "preupload", "main"]:
                modes = {True: "lfs", False: "regular"}
                self.answer(
                    {
                        "files": [
                            {
                                "path": file["path"],
                                "uploadMode": modes[file["path"].endswith("safetensors")],
                                "shouldIgnore": False,
                            }
                            for file in json.loads(body)["files"]
                        ]
                    }
                )
            case [_, _, "info", "lfs", "objects", "batch"]:
                objects = json.loads(body)["objects"]
                actions = [{"upload": {"href": f"{self.endpoint}/lfs/{item['oid']}"}} for item in objects]
                self.answer({"objects": [item | {"actions": a} for item, a in zip(objects, actions, strict=True)]})
            case ["api", "models", owner, name, "commit", "main"]:
                self.commit(f"{owner}/{name}", [json.loads(line) for line in body.splitlines()])
            case _:
                self.answer({}, 404)

    def create(self, request: dict[str, Any]) -> None:
        repository = f"{request['organization']}/{request['name']}"
        if request["organization"] != "me":
            return self.answer({"error": "You don't have the rights to create a model under this namespace"}, 403)
        is_new = repository not in self.private
        self.private.setdefault(repository, request.get("visibility") == "private")
        self.files.setdefault(repository, {})
        self.answer({"url": f"{self.endpoint}/{repository}"}, 200 if is_new else 409)

    def commit(self, repository: str, operations: list[dict[str, Any]]) -> None:
        files = self.files[repository]
        for operation in operations:
            value = operation["value"]
            match operation["key"]:
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    files[value["path"]] = self.objects[value["oid"]]
                case "deletedFile":
                    del files[value["path"]]
        self.answer({"commitUrl": f"{self.endpoint}/{repository}/commit/1", "commitOid": "1" * 40})

    def answer(self, value: Any, status: int = 200) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[str]:
    HubHandler.private, HubHandler.files, HubHandler.objects = {}, {}, {}
    server = ThreadingHTTPServer(("127.0.0.1", 0), HubHandler)
    HubHandler.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield HubHandler.endpoint
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def folder(tmp_path: Path, tiny_model: MakeModel) -> Path:
    """A model in two files, which a run might have written, and an adapter on it, as PEFT writes it."""
    words = train_bpe(["a"], vocab_size=258)
    model = tiny_model(vocab_size=258, mask_token_id=words.mask_token_id, eos_token_id=words.eos_token_id)
    save_model_directory(model, words, tmp_path / "model", max_shard_size=4_000)
    (tmp_path / "model/training_state").mkdir()
    for name in ("state.json", "config.toml", "training_state/__0_0.distcp"):
        (tmp_path / "model" / name).write_text("only of the run")
    lora = LoraConfig(rank=2)
    add_adapter(model, lora, seed=0)
    (tmp_path / "adapter").mkdir()
    save_adapter(model, lora, tmp_path / "adapter", base="org/base")
    return tmp_path


COMMANDS = """
import contextlib, io, json, os, sys
from cli.convert import main
for token, arguments in json.loads(sys.argv[1]):
    os.environ["HF_TOKEN"] = token
    code, stdout, stderr = 0, io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        try:
            main(arguments)
        except SystemExit as ended:
            code = ended.code
    print(json.dumps([code, stdout.getvalue(), stderr.getvalue()]))
"""


def convert(folder: Path, endpoint: str, *calls: tuple[str, str], **variables: str) -> list[tuple[int, str, str]]:
    """Run commands in one process, each with a token: of each the exit code, standard output and standard error."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_HOME": str(folder / "home"), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1"}
    result = subprocess.run(
        [sys.executable, "-c", COMMANDS, json.dumps([(token, arguments.split()) for token, arguments in calls])],
        capture_output=True,
        text=True,
        env=environment | {"PYTHONPATH": str(Path(__file__).parents[2])} | variables,
        cwd=folder,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr
    assert TOKEN not in result.stdout + result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.slow
def test_what_is_pushed_is_what_others_load(folder: Path, endpoint: str) -> None:
    calls = ("--source model --push me/model", "--source adapter --push me/adapter --private")
    for (code, output, errors), name in zip(
        convert(folder, endpoint, *[(TOKEN, call) for call in calls]), ("model", "adapter"), strict=True
    ):
        assert code == 0 and output.endswith(f"pushed: {endpoint}/me/{name}/commit/1\n"), errors
    pushed = HubHandler.files["me/model"]
    assert {"config.json", "tokenizer.json", "README.md", "model.safetensors.index.json"} < pushed.keys()
    assert sum(name.endswith(".safetensors") for name in pushed) > 1
    assert all((folder / "model" / name).read_bytes() == content for name, content in pushed.items())
    assert "MANIFEST.json" not in pushed and b"only of the run" not in pushed.values()
    assert HubHandler.files["me/adapter"].keys() == {"adapter_config.json", "adapter_model.safetensors"}
    assert HubHandler.private == {"me/model": False, "me/adapter": True}
    calls = ("--source adapter --push me/model", "--source model --target narrow --set dtype=bfloat16 --push me/model")
    for code, _, errors in convert(folder, endpoint, *[(TOKEN, call) for call in calls]):
        assert code == 0, errors
    weights = {name: content for name, content in pushed.items() if name.endswith((".safetensors", ".index.json"))}
    adapter = {"adapter_model.safetensors": (folder / "adapter/adapter_model.safetensors").read_bytes()}
    narrow = {"model.safetensors": (folder / "narrow/model.safetensors").read_bytes()}
    assert weights == narrow | adapter, "older ones of the same kind are gone"


@pytest.mark.slow
def test_errors_are_one_line_with_a_remedy(folder: Path, endpoint: str) -> None:
    HubHandler.private["me/public"], new = False, "--source model --push me/new"
    expected = {
        ("", new): (2, ["there is no token", "HF_TOKEN", "hf auth login"]),
        ("hf_other", new): (1, ["401", "HF_TOKEN"]),
        (TOKEN, "--source model --target new --push other/new"): (
            1,
            ["of an organization of yours", "403", "rights to create", "convert --source new --push other/new\n"],
        ),
        (TOKEN, "--source model --push me/public --private"): (1, ["is public", "--push me/public --private\n"]),
    }
    dry_run, *ended = convert(folder, endpoint, ("", f"{new} --dry-run"), *expected)
    ended += convert(folder, endpoint, (TOKEN, new), HF_HUB_OFFLINE="1")
    ended += convert(folder, "http://127.0.0.1:9", (TOKEN, new))
    cases = [*expected.values(), (1, ["HF_HUB_OFFLINE"]), (1, ["model was not pushed to me/new", "Connection refused"])]
    for (code, _, errors), (expected_code, texts) in zip(ended, cases, strict=True):
        assert code == expected_code and errors.count("\n") == 1, errors
        assert errors.startswith("diffusionlm-convert: error: ") and all(text in errors for text in texts), errors
    assert dry_run[0] == 0 and "model to me/new on the Hugging Face Hub" in dry_run[1]
    assert not any(HubHandler.files.values()) and list(HubHandler.private) == ["me/public"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"push": "model"}, 'push = "model": expected OWNER/NAME'),
        ({"push": "me/model@main"}, "expected OWNER/NAME"),
        ({"push": "me/model", "dtype": "float16"}, "set target, or remove dtype"),
        ({"target": "new", "private": True}, "private = true has no effect without push"),
    ],
)
def test_mistakes_in_the_config(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ConvertConfig.model_validate({"source": "model", **values})
