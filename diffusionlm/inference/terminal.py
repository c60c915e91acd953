"""What a person sees of a decoding: the answers, and the canvases while masks become text."""

from __future__ import annotations

import json
import os
import shutil
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TextIO

from diffusionlm.inference.generate import Canvas, Generation, Step
from diffusionlm.inference.text import canvas_pieces, render_canvas
from tokenizer import Tokenizer

DIM, PLAIN = "\x1b[2m", "\x1b[0m"


@dataclass(frozen=True)
class Requests:
    """Requests that are decoded together."""

    kind: str
    """``prompt`` or ``infill``."""
    texts: tuple[str, ...]
    inputs: list[list[int]]
    is_new: list[list[bool]]
    """Which positions of each canvas are to be decoded."""
    seeds: list[int]
    hidden: int = 0
    """Tokens at the beginning of each canvas that are not shown: the end of text that every text begins with."""


def print_answer(
    tokenizer: Tokenizer,
    requests: Requests,
    index: int,
    result: Generation,
    seconds: float | None,
    is_one_of_many: bool,
) -> None:
    """One request: the text, or, where ``seconds`` of its batch are given, a line of JSON."""
    if seconds is not None:
        record = {
            requests.kind: requests.texts[index],
            "text": tokenizer.decode(result.token_ids[requests.hidden if requests.kind == "infill" else 0 :]),
            "token_ids": result.token_ids,
            "finish_reason": result.finish_reason,
            "num_forwards": result.num_forwards,
            "logprobs": result.logprobs,
            "step_map": result.step_map,
            "seed": requests.seeds[index],
            "seconds": round(seconds, 6),
        }
        print(json.dumps(record), flush=True)
        return
    if is_one_of_many:
        print(_styled(f"[{requests.kind} {index + 1}]", DIM))
    print("".join(_styled(text, "" if new else DIM) for text, new in _final_pieces(tokenizer, requests, index, result)))


def _final_pieces(tokenizer: Tokenizer, requests: Requests, index: int, result: Generation) -> list[tuple[str, bool]]:
    if requests.kind == "prompt":
        return [(requests.texts[index], False), (tokenizer.decode(result.token_ids), True)]
    shown = result.token_ids[requests.hidden :]
    return canvas_pieces(shown, [False] * len(shown), requests.is_new[index][requests.hidden :], tokenizer)


def _styled(text: str, style: str) -> str:
    """The text as it is, or, in a terminal, with a style and without characters that would command it."""
    if not sys.stdout.isatty():
        return text
    text = _printable(text)
    return f"{style}{text}{PLAIN}" if style and text and "NO_COLOR" not in os.environ else text


def _printable(text: str) -> str:
    """Without control characters: tabs become spaces, others a replacement; newlines stay."""
    text = text.replace("\t", "    ")
    return "".join("\ufffd" if unicodedata.category(char) == "Cc" and char != "\n" else char for char in text)


class LiveView:
    """Shows the canvases after each forward: redrawn in a terminal, else one line for each that changed."""

    def __init__(self, tokenizer: Tokenizer, requests: Requests, output_format: str) -> None:
        self._tokenizer = tokenizer
        self._requests = requests
        self._stream: TextIO = sys.stderr if output_format == "json" else sys.stdout
        self._is_terminal = self._stream.isatty()
        self._lines_shown = 0
        self._canvases: tuple[Canvas, ...] = ()

    def __call__(self, step: Step) -> None:
        if self._is_terminal:
            self._redraw(step)
        else:
            self._append(step)
        self._canvases = step.canvases
        self._stream.flush()

    def close(self) -> None:
        """Take the drawing away, for the final text to stand in its place."""
        if self._lines_shown:
            self._stream.write(f"\x1b[{self._lines_shown}A\r\x1b[J")
            self._lines_shown = 0

    def _append(self, step: Step) -> None:
        for index, canvas in enumerate(step.canvases):
            if self._canvases and self._canvases[index] == canvas:
                continue
            hidden = self._requests.hidden
            text = render_canvas(canvas.token_ids[hidden:], canvas.is_masked[hidden:], self._tokenizer)
            request = f"{self._requests.kind} {index + 1}, forward {step.num_forwards}"
            self._stream.write(f"{request}: {json.dumps(text, ensure_ascii=False)}\n")

    def _redraw(self, step: Step) -> None:
        width, height = shutil.get_terminal_size()
        lines = [f"forward {step.num_forwards}"]
        for canvas, is_new in zip(step.canvases, self._requests.is_new, strict=True):
            shown = slice(self._requests.hidden, None)
            pieces = canvas_pieces(canvas.token_ids[shown], canvas.is_masked[shown], is_new[shown], self._tokenizer)
            lines += wrapped(pieces, width)
        # Of what does not fit the end is shown: the terminal cannot go back further than its top line.
        lines = lines[-(height - 1) :]
        self.close()
        self._stream.write("".join(f"{line}\n" for line in lines))
        self._lines_shown = len(lines)


def wrapped(pieces: Sequence[tuple[str, bool]], width: int) -> list[str]:
    """Lines that fit a terminal of so many columns, what is not new dimmed."""
    rows: list[list[tuple[str, bool]]] = [[]]
    column = 0
    for text, new in pieces:
        for char in _printable(text):
            wide = 0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1
            if char == "\n" or column + wide > width:
                rows.append([])
                column = 0
            if char != "\n":
                rows[-1].append((char, new))
                column += wide
    return ["".join(_colored(run, new) for new, run in groupby(row, key=lambda item: item[1])) for row in rows]


def _colored(run: Iterable[tuple[str, bool]], new: bool) -> str:
    text = "".join(char for char, _ in run)
    return text if new or "NO_COLOR" in os.environ else f"{DIM}{text}{PLAIN}"
