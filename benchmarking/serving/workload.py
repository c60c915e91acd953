"""Requests of a load test: read from a file or drawn, and the times at which they are sent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from config.bench.serve import LengthRange, RequestsSection
from files.usage_error import UsageError

DEFAULT_COUNT = 100
TEXT = (
    "the of and to in is that for it was on are as with they at be this from have or by one had not but what all were "
    "when we there can an your which their said if do will each about how up out them then she many some so these "
    "would other into has more her two like him see time could no make than first been its who now people my made over "
    "did down only way find use may water long little very after words called just where most know get through back "
    "much before go good new write our used me man too any day same right look think also around another came come "
    "work three word must because does part even place well such here take why things help put years different away "
    "again off went old number great tell men say small every found still between name should home big give air line"
)
"""Words of drawn prompts."""
FILE_KEYS = {"prompt", "messages", "prompt_length", "max_tokens", "seed"}


def build_requests(section: RequestsSection, *, is_chat: bool, num_warmup: int = 0) -> list[dict[str, Any]]:
    """Read or draw the bodies of a load test's requests, without the model, and then those of its warm-up. Request i is
    the same for any count.

    Raises:
        UsageError: the file cannot be read, or a line is wrong; names file and line.
    """
    lines = [{}] if section.file is None else _read_lines(section.file, is_chat=is_chat)
    count = section.count or (DEFAULT_COUNT if section.file is None else len(lines))
    return [
        _build_request(section, lines[index % len(lines)], index, is_chat=is_chat)
        for index in range(count + num_warmup)
    ]


def arrival_times(rate: float, count: int, seed: int) -> list[float]:
    """Seconds from the start at which requests of a Poisson process are sent; the first one is sent at once."""
    gaps = np.random.default_rng([seed, 1]).exponential(1.0 / rate, count)
    return [float(time) for time in np.cumsum(gaps) - gaps[0]]


def _build_request(section: RequestsSection, line: Mapping[str, Any], index: int, *, is_chat: bool) -> dict[str, Any]:
    rng = np.random.default_rng([section.seed, 0, index])
    lengths = [_draw_length(rng, section.prompt_length), _draw_length(rng, section.answer_length)]
    content = {key: line[key] for key in ("prompt", "messages") if key in line}
    if not content:
        content = {"prompt": " ".join(rng.choice(TEXT.split(), line.get("prompt_length", lengths[0])).tolist())}
    if is_chat and "prompt" in content:
        content = {"messages": [{"role": "user", "content": content["prompt"]}]}
    return {
        **content,
        "max_tokens": line.get("max_tokens", lengths[1]),
        "seed": line.get("seed", section.seed + index),
        "stream": True,
        "stream_options": {"include_usage": True},
        **section.body,
    }


def _draw_length(rng: np.random.Generator, limits: LengthRange) -> int:
    return int(rng.integers(limits[0], limits[1] + 1))


def _read_lines(path: Path, *, is_chat: bool) -> list[dict[str, Any]]:
    lines = []
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"requests.file = {path} cannot be read: {error}") from None
    for number, text in enumerate(content.split("\n"), 1):
        if not text.strip():
            continue
        try:
            lines.append(_check_line(json.loads(text), is_chat=is_chat))
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path}:{number}: {error}") from None
    if not lines:
        raise UsageError(f'{path} is empty: write a JSON object in each line, such as {{"prompt": "Once upon a time"}}')
    return lines


def _check_line(line: Any, *, is_chat: bool) -> dict[str, Any]:
    if not isinstance(line, dict):
        raise ValueError('expected a JSON object, such as {"prompt": "Once upon a time"}')
    if unknown := sorted(line.keys() - FILE_KEYS):
        raise ValueError(f'unknown key "{unknown[0]}": a line may have {", ".join(sorted(FILE_KEYS))}')
    if len(line.keys() & {"prompt", "messages", "prompt_length"}) != 1:
        raise ValueError('expected one of the keys "prompt", "messages" and "prompt_length"')
    if "messages" in line and not is_chat:
        raise ValueError('"messages" need server.endpoint = "chat"')
    if "messages" in line and not isinstance(line["messages"], list):
        raise ValueError('"messages" must be an array of objects with "role" and "content"')
    prompt = line.get("prompt", "")
    is_token_ids = not is_chat and isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if not isinstance(prompt, str) and not is_token_ids:
        raise ValueError('"prompt" must be text' + ("" if is_chat else " or an array of token ids"))
    for key, lowest in (("prompt_length", 1), ("max_tokens", 1), ("seed", 0)):
        value = line.get(key, lowest)
        if type(value) is not int or value < lowest:
            raise ValueError(f'"{key}" = {json.dumps(value)} must be an integer of at least {lowest}')
    return line
