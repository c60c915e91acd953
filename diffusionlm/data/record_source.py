"""Documents of text that people wrote: bad records answered, splits taken, the first so many read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from diffusionlm.data.reader import MENDED, Position
from diffusionlm.data.records import Fault


class Cursor(Protocol):
    """Reads records one after the other, and knows where it is."""

    def __iter__(self) -> Iterator[str | Fault]:
        """The records from here on; the other methods speak of the one given last.

        Raises:
            ValueError: what is read cannot be read on, whatever is done about bad records.
        """

    def place(self) -> Any:
        """Where to read on, behind it: a JSON value."""

    def order(self) -> tuple[int, ...]:
        """Grows with each record of an epoch."""

    def where(self) -> str:
        """What people call its place, such as a file and a line."""


class Records(Protocol):
    """What a source holds, in an order that is always the same."""

    def cursor(self, place: Any) -> Cursor:
        """Reads on from there; None: from the start."""

    def key(self, *, in_field: bool) -> str:
        """Of the config: names the text field, or what is read, with its value."""


@dataclass
class WrittenSource:
    """Documents of one split."""

    records: Records
    identity: str
    provenance: str
    on_bad_row: Literal["raise", "skip", "replace"] = "raise"
    max_documents: int | None = None
    fraction: float | None = None
    """Share of the documents that is for validation, chosen by a hash of their text; None: they are not shared."""
    wants_validation: bool = False
    """Which share this is."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Records of the first epoch that were left out or mended, each counted once."""

    def __post_init__(self) -> None:
        self._behind: Position = None
        self._cursor = self.records.cursor(None)
        self._rest = iter(self._cursor)
        self._counted: tuple[int, ...] = ()

    def read(self, epoch: int, position: Position, limit: int) -> tuple[list[str], Position]:
        """Documents from a position on; going on where the last call stopped costs no seek.

        Raises:
            ValueError: a record that is no text, unless `on_bad_row` says otherwise, or a file or dataset that cannot
                be read; names them.
        """
        given = 0 if position is None else position["given"]
        if position is None or position != self._behind:
            self._cursor = self.records.cursor(position and position["place"])
            self._rest = iter(self._cursor)
        self._behind = None  # a reader that fails has gone too far
        most = limit if self.max_documents is None else min(limit, self.max_documents - given)
        documents: list[str] = []
        while len(documents) < most:
            record = next(self._rest, None)
            if record is None:
                return documents, None
            text = record if isinstance(record, str) else self._answer(record, epoch)
            if text == "":
                self._count("empty", epoch)
            elif text is not None and self._belongs(text):
                documents.append(text)
        given += len(documents)
        if given == self.max_documents:
            return documents, None
        self._behind = {"place": self._cursor.place(), "given": given}
        return documents, self._behind

    def _answer(self, fault: Fault, epoch: int) -> str | None:
        """What is read in place of a bad record; None: nothing."""
        if self.on_bad_row == "raise":
            remedy = 'set data.source.on_bad_row = "skip" to leave such rows out and count them'
            if fault.mended is not None:
                remedy += ', or "replace" to mend them'
            key = self.records.key(in_field=fault.in_field)
            raise ValueError(f"{key}: {self._cursor.where()}: {fault.reason}: {fault.found}; {remedy}")
        if self.on_bad_row == "skip" or fault.mended is None:
            self._count(fault.reason, epoch)
            return None
        self._count(f"{MENDED}{fault.reason}", epoch)
        return fault.mended

    def _count(self, reason: str, epoch: int) -> None:
        """Once for each record, however often the first epoch is read."""
        order = self._cursor.order()
        if epoch == 0 and order > self._counted:
            self._counted = order
            self.skipped[reason] = self.skipped.get(reason, 0) + 1

    def _belongs(self, text: str) -> bool:
        if self.fraction is None:
            return True
        place = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64
        return (place < self.fraction) == self.wants_validation
