"""Documents of text that people wrote: bad records answered, splits taken, the first so many read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from diffusionlm.data.reader import REPAIRED_PREFIX, ReaderPosition
from diffusionlm.data.records import BadRecord


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
