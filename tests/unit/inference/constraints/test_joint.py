"""The joint distribution of one forward, compared with the enumeration of every sequence of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from diffusionlm.inference.constraints.byte_automaton import DEAD, compile_expression
from diffusionlm.inference.constraints.expressions import parse_regex
from diffusionlm.inference.constraints.joint import JointDistribution
from diffusionlm.inference.constraints.token_automaton import TokenAutomaton, TokenTrie

TEXTS = [b"a", b"b", b"ab", b"ba", b"a"]
STOP, SPECIAL = 5, 6
V = 7
FREE, ALL = np.array([-1, -1]), np.array([True, True])
PATTERNS = ["[ab]*", "(ab)+", "a(b|aa)*", "[ab]{3,4}", "a|bab?"]


@dataclass
class Case:
    """One forward of 4 positions, and all accepted sequences with their probabilities."""

    joint: JointDistribution
    sequences: NDArray[np.int64]
    probabilities: NDArray[np.float64]
    """Of all accepted sequences; they sum to 1."""
    free_weights: list[dict[int, float]]
    """Position -> weight of each of its tokens beside the committed ones of all others."""


def accepted_sequences(automaton: TokenAutomaton, is_final_S: NDArray[np.bool_]) -> list[tuple[int, ...]]:
    """All of 4 tokens, by trying each token after each beginning that is possible."""
    beginnings: list[tuple[tuple[int, ...], int]] = [((), 0)]
    for _ in range(4):
        beginnings = [
            ((*sequence, token), following)
            for sequence, state in beginnings
            for token in range(V)
            if (following := automaton.next_state(state, token)) != DEAD
        ]
    return [sequence for sequence, state in beginnings if is_final_S[state]]


def make_case(
    pattern: str, stops: tuple[int, ...], committed: tuple[int, ...], seed: int = 0, rest: int = 0
) -> Case | None:
    """None: no sequence is accepted."""
    trie = TokenTrie.from_texts(range(len(TEXTS)), TEXTS, V)
    automaton = TokenAutomaton(compile_expression(parse_regex(pattern)), trie, V, stops)
    is_final_S = automaton.completable(rest)
    rng = np.random.default_rng(seed)
    logits_PV = 3.0 * rng.normal(size=(4, V))
    logprobs_PV = logits_PV - np.log(np.exp(logits_PV).sum(1, keepdims=True))
    sequences, weights = [], []
    free_weights: list[dict[int, float]] = [{} for _ in range(4)]
    for sequence in accepted_sequences(automaton, is_final_S):
        different = [i for i, token in enumerate(committed) if token not in (-1, sequence[i])]
        probs = [np.exp(logprobs_PV[i, token]) for i, token in enumerate(sequence)]
        if not different:
            sequences.append(sequence)
            weights.append(np.prod([p for i, p in enumerate(probs) if committed[i] < 0]))
        for position in range(4):
            if set(different) <= {position}:
                others = [p for i, p in enumerate(probs) if committed[i] < 0 or i == position]
                token = sequence[position]
                free_weights[position][token] = free_weights[position].get(token, 0.0) + float(np.prod(others))
    if not sequences:
        return None
    joint = JointDistribution(automaton, 0, logprobs_PV, np.array(committed), np.ones(4, dtype=np.bool_), is_final_S)
    return Case(joint, np.array(sequences), np.array(weights) / np.sum(weights), free_weights)


CASES = [
    (pattern, stops, committed, rest)
    for pattern in PATTERNS
    for stops in ((), (STOP,))
    for committed in ((-1,) * 4, (-1, 1, -1, -1), (0, -1, -1, 2))
    for rest in (0, 2)
]


@pytest.mark.parametrize(
    ("pattern", "stops", "committed", "rest"),
    [pytest.param(*case, marks=[] if index % 5 == 3 else [pytest.mark.slow]) for index, case in enumerate(CASES)],
)
def test_equals_the_enumeration(pattern: str, stops: tuple[int, ...], committed: tuple[int, ...], rest: int) -> None:
    case = make_case(pattern, stops, committed, rest=rest)
    if case is None:  # too short a text for so many tokens
        assert not stops and pattern in PATTERNS[3:]
        return
    joint, automaton = case.joint, case.joint._automaton
    # Most probable sequence.
    assert joint.best_tokens().tolist() == case.sequences[case.probabilities.argmax()].tolist()
    # The chain of conditionals is the whole distribution.
    for sequence, expected in zip(case.sequences.tolist(), case.probabilities, strict=True):
        state, logprob = 0, 0.0
        for position, token in enumerate(sequence):
            if committed[position] < 0:
                scores_V = joint.conditional_logprobs(position, state)
                logprob += scores_V[token] - np.log(np.exp(scores_V).sum())
            state = automaton.next_state(state, token)
        assert np.exp(logprob) == pytest.approx(expected, rel=1e-10, abs=1e-12)
    # Marginals; of committed positions with the others alone.
    weights_PK = joint.class_weights()
    for position in range(4):
        marginal_V = np.exp(joint._logprobs_PV[position] + weights_PK[position, automaton.class_of_V])
        expected_V = np.zeros(V)
        for token, weight in case.free_weights[position].items():
            expected_V[token] = weight
        np.testing.assert_allclose(marginal_V, expected_V / expected_V.sum(), atol=1e-12)


def test_improbable_paths_are_not_lost() -> None:
    """Two paths whose probabilities, 10^-695 each, are no floating-point numbers."""
    trie = TokenTrie.from_texts(range(2), [b"a", b"b"], 3)
    automaton = TokenAutomaton(compile_expression(parse_regex("ab|ba")), trie, 3)
    logprobs_PV = np.array([[-800.0, -800.0 + np.log(3.0), 0.0], [-800.0, -800.0, 0.0]])
    joint = JointDistribution(automaton, 0, logprobs_PV, FREE, ALL, automaton.is_accepting_S)
    assert joint.best_tokens().tolist() == [1, 0]
    marginal_V = np.exp(logprobs_PV[0] + joint.class_weights()[0, automaton.class_of_V])
    np.testing.assert_allclose(marginal_V, [0.25, 0.75, 0.0], atol=1e-12)
    with pytest.raises(ValueError, match="probability zero"):
        JointDistribution(
            automaton,
            0,
            np.array([[-1.0, -1.0, -np.inf], [-np.inf, -np.inf, 0.0]]),
            FREE,
            ALL,
            automaton.is_accepting_S,
        )


def test_equal_probabilities_take_the_lowest_ids_from_the_left() -> None:
    trie = TokenTrie.from_texts(range(5), TEXTS, V)
    automaton = TokenAutomaton(compile_expression(parse_regex("b?a[ab]")), trie, V)
    joint = JointDistribution(automaton, 0, np.full((2, V), -np.log(V)), FREE, ALL, automaton.is_accepting_S)
    assert joint.best_tokens().tolist() == [0, 0]
