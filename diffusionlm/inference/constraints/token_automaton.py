"""Deterministic automata over tokens, and the spans of a canvas that they constrain.

Tokens that lead every state to the same state are one class. A token's text is a function from states to states, so
classes are found along the prefix tree of the vocabulary, one function for each class instead of one walk of the
vocabulary for each state.

Shapes: S states, K classes, E transitions, V tokens, D nodes of one depth of the tree, L positions of a canvas.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from diffusionlm.inference.constraints.byte_automaton import DEAD, ByteAutomaton, too_large_error
from tokenizer import Tokenizer

MAX_TRANSITIONS = 1 << 20
"""Of all prefixes of tokens together."""
MAX_STEPS = 1 << 28
"""Transitions times tokens of an answer."""


@dataclass(frozen=True, eq=False)
class TrieLevel:
    """The nodes of one depth: texts of so many bytes with which tokens begin."""

    parents_D: NDArray[np.int64]
    """Index of the node without the last byte, in the level before."""
    bytes_D: NDArray[np.uint8]
    """Last byte of the prefix of each node."""
    token_ids: NDArray[np.int64]
    """Tokens of exactly this length."""
    token_nodes: NDArray[np.int64]
    """Node of each of them."""


@dataclass(frozen=True, eq=False)
class TokenTrie:
    """All tokens that stand for text."""

    levels: tuple[TrieLevel, ...]
    vocab_size: int
    """Ids of the tokenizer."""

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer, text: str = "") -> TokenTrie:
        """Build the tree of a vocabulary. Of special tokens only those in ``text`` stand for text."""
        added_ids = (token_id for token, token_id in tokenizer.special_tokens.items() if token in text)
        token_ids = sorted((*tokenizer.vocab.values(), *added_ids))
        return cls.from_texts(token_ids, [tokenizer.token_bytes(token) for token in token_ids], tokenizer.vocab_size)

    @classmethod
    def from_texts(cls, token_ids: Sequence[int], texts: Sequence[bytes], vocab_size: int) -> TokenTrie:
        """Build the tree; tokens without a byte are left out.

        Args:
            texts: of each token.
        """
        lengths = np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
        order = np.argsort(-lengths, kind="stable")  # the tokens that reach a depth come first
        ids, lengths = np.asarray(token_ids, dtype=np.int64)[order], lengths[order]
        letters = np.frombuffer(b"".join(texts[index] for index in order), dtype=np.uint8)
        starts = np.cumsum(lengths) - lengths
        nodes = np.zeros(len(ids), dtype=np.int64)
        levels = []
        for depth in range(int(lengths[0]) if len(lengths) else 0):
            count = int(np.searchsorted(-lengths, -depth, side="left"))
            keys = nodes[:count] * 256 + letters[starts[:count] + depth]
            unique_keys, nodes = np.unique(keys, return_inverse=True)
            nodes = nodes.reshape(-1)
            first = int(np.searchsorted(-lengths, -(depth + 1), side="left"))
            levels.append(
                TrieLevel(unique_keys // 256, (unique_keys % 256).astype(np.uint8), ids[first:count], nodes[first:])
            )
        return cls(tuple(levels), vocab_size)


class TokenAutomaton:
    """An automaton over tokens, whose start is state 0. Threads may share it.

    If there are stop tokens, an accepting state can take one, which leads to the last state; from there on every
    token is accepted. A stop token never stands for text, and neither does any token without a text.
    """

    def __init__(
        self,
        automaton: ByteAutomaton,
        trie: TokenTrie,
        vocab_size: int,
        stop_token_ids: Collection[int] = (),
        forbidden_token_ids: Collection[int] = (),
    ) -> None:
        """Compile an automaton for a vocabulary.

        Args:
            vocab_size: of the model; ids that the tokenizer does not have stand for no text.
            forbidden_token_ids: tokens that are never generated.

        Raises:
            ValueError: the automaton is too large.
        """
        functions, class_of_token = _classify_tokens(automaton, trie)
        class_of_V = np.full(vocab_size, -1, dtype=np.int64)
        num_common = min(vocab_size, trie.vocab_size)
        class_of_V[:num_common] = class_of_token[:num_common]
        forbidden = np.array(sorted(forbidden_token_ids), dtype=np.int64)
        stops = np.array(sorted(set(stop_token_ids) - set(forbidden_token_ids)), dtype=np.int64)
        class_of_V[forbidden] = class_of_V[stops] = -1
        numbers, class_of_V = _renumber(class_of_V)
        functions = [functions[number] for number in numbers]
        self.is_accepting_S = automaton.is_accepting_S
        self.has_stops = len(stops) > 0
        """The last state follows a stop token."""
        if len(stops):
            stopped, accepting = automaton.num_states, np.flatnonzero(automaton.is_accepting_S)
            nothing = _Function(accepting[:0], accepting[:0])
            stop = _Function(accepting, np.full(len(accepting), stopped))
            class_of_V[class_of_V == -1] = len(functions)
            class_of_V[stops] = len(functions) + 1
            class_of_V[forbidden] = -1
            functions = [_extend(function, stopped) for function in (*functions, nothing, stop)]
            self.is_accepting_S = np.append(self.is_accepting_S, True)
        self.class_of_V = class_of_V.astype(np.int32)
        """Class of each token, -1: it is never possible."""
        self.num_classes = len(functions)
        self.tokens_by_class = self._sort_tokens()
        """Tokens that are possible, by class and ascending; first index and number of those of each class."""
        self._sort_transitions(functions)
        self._completable = [np.packbits(self.is_accepting_S)]
        """Bits of the states that can be completed with 0, 1, ... tokens; if the last two are equal, also with more.
        Threads replace the list, so that it needs no lock."""

    def _sort_tokens(self) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
        num_impossible = int((self.class_of_V < 0).sum())
        order = np.argsort(self.class_of_V, kind="stable")[num_impossible:]
        starts = np.searchsorted(self.class_of_V[order], np.arange(self.num_classes))
        return order.astype(np.int32), starts, np.diff(starts, append=len(order))

    def _sort_transitions(self, functions: list[_Function]) -> None:
        sizes = [len(function.sources) for function in functions]
        classes_E = np.repeat(np.arange(len(functions)), sizes)
        sources_E = np.concatenate([np.zeros(0, np.int64), *(function.sources for function in functions)])
        targets_E = np.concatenate([np.zeros(0, np.int64), *(function.targets for function in functions)])
        order = np.lexsort((classes_E, sources_E))
        self.classes_E = classes_E[order]
        self.sources_E = sources_E[order]
        """Ascending; those of one state by class."""
        self.targets_E = targets_E[order]
        self._starts = np.searchsorted(self.sources_E, np.arange(self.num_states + 1))
        self._keys_E = self.sources_E * self.num_classes + self.classes_E
        pairs = np.unique(self.sources_E * self.num_states + self.targets_E)
        self._edge_sources, self._edge_targets = np.divmod(pairs, self.num_states)

    @property
    def num_states(self) -> int:
        return len(self.is_accepting_S)

    def next_state(self, state: int, token_id: int) -> int:
        """State after a token, or `DEAD`."""
        token_class = int(self.class_of_V[token_id])
        key = state * self.num_classes + token_class
        index = int(np.searchsorted(self._keys_E, key))
        is_known = token_class >= 0 and index < len(self._keys_E) and int(self._keys_E[index]) == key
        return int(self.targets_E[index]) if is_known else DEAD

    def transitions_from(self, states: NDArray[np.int64]) -> NDArray[np.int64]:
        """Indices of the transitions of some states."""
        starts, sizes = self._starts[states], self._starts[states + 1] - self._starts[states]
        offsets = np.cumsum(sizes) - sizes
        indices: NDArray[np.int64] = np.arange(int(sizes.sum())) + np.repeat(starts - offsets, sizes)
        return indices

    def completable(self, length: int) -> NDArray[np.bool_]:
        """True for the states from which some ``length`` tokens lead to an accepting one, [S].

        Raises:
            ValueError: automaton and length together are too large.
        """
        known = self._completable
        if len(known) <= length and not _has_settled(known):
            self.check_steps(length)
            known = [*known]
            while len(known) <= length and not _has_settled(known):
                following = np.unpackbits(known[-1], count=self.num_states).view(np.bool_)
                known.append(np.packbits(self.completable_by(None, following)))
            self._completable = known
        return np.unpackbits(known[min(length, len(known) - 1)], count=self.num_states).view(np.bool_)

    def check_steps(self, length: int) -> None:
        """Check that so many steps of the automaton can be computed.

        Raises:
            ValueError: automaton and length together are too large.
        """
        if length * len(self._edge_sources) > MAX_STEPS:
            error = too_large_error(MAX_STEPS, f"transitions times the {length:,} tokens of the answer")
            raise ValueError(f"{error}, or a shorter answer")

    def completable_by(self, token_ids: ArrayLike | None, following: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """True for the states from which one of these tokens, None: any token, leads to one of the states
        ``following``, [S]."""
        if token_ids is None:
            return self._before(following[self._edge_targets], self._edge_sources)
        is_allowed = np.zeros(self.num_classes + 1, dtype=np.bool_)
        is_allowed[self.class_of_V[np.asarray(token_ids)]] = True
        is_allowed[-1] = False  # the class -1
        return self._before(following[self.targets_E] & is_allowed[self.classes_E], self.sources_E)

    def _before(self, is_used: NDArray[np.bool_], sources: NDArray[np.int64]) -> NDArray[np.bool_]:
        states = np.zeros(self.num_states, dtype=np.bool_)
        states[sources[is_used]] = True
        return states

    def min_length(self) -> int | None:
        """Fewest tokens that lead from the start to an accepting state; None: there is no way."""
        is_seen = np.zeros(self.num_states, dtype=np.bool_)
        states, length = np.zeros(1, dtype=np.int64), 0
        while len(states):
            if self.is_accepting_S[states].any():
                return length
            is_seen[states] = True
            targets = np.unique(self.targets_E[self.transitions_from(states)])
            states, length = targets[~is_seen[targets]], length + 1
        return None


def _has_settled(sets: Sequence[NDArray[np.uint8]]) -> bool:
    """Whether the last two sets are equal; as each follows from the one before, so are all further ones."""
    return len(sets) > 1 and np.array_equal(sets[-1], sets[-2])


@dataclass(frozen=True, eq=False)
class _Function:
    """Where a text leads: states that it can follow, ascending, and the states after it."""

    sources: NDArray[np.int64]
    targets: NDArray[np.int64]


def _extend(function: _Function, state: int) -> _Function:
    """Let the text lead one more state to itself."""
    return _Function(np.append(function.sources, state), np.append(function.targets, state))


def _classify_tokens(automaton: ByteAutomaton, trie: TokenTrie) -> tuple[list[_Function], NDArray[np.int64]]:
    """Functions of prefixes of tokens, and the function of each token, -1: no state can be followed by it.

    Raises:
        ValueError: the functions are too large.
    """
    all_states = np.arange(automaton.num_states)
    functions = [_Function(all_states, all_states)]
    numbers = {_identity(functions[0]): 0}
    products: dict[int, int] = {}
    num_byte_classes = automaton.transitions_SC.shape[1]
    work = 0

    def multiply(key: int) -> int:
        """Number of the function of a prefix and one more byte, by the number of the prefix and the byte's class."""
        nonlocal work
        if key not in products:
            function, byte_class = functions[key // num_byte_classes], key % num_byte_classes
            targets = automaton.transitions_SC[function.targets, byte_class]
            is_live = targets != DEAD
            product = _Function(function.sources[is_live], targets[is_live].astype(np.int64))
            work += len(targets)
            if work > MAX_TRANSITIONS:
                raise too_large_error(MAX_TRANSITIONS, "transitions")
            number = -1
            if len(product.sources):
                number = numbers.setdefault(_identity(product), len(functions))
                if number == len(functions):
                    functions.append(product)
            products[key] = number
        return products[key]

    class_of_token = np.full(trie.vocab_size, -1, dtype=np.int64)
    nodes = np.zeros(1, dtype=np.int64)
    for level in trie.levels:
        parents = nodes[level.parents_D]
        is_live = parents >= 0
        keys = parents[is_live] * num_byte_classes + automaton.byte_classes[level.bytes_D[is_live]]
        unique_keys, inverse = np.unique(keys, return_inverse=True)
        nodes = np.full(len(parents), -1, dtype=np.int64)
        nodes[is_live] = np.array([multiply(key) for key in unique_keys.tolist()], dtype=np.int64)[inverse.reshape(-1)]
        class_of_token[level.token_ids] = nodes[level.token_nodes]
        if not is_live.any():
            break
    return functions, class_of_token


def _identity(function: _Function) -> bytes:
    return hashlib.blake2b(function.sources.tobytes() + function.targets.tobytes(), digest_size=16).digest()


def _renumber(numbers_V: NDArray[np.int64]) -> tuple[list[int], NDArray[np.int64]]:
    """The numbers that occur, without -1, and each entry's place among them."""
    numbers = np.unique(numbers_V[numbers_V >= 0])
    places = np.searchsorted(numbers, numbers_V)
    return numbers.tolist(), np.where(numbers_V >= 0, places, -1)


class ConstrainedSpan:
    """Masked positions ``start`` to ``end`` - 1, whose tokens an automaton has to accept."""

    def __init__(
        self,
        automaton: TokenAutomaton,
        start: int,
        end: int,
        allowed_token_ids: Mapping[int, ArrayLike],
        min_length: int = 0,
    ) -> None:
        """Check that there is an answer.

        Args:
            allowed_token_ids: masked position -> the tokens that it may hold.
            min_length: tokens from ``start`` on among which there is no stop token.

        Raises:
            ValueError: no tokens of this span are accepted, or automaton and length together are too large.
        """
        self.automaton, self.start, self.end = automaton, start, end
        min_length *= automaton.has_stops
        positions = (position for position in allowed_token_ids if start <= position < end)
        last = max(positions, default=start - 1)
        last = max(last, start + min_length - 1)
        automaton.check_steps(last - start + 1)
        following = automaton.completable(end - last - 1)
        early = []
        for position in range(last, start - 1, -1):
            if position == start + min_length - 1:
                following[-1] = False  # after a stop token, which nothing before this position leads to either
            following = automaton.completable_by(allowed_token_ids.get(position), following)
            early.append(np.packbits(following))
        self._early = early[::-1]
        """Bits of `completable_at` of the positions from ``start`` on, up to the last one with tokens of its own."""
        if not self.completable_at(start)[0]:
            raise ValueError(self._explain(min_length, restricts_tokens=last >= start))

    def completable_at(self, position: int) -> NDArray[np.bool_]:
        """True for the states before a position from which the rest of the span can be completed, [S]."""
        if position - self.start < len(self._early):
            return np.unpackbits(self._early[position - self.start], count=self.automaton.num_states).view(np.bool_)
        return self.automaton.completable(self.end - position)

    def _explain(self, min_length: int, *, restricts_tokens: bool) -> str:
        length, num_needed = self.end - self.start, self.automaton.min_length()
        if num_needed is not None and num_needed > length:
            return f"the constraint needs at least {num_needed} tokens, and there are {length}: allow more tokens"
        if min_length:
            return (
                f"no text of min_new_tokens (min_tokens) = {min_length} to {length} tokens fits the constraint: change "
                "one of them"
            )
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
