"""Deterministic automata over the bytes of UTF-8 text, from expressions.

Shapes: S states, C classes of bytes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diffusionlm.inference.constraints.expressions import (
    Alternation,
    ByteRanges,
    CharacterSet,
    CodePoints,
    Concatenation,
    Expression,
    OptionalItems,
    Repetition,
    utf8_sequences,
)

DEAD = -1
"""No state: the text cannot be completed anymore."""

MAX_STATES = 1 << 14
"""States of a deterministic automaton."""
MAX_NONDETERMINISTIC_STATES = 1 << 17
MAX_NONDETERMINISTIC_EDGES = 1 << 18
MAX_WORK = 1 << 21
"""Steps of the construction, about 2 s."""


def too_large_error(limit: int, unit: str) -> ValueError:
    """The error of a constraint beyond a limit."""
    return ValueError(
        f"the constraint is too large, more than {limit:,} {unit}: use fewer alternatives, lower counts, or no upper "
        "limit of a count"
    )


@dataclass(frozen=True, eq=False)
class ByteAutomaton:
    """A deterministic automaton, whose start is state 0. Every state is reachable and can be completed."""

    transitions_SC: NDArray[np.int32]
    """Next state, or `DEAD`."""
    byte_classes: NDArray[np.int32]
    """Class of each byte, [256]."""
    is_accepting_S: NDArray[np.bool_]

    @classmethod
    def from_table(
        cls, table_SC: NDArray[np.int32], byte_classes: NDArray[np.int32], is_accepting_S: NDArray[np.bool_]
    ) -> ByteAutomaton:
        """Join the classes of bytes that lead every state to the same one."""
        columns, numbers = np.unique(table_SC, axis=1, return_inverse=True)
        joined_classes = numbers.reshape(-1)[byte_classes].astype(np.int32)
        return cls(np.ascontiguousarray(columns), joined_classes, is_accepting_S)

    @property
    def num_states(self) -> int:
        return len(self.is_accepting_S)

    def accepts(self, text: bytes) -> bool:
        state = 0
        for byte in text:
            state = int(self.transitions_SC[state, self.byte_classes[byte]])
            if state == DEAD:
                return False
        return bool(self.is_accepting_S[state])

    def with_prefix(self, prefix: bytes) -> ByteAutomaton:
        """The automaton of the same texts behind a prefix."""
        length = len(prefix)
        table_SB = np.full((length + self.num_states, 256), DEAD, dtype=np.int32)
        own_SB = self.transitions_SC[:, self.byte_classes]
        table_SB[length:] = np.where(own_SB == DEAD, DEAD, own_SB + length)
        table_SB[np.arange(length), np.frombuffer(prefix, dtype=np.uint8)] = np.arange(1, length + 1)
        is_accepting_S = np.append(np.zeros(length, dtype=np.bool_), self.is_accepting_S)
        return ByteAutomaton.from_table(table_SB, np.arange(256, dtype=np.int32), is_accepting_S)


def compile_expression(expression: Expression, max_states: int = MAX_STATES) -> ByteAutomaton:
    """The automaton of the texts of an expression.

    Args:
        max_states: of the deterministic automaton.

    Raises:
        ValueError: no text matches, or the automaton is too large.
    """
    graph = _Graph()
    start, end = graph.add_state(), graph.add_state()
    graph.connect(expression, start, end)
    return _SubsetConstruction(graph, end, max_states).run(start)


class _Graph:
    """A nondeterministic automaton (Thompson 1968)."""

    def __init__(self) -> None:
        self.empty_edges: list[list[int]] = []
        """State -> states that are reached without a byte."""
        self.byte_edges: list[list[tuple[int, int, int]]] = []
        """State -> (lowest byte, highest byte, next state)."""
        self._num_edges = 0
        self._sequences: dict[int, list[tuple[tuple[int, int], ByteRanges]]] = {}
        """Identity of an expression, which lives as long as this -> its byte ranges."""

    def add_state(self) -> int:
        if len(self.empty_edges) >= MAX_NONDETERMINISTIC_STATES:
            raise too_large_error(MAX_NONDETERMINISTIC_STATES, "states of its nondeterministic automaton")
        self.empty_edges.append([])
        self.byte_edges.append([])
        return len(self.empty_edges) - 1

    def _add_empty_edge(self, start: int, end: int) -> None:
        self._count_edge()
        self.empty_edges[start].append(end)

    def _add_byte_edge(self, start: int, low: int, high: int, end: int) -> None:
        self._count_edge()
        self.byte_edges[start].append((low, high, end))

    def _count_edge(self) -> None:
        self._num_edges += 1
        if self._num_edges > MAX_NONDETERMINISTIC_EDGES:
            raise too_large_error(MAX_NONDETERMINISTIC_EDGES, "transitions of its nondeterministic automaton")

    def _encode(self, expression: Expression, code_points: CodePoints) -> list[tuple[tuple[int, int], ByteRanges]]:
        """First and further bytes of a set of characters; computed once, however often the set is repeated."""
        if id(expression) not in self._sequences:
            self._sequences[id(expression)] = [(first, tuple(rest)) for first, *rest in utf8_sequences(code_points)]
        return self._sequences[id(expression)]

    def _add_ranges(self, ranges: ByteRanges, states: dict[ByteRanges, int]) -> int:
        """State before bytes of these ranges; equal ranges share it."""
        if ranges not in states:
            following = self._add_ranges(ranges[1:], states)
            states[ranges] = self.add_state()
            self._add_byte_edge(states[ranges], *ranges[0], following)
        return states[ranges]

    def connect(self, expression: Expression, start: int, end: int) -> None:
        """Add paths from ``start`` to ``end`` for the texts of an expression."""
        match expression:
            case CharacterSet(code_points):
                states: dict[ByteRanges, int] = {(): end}
                sequences = self._encode(expression, code_points)
                if not sequences:  # so that every state can be completed
                    raise ValueError("no text matches the constraint, because a set has no character: correct it")
                for (low, high), rest in sequences:
                    self._add_byte_edge(start, low, high, self._add_ranges(rest, states))
            case Concatenation(parts):
                for part in parts:
                    start = self._append(part, start)
                self._add_empty_edge(start, end)
            case Alternation(options):
                # Options share the states of the parts that they begin with, so that texts make up a prefix tree.
                following: dict[tuple[int, int], int] = {}
                for option in options:
                    state = start
                    for part in option.parts if isinstance(option, Concatenation) else (option,):
                        if (state, id(part)) not in following:
                            following[state, id(part)] = self._append(part, state)
                        state = following[state, id(part)]
                    self._add_empty_edge(state, end)
            case Repetition():
                self._connect_repetition(expression, start, end)
            case OptionalItems():
                self._connect_items(expression, start, end)

    def _append(self, expression: Expression, start: int) -> int:
        end = self.add_state()
        self.connect(expression, start, end)
        return end

    def _connect_repetition(self, repetition: Repetition, start: int, end: int) -> None:
        part, separator = repetition.part, repetition.separator
        if repetition.minimum == 0:
            self._add_empty_edge(start, end)
        if repetition.maximum is None:
            num_copies = max(repetition.minimum, 1)
        elif repetition.maximum == 0:
            return
        else:
            num_copies = repetition.maximum
        state = self.add_state()
        self._add_empty_edge(start, state)
        for index in range(1, num_copies + 1):
            last, state = state, self._append(part, state)
            if index >= repetition.minimum:
                self._add_empty_edge(state, end)
            if index < num_copies:
                state = self._append(separator, state)
        if repetition.maximum is None:
            self.connect(separator, state, last)

    def _connect_items(self, items: OptionalItems, start: int, end: int) -> None:
        """Two chains of states: no item was there yet (None: impossible), or one was."""
        without: int | None = start
        some: int | None = None
        for item, is_required in items.items:
            item_start, item_end = self.add_state(), self.add_state()
            if without is not None:
                self._add_empty_edge(without, item_start)
            if some is not None:
                self.connect(items.separator, some, item_start)
            self.connect(item, item_start, item_end)
            if not is_required and some is not None:
                self._add_empty_edge(some, item_end)
            some = item_end
            without = None if is_required else without
        for state in (without, some):
            if state is not None:
                self._add_empty_edge(state, end)


class _SubsetConstruction:
    """Makes an automaton deterministic (Rabin and Scott 1959)."""

    def __init__(self, graph: _Graph, end: int, max_states: int) -> None:
        self._graph, self._end, self._max_states = graph, end, max_states
        self._byte_classes = _classify_bytes(graph)
        self._edges = [
            [(int(self._byte_classes[low]), int(self._byte_classes[high]), target) for low, high, target in edges]
            for edges in graph.byte_edges
        ]
        self._closures: dict[int, frozenset[int]] = {}
        self._numbers: dict[frozenset[int], int] = {}
        """Set of states of the graph -> state of the result."""
        self._pending: deque[frozenset[int]] = deque()
        self._known_targets: dict[frozenset[int], int] = {}
        self._work = 0

    def run(self, start: int) -> ByteAutomaton:
        self._number_subset(frozenset((start,)))
        rows = []
        while self._pending:
            rows.append(self._follow_bytes(self._pending.popleft()))
        transitions_SC = np.full((len(rows), int(self._byte_classes.max()) + 1), DEAD, dtype=np.int32)
        for number, row in enumerate(rows):
            transitions_SC[number, list(row)] = list(row.values())
        is_accepting_S = np.array([self._end in subset for subset in self._numbers])
        return ByteAutomaton.from_table(transitions_SC, self._byte_classes, is_accepting_S)

    def _follow_bytes(self, subset: frozenset[int]) -> dict[int, int]:
        """Next state for each class of bytes."""
        targets: dict[int, set[int]] = {}
        for state in subset:
            for low, high, target in self._edges[state]:
                self._count_work(high - low + 1)
                for byte_class in range(low, high + 1):
                    targets.setdefault(byte_class, set()).add(target)
        return {byte_class: self._number_subset(frozenset(states)) for byte_class, states in targets.items()}

    def _number_subset(self, states: frozenset[int]) -> int:
        """State of the result for states of the graph and what they reach without a byte."""
        if states not in self._known_targets:
            subset = frozenset[int]().union(*map(self._close, states))
            if subset not in self._numbers:
                if len(self._numbers) >= self._max_states:
                    raise too_large_error(self._max_states, "states")
                self._numbers[subset] = len(self._numbers)
                self._pending.append(subset)
            self._known_targets[states] = self._numbers[subset]
        return self._known_targets[states]

    def _close(self, state: int) -> frozenset[int]:
        """The states that are reached without a byte and matter: those with edges, and the end."""
        if state not in self._closures:
            seen, stack = {state}, [state]
            while stack:
                for following in self._graph.empty_edges[stack.pop()]:
                    if following not in seen:
                        seen.add(following)
                        stack.append(following)
            self._count_work(len(seen))
            self._closures[state] = frozenset(
                member for member in seen if self._graph.byte_edges[member] or member == self._end
            )
        self._count_work(len(self._closures[state]))
        return self._closures[state]

    def _count_work(self, num_steps: int) -> None:
        self._work += num_steps
        if self._work > MAX_WORK:
            raise too_large_error(MAX_WORK, "steps of its construction")


def _classify_bytes(graph: _Graph) -> NDArray[np.int32]:
    """Classes of bytes that no edge tells apart, ascending with the bytes, [256]."""
    is_cut = np.zeros(257, dtype=np.int32)
    for edges in graph.byte_edges:
        for low, high, _ in edges:
            is_cut[low] = is_cut[high + 1] = 1
    is_cut[0] = 0
    return is_cut[:256].cumsum(dtype=np.int32)
