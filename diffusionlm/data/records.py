"""Records of files: each is a text, or a fault that says why it is none.

What is done about faults is decided elsewhere, in `written`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from diffusionlm.data.bytestreams import open_bytes

SHOWN = 60
"""Characters of a bad record that messages show."""

BYTE_ORDER_MARK = "\ufeff"
SURROGATES = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Fault:
    """Why a record is no text."""

    reason: str
    """In a few words, under which it is counted."""
    found: str
    """What is there, shortened."""
    mended: str | None = None
    """The text that can be made of it; None: there is none."""
    in_field: bool = False
    """The record is sound, but has no text under this name; under another it may."""


Record = tuple[str | Fault, int, int]
"""What a record holds; the place behind it, in units of its format; and the lines or rows up to there, 0 where they
say nothing."""

SampleBy = Literal["document", "paragraph", "line"]


def shortened(value: object) -> str:
    """The beginning of a value, as messages show it."""
    shown = repr(value[:SHOWN] if isinstance(value, str | bytes | list) else value)
    whole = len(shown) <= SHOWN and not (isinstance(value, str | bytes | list) and len(value) > SHOWN)
    return shown if whole else f"{shown[:SHOWN]}..."


def checked(value: object) -> str | Fault:
    """The text that a value of JSON or Arrow is."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            near = value[max(0, error.start - 20) : error.end + 20]
            return Fault("lone surrogate", shortened(near), SURROGATES.sub("\ufffd", value))
        return value
    if isinstance(value, bytes):
        return decoded(value)
    if isinstance(value, bool):
        return Fault("boolean instead of text", str(value).lower(), in_field=True)
    if isinstance(value, int | float):
        digits = str(value) if math.isfinite(value) else None
        return Fault("number instead of text", str(value), digits, in_field=True)
    if value is None:
        return Fault("null instead of text", "null", in_field=True)
    kind = "object" if isinstance(value, dict) else type(value).__name__
    return Fault(f"{kind} instead of text", shortened(value), in_field=True)


def decoded(content: bytes) -> str | Fault:
    """The text that UTF-8 stands for."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        near = content[max(0, error.start - 10) : error.end + 10]
        found = f"{shortened(near)}, byte {error.start} of it"
        return Fault("not UTF-8", found, content.decode("utf-8", "replace"))


def plain_records(path: Path, sample_by: SampleBy, at: int, line: int) -> Iterator[Record]:
    """The documents of a plain text file; places are bytes.

    Paragraphs are between blank lines, and blank lines are no documents. The line break at the end of a line or a
    paragraph is left out. Line breaks of Windows become plain ones, and a byte order mark at the beginning goes.
    """
    with open_bytes(path, at) as stream:
        for content, behind, count in PIECES[sample_by](stream, at, line):
            yield _plain_text(content, is_first=at == 0), behind, count
            at = behind


def _plain_text(content: bytes, *, is_first: bool) -> str | Fault:
    if b"\0" in content:
        return Fault("binary data", f"a byte 0 in {shortened(content)}; plain text in UTF-8 has none")
    text = decoded(content)
    if isinstance(text, Fault):
        assert text.mended is not None, "bytes can always be mended"
        return Fault(text.reason, text.found, _tidy(text.mended, is_first=is_first))
    return _tidy(text, is_first=is_first)


def _tidy(text: str, *, is_first: bool) -> str:
    if is_first:
        text = text.removeprefix(BYTE_ORDER_MARK)
    return text.replace("\r\n", "\n") if "\r" in text else text


Piece = tuple[bytes, int, int]
"""Bytes of a document, the place behind it, and the lines up to there."""


def _whole(stream: BinaryIO, at: int, line: int) -> Iterator[Piece]:
    content = stream.read()
    if content or at == 0:
        yield content, at + len(content), line


def _paragraphs(stream: BinaryIO, at: int, line: int) -> Iterator[Piece]:
    lines: list[bytes] = []
    for raw in stream:
        at += len(raw)
        line += 1
        if raw.strip():
            lines.append(raw)
        elif lines:
            yield _without_break(b"".join(lines)), at, line
            lines = []
    if lines:
        yield _without_break(b"".join(lines)), at, line


def _lines(stream: BinaryIO, at: int, line: int) -> Iterator[Piece]:
    for raw in stream:
        at += len(raw)
        line += 1
        if raw.strip():
            yield _without_break(raw), at, line


def _without_break(content: bytes) -> bytes:
    return content.removesuffix(b"\n").removesuffix(b"\r")


PIECES: dict[SampleBy, Callable[[BinaryIO, int, int], Iterator[Piece]]] = {
    "document": _whole,
    "paragraph": _paragraphs,
    "line": _lines,
}
