"""Terminal output: the answers, and the canvases while they are decoded (``--show``)."""

from __future__ import annotations

import json
import os
import shutil
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TextIO

from cli.infer.answers import Answer
from cli.infer.inputs import EncodedInput
from diffusionlm.inference.generate import CanvasSnapshot, DecodingStep
from diffusionlm.inference.text import decode_continuation
from files.terminal_text import escape_control_characters, print_line
from tokenizer import Tokenizer

DIM, RESET = "\x1b[2m", "\x1b[0m"

MASK_GLYPH = "░"
"""A masked position."""


def print_answer(tokenizer: Tokenizer, answer: Answer, *, shows_name: bool) -> None:
    """Print an answer; of prompts and infills with the given text, dimmed."""
    if shows_name:
        print(style_text(f"[{answer.request.name}]", DIM))
    pieces = _final_pieces(tokenizer, answer)
    print("".join(style_text(text, "" if new else DIM) for text, new in pieces), flush=True)


def _final_pieces(tokenizer: Tokenizer, answer: Answer) -> list[tuple[str, bool]]:
    request, ids = answer.request, answer.result.token_ids
    if request.source.kind == "chat":
        return [(answer.output, True)]
    if request.source.kind == "prompt":
        return [(request.text, False), (answer.output, True)]
    is_new = request.is_new(len(ids))[request.num_hidden :]
    return canvas_text_pieces(ids[request.num_hidden :], [False] * len(is_new), is_new, tokenizer)


def style_text(text: str, style: str) -> str:
    """In a terminal, apply a style and escape control characters; elsewhere return the text unchanged."""
    if not sys.stdout.isatty():
        return text
    text = _format_for_terminal(text)
    return f"{style}{text}{RESET}" if style and text and "NO_COLOR" not in os.environ else text


def _format_for_terminal(text: str) -> str:
    """Replace tabs by spaces, and other control characters except newlines by their escapes."""
    return escape_control_characters(text.replace("\t", "    "))


class LiveView:
    """Shows the canvases of a batch after each forward: redrawn in a terminal, else one line per changed canvas."""

    def __init__(self, tokenizer: Tokenizer, requests: Sequence[EncodedInput], stream: TextIO) -> None:
        self._tokenizer = tokenizer
        self._requests = requests
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._num_lines_drawn = 0
        self._canvases: tuple[CanvasSnapshot, ...] = ()

    def __call__(self, step: DecodingStep) -> None:
        if self._is_terminal:
            self._redraw(step)
        else:
            self._append(step)
        self._canvases = step.canvases
        self._stream.flush()

    def close(self) -> None:
        """Erase the drawing, so that the final text replaces it."""
        if self._num_lines_drawn:
            self._stream.write(f"\x1b[{self._num_lines_drawn}A\r\x1b[J")
            self._num_lines_drawn = 0

    def _append(self, step: DecodingStep) -> None:
        for index, (request, canvas) in enumerate(zip(self._requests, step.canvases, strict=True)):
            # Log-probabilities are nan at masked positions, so snapshots are never equal.
            if self._canvases and _visible_state(self._canvases[index]) == _visible_state(canvas):
                continue
            ids, is_masked = canvas.token_ids[request.num_hidden :], canvas.is_masked[request.num_hidden :]
            text = json.dumps(render_canvas(ids, is_masked, self._tokenizer), ensure_ascii=False)
            print_line(f"{request.name}, forward {step.num_forwards}: {text}", self._stream)

    def _redraw(self, step: DecodingStep) -> None:
        width, height = shutil.get_terminal_size()
        lines = [f"forward {step.num_forwards}"]
        for request, canvas in zip(self._requests, step.canvases, strict=True):
            if len(self._requests) > 1:
                lines += wrap_pieces([(f"[{request.name}]", False)], width)
            # Of a chat show the answer alone.
            first = len(request.token_ids) if request.source.kind == "chat" else request.num_hidden
            visible = slice(first, None)
            is_new = request.is_new(len(canvas.token_ids))
            pieces = canvas_text_pieces(
                canvas.token_ids[visible], canvas.is_masked[visible], is_new[visible], self._tokenizer
            )
            lines += wrap_pieces(pieces, width)
        # Show the last lines that fit: the cursor cannot move above the top line.
        lines = lines[-max(height - 1, 1) :]
        self.close()
        self._stream.write("".join(f"{line}\n" for line in lines))
        self._num_lines_drawn = len(lines)


def _visible_state(canvas: CanvasSnapshot) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    return canvas.token_ids, canvas.is_masked


def wrap_pieces(pieces: Sequence[tuple[str, bool]], width: int) -> list[str]:
    """Split pieces into lines of at most ``width`` columns; pieces that are not new are dimmed."""
    rows: list[list[tuple[str, bool]]] = [[]]
    column = 0
    for text, new in pieces:
        for char in _format_for_terminal(text):
            wide = _display_width(char)
            # In a terminal of one column a wide character has a line of its own.
            if char == "\n" or (column and column + wide > width):
                rows.append([])
                column = 0
            if char != "\n":
                rows[-1].append((char, new))
                column += wide
    return ["".join(_dim_unless_new(run, new) for new, run in groupby(row, key=lambda item: item[1])) for row in rows]


def _display_width(char: str) -> int:
    """Columns that a character takes in a terminal."""
    if unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def _dim_unless_new(run: Iterable[tuple[str, bool]], new: bool) -> str:
    text = "".join(char for char, _ in run)
    return text if new or "NO_COLOR" in os.environ else f"{DIM}{text}{RESET}"


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
