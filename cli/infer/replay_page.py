"""A self-contained HTML page that replays decodings in a browser, forward by forward.

`replay.html` is its template and script; this module writes the data, and the parts that are readable without a script.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from markupsafe import Markup

from cli.infer.answers import Answer
from cli.infer.inputs import EncodedInput
from cli.infer.terminal import canvas_text_pieces
from diffusionlm.inference.generate import CanvasSnapshot, DecodingStep
from files.atomic import write_text_atomic
from logger.pages.charts import draw_columns
from logger.pages.page import render_template
from logger.pages.tables import isolate, terms
from tokenizer import Tokenizer

_MAIN_KEYS = ("remasking_strategy", "attention", "block_length", "denoising_steps", "steps", "temperature", "cache")
_NAMES = {"remasking_strategy": "strategy", "denoising_steps": "steps per block"}


@dataclass(frozen=True)
class ReplayFrame:
    """The changes of one forward in a canvas."""

    length: int
    """Tokens of the canvas, including hidden ones."""
    committed: tuple[tuple[int, int, float], ...]
    """Position, token id and log-probability in nats of positions that were committed or whose token changed."""
    masked: tuple[int, ...]
    """Positions that were masked again."""

    @property
    def is_empty(self) -> bool:
        return not self.committed and not self.masked


@dataclass
class RequestReplay:
    """The changes of one request's canvas."""

    request: EncodedInput
    start: CanvasSnapshot | None = None
    """The canvas before the first forward."""
    last: CanvasSnapshot | None = None
    frames: list[ReplayFrame] = field(default_factory=list)

    def add(self, canvas: CanvasSnapshot) -> None:
        """Append the changes of a forward."""
        before = self.last
        if before is None:
            is_masked = self.request.is_new(len(canvas.token_ids))
            before = self.start = CanvasSnapshot(canvas.token_ids, tuple(is_masked), (math.nan,) * len(is_masked))
        self.frames.append(_diff_snapshots(before, canvas))
        self.last = canvas

    def trim_frames(self, num_forwards: int) -> list[ReplayFrame]:
        """One frame per forward of the request, without the forwards of the batch that it took no part in."""
        frames = list(self.frames)
        if sum(not frame.is_empty for frame in frames) == num_forwards:
            return [frame for frame in frames if not frame.is_empty]
        while len(frames) > num_forwards and frames[-1].is_empty:
            frames.pop()
        return frames


class ReplayRecorder:
    """Records what each forward of a batch changed, for the replay page (pass as ``on_step``)."""

    def __init__(self, requests: Sequence[EncodedInput]) -> None:
        self.replays = [RequestReplay(request) for request in requests]

    def __call__(self, step: DecodingStep) -> None:
        for replay, canvas in zip(self.replays, step.canvases, strict=True):
            replay.add(canvas)


def _diff_snapshots(before: CanvasSnapshot, after: CanvasSnapshot) -> ReplayFrame:
    committed, masked = [], []
    for position, (token, is_masked) in enumerate(zip(after.token_ids, after.is_masked, strict=True)):
        is_known = position < len(before.token_ids)
        was_masked = before.is_masked[position] if is_known else True
        if is_masked and not was_masked:
            masked.append(position)
        elif not is_masked and (was_masked or token != before.token_ids[position]):
            committed.append((position, token, after.logprobs[position]))
    return ReplayFrame(len(after.token_ids), tuple(committed), tuple(masked))


def write_replay_page(
    path: Path,
    tokenizer: Tokenizer,
    model_name: str,
    params: Mapping[str, Any],
    replays: Sequence[tuple[RequestReplay, Answer]],
) -> None:
    """Write the page atomically.

    Args:
        params: keys of the generation config with their defaults.

    Raises:
        OSError: the file cannot be written.
    """
    write_text_atomic(path, render_page(tokenizer, model_name, params, replays))


def render_page(
    tokenizer: Tokenizer,
    model_name: str,
    params: Mapping[str, Any],
    replays: Sequence[tuple[RequestReplay, Answer]],
) -> str:
    """Return the HTML of the page."""
    requests, data = [], []
    for replay, answer in replays:
        frames = replay.trim_frames(answer.result.num_forwards)
        requests.append(_request_parts(tokenizer, replay, answer, frames))
        data.append(_replay_data(replay, answer, frames))
    return render_template(
        "cli.infer/replay.html",
        title=f"{model_name}: a replay",
        model=model_name,
        main=terms(_settings({key: params.get(key) for key in _MAIN_KEYS}), "facts main"),
        settings=terms(_settings(params), "facts"),
        requests=requests,
        data={"tokens": _token_table(tokenizer, data), "requests": data},
    )


def _settings(params: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and values of settings; keys that are None are left out."""
    return [
        (_NAMES.get(key, key.replace("_", " ")), _format_value(value))
        for key, value in params.items()
        if value is not None
    ]


def _format_value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_format_value, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _request_parts(
    tokenizer: Tokenizer, replay: RequestReplay, answer: Answer, frames: Sequence[ReplayFrame]
) -> dict[str, Any]:
    """What is readable of a request without a script: numbers, text, chart."""
    result = answer.result
    facts = {
        "finished by": {"stop": "a stop token", "length": "its length"}[result.finish_reason],
        "new tokens": f"{answer.num_tokens:,}",
        "forwards": f"{result.num_forwards:,}",
        "tokens per forward": f"{result.tokens_per_forward:.2f}",
        "probability (geometric mean)": "" if answer.mean_logprob is None else f"{math.exp(answer.mean_logprob):.1%}",
        "seconds": f"{answer.batch.seconds:.2f}" + f" (batch of {answer.batch.size})" * (answer.batch.size > 1),
        "seed": str(answer.request.seed),
    }
    return {
        "name": answer.request.name,
        "facts": terms(((name, value) for name, value in facts.items() if value), "facts"),
        "pieces": _final_pieces(tokenizer, replay, answer),
        "chart": _draw_commits(frames),
    }


def _final_pieces(tokenizer: Tokenizer, replay: RequestReplay, answer: Answer) -> list[tuple[Markup, bool]]:
    """Pieces of the whole text, and whether they are new."""
    request, ids = replay.request, answer.result.token_ids
    if request.source.kind != "infill":
        ids = (*request.token_ids, *ids)
    visible_ids, is_new = ids[request.num_hidden :], request.is_new(len(ids))[request.num_hidden :]
    pieces = canvas_text_pieces(visible_ids, [False] * len(visible_ids), is_new, tokenizer)
    return [(isolate(text), new) for text, new in pieces]


def _replay_data(replay: RequestReplay, answer: Answer, frames: Sequence[ReplayFrame]) -> dict[str, Any]:
    """Frames of a request for the script; positions count from the first visible token."""
    num_hidden = replay.request.num_hidden
    start = replay.start
    ids = replay.request.token_ids if start is None else start.token_ids
    is_masked = (False,) * len(ids) if start is None else start.is_masked
    is_infill = answer.request.source.kind == "infill"
    end = None if is_infill else len(answer.request.token_ids) - num_hidden + len(answer.result.token_ids)
    return {
        "start": [
            -1 if masked else token for token, masked in zip(ids[num_hidden:], is_masked[num_hidden:], strict=True)
        ],
        "new": [
            int(new) for new in answer.request.is_new(max([len(ids), *(frame.length for frame in frames)]))[num_hidden:]
        ],
        "end": end,
        "frames": [
            {
                "length": frame.length - num_hidden,
                "committed": [
                    [position - num_hidden, token, _probability(p)] for position, token, p in frame.committed
                ],
                "masked": [position - num_hidden for position in frame.masked],
            }
            for frame in frames
        ],
    }


def _probability(logprob: float) -> float | None:
    return None if math.isnan(logprob) else round(math.exp(min(logprob, 0.0)), 5)


def _token_table(tokenizer: Tokenizer, requests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Token id -> its text, {"special": text}, or {"bytes": hex} if it is not valid UTF-8 alone."""
    ids = {token for request in requests for token in request["start"] if token >= 0}
    ids |= {token for request in requests for frame in request["frames"] for _, token, _ in frame["committed"]}
    special = {token: text for text, token in tokenizer.special_tokens.items()}
    return {str(token): _token(tokenizer, token, special) for token in sorted(ids)}


def _token(tokenizer: Tokenizer, token: int, special: Mapping[int, str]) -> Any:
    if token in special:
        return {"special": special[token]}
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"bytes": data.hex()}


def _draw_commits(frames: Sequence[ReplayFrame]) -> Markup:
    """Draw how many tokens each forward committed and, downwards, how many it masked again."""
    if not frames:
        return Markup("")
    bars = [(len(frame.committed), len(frame.masked)) for frame in frames]
    notes = [
        f"forward {number}: {up} committed" + f", {down} masked again" * bool(down)
        for number, (up, down) in enumerate(bars, 1)
    ]
    maximum = max(1, *(up for up, _ in bars))
    title = "Tokens committed per forward" + " (below the line: masked again)" * any(down for _, down in bars)
    return draw_columns(f"{title}; at most {maximum} token{'s' * (maximum != 1)}", bars, notes)
