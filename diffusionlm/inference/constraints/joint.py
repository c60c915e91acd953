"""Independent distributions of tokens, conditioned on an automaton: exact, by dynamic programming.

A path is a sequence of tokens that leads from the first state to an allowed last one; its weight is the product of its
tokens' probabilities. Forward-backward sums over paths (Rabiner 1989), the most probable one is Viterbi's, as in DINGO
(Suresh et al. 2025, arXiv 2505.23061). All in log space, so that no path gets lost.

Shapes: P positions, V tokens, K classes of tokens, S states, E transitions from the states that can be reached.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from diffusionlm.inference.constraints.byte_automaton import DEAD
from diffusionlm.inference.constraints.token_automaton import TokenAutomaton


class JointDistribution:
    """The distribution of the tokens at successive positions."""

    def __init__(
        self,
        automaton: TokenAutomaton,
        state: int,
        logprobs_PV: NDArray[np.float64],
        committed_P: NDArray[np.int64],
        is_scored_P: NDArray[np.bool_],
        is_final_S: NDArray[np.bool_],
    ) -> None:
        """Sum over all paths.

        Args:
            state: before the first position.
            logprobs_PV: log-probabilities of the tokens at each position.
            committed_P: token of a position that is committed already, else -1.
            is_scored_P: True at positions whose `class_weights` are of use: all that are not committed, and those whose
                committed token may be taken back.
            is_final_S: states that are allowed after the last position.

        Raises:
            ValueError: every path has probability zero.
        """
        self._automaton, self._logprobs_PV, self._state = automaton, logprobs_PV, state
        self._committed_P, self._is_final_S = committed_P, is_final_S
        self._max_PK, self._sum_PK = reduce_classes(automaton, logprobs_PV)
        self._all_edges, self._used_edges = self._find_edges(is_scored_P)
        self._beta = self._run_backward(greedy=False)
        """Log of the sum of the rests of the paths from a state before a position, [P + 1, S]."""
        if not np.isfinite(self._beta[0][state]):
            raise ValueError("the model gives every text that the constraint allows the probability zero")

    def _find_edges(self, is_scored_P: NDArray[np.bool_]) -> tuple[list[NDArray[np.int64]], list[NDArray[np.int64]]]:
        """Transitions at each position: from the states that can be reached if committed tokens may be taken back, and
        those of the committed token."""
        automaton, states = self._automaton, np.array([self._state])
        all_edges, used_edges = [], []
        for token, is_scored in zip(self._committed_P.tolist(), is_scored_P.tolist(), strict=True):
            all_E = used_E = automaton.transitions_from(states)
            if token >= 0:
                used_E = all_E[automaton.classes_E[all_E] == automaton.class_of_V[token]]
                all_E = all_E if is_scored else used_E
            all_edges.append(all_E)
            used_edges.append(used_E)
            is_reached_S = np.zeros(automaton.num_states, dtype=np.bool_)
            is_reached_S[automaton.targets_E[all_E]] = True
            states = np.flatnonzero(is_reached_S)
        return all_edges, used_edges

    def _weights(
        self, position: int, weights_PK: NDArray[np.float64], edges_E: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Log-probability of each transition's class; a committed token counts as certain."""
        weights_E: NDArray[np.float64] = weights_PK[position, self._automaton.classes_E[edges_E]]
        return np.zeros_like(weights_E) if self._committed_P[position] >= 0 else weights_E

    def _run_backward(self, *, greedy: bool) -> list[NDArray[np.float64]]:
        """Log of the sum, or of the maximum, over the rests of the paths."""
        automaton = self._automaton
        rest_S = np.where(self._is_final_S, 0.0, -np.inf)
        rests = [rest_S]
        for position, edges_E in reversed([*enumerate(self._used_edges)]):
            weights_E = self._weights(position, self._max_PK if greedy else self._sum_PK, edges_E)
            values_E = weights_E + rest_S[automaton.targets_E[edges_E]]
            reduce = max_by if greedy else logsumexp_by
            rest_S = reduce(automaton.sources_E[edges_E], values_E, automaton.num_states)
            rests.append(rest_S)
        return rests[::-1]

    def log_factor(self, tokens_P: NDArray[np.int64]) -> float:
        """Log of the number by which the condition multiplies the probability of tokens for all positions, none of
        which is committed: 1 / (sum over all paths), or 0 if they are no path."""
        state = self._state
        for token in tokens_P.tolist():
            state = self._automaton.next_state(state, token)
        return -float(self._beta[0][self._state]) if state != DEAD and self._is_final_S[state] else -np.inf

    def best_tokens(self) -> NDArray[np.int64]:
        """The tokens of the most probable path; the lowest ids among equals, from the left."""
        rests, state, tokens = self._run_backward(greedy=True), self._state, self._committed_P.copy()
        for position, token in enumerate(self._committed_P.tolist()):
            if token < 0:
                tokens[position] = int(self.conditional_logprobs(position, state, rests).argmax())
            state = self._automaton.next_state(state, int(tokens[position]))
        return tokens

    def conditional_logprobs(
        self, position: int, state: int, rests: Sequence[NDArray[np.float64]] | None = None
    ) -> NDArray[np.float64]:
        """Log of numbers that are proportional to the probabilities of a position's tokens, given the state before it
        and thereby all tokens on its left, [V].

        Args:
            rests: in place of the sums over the rests of the paths.
        """
        automaton, rests = self._automaton, self._beta if rests is None else rests
        edges_E = automaton.transitions_from(np.array([state]))
        rest_K = np.full(automaton.num_classes + 1, -np.inf)  # the last entry is that of class -1
        rest_K[automaton.classes_E[edges_E]] = rests[position + 1][automaton.targets_E[edges_E]]
        scores_V: NDArray[np.float64] = self._logprobs_PV[position] + rest_K[automaton.class_of_V]
        return scores_V

    def class_weights(self) -> NDArray[np.float64]:
        """What the constraint makes of each class of tokens at each position, given all committed tokens but the
        position's own: marginal log-probability of a token = its log-probability + that of its class, [P, K + 1]. The
        last column is that of the class -1."""
        automaton = self._automaton
        past_S = np.full(automaton.num_states, -np.inf)
        past_S[self._state] = 0.0
        weights_PK = np.full((len(self._all_edges), automaton.num_classes + 1), -np.inf)
        for position, (all_E, used_E) in enumerate(zip(self._all_edges, self._used_edges, strict=True)):
            rest_S = self._beta[position + 1]
            values_E = past_S[automaton.sources_E[all_E]] + rest_S[automaton.targets_E[all_E]]
            outside_K = logsumexp_by(automaton.classes_E[all_E], values_E, automaton.num_classes)
            sums_K = outside_K + self._sum_PK[position]
            total = np.logaddexp.reduce(sums_K)
            weights_PK[position, :-1] = outside_K - max(total, np.finfo(np.float64).min)
            possible = np.flatnonzero(np.isfinite(sums_K))
            if len(possible) == 1:  # without rounding, so that a forced token has the log-probability 0
                weights_PK[position, possible] = -self._sum_PK[position, possible]
            values_E = past_S[automaton.sources_E[used_E]] + self._weights(position, self._sum_PK, used_E)
            past_S = logsumexp_by(automaton.targets_E[used_E], values_E, automaton.num_states)
        return weights_PK


def reduce_classes(
    automaton: TokenAutomaton, logprobs_PV: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Log of the largest probability and of the sum of the probabilities in each class of tokens, [P, K] each."""
    order, starts, sizes = automaton.tokens_by_class
    if not len(starts):
        nothing_PK = np.zeros((len(logprobs_PV), 0))
        return nothing_PK, nothing_PK
    max_PK, sum_PK = (np.empty((len(logprobs_PV), len(starts))) for _ in range(2))
    for row, logprobs_V in enumerate(logprobs_PV):  # row by row: what is between fits into the cache
        sorted_V = logprobs_V[order]
        max_PK[row] = np.maximum.reduceat(sorted_V, starts)
        sorted_V -= np.repeat(np.maximum(max_PK[row], np.finfo(np.float64).min), sizes)
        with np.errstate(divide="ignore"):
            sum_PK[row] = np.log(np.add.reduceat(np.exp(sorted_V, out=sorted_V), starts)) + max_PK[row]
    return max_PK, sum_PK


def max_by(keys: NDArray[np.int64], values: NDArray[np.float64], num_keys: int) -> NDArray[np.float64]:
    """The largest value of each key, -inf where there is none."""
    largest = np.full(num_keys, -np.inf)
    np.maximum.at(largest, keys, values)
    return largest


def logsumexp_by(keys: NDArray[np.int64], values: NDArray[np.float64], num_keys: int) -> NDArray[np.float64]:
    """Log of the sum of the exponentials of each key's values, -inf where there is none."""
    largest = np.maximum(max_by(keys, values, num_keys), np.finfo(np.float64).min)
    sums = np.bincount(keys, weights=np.exp(values - largest[keys]), minlength=num_keys)
    with np.errstate(divide="ignore"):
        return np.log(sums) + np.where(sums > 0.0, largest, 0.0)
