"""A self-contained HTML page that replays decodings in a browser, forward by forward.

`replay.html` is its template and script; this module writes the data, the texts that are readable without a script, and
the charts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from cli.infer.answers import Answer
from cli.infer.inputs import EncodedInput
from cli.infer.terminal import canvas_text_pieces
from diffusionlm.inference.generate import CanvasSnapshot, DecodingStep
from files.atomic import write_text_atomic
from logger.report.template import fill_template, script_json
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


def write_page(
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
    sections, data = [], []
    for index, (replay, answer) in enumerate(replays):
        frames = replay.trim_frames(answer.result.num_forwards)
        sections.append(_section(index, tokenizer, replay, answer, frames))
        data.append(_replay_data(replay, answer, frames))
    names = [answer.request.name for _, answer in replays]
    parts = {
        "title": escape(f"{model_name}: a replay"),
        "model": escape(model_name),
        "main": _definition_list({key: params.get(key) for key in _MAIN_KEYS}),
        "settings": _definition_list(params),
        "tabs": _tabs(names),
        "requests": "\n".join(sections),
        "data": script_json({"tokens": _token_table(tokenizer, data), "requests": data}),
    }
    return fill_template("cli.infer", "replay.html", parts)


def _definition_list(params: Mapping[str, Any]) -> str:
    """Items of an HTML description list; keys that are None are left out."""
    return "".join(
        f"<div><dt>{escape(_NAMES.get(key, key.replace('_', ' ')))}</dt><dd>{escape(_format_value(value))}</dd></div>"
        for key, value in params.items()
        if value is not None
    )


def _format_value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_format_value, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _tabs(names: Sequence[str]) -> str:
    if len(names) < 2:
        return ""
    tabs = "".join(
        f'<button type="button" role="tab" id="tab{index}" aria-controls="request{index}">{escape(name)}</button>'
        for index, name in enumerate(names)
    )
    return f'<nav class="tabs" role="tablist" aria-label="Requests" hidden>{tabs}</nav>'


def _section(
    index: int, tokenizer: Tokenizer, replay: RequestReplay, answer: Answer, frames: Sequence[ReplayFrame]
) -> str:
    """HTML of one request that is readable without a script: numbers, text, chart."""
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
    terms = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts.items() if value)
    return (
        f'<section class="request" id="request{index}" aria-label="{escape(answer.request.name)}">'
        f"<h2>{escape(answer.request.name)}</h2>"
        f'<dl class="facts">{terms}</dl>'
        f'<div class="canvas" lang="">{_final_text(tokenizer, replay, answer)}</div>'
        f"{render_chart(frames)}</section>"
    )


def _final_text(tokenizer: Tokenizer, replay: RequestReplay, answer: Answer) -> str:
    """HTML of the whole text, with given and new pieces marked."""
    request, ids = replay.request, answer.result.token_ids
    if request.source.kind != "infill":
        ids = (*request.token_ids, *ids)
    visible_ids, is_new = ids[request.num_hidden :], request.is_new(len(ids))[request.num_hidden :]
    pieces = canvas_text_pieces(visible_ids, [False] * len(visible_ids), is_new, tokenizer)
    return "".join(f'<span class="{"new" if new else "given"}">{escape(text)}</span>' for text, new in pieces)


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


_CHART_HEIGHT = 48.0


def render_chart(frames: Sequence[ReplayFrame]) -> str:
    """SVG bars of the tokens that each forward committed and, downwards, of those that it masked again."""
    if not frames:
        return ""
    max_committed = max(1, *(len(frame.committed) for frame in frames))
    max_masked = max(len(frame.masked) for frame in frames)
    scale = _CHART_HEIGHT / (max_committed + max_masked)
    base = max_committed * scale
    bars = []
    for number, frame in enumerate(frames, 1):
        up, down = len(frame.committed), len(frame.masked)
        again = f", {down} masked again" if down else ""
        bars.append(
            f'<g class="bar"><title>forward {number}: {up} committed{again}</title>'
            f'<rect class="hit" x="{number - 1}" y="0" width="1" height="{_CHART_HEIGHT:g}"/>'
            f'<rect class="up" x="{number - 0.9:g}" y="{base - up * scale:.2f}" width="0.8" height="{up * scale:.2f}"/>'
            + (f'<rect class="down" x="{number - 0.9:g}" y="{base:.2f}" width="0.8" height="{down * scale:.2f}"/>')
            * bool(down)
            + "</g>"
        )
    below = " (below the line: masked again)" if max_masked else ""
    maximum = "1 token" if max_committed == 1 else f"{max_committed} tokens"
    return (
        f'<figure class="chart"><figcaption>Tokens committed per forward{below}; at most {maximum}</figcaption>'
        f'<svg viewBox="0 0 {len(frames)} {_CHART_HEIGHT:g}" style="max-width:{3 * len(frames)}rem" '
        f'preserveAspectRatio="none" role="img" '
        f'aria-label="Tokens committed per forward">{"".join(bars)}</svg></figure>'
    )
