"""Several sources of rows as one, by weights."""

from __future__ import annotations

from dataclasses import dataclass

from diffusionlm.data.packing import Row
from diffusionlm.data.reader import ReaderPosition, ResumableReader

MAX_PASSES_PER_EPOCH = 1 << 20
"""Most often that a part is read within one epoch of the mixture; its own epochs are counted through."""


@dataclass
class MixedRowReader:
    """Rows of several readers, in turns that follow from what was read: the next row comes from the part that has had
    the fewest tokens for its weight, the first of equals.

    So at any place the tokens of each part are its share of all, to a row. No chance is in it, and a position holds
    the tokens, passes and position of each part.
    """

    parts: list[ResumableReader[Row]]
    weights: list[float]
    names: list[str]
    repeat: bool
    """Parts begin again, in a new order, until each was read to its end once. False: each is read once, and the
    others go on without it."""

    def read(self, epoch: int, position: ReaderPosition, limit: int) -> tuple[list[Row], ReaderPosition]:
        """Up to ``limit`` rows.

        Raises:
            ValueError: a part has no rows.
        """
        states = (
            [_ComponentState(**state) for state in position] if position else [_ComponentState() for _ in self.parts]
        )
        rows: list[Row] = []
        while len(rows) < limit:
            open_components = [index for index, state in enumerate(states) if self.repeat or state.passes == 0]
            if all(state.passes for state in states) or not open_components:
                return rows, None
            index = min(open_components, key=lambda part: states[part].tokens / self.weights[part])
            rows += self._read_row(epoch, index, states[index])
        return rows, [vars(state) for state in states]

    def _read_row(self, epoch: int, index: int, state: _ComponentState) -> list[Row]:
        """The next row of a part, if its pass has one more."""
        started = state.position is None
        rows, state.position = self.parts[index].read(epoch * MAX_PASSES_PER_EPOCH + state.passes, state.position, 1)
        if started and not rows and self.repeat:
            raise ValueError(f"data.mixture: {self.names[index]} has no documents to train on; remove it")
        state.tokens += sum(int((row.document_ids_L >= 0).sum()) for row in rows)
        state.passes += state.position is None
        return rows


@dataclass
class _ComponentState:
    """Of one part within an epoch."""

    tokens: int = 0
    passes: int = 0
    """Times that it was read to its end."""
    position: ReaderPosition = None
