"""Read the results of a run from its files.

Missing files and truncated lines are ignored, because the run may still be active.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from cli.sweep.commands import ANSWERS_FILE

_CURVE_POINTS = 200
MAX_TAIL_BYTES = 16_384
"""Bytes at the end of metrics.jsonl that hold its last lines."""


@dataclass(frozen=True)
class Measurement:
    """A number and its standard error, if it has one."""

    value: float
    error: float | None = None


@dataclass(frozen=True)
class RunResult:
    """Numbers and texts of a run; those that do not exist yet are missing."""

    numbers: dict[str, Measurement] = field(default_factory=dict)
    """Measurements by column."""
    texts: tuple[tuple[str, str], ...] = ()
    """Pairs of a prompt and the output of the model."""
    curve: tuple[tuple[int, float], ...] = ()
    """Pairs of a step and the smoothed training loss."""
    step: int | None = None
    """The last step; None: an inference run, or no step yet."""
    is_final: bool = False


TRAIN_COLUMNS = {
    "bound": "bound, nats per token",
    "bits_per_byte": "bits per byte",
    "tokens_per_second": "tokens/s",
}
INFER_COLUMNS = {
    "tokens_per_second": "tokens/s",
    "tokens_per_forward": "tokens per forward",
    "forwards": "forwards",
    "mean_logprob": "mean log-probability",
}


def read_result(command: str, directory: Path) -> RunResult:
    """Read the result of a run of this command."""
    return read_training_result(directory) if command == "train" else read_inference_result(directory)


def read_training_result(directory: Path) -> RunResult:
    """Read ``summary.json``, or ``metrics.jsonl`` while the run is active."""
    curve: list[tuple[int, float]] = []
    samples: dict[int, list[tuple[str, str]]] = {}
    numbers: dict[str, Measurement] = {}
    step = None
    for line in read_json_lines(directory / "metrics.jsonl"):
        line_step, values = line.get("step"), line.get("metrics")
        if not isinstance(line_step, int):
            continue
        if line.get("event") == "sample":
            sample = line.get("values")
            pair = (
                (sample.get("given"), sample.get("filled")) if isinstance(sample, dict) else ("", line.get("text", ""))
            )
            samples.setdefault(line_step, []).append((str(pair[0]), str(pair[1])))
        if not isinstance(values, dict):
            continue
        step = line_step
        loss = values.get("loss_smooth", values.get("loss"))
        if _is_number(loss):
            curve.append((line_step, float(loss)))
        _set_number(numbers, "bound", values.get("val_nats_per_token"), values.get("val_standard_error"))
        _set_number(
            numbers, "bits_per_byte", values.get("val_bits_per_byte"), values.get("val_bits_per_byte_standard_error")
        )
        _set_number(numbers, "tokens_per_second", values.get("tokens_per_second"), None)
    summary = read_json(directory / "summary.json")
    if summary:
        step = summary.get("step", step)
        _set_summary_numbers(numbers, summary)
    texts = samples[max(samples)] if samples else []
    return RunResult(numbers, tuple(texts), tuple(_thin_out(curve)), step, bool(summary))


def _set_summary_numbers(numbers: dict[str, Measurement], summary: dict[str, Any]) -> None:
    evaluation = summary.get("evaluation", {})
    # Values of the last validation are dropped, because the final ones may be missing if they are not finite.
    for name in ("bound", "bits_per_byte"):
        numbers.pop(name, None)
    _set_number(numbers, "bound", evaluation.get("nats_per_token"), evaluation.get("standard_error"))
    error = evaluation.get("bits_per_byte_standard_error")
    _set_number(numbers, "bits_per_byte", evaluation.get("bits_per_byte"), error)
    tokens, seconds = summary.get("tokens_seen"), summary.get("seconds")
    if _is_number(tokens) and _is_number(seconds) and seconds > 0:
        numbers["tokens_per_second"] = Measurement(tokens / seconds)


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
        if _is_number(metrics.get("mean_logprob")):
            logprobs.append((metrics["mean_logprob"], metrics.get("num_tokens", 0)))
    numbers: dict[str, Measurement] = {}
    if texts:
        numbers["forwards"] = Measurement(forwards)
        _set_number(numbers, "tokens_per_second", tokens / seconds if seconds else None, None)
        _set_number(numbers, "tokens_per_forward", tokens / forwards if forwards else None, None)
        weight = sum(count for _, count in logprobs)
        _set_number(numbers, "mean_logprob", sum(a * b for a, b in logprobs) / weight if weight else None, None)
    return RunResult(numbers, tuple(texts), is_final=bool(texts))


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON lines file, except invalid lines."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; empty if there is no valid one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def last_metrics(path: Path) -> tuple[int, dict[str, Any]] | None:
    """Read step and metrics of the last line with a loss, within the last `MAX_TAIL_BYTES` of the file."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - MAX_TAIL_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return None
    for line in reversed(lines):
        try:
            record = json.loads(line)
            if "loss" in record["metrics"]:
                return int(record["step"]), record["metrics"]
        except (ValueError, KeyError, TypeError):
            continue
    return None


def _set_number(numbers: dict[str, Measurement], name: str, value: Any, error: Any) -> None:
    if _is_number(value):
        numbers[name] = Measurement(float(value), float(error) if _is_number(error) else None)


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _thin_out(curve: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Reduce a curve to `_CURVE_POINTS` points at most; the last one stays."""
    stride = max(1, -(-len(curve) // _CURVE_POINTS))
    return curve[::-1][::stride][::-1]
