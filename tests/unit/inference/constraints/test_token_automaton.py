"""Automata over tokens, compared with the text of every sequence of tokens."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from diffusionlm.inference.constraints.byte_automaton import DEAD, compile_expression
from diffusionlm.inference.constraints.expressions import parse_regex
from diffusionlm.inference.constraints.token_automaton import TokenAutomaton, TokenTrie

TEXTS = [b"a", b"b", b"ab", b"ba", b"aab", b"\xc3", b"\xa9", b"a\xc3", b"", b"a", b"\xa9b"]
"""Two tokens have the same text, some end within a character."""
SPECIAL, STOP, MASK = 11, 12, 13
VOCAB_SIZE = 15  # the last one is padding of the model
PATTERNS = ["", "a|b", "(ab)*", "a{3}", "[ab]{2,4}", "é(a|é)?b?", "(ba|aab){1,2}", "a*b"]


def make_automaton(pattern: str, stops: tuple[int, ...] = (), forbidden: tuple[int, ...] = (MASK, 0)) -> TokenAutomaton:
    trie = TokenTrie.from_texts(range(len(TEXTS)), TEXTS, 14)
    return TokenAutomaton(compile_expression(parse_regex(pattern)), trie, VOCAB_SIZE, stops, forbidden)


def is_answer(pattern: str, tokens: tuple[int, ...], stops: tuple[int, ...], forbidden: tuple[int, ...]) -> bool:
    """The definition: the text before the first stop token matches, and no token is forbidden."""
    text = b""
    for token in tokens:
        if token in forbidden:
            return False
    for token in tokens:
        if token in stops:
            break
        if token >= len(TEXTS) or not TEXTS[token]:
            return False
        text += TEXTS[token]
    try:
        return re.fullmatch(pattern, text.decode()) is not None
    except UnicodeDecodeError:
        return False


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("stops", [(), (STOP,), (STOP, 1)])
def test_accepts_exactly_the_answers(pattern: str, stops: tuple[int, ...]) -> None:
    forbidden = (MASK, 0)
    automaton = make_automaton(pattern, stops, forbidden)
    min_length = None
    for length in range(4):
        completable = np.zeros(automaton.num_states, dtype=np.bool_)
        for tokens in itertools.product(range(VOCAB_SIZE), repeat=length):
            state = 0
            for token in tokens:
                state = automaton.next_state(state, token) if state != DEAD else DEAD
            is_accepted = state != DEAD and bool(automaton.is_accepting_S[state])
            assert is_accepted == is_answer(pattern, tokens, stops, forbidden), tokens
            completable[0] |= is_accepted
        assert automaton.completable(length)[0] == completable[0]
        if completable[0] and min_length is None:
            min_length = length
    assert automaton.min_length() in (min_length, *range(4, 9))


def test_a_token_of_the_same_text_is_of_the_same_class() -> None:
    automaton = make_automaton("[ab]*", forbidden=())
    assert automaton.num_classes == 1  # from the only state to itself
    assert automaton.class_of_V.tolist() == [0, 0, 0, 0, 0, -1, -1, -1, -1, 0, -1, -1, -1, -1, -1]


def test_no_way() -> None:
    assert make_automaton("c").min_length() is None
    assert make_automaton("c", (STOP,)).completable(9)[0] == np.False_


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    automaton = make_automaton("[ab]{300}")
    monkeypatch.setattr("diffusionlm.inference.constraints.token_automaton.MAX_STEPS", 1 << 12)
    with pytest.raises(ValueError, match="or a shorter answer"):
        automaton.completable(100)
    monkeypatch.setattr("diffusionlm.inference.constraints.token_automaton.MAX_TRANSITIONS", 1 << 9)
    with pytest.raises(ValueError, match="too large"):
        make_automaton("[ab]{300}")
