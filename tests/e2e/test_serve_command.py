"""``diffusionlm-serve`` as a process: the commands of docs/serving.md, signals, kills, addresses in use."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diffusionlm.checkpoints.huggingface import save_model_directory
from diffusionlm.serving.http.access import bind_socket
from tests.conftest import MakeModel
from tokenizer import CHAT_TEMPLATES, train_bpe

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = BLOCK.findall((ROOT / "docs" / "serving.md").read_text(encoding="utf-8"))
ADDRESS = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def folder(tiny_model: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model that the guide names."""
    folder = tmp_path_factory.mktemp("served")
    words = train_bpe(["def __init__(self): import os for i in print()\n"], vocab_size=280)
    words = words.with_chat_template(CHAT_TEMPLATES["chatml"])
    model = tiny_model(
        vocab_size=words.vocab_size,
        mask_token_id=words.mask_token_id,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.eos_token_id,
        max_position_embeddings=512,
    )
    save_model_directory(model, words, folder / "runs" / "quickstart")
    return folder


class ServerProcess:
    """The command, from its line that it serves on."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cli", "serve", "--model", "runs/quickstart", *arguments],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        assert self.line, self.process.communicate()
        self.url = self.line.split()[-1].removesuffix("/v1")

    def curl(self, path: str, *arguments: str) -> str:
        return subprocess.run(
            ["curl", "-s", "-m", "30", f"{self.url}{path}", *arguments], capture_output=True, text=True, timeout=40
        ).stdout

    def post(self, path: str, **fields: Any) -> str:
        return self.curl(path, "-H", "Content-Type: application/json", "-d", json.dumps(fields))

    def start_stream(self, **fields: Any) -> subprocess.Popen[str]:
        """Begin a stream that takes a while; returns after its first bytes."""
        body = json.dumps({"prompt": "def ", "stream": True, **fields})
        arguments = ["curl", "-sN", f"{self.url}/v1/completions", "-H", "Content-Type: application/json", "-d", body]
        stream = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
        assert stream.stdout is not None and stream.stdout.readline().startswith("data: ")
        return stream

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Send a signal; returns exit code and standard error."""
        self.process.send_signal(number)
        errors = self.process.communicate(timeout=60)[1]
        return self.process.returncode, errors


@pytest.fixture
def server(folder: Path) -> Iterator[ServerProcess]:
    server = ServerProcess(folder, "--port", "0")
    yield server
    server.process.kill()
    server.process.communicate()


def test_the_guide(folder: Path, server: ServerProcess) -> None:
    """Its commands, at another port, print answers; its log has no text of them."""
    assert BLOCKS[0] == ("bash", "uv run --extra serve diffusionlm-serve --model runs/quickstart\n")
    assert re.match(r"serving quickstart \([\d,]+ parameters, [\d,]+ cache pages\) at http://", server.line)
    curls = [text.replace(ADDRESS, server.url) for kind, text in BLOCKS[1:] if kind == "bash"]
    assert len(curls) == 2
    for command in curls:
        done = subprocess.run(["bash", "-c", f"{command.strip()} -s"], capture_output=True, text=True, timeout=60)
        assert json.loads(done.stdout)["choices"][0]["text"], done
    program = "".join(text for kind, text in BLOCKS if kind == "python").replace(ADDRESS, server.url)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout, done.stderr
    code, errors = server.end()
    assert code == 0 and " 200 id=" in errors and "forwards=" in errors
    assert "__init__" not in errors and "import" not in errors and "Traceback" not in errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_requests_end(number: signal.Signals, server: ServerProcess) -> None:
    stream = server.start_stream(max_tokens=100)
    code, errors = server.end(number)
    text = stream.communicate(timeout=30)[0]
    assert code == 0 and text.endswith("data: [DONE]\n\n") and number.name in errors


def test_a_second_signal_ends_at_once(folder: Path) -> None:
    limits = ["--set", "serve.max_steps=100000", "--set", "serve.max_total_steps=100000"]
    server = ServerProcess(folder, "--host", "0.0.0.0", "--port", "0", *limits)
    stream = server.start_stream(max_tokens=400, remasking_strategy="p2", denoising_steps=30_000, diffusing=True)
    server.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert server.process.poll() is None
    code, errors = server.end(signal.SIGINT)
    assert code == 130 and "everybody who reaches 0.0.0.0 can use this server" in errors
    assert "[DONE]" not in stream.communicate(timeout=30)[0]


def test_a_killed_server_starts_again(folder: Path, server: ServerProcess) -> None:
    port = server.url.rpartition(":")[2]
    stream = server.start_stream(max_tokens=400)
    server.process.kill()
    server.process.wait()
    stream.communicate(timeout=30)
    again = ServerProcess(folder, "--port", port)
    try:
        assert json.loads(again.post("/v1/completions", prompt="def ", max_tokens=3))["usage"]["completion_tokens"] == 3
        assert json.loads(again.curl("/health")) == {"status": "ok"}
    finally:
        assert again.end()[0] == 0


def test_an_address_in_use(folder: Path) -> None:
    with bind_socket("127.0.0.1", 0) as bound:
        bound.listen()
        port = str(bound.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-m", "cli", "serve", "--model", "runs/quickstart", "--port", port],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 2 and f"serve.port = {port}" in done.stderr and done.stderr.count("\n") == 1
