"""What is written of the answers: JSON lines, and whether their files can be written at all."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli.infer.inputs import EncodedInput
from config.infer import InferOutputConfig

if TYPE_CHECKING:
    from diffusionlm.inference.generate import Generation
    from tokenizer import Tokenizer


@dataclass(frozen=True)
class Answer:
    """A request and what became of it."""

    request: EncodedInput
    result: Generation
    output: str
    """The new text; of an infill the whole text, its holes filled."""
    batch: BatchTiming

    @property
    def num_tokens(self) -> int:
        """New tokens, the holes of an infill; without the stop token."""
        return len(self.result.step_map)

    @property
    def mean_logprob(self) -> float | None:
        """In nats, of the new tokens; None if there are none."""
        logprobs = [value for value in self.result.logprobs if math.isfinite(value)]
        return sum(logprobs) / len(logprobs) if logprobs else None


@dataclass(frozen=True)
class BatchTiming:
    """Requests that were decoded together."""

    size: int
    seconds: float
    num_tokens: int
    """New ones of all requests."""

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds if self.seconds > 0.0 else 0.0


def build_answers(
    tokenizer: Tokenizer, requests: Sequence[EncodedInput], results: Sequence[Generation], seconds: float
) -> list[Answer]:
    """The answers of one batch, which took so long."""
    batch = BatchTiming(len(requests), seconds, sum(len(result.step_map) for result in results))
    return [
        Answer(request, result, _output_text(tokenizer, request, result), batch)
        for request, result in zip(requests, results, strict=True)
    ]


def _output_text(tokenizer: Tokenizer, request: EncodedInput, result: Generation) -> str:
    from diffusionlm.inference.text import decode_continuation

    if request.source.kind == "prompt" and len(request.token_ids) > request.num_hidden:
        return decode_continuation(tokenizer, result.token_ids)
    return tokenizer.decode(result.token_ids[request.num_hidden if request.source.kind == "infill" else 0 :])


def answer_record(answer: Answer, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON object of an answer.

    Args:
        settings: of the generation, as they were used.
    """
    request, result = answer.request, answer.result
    text: dict[str, Any] = {"prompt": request.text, "output": answer.output}
    if request.source.messages:
        text["messages"] = list(request.source.messages)
    return {
        "kind": request.source.kind,
        "text": text,
        "params": {**settings, "seed": request.seed},
        "metrics": {
            "finish_reason": result.finish_reason,
            "num_tokens": answer.num_tokens,
            "num_forwards": result.num_forwards,
            "tokens_per_forward": round(result.tokens_per_forward, 6),
            "mean_logprob": answer.mean_logprob,
            "batch_size": answer.batch.size,
            "seconds": round(answer.batch.seconds, 6),
            "tokens_per_second": round(answer.batch.tokens_per_second, 3),
        },
        "tokens": {
            "token_ids": list(result.token_ids),
            "logprobs": [value if math.isfinite(value) else None for value in result.logprobs],
            "step_map": list(result.step_map),
        },
        **({"extra": dict(request.source.extra)} if request.source.extra else {}),
    }


def append_json_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """One JSON object a line, on the disk when this returns."""
    with path.open("a", encoding="utf-8", newline="\n") as file:
        for each in records:
            file.write(json.dumps(each) + "\n")


def check_output_paths(config: InferOutputConfig) -> None:
    """Say now what would be in the way of writing later.

    Raises:
        ValueError: a file whose directory is not there or cannot be written to, a directory in its place, or answers
            that are already there.
    """
    for key, path in (("file", config.file), ("html", config.html)):
        if path is None:
            continue
        parent = path.parent
        if not parent.is_dir():
            raise ValueError(f'output.{key} = "{path}": there is no directory {parent}; make it, or name another')
        if path.is_dir():
            raise ValueError(f'output.{key} = "{path}" is a directory: name a file')
        if not os.access(parent, os.W_OK):
            raise ValueError(f'output.{key} = "{path}": {parent} cannot be written to; name another directory')
    if config.file is not None and config.file.exists() and config.file.stat().st_size > 0:
        raise ValueError(f'output.file = "{config.file}" has answers already: name a new file, or remove it')
    if config.file is not None and config.file == config.html:
        raise ValueError(f'output.file and output.html are both "{config.file}": name two files')
