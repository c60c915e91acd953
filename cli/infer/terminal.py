"""Terminal output: the answers, and the canvases while they are decoded (``--show``)."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import TextIO

from rich.cells import chop_cells
from rich.live import Live
from rich.text import Text

from cli.infer.answers import Answer
from cli.infer.inputs import EncodedInput
from diffusionlm.inference.generate import CanvasSnapshot, DecodingStep
from diffusionlm.inference.text import decode_continuation
from files.terminal_text import accepts_escapes, escape_control_characters, print_line
from logger.pages.terminal import make_console
from tokenizer import Tokenizer

MASK_GLYPH = "░"
"""A masked position."""


def print_answer(tokenizer: Tokenizer, answer: Answer, *, shows_name: bool) -> None:
    """Print an answer; of prompts and infills with the given text, dimmed. A pipe gets the exact text."""
    pieces = [(f"[{answer.request.name}]\n", False)] if shows_name else []
    pieces += _final_pieces(tokenizer, answer)
    if sys.stdout.isatty():
        make_console(sys.stdout).print(style_pieces(pieces), soft_wrap=True)
    else:
        print("".join(text for text, _ in pieces))
    sys.stdout.flush()


def _final_pieces(tokenizer: Tokenizer, answer: Answer) -> list[tuple[str, bool]]:
    request, ids = answer.request, answer.result.token_ids
    if request.source.kind == "chat":
        return [(answer.output, True)]
    if request.source.kind == "prompt":
        return [(request.text, False), (answer.output, True)]
    is_new = request.is_new(len(ids))[request.num_hidden :]
    return canvas_text_pieces(ids[request.num_hidden :], [False] * len(is_new), is_new, tokenizer)


def style_pieces(pieces: Sequence[tuple[str, bool]]) -> Text:
    """Join pieces for a terminal: those that are not new are dimmed, and control characters are escaped."""
    styled = [(escape_control_characters(text.replace("\t", "    ")), "" if new else "dim") for text, new in pieces]
    return Text.assemble(*styled)


class LiveView:
    """Shows the canvases of a batch after each forward: redrawn in a terminal, else one line per changed canvas."""

    def __init__(self, tokenizer: Tokenizer, requests: Sequence[EncodedInput], stream: TextIO) -> None:
        self._tokenizer = tokenizer
        self._requests = requests
        self._stream = stream
        self._canvases: tuple[CanvasSnapshot, ...] = ()
        self._console = make_console(stream)
        self._live: Live | None = None

    def __call__(self, step: DecodingStep) -> None:
        if accepts_escapes(self._stream):
            self._redraw(step)
        else:
            self._append(step)
        self._canvases = step.canvases

    def close(self) -> None:
        """Erase the drawing, so that the final text replaces it."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _append(self, step: DecodingStep) -> None:
        for index, (request, canvas) in enumerate(zip(self._requests, step.canvases, strict=True)):
            # Log-probabilities are nan at masked positions, so snapshots are never equal.
            if self._canvases and _visible_state(self._canvases[index]) == _visible_state(canvas):
                continue
            ids, is_masked = canvas.token_ids[request.num_hidden :], canvas.is_masked[request.num_hidden :]
            text = json.dumps(render_canvas(ids, is_masked, self._tokenizer), ensure_ascii=False)
            print_line(f"{request.name}, forward {step.num_forwards}: {text}", self._stream)

    def _redraw(self, step: DecodingStep) -> None:
        width, height = self._console.size
        pieces = [(f"forward {step.num_forwards}\n", True)]
        for request, canvas in zip(self._requests, step.canvases, strict=True):
            if len(self._requests) > 1:
                pieces.append((f"[{request.name}]\n", False))
            # Of a chat show the answer alone.
            first = len(request.token_ids) if request.source.kind == "chat" else request.num_hidden
            visible = slice(first, None)
            is_new = request.is_new(len(canvas.token_ids))
            pieces += canvas_text_pieces(
                canvas.token_ids[visible], canvas.is_masked[visible], is_new[visible], self._tokenizer
            )
            pieces.append(("\n", True))
        lines = fold_lines(style_pieces(pieces[:-1]), width)
        # Show the last lines that fit: the cursor cannot move above the top line.
        drawing = Text("\n", no_wrap=True).join(lines[-max(height - 1, 1) :])
        if self._live is None:
            self._live = Live(
                console=self._console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
                vertical_overflow="visible",
            )
            self._live.start()
            self._console.show_cursor(True)  # a process that is killed would leave it hidden
        self._live.update(drawing, refresh=True)


def _visible_state(canvas: CanvasSnapshot) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    return canvas.token_ids, canvas.is_masked


def fold_lines(text: Text, width: int) -> list[Text]:
    """Split a text into lines of at most ``width`` columns, at any character, so that committed tokens move nothing."""
    lines: list[Text] = []
    for line in text.split("\n", allow_blank=True):
        ends = accumulate(map(len, chop_cells(line.plain, width)))
        lines += line.divide(end for end in ends if 0 < end < len(line))
    return lines


def canvas_text_pieces(
    token_ids: Sequence[int], is_masked: Sequence[bool], is_new: Sequence[bool], tokenizer: Tokenizer
) -> list[tuple[str, bool]]:
    """Split a canvas into pieces of text, each with True if it is new; a masked position is `MASK_GLYPH`.

    Args:
        is_new: True at positions that were masked at the start.
    """
    pieces: list[tuple[str, bool]] = []
    positions = zip(is_masked, is_new, token_ids, strict=True)
    for (masked, new), run in groupby(positions, key=lambda position: position[:2]):
        ids = [token for _, _, token in run]
        text = decode_continuation(tokenizer, ids) if pieces else tokenizer.decode(ids)
        pieces.append((MASK_GLYPH * len(ids) if masked else text, new))
    return pieces


def render_canvas(token_ids: Sequence[int], is_masked: Sequence[bool], tokenizer: Tokenizer) -> str:
    """The text of a canvas with `MASK_GLYPH` at each masked position."""
    return "".join(text for text, _ in canvas_text_pieces(token_ids, is_masked, is_masked, tokenizer))
