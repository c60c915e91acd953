"""Predictions for constrained requests: the tokens of all masked positions of a span are sampled together; with
speculation one by one, as in next-token decoding.

Shapes: N output positions of a request, P positions of a span in the current block, V vocabulary, K classes of tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffusionlm.diffusion.rng import RngStream
from diffusionlm.inference.constraints.joint import JointDistribution
from diffusionlm.inference.constraints.token_automaton import ConstrainedSpan
from diffusionlm.inference.requests import ActiveRequest, Predictions
from diffusionlm.inference.sampling.distributions import (
    choose_tokens,
    divide_by_temperature,
    exclude_tokens,
    filter_logits,
    find_top_tokens,
)
from diffusionlm.inference.sampling.logit_changes import LogitChanges
from diffusionlm.inference.sampling.token_sampler import LogitRows
from diffusionlm.inference.strategy import TOKEN_PROBABILITY

SLOW_CONSTRAINT_SECONDS = 0.02
"""Time of a request's constraint in a step, beyond which the others then go ahead for as long."""
CONFIDENCE_DECIMALS = 9
"""Positions whose tokens determine each other have equal confidences, but for rounding in their sums."""


def constrain_predictions(
    logits: LogitRows, predictions: Sequence[Predictions | ValueError]
) -> list[Predictions | Exception]:
    """Replace the predictions of requests within constrained spans, and add those of choices; an error where a
    constraint cannot be kept, or where this fails."""
    results: list[Predictions | Exception] = []
    for request, predicted in zip(logits.requests, predictions, strict=True):
        result: Predictions | Exception = predicted
        if (request.span_cursors or request.options.choices) and isinstance(predicted, Predictions):
            start = time.perf_counter()
            try:
                result = _constrain_request(logits.logits_of(request), request, predicted)
            except Exception as error:  # whatever it is, the others' requests go on
                result = error
            seconds = time.perf_counter() - start
            if seconds > SLOW_CONSTRAINT_SECONDS:
                request.paused_until = start + 2 * seconds
        results.append(result)
    return results


def _constrain_request(logits_NV: Tensor, request: ActiveRequest, predictions: Predictions) -> Predictions:
    if request.speculation is not None:
        _constrain_drafts(logits_NV.cpu(), request, request.speculation.tokens, predictions)
        return predictions
    block_positions = request.blocks[0].positions
    joints: dict[int, JointDistribution] = {}
    for cursor in request.span_cursors:
        span = cursor.span
        positions_P = block_positions[(block_positions >= span.start) & (block_positions < span.end)]
        if request.is_masked_L[positions_P].any():
            state = cursor.state_before(int(positions_P[0]), request.tokens_L)
            sampler = _SpanSampler(logits_NV, request, span, state, positions_P)
            sampler.replace_predictions(predictions)
            joints[span.start] = sampler.joint
    scores = (
        _score_choices(logits_NV, request, start, np.array(choices), joints.get(start))
        for start, choices in request.options.choices.items()
    )
    return replace(predictions, choice_logprobs=tuple(scores))


def _constrain_drafts(
    logits_NV: Tensor, request: ActiveRequest, drafts_D: NDArray[np.int64], predictions: Predictions
) -> None:
    """Replace the predictions of verified positions, and then of drafted ones, each given the tokens before it. The
    last one is that of the first draft that is wrong, because nothing after it is of use."""
    [cursor] = request.span_cursors
    state = cursor.state_before(int(request.output_positions[0]), request.tokens_L)
    for index in range(len(request.output_positions)):
        position_1 = request.output_positions[index : index + 1]
        _SpanSampler(logits_NV, request, cursor.span, state, position_1).replace_predictions(predictions)
        token = int(predictions.tokens_N[index])
        if index < len(drafts_D) and drafts_D[index] != token:
            return
        state = cursor.span.automaton.next_state(state, token)


def _score_choices(
    logits_NV: Tensor, request: ActiveRequest, start: int, tokens_CP: NDArray[np.int64], joint: JointDistribution | None
) -> tuple[float, ...]:
    """Log-probability of each choice for the span that begins at ``start``."""
    length = tokens_CP.shape[1]
    logprobs_PV = _log_softmax(logits_NV, request, _find_rows(request, start, start + length))
    scores_C = logprobs_PV[np.arange(length), tokens_CP].sum(axis=1)
    if joint is not None:
        scores_C += [joint.log_factor(tokens_P) for tokens_P in tokens_CP]
    return tuple(scores_C.tolist())


def _find_rows(request: ActiveRequest, start: int, end: int) -> slice:
    """Rows of the logits of a request for its output positions from ``start`` to before ``end``."""
    return slice(*np.searchsorted(request.output_positions, [start, end]).tolist())


def _log_softmax(logits_NV: Tensor, request: ActiveRequest, rows: slice) -> NDArray[np.float64]:
    """Log-probabilities of some of the output positions of a request without the constraint, [N, V]."""
    changed_NV = LogitChanges([request]).apply(logits_NV[rows].to(torch.float64, copy=True), rows.start)
    forbidden = torch.tensor(request.settings.forbidden_token_ids, dtype=torch.long)
    return changed_NV.cpu().index_fill_(1, forbidden, float("-inf")).log_softmax(dim=1).numpy()


class _SpanSampler:
    """Samples the tokens of a span at positions that are decoded together."""

    def __init__(
        self,
        logits_NV: Tensor,
        request: ActiveRequest,
        span: ConstrainedSpan,
        state: int,
        positions_P: NDArray[np.int64],
    ) -> None:
        """Compute the joint distributions.

        Args:
            state: of the span's automaton before the first position.

        Raises:
            ValueError: every text that the constraint allows has probability zero.
        """
        self._request, self._automaton, self._positions_P = request, span.automaton, positions_P
        start, end = int(positions_P[0]), int(positions_P[-1]) + 1
        self._state = state
        self._rows = _find_rows(request, start, end)
        self._is_output_P = np.isin(positions_P, request.output_positions)
        """True for all masked positions."""
        self._committed_P = np.where(request.is_masked_L[positions_P], -1, request.tokens_L[positions_P])
        self._is_final_S = span.completable_at(end)
        self._logprobs_PV = _log_softmax(logits_NV, request, self._rows)
        """Without the constraint; zeros at committed positions that have no logits."""
        if not self._is_output_P.all():
            logprobs_PV = np.zeros((len(positions_P), logits_NV.shape[1]))
            logprobs_PV[self._is_output_P] = self._logprobs_PV
            self._logprobs_PV = logprobs_PV
        self.joint = self._build_joint(self._logprobs_PV)
        self._tempered_PV, self._tempered_joint = self._logprobs_PV, self.joint
        if (temperature := request.settings.temperature) not in (0.0, 1.0):
            scaled_PV = divide_by_temperature(torch.from_numpy(self._logprobs_PV), temperature)
            self._tempered_PV = scaled_PV.log_softmax(dim=1).numpy()
            self._tempered_joint = self._build_joint(self._tempered_PV)

    def _build_joint(self, logprobs_PV: NDArray[np.float64]) -> JointDistribution:
        return JointDistribution(
            self._automaton, self._state, logprobs_PV, self._committed_P, self._is_output_P, self._is_final_S
        )

    def replace_predictions(self, predictions: Predictions) -> None:
        """Replace those of the span."""
        tokens_P, rows, is_output_P = self._choose_tokens(), self._rows, self._is_output_P
        marginals_PK, rows_P = self.joint.class_weights(), np.arange(len(tokens_P))
        weights_P = marginals_PK[rows_P, self._automaton.class_of_V[tokens_P]]
        logprobs_P = np.minimum(self._logprobs_PV[rows_P, tokens_P] + weights_P, 0.0)
        confidence_P = self._compute_confidence(tokens_P, logprobs_P, marginals_PK).round(CONFIDENCE_DECIMALS)
        predictions.tokens_N[rows] = tokens_P[is_output_P]
        predictions.logprobs_N[rows] = logprobs_P[is_output_P]
        predictions.confidence_N[rows] = confidence_P[is_output_P]
        if num_top := predictions.top_tokens_NT.shape[1]:
            marginal_PV = self._marginal_logprobs(self._logprobs_PV, marginals_PK)[is_output_P]
            top_NT = find_top_tokens(torch.from_numpy(marginal_PV), num_top).numpy()
            predictions.top_tokens_NT[rows] = top_NT
            predictions.top_logprobs_NT[rows] = np.take_along_axis(marginal_PV, top_NT, axis=1)

    def _choose_tokens(self) -> NDArray[np.int64]:
        """The tokens of the most probable path, or of a sampled one, from the left. Top-k, top-p and min-p are applied
        to the distribution of each position given the tokens on its left, so that they always leave a token."""
        request, config = self._request, self._request.settings.config
        if request.settings.temperature == 0.0:
            return self.joint.best_tokens()
        uniforms_P = torch.from_numpy(request.draw_uniforms(RngStream.TOKEN_SAMPLING, self._positions_P))
        tokens_P, state = self._committed_P.copy(), self._state
        for index, token in enumerate(self._committed_P.tolist()):
            if token < 0:
                scores_1V = torch.from_numpy(self._tempered_joint.conditional_logprobs(index, state))[None]
                filtered_1V = filter_logits(scores_1V, config, 1.0)
                token = int(choose_tokens(filtered_1V.softmax(dim=1), uniforms_P[index : index + 1]))
                tokens_P[index] = token
            state = self._automaton.next_state(state, token)
        return tokens_P

    def _compute_confidence(
        self, tokens_P: NDArray[np.int64], logprobs_P: NDArray[np.float64], marginals_PK: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Confidence of each position from its distribution given the constraint and all committed tokens."""
        settings = self._request.settings
        config, measure = settings.config, settings.strategy.measure
        if measure is None:
            return np.zeros(len(tokens_P))
        is_filtered = config.confidence_from == "filtered"
        has_filter = config.top_k is not None or config.top_p < 1.0 or config.min_p > 0.0
        is_changed = is_filtered and (self._tempered_joint is not self.joint or has_filter)
        if measure is TOKEN_PROBABILITY and not is_changed and not config.defer_token_ids:
            return np.exp(logprobs_P)
        if is_filtered:
            marginals_PK = self._tempered_joint.class_weights()
        marginal_PV = torch.from_numpy(
            self._marginal_logprobs(self._tempered_PV if is_filtered else self._logprobs_PV, marginals_PK)
        )
        if is_filtered:
            marginal_PV = filter_logits(marginal_PV, config, 1.0)
        deferred_token_ids = torch.tensor(config.defer_token_ids, dtype=torch.long)
        probs_PV = exclude_tokens(marginal_PV.softmax(dim=1), deferred_token_ids)
        return measure.compute(probs_PV, torch.from_numpy(tokens_P)).numpy()

    def _marginal_logprobs(
        self, logprobs_PV: NDArray[np.float64], marginals_PK: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        marginal_PV: NDArray[np.float64] = logprobs_PV + marginals_PK[:, self._automaton.class_of_V]
        return np.minimum(marginal_PV, 0.0)
