"""Texts with holes as a run filled them, over its steps."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from html import escape

from logger.report.reading import Event, RunRecord

ROWS_SHOWN = 12
"""Of each text and run, spread over its steps; the first and the last are among them."""

_TEXT = re.compile(
    r"(?:step \d+: )?(?P<given>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\") -> (?P<filled>'.*'|\".*\")", re.DOTALL
)
_HOLE = re.compile(r"\[MASK:[^\[\]\n]*\]")


def samples(runs: Sequence[RunRecord]) -> str:
    """A block for each text, in it the runs one after the other, and of each what it wrote at which step."""
    blocks: dict[str, list[str]] = {}
    plain: list[str] = []
    for run in runs:
        texts: dict[str, list[tuple[int, str]]] = {}
        for event in run.events_of("sample"):
            parsed = _parsed(event)
            if parsed is None:
                plain.append(f"<li>{escape(event.text)}</li>")
            else:
                texts.setdefault(parsed[0], []).append((event.step, parsed[1]))
        for given, filled in texts.items():
            title = f"<h4>{escape(run.name)}</h4>" if len(runs) > 1 else ""
            blocks.setdefault(given, []).append(title + _history(given, filled))
    parts = [
        f'<article class="sample"><pre class="given">{_with_holes(given)}</pre>{"".join(block)}</article>'
        for given, block in blocks.items()
    ]
    if plain:
        parts.append(f'<ul class="plain">{"".join(plain[:ROWS_SHOWN])}</ul>')
    return f'<div class="samples">{"".join(parts)}</div>' if parts else ""


def _parsed(event: Event) -> tuple[str, str] | None:
    """The text with holes and the filled one, from the words of the event."""
    match = _TEXT.fullmatch(event.text)
    if match is None:
        return None
    try:
        given, filled = ast.literal_eval(match["given"]), ast.literal_eval(match["filled"])
    except (ValueError, SyntaxError):
        return None
    return (given, filled) if isinstance(given, str) and isinstance(filled, str) else None


def _history(given: str, filled: list[tuple[int, str]]) -> str:
    spread = sorted({round(place * (len(filled) - 1) / max(1, ROWS_SHOWN - 1)) for place in range(ROWS_SHOWN)})
    chosen = [filled[place] for place in (spread if len(filled) > ROWS_SHOWN else range(len(filled)))]
    rows = "".join(
        f'<tr><th scope="row">{step:,}</th><td><pre>{_with_new(given, text)}</pre></td></tr>' for step, text in chosen
    )
    head = '<thead><tr><th scope="col">Step</th><th scope="col">Filled</th></tr></thead>'
    return f'<div class="wide" tabindex="0" role="group"><table>{head}<tbody>{rows}</tbody></table></div>'


def _with_holes(given: str) -> str:
    """The holes as boxes; their length is the number of tokens."""
    parts = []
    end = 0
    for match in _HOLE.finditer(given):
        parts.append(escape(given[end : match.start()]))
        parts.append(f'<span class="hole">{escape(match[0][6:-1])}</span>')
        end = match.end()
    return "".join([*parts, escape(given[end:])])


def _with_new(given: str, filled: str) -> str:
    """What was filled in apart from what was given, where that can be told."""
    pieces = _HOLE.split(given)
    match = re.fullmatch("(.*?)".join(map(re.escape, pieces)), filled, re.DOTALL)
    if match is None:
        return escape(filled)
    parts = [escape(pieces[0])]
    for new, piece in zip(match.groups(), pieces[1:], strict=True):
        shown = escape(new).replace("\n", '<i aria-label="line break">↵</i>\n')
        parts.append(f"<mark>{shown}</mark>{escape(piece)}")
    return "".join(parts)
