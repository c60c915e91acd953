"""A soak of ``diffusionlm-serve``: random arrivals, clients that leave, kills and restarts, and every answer compared.

    uv run python -m tests.e2e.serving_soak --seconds 600

Prints one line of JSON with what has happened; an answer that differs, an unexpected status or a page of the cache that
is lost ends it with an error.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from config.model import ModelConfig
from diffusionlm.checkpoints.huggingface import save_model_directory
from diffusionlm.models.init import init_weights
from diffusionlm.models.transformer import Transformer
from tokenizer import train_bpe

ROOT = Path(__file__).parents[2]
NUM_BODIES, NUM_CLIENTS = 16, 12
ARGUMENTS = (
    "serve.deterministic=true", "serve.cache_memory=64KiB", "serve.max_requests=6", "serve.max_waiting=10",
    "serve.max_num_batched_tokens=64", "serve.drain_timeout_seconds=2.0", "serve.log_requests=false",
)  # fmt: skip
REFUSED = (429, 503)


def write_model(directory: Path) -> None:
    words = train_bpe(["the cat sat on the mat. the dog sat on the cat.\n" * 4], vocab_size=290)
    config = ModelConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=64, max_position_embeddings=256, vocab_size=words.vocab_size, block_length=4,
        mask_token_id=words.mask_token_id, eos_token_id=words.eos_token_id, pad_token_id=words.eos_token_id,
    )  # fmt: skip
    model = Transformer(config)
    init_weights(model, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    save_model_directory(model, words, directory)


class Soak:
    """Clients of one server, which is started again when it was killed."""

    def __init__(self, model: Path, seconds: float, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self._model, self._seed, self._port = model, seed, 0
        self._seconds, self._deadline = seconds, 0.0
        self._process = self._start()
        self._is_restarting = threading.Event()
        rng = random.Random(seed)
        self._bodies = [self._make_body(rng, index) for index in range(NUM_BODIES)]
        self._answers = [self._post(body)[1] for body in self._bodies]

    def _make_body(self, rng: random.Random, index: int) -> dict[str, Any]:
        strategies: tuple[dict[str, Any], ...] = (
            {},
            {"denoising_steps": 2},
            {"remasking_strategy": "threshold", "confidence_threshold": 0.4},
        )
        return {
            "prompt": "the cat sat on the mat. " * rng.randrange(1, 7),
            "max_tokens": rng.randrange(1, 60),
            "temperature": rng.choice([0.0, 1.0]),
            "seed": index,
            "n": rng.choice([1, 1, 2]),
            "logprobs": 1,
            **rng.choice(strategies),
        }

    def _start(self) -> subprocess.Popen[str]:
        settings = [word for setting in ARGUMENTS for word in ("--set", setting)]
        process = subprocess.Popen(
            [sys.executable, "-m", "cli", "serve", "--model", str(self._model), "--port", str(self._port), *settings],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        match = re.search(r":(\d+)/v1", process.stdout.readline())
        assert match, "the server did not start"
        self._port = int(match[1])
        return process

    def _post(self, body: dict[str, Any]) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        if response.status != 200:
            return response.status, json.loads(text)
        return 200, _join_stream(text) if body.get("stream") else json.loads(text)["choices"]

    def _leave(self, body: dict[str, Any], seconds: float) -> None:
        """Send a request, and close the connection."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        time.sleep(seconds)
        connection.close()

    def _run_client(self, number: int) -> None:
        rng = random.Random(self._seed * 1000 + number)
        while time.monotonic() < self._deadline and not self.problems:
            time.sleep(rng.expovariate(20.0))
            index, is_stream = rng.randrange(NUM_BODIES), rng.random() < 0.5
            body = {**self._bodies[index], "stream": is_stream}
            was_restarting = self._is_restarting.is_set()
            try:
                if rng.random() < 0.3:
                    self._leave(body, rng.random() * 0.2)
                    self.counts["left"] += 1
                    continue
                status, answer = self._post(body)
            except (OSError, http.client.HTTPException, StreamError) as error:
                # The restart may begin a moment after the connection was lost.
                time.sleep(0.2)
                if not (was_restarting or self._is_restarting.is_set()):
                    self.problems.append(f"{body}: {error!r}")
                self.counts["cut by a kill"] += 1
                time.sleep(0.8)
                continue
            self.counts[f"{'stream' if is_stream else 'whole'} {status}"] += 1
            if status not in (200, *REFUSED):
                self.problems.append(f"{body}: status {status}, {answer}")
            elif status == 200 and _comparable(answer) != _comparable(self._answers[index]):
                self.problems.append(f"{body}: {answer} instead of {self._answers[index]}")

    def _restart(self, number: int) -> None:
        """End the server, by turns with SIGKILL and SIGTERM, and start it again at the same port."""
        self._is_restarting.set()
        self._process.send_signal(signal.SIGKILL if number % 2 == 0 else signal.SIGTERM)
        code = self._process.wait(60)
        if code not in (-signal.SIGKILL, 0):
            self.problems.append(f"exit code {code}")
        self._process = self._start()
        time.sleep(1.0)
        self._is_restarting.clear()
        self.counts["restarts"] += 1

    def _read_gauges(self) -> dict[str, float]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        values = {name: re.search(rf"^vllm:{name}{{.*}} (\S+)$", text, re.MULTILINE) for name in names}
        return {name: float(match[1]) for name, match in values.items() if match}

    def run(self, restart_seconds: float) -> None:
        self._deadline = time.monotonic() + self._seconds
        clients = [threading.Thread(target=self._run_client, args=(number,)) for number in range(NUM_CLIENTS)]
        for client in clients:
            client.start()
        number, next_restart = 0, time.monotonic() + restart_seconds
        while any(client.is_alive() for client in clients):
            time.sleep(0.05)
            if next_restart < time.monotonic() < self._deadline - 2.0:
                self._restart(number)
                number, next_restart = number + 1, time.monotonic() + restart_seconds
        deadline = time.monotonic() + 30
        while any(self._read_gauges().values()):
            if time.monotonic() > deadline:
                self.problems.append(f"not everything was returned: {self._read_gauges()}")
                break
            time.sleep(0.05)
        self._process.send_signal(signal.SIGTERM)
        if (code := self._process.wait(60)) != 0:
            self.problems.append(f"exit code {code}")


class StreamError(Exception):
    """A stream has ended with an error, or before its end."""


def _join_stream(text: str) -> list[dict[str, Any]]:
    """The choices of a stream, as if they had come at once."""
    if not text.endswith("data: [DONE]\n\n"):
        raise StreamError(text[-300:])
    choices: dict[int, dict[str, Any]] = {}
    for line in text.split("\n\n")[:-2]:
        for part in json.loads(line.removeprefix("data: "))["choices"]:
            choice = choices.setdefault(part["index"], {"text": "", "logprobs": []})
            choice["text"] += part["text"]
            choice["logprobs"] += part["logprobs"]["token_logprobs"]
            choice["finish_reason"] = part["finish_reason"]
    return [{**choice, "logprobs": {"token_logprobs": choice["logprobs"]}} for _, choice in sorted(choices.items())]


def _comparable(choices: list[dict[str, Any]]) -> list[Any]:
    return [(choice["text"], choice["finish_reason"], choice["logprobs"]["token_logprobs"]) for choice in choices]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--restart-seconds", type=float, default=40.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        write_model(model)
        soak = Soak(model, arguments.seconds, arguments.seed)
        try:
            soak.run(arguments.restart_seconds)
        finally:
            soak._process.kill()
    print(json.dumps({**dict(sorted(soak.counts.items())), "problems": soak.problems[:3]}))
    sys.exit(1 if soak.problems else 0)


if __name__ == "__main__":
    main()
