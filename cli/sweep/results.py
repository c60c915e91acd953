"""What the files of a run contain. Those that are missing or damaged are ignored, because it may be active."""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cli.sweep.definition import ANSWERS_FILE
from logger.pages import Column, Number
from logger.report.reading import LoggedRun, read_run

EVALUATION_KEYS = {
    "bound": ("nats_per_token", "standard_error"),
    "bits_per_byte": ("bits_per_byte", "bits_per_byte_standard_error"),
}
"""Measurement -> its key, and that of its standard error, in an evaluation; metrics have them after ``val_``."""
COLUMNS = {
    "train": {
        "bound": Column("bound, nats per token", ".4f"),
        "bits_per_byte": Column("bits per byte", ".4f"),
        "tokens_per_second": Column("tokens/s", ",.0f"),
    },
    "infer": {
        "tokens_per_second": Column("tokens/s", ",.0f"),
        "tokens_per_forward": Column("tokens per forward", ".2f"),
        "forwards": Column("forwards", ",.0f"),
        "mean_logprob": Column("mean log-probability", ".4f"),
    },
}
"""Command -> columns of the table by measurement."""


@dataclass(frozen=True)
class RunResult:
    """Numbers and texts of a run; those that do not exist yet are missing."""

    numbers: dict[str, Number] = field(default_factory=dict)
    """Measurements by column."""
    texts: tuple[tuple[str, str], ...] = ()
    """Of inference: pairs of a prompt, or a text with masked spans, and the output of the model."""
    logged: LoggedRun | None = None
    """Of training: curves and samples."""
    is_final: bool = False

    @property
    def step(self) -> int | None:
        """The last step; None: an inference run, or no step yet."""
        return self.logged.last_step if self.logged is not None and self.logged.numbers else None


def read_result(command: str, directory: Path) -> RunResult:
    """Read the result of a run of this command."""
    return read_training_result(directory) if command == "train" else read_inference_result(directory)


def read_training_result(directory: Path) -> RunResult:
    """Read ``summary.json``, or the last validation in ``metrics.jsonl`` while the run is active."""
    try:
        run = read_run(directory)
    except ValueError:
        return RunResult()
    numbers: dict[str, Number] = {}
    for name, keys in EVALUATION_KEYS.items():
        value, error = (run.result("evaluation", key) if run.summary else run.last(f"val_{key}") for key in keys)
        if value is not None:
            numbers[name] = Number(value, error=error)
    tokens, seconds = run.result("tokens_seen"), run.result("seconds")
    rate = tokens / seconds if tokens and seconds else run.last("tokens_per_second")
    if rate is not None:
        numbers["tokens_per_second"] = Number(rate)
    return RunResult(numbers, logged=run, is_final=bool(run.summary))


def read_inference_result(directory: Path) -> RunResult:
    """Read the JSON lines of ``diffusionlm-infer``."""
    texts, logprobs = [], []
    tokens = forwards = seconds = 0.0
    for line in read_json_lines(directory / ANSWERS_FILE):
        text, metrics = line.get("text", {}), line.get("metrics", {})
        texts.append((str(text.get("prompt", "")), str(text.get("output", ""))))
        tokens += metrics.get("num_tokens", 0)
        forwards += metrics.get("num_forwards", 0)
        # Each answer of a batch states the seconds of the whole batch.
        seconds += metrics.get("seconds", 0.0) / max(1, metrics.get("batch_size", 1))
        if metrics.get("mean_logprob") is not None:
            logprobs.append((metrics["mean_logprob"], metrics.get("num_tokens", 0)))
    weight = sum(count for _, count in logprobs)
    numbers = {
        "forwards": forwards,
        "tokens_per_second": tokens / seconds if seconds else math.nan,
        "tokens_per_forward": tokens / forwards if forwards else math.nan,
        "mean_logprob": sum(a * b for a, b in logprobs) / weight if weight else math.nan,
    }
    finite = {name: Number(value) for name, value in numbers.items() if texts and math.isfinite(value)}
    return RunResult(finite, tuple(texts), is_final=bool(texts))


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read the objects of a JSON lines file, except invalid lines; a missing file has none."""
    values = []
    with contextlib.suppress(OSError):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                values.append(json.loads(line))
    return [value for value in values if isinstance(value, dict)]
