"""Spans of a canvas whose text is constrained.

Shapes: S states of an automaton, L positions of a canvas.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from diffusionlm.inference.constraints.token_automaton import TokenAutomaton


class ConstrainedSpan:
    """Masked positions ``start`` to ``end`` - 1, whose tokens an automaton has to accept."""

    def __init__(
        self, automaton: TokenAutomaton, start: int, end: int, allowed_token_ids: Mapping[int, NDArray[np.int64]]
    ) -> None:
        """Check that there is an answer.

        Args:
            allowed_token_ids: masked position -> the tokens that it may hold.

        Raises:
            ValueError: no tokens of this span are accepted.
        """
        self.automaton, self.start, self.end = automaton, start, end
        last = max((position for position in allowed_token_ids if start <= position < end), default=start - 1)
        self._early: list[NDArray[np.bool_]] = []
        """`completable_at` of the positions from ``start`` on, up to the last one with tokens of its own."""
        following = automaton.completable(end - last - 1)
        for position in range(last, start - 1, -1):
            allowed_ids = allowed_token_ids.get(position)
            if allowed_ids is None:
                allowed_ids = np.arange(len(automaton.class_of_V))
            following = automaton.completable_by(allowed_ids, following)
            self._early.insert(0, following)
        if not self.completable_at(start)[0]:
            raise ValueError(self._explain(restricts_tokens=last >= start))

    def completable_at(self, position: int) -> NDArray[np.bool_]:
        """True for the states before a position from which the rest of the span can be completed, [S]."""
        if position - self.start < len(self._early):
            return self._early[position - self.start]
        return self.automaton.completable(self.end - position)

    def _explain(self, *, restricts_tokens: bool) -> str:
        length, min_length = self.end - self.start, self.automaton.min_length()
        if min_length is None:
            return "no tokens of the vocabulary are a text that the constraint allows: correct it"
        if min_length > length:
            return f"the constraint needs at least {min_length} tokens, and there are {length}: allow more tokens"
        allowed = ", with the tokens that are allowed in their places," if restricts_tokens else ""
        return (
            f"no text of exactly {length} tokens{allowed} fits the constraint: change their number or the constraint, "
            "or set stop tokens (not for a masked span)"
        )


class SpanCursor:
    """The state of a span's automaton before the block that is being decoded."""

    def __init__(self, span: ConstrainedSpan) -> None:
        self.span = span
        self._position, self._state = span.start, 0

    def state_before(self, position: int, tokens_L: NDArray[np.int64]) -> int:
        """State before a position of the span; everything before it is final."""
        for token in tokens_L[self._position : position].tolist():
            self._state = self.span.automaton.next_state(self._state, token)
        self._position = position
        return self._state
