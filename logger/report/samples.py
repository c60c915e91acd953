"""Render infilled samples over the steps of a run; each token shows the forward in which it was unmasked."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

from logger.pages.tables import isolate, join, scrolling_table
from logger.report.reading import LoggedRun, RunEvent

MAX_SAMPLES_PER_TEXT = 12
"""Samples of each text and run: the first, the last and evenly spaced ones between."""

MIN_SHADE_PERCENT = 20
"""Shade of tokens of the last forward; those of the first have 100 %."""

_MASKED_SPAN = re.compile(r"\[MASK:([^\[\]\n]*)\]")
_LINE_BREAK = Markup('<i aria-label="line break">↵</i>\n')


@dataclass(frozen=True)
class SampleToken:
    """Part of an infilled text: a token, or several that form one character."""

    text: str
    forward: int | None = None
    """The forward, from 1, after which it was final; None: it was given."""
    probability: float | None = None


@dataclass(frozen=True)
class FilledSample:
    """A text whose masked spans the model filled at one step of training."""

    step: int
    masked_text: str
    pieces: tuple[SampleToken, ...]

    @property
    def num_forwards(self) -> int:
        return max((piece.forward or 0 for piece in self.pieces), default=0)


def render_samples(runs: Sequence[LoggedRun]) -> Markup:
    """Render a block for each text, with the samples of each run by step."""
    blocks: dict[str, Markup] = {}
    forwards: dict[str, int] = {}
    plain: list[str] = []
    for run in runs:
        texts: dict[str, list[FilledSample]] = {}
        for event in run.events_of("sample"):
            sample = read_sample(event)
            if sample is None:
                plain.append(event.text)
            else:
                texts.setdefault(sample.masked_text, []).append(sample)
        for masked_text, filled in texts.items():
            title = Markup("<h4>{}</h4>").format(run.name) if len(runs) > 1 else Markup("")
            chosen = _subsample(filled)
            blocks[masked_text] = blocks.get(masked_text, Markup("")) + title + _render_history(chosen)
            forwards[masked_text] = max(forwards.get(masked_text, 0), *(sample.num_forwards for sample in chosen))
    html = join(
        Markup('<article class="sample card"><pre class="given" dir="auto">{}</pre>{}{}</article>').format(
            render_masked_spans(masked_text), _render_replay(forwards[masked_text]), block
        )
        for masked_text, block in blocks.items()
    )
    if plain:
        items = join(Markup("<li>{}</li>").format(text) for text in plain[:MAX_SAMPLES_PER_TEXT])
        html += Markup('<ul class="plain">{}</ul>').format(items)
    key = (
        '<p class="note">The small number is the forward, from 1 on, in which a token was unmasked; the earlier, the '
        "stronger its shade. Point at a token to read its probability.</p>"
    )
    return Markup('<div class="samples">{}</div>{}').format(html, Markup(key * bool(blocks))) if html else html


def read_sample(event: RunEvent) -> FilledSample | None:
    """Read a sample event; None: its values are damaged or missing."""
    values = event.values
    masked_text, texts = values.get("given"), values.get("tokens")
    if not isinstance(masked_text, str) or not isinstance(texts, list):
        return None
    try:
        columns = list(zip(texts, values.get("step_map", ()), values.get("logprobs", ()), strict=True))
    except (TypeError, ValueError):
        return None
    pieces: list[SampleToken] = []
    rest: list[tuple[int | None, float | None]] = []
    for text, forward, logprob in columns:
        if not isinstance(text, str) or not _is_forward(forward) or not _is_logprob(logprob):
            return None
        rest.append((forward, logprob))
        if text:
            # Earlier tokens without text are bytes of this token's first character.
            latest = max((number or 0 for number, _ in rest), default=0)
            logprobs = [value for _, value in rest if value is not None]
            size = 1 if latest and forward is None else len(text)
            pieces.append(
                SampleToken(text[:size], latest or None, math.exp(min(0.0, sum(logprobs))) if logprobs else None)
            )
            if text[size:]:
                pieces.append(SampleToken(text[size:]))
            rest = []
    return FilledSample(event.step, masked_text, tuple(pieces))


def _is_forward(value: Any) -> bool:
    return value is None or (type(value) is int and 0 < value < 2**31)


def _is_logprob(value: Any) -> bool:
    return value is None or (isinstance(value, float | int) and not math.isnan(value))


def _subsample(filled: list[FilledSample]) -> list[FilledSample]:
    """Select at most `MAX_SAMPLES_PER_TEXT` samples, evenly spaced."""
    if len(filled) <= MAX_SAMPLES_PER_TEXT:
        return filled
    return [
        filled[round(index * (len(filled) - 1) / (MAX_SAMPLES_PER_TEXT - 1))] for index in range(MAX_SAMPLES_PER_TEXT)
    ]


def _render_replay(num_forwards: int) -> Markup:
    """Render a slider over the forwards; the page's script shows and drives it."""
    html = (
        '<div class="replay" hidden><button type="button">Play</button>'
        f'<label>Forward <input type="range" min="0" max="{num_forwards}" value="{num_forwards}"></label>'
        f"<output>{num_forwards} of {num_forwards}</output></div>"
    )
    return Markup(html if num_forwards > 1 else "")


def _render_history(filled: list[FilledSample]) -> Markup:
    row = Markup('<tr><th scope="row">{}</th><td><pre dir="auto">{}</pre></td></tr>')
    rows = join(row.format(f"{sample.step:,}", render_filled(sample)) for sample in filled)
    head = Markup('<thead><tr><th scope="col">Step</th><th scope="col">Filled</th></tr></thead>')
    return scrolling_table(Markup("{}<tbody>{}</tbody>").format(head, rows))


def render_masked_spans(masked_text: str) -> Markup:
    """Render masked spans as boxes that show their number of tokens."""
    # `escape` changes neither brackets nor colons.
    return Markup(_MASKED_SPAN.sub(r'<span class="hole">\1</span>', str(escape(masked_text))))


def render_fills(masked_text: str, filled_text: str) -> Markup:
    """Render a filled text whose tokens are not known, with its fills marked; without marks if the texts differ."""
    first, *others = _MASKED_SPAN.split(masked_text)[::2]
    if not others or not filled_text.startswith(first):
        return isolate(filled_text)
    parts, start = [isolate(first)], len(first)
    for index, given in enumerate(others, 1):
        is_last = index == len(others)
        place = len(filled_text) - len(given) if is_last else filled_text.find(given, start)
        if place < start or not filled_text.startswith(given, place):
            return isolate(filled_text)
        parts.append(Markup("<mark>{}</mark>").format(_LINE_BREAK.join(filled_text[start:place].split("\n"))))
        parts.append(isolate(given))
        start = place + len(given)
    return join(parts)


def render_filled(sample: FilledSample) -> Markup:
    """Render the text with each unmasked token shaded by its forward."""
    parts = []
    for piece in sample.pieces:
        if piece.forward is None:
            parts.append(isolate(piece.text))
            continue
        shade = 100 - (100 - MIN_SHADE_PERCENT) * (piece.forward - 1) / max(1, sample.num_forwards - 1)
        first, *lines = piece.text.split("\n")
        note = "" if piece.probability is None else f", probability {piece.probability:.1%}"
        mark = Markup('<mark data-forward="{0}" style="--shade:{1:.0f}%" title="forward {0}{2}">{3}</mark>')
        text = _LINE_BREAK.join([Markup("{}<sub>{}</sub>").format(first, piece.forward), *lines])
        parts.append(mark.format(piece.forward, shade, note, text))
    return join(parts)
