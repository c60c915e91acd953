"""Deterministic automata over the bytes of UTF-8 text, from expressions.

Shapes: S states, C classes of bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

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
MAX_NONDETERMINISTIC_SIZE = 3 << 17
"""States and transitions of a nondeterministic automaton."""
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
        """Whether it is one of the texts."""
        state = 0
        for byte_class in self.byte_classes[np.frombuffer(text, dtype=np.uint8)]:
            state = self.transitions_SC[state, byte_class]
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
        ValueError: a set of characters is empty, or the automaton is too large.
    """
    graph = _Graph()
    start, end = graph.add_state(), graph.add_state()
    graph.connect(expression, start, end)
    return _make_deterministic(graph, start, end, max_states)


class _Graph:
    """A nondeterministic automaton (Thompson 1968)."""

    def __init__(self) -> None:
        self.empty_edges: list[list[int]] = []
        """State -> states that are reached without a byte."""
        self.byte_edges: list[list[tuple[int, int, int]]] = []
        """State -> (lowest byte, highest byte, next state)."""
        self._size = 0
        self._sequences: dict[int, list[tuple[tuple[int, int], ByteRanges]]] = {}
        """Identity of an expression, which lives as long as this -> its byte ranges."""

    def _grow(self) -> None:
        self._size += 1
        if self._size > MAX_NONDETERMINISTIC_SIZE:
            raise too_large_error(MAX_NONDETERMINISTIC_SIZE, "states and transitions of its nondeterministic automaton")

    def add_state(self) -> int:
        self._grow()
        self.empty_edges.append([])
        self.byte_edges.append([])
        return len(self.empty_edges) - 1

    def _add_empty_edge(self, start: int, end: int) -> None:
        self._grow()
        self.empty_edges[start].append(end)

    def _add_byte_edge(self, start: int, low: int, high: int, end: int) -> None:
        self._grow()
        self.byte_edges[start].append((low, high, end))

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
                    raise ValueError("a set of characters is empty, as in [^\\s\\S]: remove it")
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


def _make_deterministic(graph: _Graph, start: int, end: int, max_states: int) -> ByteAutomaton:
    """Number the sets of states that a text leads to (Rabin and Scott 1959).

    Raises:
        ValueError: the automaton, or the work, is too large.
    """
    byte_classes = _classify_bytes(graph)
    edges = [
        [(int(byte_classes[low]), int(byte_classes[high]), target) for low, high, target in edges]
        for edges in graph.byte_edges
    ]
    subsets: list[frozenset[int]] = []
    numbers: dict[frozenset[int], int] = {}
    work = 0

    def count_work(num_steps: int) -> None:
        nonlocal work
        work += num_steps
        if work > MAX_WORK:
            raise too_large_error(MAX_WORK, "steps of its construction")

    @cache
    def close(state: int) -> frozenset[int]:
        """The states that are reached without a byte and matter: those with edges, and the end."""
        seen, stack = {state}, [state]
        while stack:
            new_states = set(graph.empty_edges[stack.pop()]) - seen
            seen |= new_states
            stack += new_states
        count_work(len(seen))
        return frozenset(member for member in seen if graph.byte_edges[member] or member == end)

    @cache
    def number_closure(states: frozenset[int]) -> int:
        closures = list(map(close, states))
        count_work(sum(map(len, closures)))
        subset = frozenset[int]().union(*closures)
        if numbers.setdefault(subset, len(subsets)) == len(subsets):
            subsets.append(subset)
            if len(subsets) > max_states:
                raise too_large_error(max_states, "states")
        return numbers[subset]

    rows = []
    number_closure(frozenset((start,)))
    for subset in subsets:  # which grows meanwhile
        targets: dict[int, set[int]] = {}
        for low, high, target in (edge for state in subset for edge in edges[state]):
            count_work(high - low + 1)
            for byte_class in range(low, high + 1):
                targets.setdefault(byte_class, set()).add(target)
        rows.append({byte_class: number_closure(frozenset(states)) for byte_class, states in targets.items()})
    transitions_SC = np.full((len(rows), int(byte_classes.max()) + 1), DEAD, dtype=np.int32)
    for number, row in enumerate(rows):
        transitions_SC[number, list(row)] = list(row.values())
    return ByteAutomaton.from_table(transitions_SC, byte_classes, np.array([end in subset for subset in subsets]))


def _classify_bytes(graph: _Graph) -> NDArray[np.int32]:
    """Classes of bytes that no edge tells apart, ascending with the bytes, [256]."""
    is_cut = np.zeros(257, dtype=np.int32)
    for edges in graph.byte_edges:
        for low, high, _ in edges:
            is_cut[low] = is_cut[high + 1] = 1
    is_cut[0] = 0
    return is_cut[:256].cumsum(dtype=np.int32)
