"""A document source over records (lines, rows, files): handles bad records, selects the split, limits the count."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from config.data import OnBadRow, RecordSourceOptions
from diffusionlm.data.chat.conversation import Conversation, Record
from diffusionlm.data.reader import REPAIRED_PREFIX, ReaderPosition, SkipLog, iterate
from diffusionlm.data.sources.validation_split import DocumentSplit, EndSplit, WholeSource, choose_split

MAX_SHOWN_CHARACTERS = 60
"""Length to which error messages shorten a value."""

MAX_SHOWN_FIELDS = 20

NOT_UTF8 = "not UTF-8"
"""Skip reason of a record with invalid bytes."""

SURROGATES = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class BadRecord:
    """A record without usable text."""

    reason: str
    """A short phrase; skipped records are counted by it."""
    detail: str
    """The value that was read, shortened, for error messages."""
    repaired_text: Record | None = None
    """None: the record cannot be repaired."""
    is_field_error: bool = False
    """The record is valid, but its text field is missing or holds no text."""


RowParser = Callable[..., "Record | BadRecord"]
"""Turns a whole row into a text or a conversation. Keyword ``folder``: where paths in the row begin."""

TextField = str | RowParser
"""The field of a row that holds the text, or what parses the whole row."""


ParsedRecord = tuple[Record | BadRecord, int, int]
"""(content, next offset, line) of a record in a file. The offset after it counts bytes, characters or rows, as its
format does; the line is the number of lines or rows up to here, 0 if unknown."""


class RecordCursor(Protocol):
    """Records in a fixed order, and a position in them. Its methods refer to the last record that was yielded."""

    key: str
    """Config key of the paths or the dataset, for errors."""
    field_setting: str
    """Config key of the text field, and its value, for errors."""

    def seek(self, position: Any) -> None:
        """Continue at a position; None: before the first record."""

    def __iter__(self) -> Iterator[Record | BadRecord]:
        """Iterate over the records from the position on.

        Raises:
            ValueError: reading cannot continue, whatever `on_bad_row` says.
        """

    def position(self) -> Any:
        """A JSON value: where to continue after the record."""

    def sort_key(self) -> tuple[int, ...]:
        """A key that increases with each record of an epoch."""

    def location(self) -> str:
        """Location of the record in messages, such as a file and a line."""


@dataclass
class RecordSource:
    """The documents of one split; a `DocumentSource`."""

    records: RecordCursor
    key: str
    """Config key of the source's section."""
    on_bad_row: OnBadRow
    split: DocumentSplit = field(default_factory=WholeSource)
    """Selects the text of the split from each record."""
    max_documents: int | None = None
    """Number of records with text in the split that are read at most. None: all."""
    identity: str = ""
    provenance: str = ""
    skip_log: SkipLog = field(default_factory=SkipLog)

    def __post_init__(self) -> None:
        self._seek(None)
        self._next_position: ReaderPosition = None

    def read(self, epoch: int, position: ReaderPosition, limit: int) -> tuple[list[Record], ReaderPosition]:
        """Read documents. Continuing at the last returned position costs no seek."""
        num_records = 0 if position is None else position["given"]
        if position is None or position != self._next_position:
            self._seek(position and position["place"])
            if position is not None and "part" in position:
                self._read_record(epoch)
                self._num_parts_read = position["part"]
        self._next_position = None  # after an error the cursor has moved on, so the next read seeks
        documents: list[Record] = []
        while True:
            new_parts = self._parts[self._num_parts_read : self._num_parts_read + limit - len(documents)]
            documents += new_parts
            self._num_parts_read += len(new_parts)
            if self._num_parts_read < len(self._parts):
                self._next_position = {"place": self._place, "given": num_records, "part": self._num_parts_read}
                return documents, self._next_position
            if num_records == self.max_documents:
                return documents, None
            if len(documents) == limit:
                self._next_position = {"place": self.records.position(), "given": num_records}
                return documents, self._next_position
            if not self._read_record(epoch):
                return documents, None
            num_records += 1

    def _seek(self, place: Any) -> None:
        self.records.seek(place)
        self._remaining_records = iter(self.records)
        self._parts: Sequence[Record] = []  # of the current record
        self._num_parts_read = 0
        # Positions before and after the current record. A split that cuts no documents does not need them.
        self._place, self._next_place = None, place

    def _read_record(self, epoch: int) -> bool:
        """Read up to the next record with text in the split. Returns False if there is none."""
        self._parts, self._num_parts_read = [], 0
        while not self._parts:
            record = next(self._remaining_records, None)
            if record is None:
                return False
            if isinstance(self.split, EndSplit):
                self._place, self._next_place = self._next_place, self.records.position()
            is_new = self.skip_log.is_new(epoch, self.records.sort_key())
            text = self._handle_bad_record(record, is_new=is_new) if isinstance(record, BadRecord) else record
            if text == "" and is_new:
                self.skip_log.add("empty", f"{self.records.location()}: it has no text")
            elif text:
                self._parts = self.split.select(text)
        self._parts = [
            replace(part, location=self.records.location()) if isinstance(part, Conversation) else part
            for part in self._parts
        ]
        return True

    def _handle_bad_record(self, record: BadRecord, *, is_new: bool) -> Record | None:
        """Return the repaired text, or None to leave the record out."""
        place, other_remedy = self.records.location(), _other_remedy(record)
        if self.on_bad_row == "raise":
            setting = self.records.field_setting if record.is_field_error else self.records.key
            remedy = f'set {self.key}.on_bad_row = "skip" to leave such records out and count them{other_remedy}'
            raise ValueError(f"{setting}: {place}: {record.reason}: {record.detail}; {remedy}")
        is_left_out = self.on_bad_row == "skip" or record.repaired_text is None
        if is_new:
            remedy = f"; mend or remove such records{other_remedy}" if is_left_out else ""
            reason = record.reason if is_left_out else f"{REPAIRED_PREFIX}{record.reason}"
            self.skip_log.add(reason, f"{place}: {record.detail}{remedy}")
        return None if is_left_out else record.repaired_text


def _other_remedy(record: BadRecord) -> str:
    remedy = "" if record.repaired_text is None else ', or on_bad_row = "replace" to repair them'
    return f"{remedy}; text in another encoding can be converted with iconv" if record.reason == NOT_UTF8 else remedy


def select_split(
    records: RecordCursor, config: RecordSourceOptions, validation_fraction: float | None, is_validation: bool, key: str
) -> DocumentSplit:
    """Hold out validation text of the records, as `choose_split`; None: they are all of one split."""
    if validation_fraction is None:
        return WholeSource()
    source = RecordSource(records, key.rpartition(".")[0], config.on_bad_row)
    return choose_split(iterate(source, 1), validation_fraction, is_validation, key)


def validate_text(value: object) -> str | BadRecord:
    """Check that a JSON or Arrow value is text that UTF-8 can encode."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            excerpt = value[max(0, error.start - 20) : error.end + 20]
            return BadRecord("lone surrogate", shorten_repr(excerpt), SURROGATES.sub("\ufffd", value))
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
    type_name = "object" if isinstance(value, dict) else type(value).__name__
    return BadRecord(f"{type_name} instead of text", shorten_repr(value), is_field_error=True)


def decode_utf8(content: bytes) -> str | BadRecord:
    """Decode UTF-8; the repaired text has U+FFFD in place of invalid bytes."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        excerpt = content[max(0, error.start - 10) : error.end + 10]
        detail = f"{shorten_repr(excerpt)}, byte {error.start} of it"
        return BadRecord(NOT_UTF8, detail, content.decode("utf-8", "replace"))


def shorten_repr(value: object) -> str:
    """Return ``repr(value)``, cut to ``MAX_SHOWN_CHARACTERS``, with "..." if something was cut."""
    excerpt = value[:MAX_SHOWN_CHARACTERS] if isinstance(value, str | bytes | list) else value
    text = repr(excerpt)
    is_cut = len(text) > MAX_SHOWN_CHARACTERS or excerpt != value
    return f"{text[:MAX_SHOWN_CHARACTERS]}..." if is_cut else text


def list_fields(row: Mapping[str, Any]) -> str:
    """Return the names of the first fields of a row, for an error message."""
    return ", ".join(map(repr, list(row)[:MAX_SHOWN_FIELDS]))
