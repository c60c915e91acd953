"""Terminal output: the answers, and the canvases while they are decoded (``--show``)."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TextIO

from rich.live import Live
from rich.text import Text

from cli.infer.answers import Answer
from cli.infer.inputs import EncodedInput
from diffusionlm.inference.generate import DecodingStep
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
    return canvas_text_pieces(request, ids, [False] * len(ids), tokenizer)


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
        self._lines: dict[str, str] = {}
        """The last line of each request, by its name."""
        self._console = make_console(stream)
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="visible",
        )

    def __call__(self, step: DecodingStep) -> None:
        canvases = {
            request.name: canvas_text_pieces(request, canvas.token_ids, canvas.is_masked, self._tokenizer)
            for request, canvas in zip(self._requests, step.canvases, strict=True)
        }
        if accepts_escapes(self._stream):
            self._redraw(step.num_forwards, canvases)
            return
        for name, pieces in canvases.items():
            line = json.dumps("".join(text for text, _ in pieces), ensure_ascii=False)
            if self._lines.get(name) != line:
                print_line(f"{name}, forward {step.num_forwards}: {line}", self._stream)
            self._lines[name] = line

    def close(self) -> None:
        """Erase the drawing, so that the final text replaces it."""
        self._live.stop()

    def _redraw(self, num_forwards: int, canvases: Mapping[str, Sequence[tuple[str, bool]]]) -> None:
        width, height = self._console.size
        pieces = [(f"forward {num_forwards}", True)]
        for name, own in canvases.items():
            pieces += [(f"\n[{name}]" * (len(canvases) > 1) + "\n", False), *own]
        lines = style_pieces(pieces).wrap(self._console, width, overflow="fold")
        # Show the last lines that fit: the cursor cannot move above the top line.
        drawing = Text("\n", no_wrap=True).join(lines[-max(height - 1, 1) :])
        if not self._live.is_started:
            self._live.start()
            self._console.show_cursor(True)  # a process that is killed would leave it hidden
        self._live.update(drawing, refresh=True)


def canvas_text_pieces(
    request: EncodedInput, token_ids: Sequence[int], is_masked: Sequence[bool], tokenizer: Tokenizer
) -> list[tuple[str, bool]]:
    """Split the visible part of a canvas into pieces of text, each with True if it is new; a masked position is
    `MASK_GLYPH`."""
    pieces: list[tuple[str, bool]] = []
    positions = list(zip(is_masked, request.is_new(len(token_ids)), token_ids, strict=True))
    for (masked, new), run in groupby(positions[request.num_hidden :], key=lambda position: position[:2]):
        ids = [token for _, _, token in run]
        text = decode_continuation(tokenizer, ids) if pieces else tokenizer.decode(ids)
        pieces.append((MASK_GLYPH * len(ids) if masked else text, new))
    return pieces
