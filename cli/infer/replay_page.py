"""A self-contained HTML page that replays decodings in a browser, forward by forward.

`replay.html` is its template and script; this module writes the data, and the parts that are readable without a script.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cli.infer.answers import Answer
from cli.infer.inputs import EncodedInput
from cli.infer.terminal import canvas_text_pieces
from diffusionlm.inference.generate import CanvasSnapshot, DecodingStep
from logger.pages.html import render_template
from tokenizer import Tokenizer

_NAMES = {"remasking_strategy": "strategy", "denoising_steps": "steps per block"}
_MAIN_NAMES = ("strategy", "attention", "block length", "steps per block", "steps", "temperature", "cache")


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


def render_replay(
    tokenizer: Tokenizer,
    model_name: str,
    params: Mapping[str, Any],
    replays: Sequence[tuple[RequestReplay, Answer]],
) -> str:
    """Render the page; ``params`` are the keys of the generation config with their defaults."""
    requests, data = [], []
    for replay, answer in replays:
        frames = replay.trim_frames(answer.result.num_forwards)
        bars = [(len(frame.committed), len(frame.masked)) for frame in frames]
        requests.append(
            {
                "name": answer.request.name,
                "facts": list(_list_facts(answer)),
                "pieces": _final_pieces(tokenizer, answer),
                "bars": bars,
                "above": max([1, *(up for up, _ in bars)]),
                "below": max([0, *(down for _, down in bars)]),
            }
        )
        data.append(_replay_data(replay, answer, frames))
    settings = {_NAMES.get(key, key.replace("_", " ")): _format_value(value) for key, value in params.items()}
    return render_template(
        "cli.infer/replay.html",
        title=f"{model_name}: a replay",
        model=model_name,
        main=[(name, value) for name, value in settings.items() if value and name in _MAIN_NAMES],
        settings=[(name, value) for name, value in settings.items() if value],
        requests=requests,
        data={"tokens": _token_table(tokenizer, data), "requests": data},
    )


def _format_value(value: Any) -> str:
    """Format a setting; "", which is left out, for None."""
    if isinstance(value, list | tuple):
        return ", ".join(map(_format_value, value)) or "none"
    if value is None:
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value)


def _list_facts(answer: Answer) -> Iterator[tuple[str, str]]:
    result = answer.result
    yield "finished by", {"stop": "a stop token", "length": "its length"}[result.finish_reason]
    yield "new tokens", f"{answer.num_tokens:,}"
    yield "forwards", f"{result.num_forwards:,}"
    yield "tokens per forward", f"{result.tokens_per_forward:.2f}"
    if answer.mean_logprob is not None:
        yield "probability (geometric mean)", f"{math.exp(answer.mean_logprob):.1%}"
    yield "seconds", f"{answer.batch_seconds:.2f}" + f" (batch of {answer.batch_size})" * (answer.batch_size > 1)
    yield "seed", str(answer.request.seed)


def _final_pieces(tokenizer: Tokenizer, answer: Answer) -> list[tuple[str, bool]]:
    """Pieces of the whole text, readable without a script, and whether they are new."""
    request, ids = answer.request, answer.result.token_ids
    if request.source.kind != "infill":
        ids = (*request.token_ids, *ids)
    visible_ids, is_new = ids[request.num_hidden :], request.is_new(len(ids))[request.num_hidden :]
    return canvas_text_pieces(visible_ids, [False] * len(visible_ids), is_new, tokenizer)


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
