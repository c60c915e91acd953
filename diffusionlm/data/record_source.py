"""Documents of text that people wrote: bad records answered, splits taken, the first so many read."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from diffusionlm.data.reader import REPAIRED_PREFIX, ReaderPosition

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


class RecordCursor(Protocol):
    """Reads records one after the other, and knows where it is."""

    def __iter__(self) -> Iterator[str | BadRecord]:
        """The records from here on; the other methods speak of the one given last.

        Raises:
            ValueError: what is read cannot be read on, whatever is done about bad records.
        """

    def place(self) -> Any:
        """Where to read on, behind it: a JSON value."""

    def sort_key(self) -> tuple[int, ...]:
        """Grows with each record of an epoch."""

    def location(self) -> str:
        """What people call its place, such as a file and a line."""


class RecordStore(Protocol):
    """What a source holds, in an order that is always the same."""

    def cursor(self, place: Any) -> RecordCursor:
        """Reads on from there; None: from the start."""

    def key(self, *, is_field_error: bool) -> str:
        """Of the config: names the text field, or what is read, with its value."""


@dataclass
class RecordSource:
    """Documents of one split."""

    records: RecordStore
    identity: str
    provenance: str
    on_bad_row: Literal["raise", "skip", "replace"] = "raise"
    max_documents: int | None = None
    validation_fraction: float | None = None
    """Share of the documents that is for validation, chosen by a hash of their text; None: they are not shared."""
    is_validation: bool = False
    """Which share this is."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Records of the first epoch that were left out or mended, each counted once."""

    def __post_init__(self) -> None:
        self._next_position: ReaderPosition = None
        self._cursor = self.records.cursor(None)
        self._remaining_records = iter(self._cursor)
        self._last_counted: tuple[int, ...] = ()

    def read(self, epoch: int, position: ReaderPosition, limit: int) -> tuple[list[str], ReaderPosition]:
        """Documents from a position on; going on where the last call stopped costs no seek.

        Raises:
            ValueError: a record that is no text, unless `on_bad_row` says otherwise, or a file or dataset that cannot
                be read; names them.
        """
        given = 0 if position is None else position["given"]
        if position is None or position != self._next_position:
            self._cursor = self.records.cursor(position and position["place"])
            self._remaining_records = iter(self._cursor)
        self._next_position = None  # a reader that fails has gone too far
        most = limit if self.max_documents is None else min(limit, self.max_documents - given)
        documents: list[str] = []
        while len(documents) < most:
            record = next(self._remaining_records, None)
            if record is None:
                return documents, None
            text = record if isinstance(record, str) else self._handle_bad_record(record, epoch)
            if text == "":
                self._count_skipped("empty", epoch)
            elif text is not None and self._is_in_split(text):
                documents.append(text)
        given += len(documents)
        if given == self.max_documents:
            return documents, None
        self._next_position = {"place": self._cursor.place(), "given": given}
        return documents, self._next_position

    def _handle_bad_record(self, bad_record: BadRecord, epoch: int) -> str | None:
        """What is read in place of a bad record; None: nothing."""
        if self.on_bad_row == "raise":
            remedy = 'set data.source.on_bad_row = "skip" to leave such rows out and count them'
            if bad_record.repaired_text is not None:
                remedy += ', or "replace" to mend them'
            key = self.records.key(is_field_error=bad_record.is_field_error)
            raise ValueError(f"{key}: {self._cursor.location()}: {bad_record.reason}: {bad_record.detail}; {remedy}")
        if self.on_bad_row == "skip" or bad_record.repaired_text is None:
            self._count_skipped(bad_record.reason, epoch)
            return None
        self._count_skipped(f"{REPAIRED_PREFIX}{bad_record.reason}", epoch)
        return bad_record.repaired_text

    def _count_skipped(self, reason: str, epoch: int) -> None:
        """Once for each record, however often the first epoch is read."""
        sort_key = self._cursor.sort_key()
        if epoch == 0 and sort_key > self._last_counted:
            self._last_counted = sort_key
            self.skipped[reason] = self.skipped.get(reason, 0) + 1

    def _is_in_split(self, text: str) -> bool:
        if self.validation_fraction is None:
            return True
        place = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64
        return (place < self.validation_fraction) == self.is_validation
