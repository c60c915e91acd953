"""How far the tokenising is, for people: a bar in a terminal, now and then a line elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 15.0

Log = Callable[[str], None]


class MakeDataMeter:
    """Counts of one split after the other, and messages between them."""

    def __init__(self, log: Log, stream: TextIO | None) -> None:
        self._log = log
        self._terminal = stream if stream is not None and stream.isatty() else None
        self._bar: tqdm[object] | None = None
        self._name = ""
        self._documents = self._tokens = self._bytes = 0
        self._started_at = self._last_logged = time.monotonic()

    def begin(self, name: str) -> None:
        """Count from 0 under this name."""
        self.close()
        self._name = name
        self._documents = self._tokens = self._bytes = 0
        self._started_at = self._last_logged = time.monotonic()
        if self._terminal is not None:
            self._bar = tqdm(desc=name, unit="B", unit_scale=True, file=self._terminal, dynamic_ncols=True)

    def advance(self, documents: int, tokens: int, text_bytes: int) -> None:
        """So many more."""
        self._documents += documents
        self._tokens += tokens
        self._bytes += text_bytes
        if self._bar is not None:
            self._bar.set_postfix_str(f"{self._documents:,} documents, {self._tokens:,} tokens", refresh=False)
            self._bar.update(text_bytes)
        elif time.monotonic() - self._last_logged > SECONDS_BETWEEN_LINES:
            self._last_logged = time.monotonic()
            speed = self._bytes / 1e6 / (self._last_logged - self._started_at)
            self.log(f"{self._name}: {self._documents:,} documents, {self._tokens:,} tokens, {speed:.1f} MB/s")

    def log(self, text: str) -> None:
        """A line of its own."""
        if self._bar is not None:
            self._bar.write(text, file=self._terminal)
        else:
            self._log(text)

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
