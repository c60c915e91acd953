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

MAX_SHOWN_CHARACTERS = 60
"""Characters of a bad record that messages show."""

BYTE_ORDER_MARK = "\ufeff"
SURROGATES = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class BadRecord:
    """Why a record is no text."""

    reason: str
    """In a few words, under which it is counted."""
    detail: str
    """What is there, shortened."""
    repaired_text: str | None = None
    """The text that can be made of it; None: there is none."""
    is_field_error: bool = False
    """The record is sound, but has no text under this name; under another it may."""


ParsedRecord = tuple[str | BadRecord, int, int]
"""What a record holds; the place behind it, in units of its format; and the lines or rows up to there, 0 where they
say nothing."""

SampleBy = Literal["document", "paragraph", "line"]


def shorten_repr(value: object) -> str:
    """The beginning of a value, as messages show it."""
    shown = repr(value[:MAX_SHOWN_CHARACTERS] if isinstance(value, str | bytes | list) else value)
    whole = len(shown) <= MAX_SHOWN_CHARACTERS and not (
        isinstance(value, str | bytes | list) and len(value) > MAX_SHOWN_CHARACTERS
    )
    return shown if whole else f"{shown[:MAX_SHOWN_CHARACTERS]}..."


def validate_text(value: object) -> str | BadRecord:
    """The text that a value of JSON or Arrow is."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            near = value[max(0, error.start - 20) : error.end + 20]
            return BadRecord("lone surrogate", shorten_repr(near), SURROGATES.sub("\ufffd", value))
        return value
    if isinstance(value, bytes):
        return decode_utf8(value)
    if isinstance(value, bool):
        return BadRecord("boolean instead of text", str(value).lower(), is_field_error=True)
    if isinstance(value, int | float):
        digits = str(value) if math.isfinite(value) else None
        return BadRecord("number instead of text", str(value), digits, is_field_error=True)
    if value is None:
        return BadRecord("null instead of text", "null", is_field_error=True)
    kind = "object" if isinstance(value, dict) else type(value).__name__
    return BadRecord(f"{kind} instead of text", shorten_repr(value), is_field_error=True)


def decode_utf8(content: bytes) -> str | BadRecord:
    """The text that UTF-8 stands for."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        near = content[max(0, error.start - 10) : error.end + 10]
        detail = f"{shorten_repr(near)}, byte {error.start} of it"
        return BadRecord("not UTF-8", detail, content.decode("utf-8", "replace"))


def read_plain_records(path: Path, sample_by: SampleBy, at: int, line: int) -> Iterator[ParsedRecord]:
    """The documents of a plain text file; places are bytes.

    Paragraphs are between blank lines, and blank lines are no documents. The line break at the end of a line or a
    paragraph is left out. Line breaks of Windows become plain ones, and a byte order mark at the beginning goes.
    """
    with open_bytes(path, at) as stream:
        for content, behind, count in DOCUMENT_SPLITTERS[sample_by](stream, at, line):
            yield _parse_plain_text(content, is_first=at == 0), behind, count
            at = behind


def _parse_plain_text(content: bytes, *, is_first: bool) -> str | BadRecord:
    if b"\0" in content:
        return BadRecord("binary data", f"a byte 0 in {shorten_repr(content)}; plain text in UTF-8 has none")
    text = decode_utf8(content)
    if isinstance(text, BadRecord):
        assert text.repaired_text is not None, "bytes can always be mended"
        return BadRecord(text.reason, text.detail, _normalize_line_breaks(text.repaired_text, is_first=is_first))
    return _normalize_line_breaks(text, is_first=is_first)


def _normalize_line_breaks(text: str, *, is_first: bool) -> str:
    if is_first:
        text = text.removeprefix(BYTE_ORDER_MARK)
    return text.replace("\r\n", "\n") if "\r" in text else text


DocumentBytes = tuple[bytes, int, int]
"""Bytes of a document, the place behind it, and the lines up to there."""


def _read_whole_file(stream: BinaryIO, at: int, line: int) -> Iterator[DocumentBytes]:
    content = stream.read()
    if content or at == 0:
        yield content, at + len(content), line


def _read_paragraphs(stream: BinaryIO, at: int, line: int) -> Iterator[DocumentBytes]:
    lines: list[bytes] = []
    for raw in stream:
        at += len(raw)
        line += 1
        if raw.strip():
            lines.append(raw)
        elif lines:
            yield _strip_line_break(b"".join(lines)), at, line
            lines = []
    if lines:
        yield _strip_line_break(b"".join(lines)), at, line


def _read_lines(stream: BinaryIO, at: int, line: int) -> Iterator[DocumentBytes]:
    for raw in stream:
        at += len(raw)
        line += 1
        if raw.strip():
            yield _strip_line_break(raw), at, line


def _strip_line_break(content: bytes) -> bytes:
    return content.removesuffix(b"\n").removesuffix(b"\r")


DOCUMENT_SPLITTERS: dict[SampleBy, Callable[[BinaryIO, int, int], Iterator[DocumentBytes]]] = {
    "document": _read_whole_file,
    "paragraph": _read_paragraphs,
    "line": _read_lines,
}
