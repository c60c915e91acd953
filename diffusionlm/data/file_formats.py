"""Texts of JSON files: one object a line, one array of objects, or one object."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from diffusionlm.data.bytestreams import open_bytes
from diffusionlm.data.records import (
    BYTE_ORDER_MARK,
    MAX_SHOWN_CHARACTERS,
    SURROGATES,
    BadRecord,
    ParsedRecord,
    decode_utf8,
    shorten_repr,
    validate_text,
)

WHITESPACE = re.compile(r"[ \t\n\r]*")
MAX_SHOWN_FIELDS = 20
"""Names of fields that a message shows."""


def json_records(path: Path, field: str, at: int, line: int) -> Iterator[ParsedRecord]:
    """The texts under a key; places are bytes where each line is an object, and characters otherwise.

    Only a file that is one value is held in memory. Of a key that an object has twice, the last one counts.
    """
    if _has_lines(path):
        return _read_json_lines(path, field, at, line)
    return _read_json_array(path, field, at, line)


def _has_lines(path: Path) -> bool:
    """Whether each line is a value of its own: the name tells, or the first line."""
    if {".jsonl", ".ndjson"} & {suffix.lower() for suffix in path.suffixes}:
        return True
    with open_bytes(path) as stream:
        text = next((text for text in map(_decode_and_strip, stream) if text), "")
    if text.startswith("["):
        return False
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        goes_on = error.pos == len(text) > 0  # nothing is wrong but that the line ends
        return not goes_on
    except (ValueError, RecursionError):
        return True
    return True


def _decode_and_strip(line: bytes) -> str:
    return line.decode("utf-8", "replace").removeprefix(BYTE_ORDER_MARK).strip()


def _read_json_lines(path: Path, field: str, at: int, line: int) -> Iterator[ParsedRecord]:
    parse = json.JSONDecoder().raw_decode
    content: Any
    with open_bytes(path, at) as stream:
        for raw in stream:
            at += len(raw)
            line += 1
            try:
                text = raw.decode()
                row, end = parse(text)
                content = row[field]
                content.encode()
                is_text = text[end:].isspace()
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                is_text = False
            if not is_text:  # find out why, slowly
                content = parse_json_text(raw, field)
            if content is not None:
                yield content, at, line


class _NumberText(str):
    """A number as it is written: 1e3 and 1.50 would be others as numbers."""


def parse_json_text(source: bytes, field: str) -> str | BadRecord | None:
    """The text of an object, or what is wrong with it; None for a blank line."""
    text = _decode_and_strip(source)
    if not text:
        return None
    line = decode_utf8(source)
    content: str | BadRecord
    try:
        row = json.loads(text, parse_int=_NumberText, parse_float=_NumberText)
        content = _text_of_field(row, field)
    except json.JSONDecodeError as error:
        cut_off = "" if source.endswith(b"\n") else "; is the file cut off?"
        content = BadRecord("malformed JSON", f"{error.msg} at character {error.pos} of {shorten_repr(text)}{cut_off}")
    except RecursionError:
        content = BadRecord("malformed JSON", f"nested too deeply: {shorten_repr(text)}")
    if isinstance(line, str):
        return content
    return replace(line, repaired_text=content if isinstance(content, str) else content.repaired_text)


def _text_of_field(row: Any, field: str) -> str | BadRecord:
    if not isinstance(row, dict):
        return BadRecord("not an object", shorten_repr(row))
    if field not in row:
        fields = ", ".join(map(repr, list(row)[:MAX_SHOWN_FIELDS]))
        return BadRecord(f"no field {field!r}", f"its fields are {fields}", is_field_error=True)
    value = row[field]
    if isinstance(value, _NumberText):
        return BadRecord("number instead of text", value[:MAX_SHOWN_CHARACTERS], str(value), is_field_error=True)
    return validate_text(value)


def _read_json_array(path: Path, field: str, at: int, line: int) -> Iterator[ParsedRecord]:
    """The objects of an array; one object alone is read as an array of it."""
    with open_bytes(path) as stream:
        content = stream.read()
    text = content.decode("utf-8-sig", "surrogateescape").rstrip()
    is_utf8 = SURROGATES.search(text) is None
    if not text.startswith("[", _skip_whitespace(text, 0)):
        text = f"[{text}]"
    parse = json.JSONDecoder(parse_int=_NumberText, parse_float=_NumberText).raw_decode
    while True:
        is_first, before = at == 0, at
        mark = _skip_whitespace(text, at)
        start = _skip_whitespace(text, mark + 1)
        end = start if is_first else mark
        if text.startswith("]", end) and end + 1 == len(text):
            return
        try:
            if not text.startswith("[" if is_first else ",", mark):
                raise json.JSONDecodeError("Expecting ',' or the end of the array", text, mark)
            value, at = parse(text, start)
        except (ValueError, RecursionError) as error:
            detail = f"{error}: {shorten_repr(text[start : start + MAX_SHOWN_CHARACTERS])}; what follows in the array is lost"
            yield BadRecord("malformed JSON", detail), len(text), line
            return
        line = max(1, line) + text.count("\n", before, at)
        text_of_row: str | BadRecord | None
        if is_utf8 and type(value) is dict and type(value.get(field)) is str:
            text_of_row = validate_text(value[field])
        else:
            text_of_row = parse_json_text(text[start:at].encode("utf-8", "surrogateescape"), field)
        assert text_of_row is not None, "a value is not blank"
        yield text_of_row, at, line


def _skip_whitespace(text: str, place: int) -> int:
    blanks = WHITESPACE.match(text, place)
    assert blanks is not None, "it matches nothing, too"
    return blanks.end()
