"""Models by their Hub name, from a Hub on this machine. The client runs in other processes, which may use sockets."""

from __future__ import annotations

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
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, enable_progress_bars

from diffusionlm.families import hub
from diffusionlm.families.hub import describe_origin, is_hub_name
from diffusionlm.families.model_directory import resolve_model_directory

COMMITS = {"main": "a" * 40, "v1": "b" * 40}
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"a pickle",
    "modeling.py": b"code",
    "onnx/config.json": b"{}",
    "onnx/model.safetensors": b"weights",
}
PICKLED = "org/pickled"


class HubHandler(BaseHTTPRequestHandler):
    """The part of the Hub that a download uses: commits, lists of files, and files."""

    requests: list[tuple[str, str | None]]
    """Path and token of each request."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.requests.append((path, self.headers["Authorization"]))
        match path.strip("/").split("/"):
            case ["api", "models", "org", "tiny" | "pickled", "revision", revision] if revision in COMMITS:
                self.answer(json.dumps({"id": "org/tiny", "sha": COMMITS[revision]}).encode())
            case ["api", "models", "org", "tiny" | "pickled", "revision", _]:
                self.answer(b"{}", 404, {"X-Error-Code": "RevisionNotFound"})
            case ["api", "models", "org", name, "tree", _] if name in ("tiny", "pickled"):
                names = FILES.keys() - ({"model.safetensors"} if name == "pickled" else set())
                files = [{"type": "file", "path": file, "size": len(FILES[file]), "oid": "0" * 40} for file in names]
                self.answer(json.dumps(files).encode())
            case ["org", "tiny" | "pickled", "resolve", commit, *parts]:
                content = FILES["/".join(parts)]
                self.answer(content, 200, {"X-Repo-Commit": commit, "ETag": hashlib.sha1(content).hexdigest()})
            case _:
                self.answer(b"{}", 404, {"X-Error-Code": "RepoNotFound"})

    def answer(self, content: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[str]:
    HubHandler.requests = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), HubHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


RESOLVE = """
import json, sys
from diffusionlm.families.model_directory import resolve_model_directory
for name, needs_weights in json.loads(sys.argv[1]):
    try:
        folder = resolve_model_directory(name, needs_weights=needs_weights)
    except ValueError as error:
        print(json.dumps(["error", str(error)]))
    else:
        print(json.dumps([folder.name, sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*.*"))]))
assert "torch" not in sys.modules
"""


def resolve(cache: Path, endpoint: str, *calls: tuple[str, bool], **variables: str) -> list[list[Any]]:
    """Resolve names in another process: of each the commit and the files, or the error."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_HOME": str(cache), "HF_ENDPOINT": endpoint, "PYTHONPATH": str(Path(__file__).parents[3])}
    result = subprocess.run(
        [sys.executable, "-c", RESOLVE, json.dumps(calls)],
        capture_output=True,
        text=True,
        env=environment | variables,
        cwd=cache,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.slow
def test_download_once_then_use_the_cache(tmp_path: Path, endpoint: str) -> None:
    calls = (("org/tiny", False), ("org/tiny", True), ("org/tiny@v1", True))
    description, model, other = resolve(tmp_path, endpoint, *calls, HF_TOKEN="hf_secret")
    assert description == [COMMITS["main"], ["config.json", "tokenizer.json"]]
    assert model == [COMMITS["main"], ["config.json", "model.safetensors", "tokenizer.json"]]
    assert other == [COMMITS["v1"], ["config.json", "model.safetensors", "tokenizer.json"]]
    assert {token for path, token in HubHandler.requests if "org/tiny" in path} == {"Bearer hf_secret"}, (
        HubHandler.requests
    )
    assert not [path for path, _ in HubHandler.requests if "pytorch_model" in path or "onnx" in path]

    HubHandler.requests.clear()
    assert resolve(tmp_path, endpoint, *calls, HF_HUB_OFFLINE="1") == [model, model, other]
    assert resolve(tmp_path, "http://127.0.0.1:9", calls[1]) == [model], "the Hub cannot be reached"
    assert not HubHandler.requests


@pytest.mark.slow
def test_errors_are_one_line_with_a_remedy(tmp_path: Path, endpoint: str) -> None:
    calls = (("org/none", True), ("org/tiny@v2", True), (PICKLED, True))
    missing, revision, pickled = resolve(tmp_path, endpoint, *calls)
    assert "no model org/none: there is no such directory" in missing[1] and "HF_TOKEN" in missing[1]
    assert "no model org/tiny@v2" in revision[1] and "no revision 'v2'" in revision[1]
    assert "org/pickled" in pickled[1] and "pickles are not downloaded" in pickled[1]
    assert not [path for path, _ in HubHandler.requests if "pytorch_model" in path]
    new, incomplete = resolve(tmp_path, endpoint, ("org/new@v1", True), ("org/tiny", True), HF_HUB_OFFLINE="1")
    assert 'run "uv run hf download org/new --revision v1" where there is a network' in new[1]
    assert "HF_HUB_OFFLINE is set" in new[1]
    assert '"uv run hf download org/tiny"' in incomplete[1]
    [unreachable] = resolve(tmp_path, "http://127.0.0.1:9", ("org/new", True))
    assert '"uv run hf download org/new"' in unreachable[1] and "HF_HUB_OFFLINE" not in unreachable[1]
    assert not [error for _, error in (missing, revision, pickled, new, incomplete, unreachable) if "\n" in error]


def test_paths_that_are_no_hub_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub is not asked about existing paths, nor about one that is probably misspelled."""
    monkeypatch.chdir(tmp_path)
    asked: list[str] = []

    def download(name: str) -> Path:
        asked.append(name)
        return tmp_path / "snapshot"

    for function in (hub.download_description, hub.download_model):
        monkeypatch.setattr(f"diffusionlm.families.model_directory.{function.__name__}", download)
    for folder in ("snapshot", "Qwen/local", "Qwen/local@main"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.json").write_text("{}")
    assert resolve_model_directory("Qwen/local") == Path("Qwen/local")
    assert resolve_model_directory("Qwen/local@main") == Path("Qwen/local@main")
    for name in (tmp_path / "none", "none", "a/b/c", "../none", "org/..", "org/a b"):
        with pytest.raises(ValueError, match=r"no model at .*: there is no such directory$"):
            resolve_model_directory(name)
    with pytest.raises(
        ValueError, match=r"no model at Qwen/none: .*; write Qwen/none@main for a model of the Hugging Face Hub"
    ):
        resolve_model_directory("Qwen/none")
    with pytest.raises(ValueError, match=r"no model at Qwen/loacl: .*; did you mean Qwen/local\?"):
        resolve_model_directory("Qwen/loacl")
    assert asked == []
    assert resolve_model_directory("Qwen/none@main") == tmp_path / "snapshot"
    assert resolve_model_directory("org/none") == tmp_path / "snapshot"
    assert asked == ["Qwen/none@main", "org/none"]
    assert is_hub_name("a/b@refs/pr/1") and not is_hub_name("a/b@")


@pytest.mark.parametrize(("rank", "is_terminal"), [("0", True), ("1", True), ("0", False)])
def test_one_rank_of_a_machine_shows_progress_in_a_terminal(
    rank: str, is_terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setattr(hub, "accepts_escapes", lambda stream: is_terminal)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path))
    enable_progress_bars()
    try:
        assert hub.download_description.__wrapped__("org/tiny") == tmp_path
        assert are_progress_bars_disabled() == (rank == "1" or not is_terminal)
    finally:
        enable_progress_bars()


def test_origin_names_no_folder_of_this_machine(tmp_path: Path) -> None:
    assert describe_origin(tmp_path / "qwen3-mask") == "qwen3-mask"
    snapshot = tmp_path / "hub/models--Qwen--Qwen3-0.6B/snapshots" / COMMITS["v1"]
    assert describe_origin(snapshot) == f"Qwen/Qwen3-0.6B, commit {COMMITS['v1']}"
