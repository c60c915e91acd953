"""From logits to predictions: penalties, temperature, filters, the choice of a token, its confidence and
log-probability.

Shapes: N positions of a forward, V vocabulary, C candidates of a nucleus.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from config.generation import GenerationConfig
from diffusionlm.diffusion.rng import RngStream
from diffusionlm.inference.requests import ActiveRequest, Predictions
from diffusionlm.inference.settings import MAX_KEPT_SETTINGS, DecodingSettings
from diffusionlm.inference.strategy import TOKEN_PROBABILITY
from diffusionlm.models.tensors import copy_to_device

PROBABILITY_CHUNK_BYTES = 64 << 20
"""Budget for one [positions, V] array of fp64 probabilities."""
CPU_CHUNK_BYTES = 4 << 20
"""The same on a CPU: arrays that stay in its caches, and whose memory the allocator keeps for the next chunk."""

NUM_TOP_P_CANDIDATES = 1024
"""Most probable tokens that a CPU sorts first; a nucleus is rarely larger."""


class TokenSampler:
    """Samples tokens from logits. fp64 throughout: in fp32 all probabilities near 1 would be ties."""

    def __init__(self, settings: DecodingSettings, device: torch.device) -> None:
        config, strategy = settings.config, settings.strategy
        self._settings = settings
        # The mask has probability zero, as in training (SUBS, Sahoo et al. 2024).
        self._forbidden_token_ids, self._deferred_token_ids = (
            copy_to_device(torch.tensor(token_ids, dtype=torch.long), device)
            for token_ids in (settings.forbidden_token_ids, config.defer_token_ids)
        )
        self._has_fast_path = (
            settings.temperature == 0.0
            and config.top_k is None
            and config.top_p == 1.0
            and config.min_p == 0.0
            and not strategy.can_remask
            and (strategy.measure is None or strategy.measure is TOKEN_PROBABILITY)
        )

    def sample(self, logits_NV: Tensor, requests: Sequence[ActiveRequest]) -> Tensor:
        """Token, confidence and log-probability of each output position of the requests, and its T most probable tokens
        and their log-probabilities, [3 + 2 T, N] in fp64 (which holds token ids exactly). T is the most that one of the
        requests keeps.

        Args:
            logits_NV: logits of the output positions of all requests, in their order.
            requests: either all or none with known texts.
        """

        def read(find_values: Callable[[ActiveRequest, NDArray[np.int64]], NDArray[Any]]) -> Tensor:
            values_N = np.concatenate([find_values(request, request.output_positions) for request in requests])
            return copy_to_device(torch.from_numpy(values_N), logits_NV.device)

        uniforms_N = committed_N = known_N = None
        if self._settings.temperature:
            uniforms_N = read(lambda request, at: request.draw_uniforms(RngStream.TOKEN_SAMPLING, at))
        if self._settings.strategy.can_remask:
            committed_N = read(lambda request, at: np.where(request.is_masked_L, -1, request.tokens_L)[at])
        if requests[0].is_known:
            known_N = read(lambda request, at: np.asarray(request.prepared.known_tokens_L)[at])
        is_fast = self._has_fast_path and known_N is None
        dtype = torch.promote_types(logits_NV.dtype, torch.float32) if is_fast else torch.float64
        changes = LogitChanges(requests)
        num_top = max((request.options.num_top_logprobs for request in requests), default=0)
        samples = []
        for chunk in iterate_chunks(logits_NV):
            copy_NV = changes.apply(logits_NV[chunk].to(dtype, copy=True), chunk.start)
            copy_NV.index_fill_(1, self._forbidden_token_ids, float("-inf"))
            if is_fast:
                samples.append(_sample_greedily(copy_NV, num_top, self._deferred_token_ids))
            else:
                values = (None if all_N is None else all_N[chunk] for all_N in (uniforms_N, committed_N, known_N))
                samples.append(self._sample_chunk(copy_NV, *values, num_top=num_top))
        return torch.cat(samples, dim=1)

    def _sample_chunk(
        self,
        logits_NV: Tensor,
        uniforms_N: Tensor | None,
        committed_N: Tensor | None,
        known_N: Tensor | None,
        *,
        num_top: int,
    ) -> Tensor:
        """Token, confidence, log-probability and ``num_top`` alternatives of each position, [3 + 2 T, N] in fp64.

        Args:
            uniforms_N: uniforms of token sampling; None: greedy.
            committed_N: tokens of committed positions, -1 at masked ones; None: all are masked.
            known_N: tokens of a known text, in place of the sampled ones, which the confidences are of.
        """
        config, measure = self._settings.config, self._settings.strategy.measure
        logprobs_NV = logits_NV.log_softmax(dim=1)
        unfiltered_probs_NV = logprobs_NV.exp()
        temperature = self._settings.temperature
        filtered_NV = filter_logits(logits_NV, config, temperature)
        probs_NV = unfiltered_probs_NV if filtered_NV is logits_NV else filtered_NV.softmax(dim=1)
        tokens_N = choose_tokens(probs_NV, uniforms_N)
        ranked_N = choose_tokens(probs_NV, None) if config.confidence_of == "most_probable" else tokens_N
        if committed_N is not None:
            tokens_N, ranked_N = (torch.where(committed_N < 0, own_N, committed_N) for own_N in (tokens_N, ranked_N))
        if measure is None:
            confidence_N = torch.zeros_like(logits_NV[:, 0])
        else:
            is_unfiltered = config.confidence_from == "unfiltered"
            basis_NV = exclude_tokens(unfiltered_probs_NV if is_unfiltered else probs_NV, self._deferred_token_ids)
            confidence_N = measure.compute(basis_NV, ranked_N)
        if known_N is not None:
            tokens_N = known_N
        logprobs_N = logprobs_NV.gather(1, tokens_N[:, None])[:, 0]
        samples_3N = torch.stack([tokens_N.double(), confidence_N, logprobs_N])
        if not num_top:
            return samples_3N
        top_NT = find_top_tokens(logprobs_NV, num_top)
        return torch.cat([samples_3N, top_NT.T.double(), logprobs_NV.gather(1, top_NT).T])


class BatchSampler:
    """Samples tokens of requests with settings of their own."""

    def __init__(
        self,
        device: torch.device,
        *,
        samples_alone: bool = False,
        share: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """
        Args:
            samples_alone: requests share no computation.
            share: of all ranks, which sample alike (`Transformer.values_of_first_rank`).
        """
        self._samples_alone, self._share = samples_alone, share
        self._sampling_key = lru_cache(MAX_KEPT_SETTINGS)(_sampling_key)
        self._get_sampler = lru_cache(MAX_KEPT_SETTINGS)(partial(TokenSampler, device=device))

    def sample_predictions(self, logits: LogitRows) -> list[Predictions | ValueError]:
        """Predictions for each request, with one device synchronization; an error where the model's probabilities are
        not finite."""
        groups: dict[object, list[ActiveRequest]] = {}
        for request in logits.requests:
            key = id(request) if self._samples_alone else (request.is_known, self._sampling_key(request.settings))
            groups.setdefault(key, []).append(request)
        samples = [
            self._get_sampler(group[0].settings).sample(logits.select(group), group) for group in groups.values()
        ]
        predictions: dict[int, Predictions | ValueError] = {}
        for group, samples_RN in zip(groups.values(), _to_arrays(samples, self._share), strict=True):
            for request, prediction in zip(group, _split_samples(samples_RN, group), strict=True):
                predictions[id(request)] = prediction
        return [predictions[id(request)] for request in logits.requests]


def _sampling_key(settings: DecodingSettings) -> tuple[object, ...]:
    """Equal for settings that turn logits into predictions alike: lengths of answers, say, differ from one request to
    the next, and each group of requests costs a pass of small operations over the vocabulary."""
    config, strategy = settings.config, settings.strategy
    options = (
        config.top_k,
        config.top_p,
        config.min_p,
        config.confidence_from,
        config.confidence_of,
        config.cfg_scale,
        config.defer_token_ids,
    )
    return (*options, settings.temperature, settings.forbidden_token_ids, strategy.name, repr(strategy))


class LogitRows:
    """The logits of the output positions of each request."""

    def __init__(self, logits_NV: Tensor, requests: Sequence[ActiveRequest]) -> None:
        """
        Args:
            logits_NV: logits of the output positions of all requests, in their order; then those without what was
                given, of the requests with guidance.
        """
        self.requests = requests
        self._logits_NV = logits_NV
        guided = [request for request in requests if request.has_guidance]
        parts = torch.split(logits_NV, [len(request.output_positions) for request in (*requests, *guided)])
        self._parts: dict[int, list[Tensor]] = {id(request): [] for request in requests}
        """By request: its logits, and with guidance those without what was given."""
        for request, part_NV in zip((*requests, *guided), parts, strict=True):
            self._parts[id(request)].append(part_NV)

    def only(self, request: ActiveRequest) -> LogitRows:
        """The logits of one request."""
        return LogitRows(torch.cat(self._parts[id(request)]), [request])

    def select(self, requests: Sequence[ActiveRequest]) -> Tensor:
        """Logits of requests with the same settings, [N, V]; with guidance in fp64."""
        if not requests[0].has_guidance and len(requests) == len(self.requests):
            return self._logits_NV
        return torch.cat([self.logits_of(request) for request in requests])

    def logits_of(self, request: ActiveRequest) -> Tensor:
        """Logits of one request, [N, V].

        Classifier-free guidance (Nie et al. 2025): ``u + (s + 1) (c - u)``, where u is computed with the prompt masked.
        """
        conditional_NV, *unconditional = self._parts[id(request)]
        if not unconditional:
            return conditional_NV
        unconditional_NV = unconditional[0].double()
        scale = request.settings.config.cfg_scale + 1.0
        return unconditional_NV + scale * (conditional_NV.double() - unconditional_NV)


def _to_arrays(tensors: Sequence[Tensor], share: Callable[[Tensor], Tensor] | None = None) -> list[NDArray[np.float64]]:
    """Copies of matrices on the CPU, with one device synchronization."""
    if not tensors:
        return []
    joined = torch.cat([tensor.flatten() for tensor in tensors])
    flat = (joined if share is None else share(joined)).cpu().numpy()
    ends = np.cumsum([tensor.numel() for tensor in tensors])[:-1]
    return [part.reshape(tensor.shape) for part, tensor in zip(np.split(flat, ends), tensors, strict=True)]


def read_samples(samples_RN: Tensor, requests: Sequence[ActiveRequest]) -> list[Predictions | ValueError]:
    """Predictions for each request from the samples of the positions of all, with one device synchronization; an error
    where the model's probabilities are not finite."""
    [array_RN] = _to_arrays([samples_RN])
    return _split_samples(array_RN, requests)


def _split_samples(
    samples_RN: NDArray[np.float64], requests: Sequence[ActiveRequest]
) -> list[Predictions | ValueError]:
    ends = np.cumsum([len(request.output_positions) for request in requests])[:-1]
    return [_to_predictions(part_RN) for part_RN in np.split(samples_RN, ends, axis=1)]


def _to_predictions(samples_RN: NDArray[np.float64]) -> Predictions | ValueError:
    """Predictions of a request from the samples of its positions (`TokenSampler.sample`)."""
    tokens_N, confidence_N, logprobs_N = samples_RN[:3]
    num_top = (len(samples_RN) - 3) // 2
    top_tokens_TN, top_logprobs_TN = samples_RN[3 : 3 + num_top], samples_RN[3 + num_top :]
    try:
        check_finite(~np.isnan(logprobs_N))  # a token of a known text may be impossible
    except ValueError as error:
        return error
    return Predictions(
        tokens_N.astype(np.int64), confidence_N, logprobs_N, top_tokens_TN.T.astype(np.int64), top_logprobs_TN.T
    )


class LogitChanges:
    """What requests change in the logits of their output positions: biases, penalties, stop tokens that come too early,
    and tokens that are not allowed."""

    def __init__(self, requests: Sequence[ActiveRequest]) -> None:
        self._allowed_tokens: dict[int, NDArray[np.int64]] = {}
        """Row of the logits -> the tokens that its position may hold."""
        self._changes: list[tuple[int, int, NDArray[np.int64], NDArray[np.float64] | float]] = []
        """First row, row after the last one, tokens, and what is added to their logits, or their repetition penalty."""
        start = 0
        for request in requests:
            for position, token_ids in request.options.allowed_token_ids.items():
                for index in np.flatnonzero(request.output_positions == position).tolist():
                    self._allowed_tokens[start + index] = np.asarray(token_ids, dtype=np.int64)
            end = start + len(request.output_positions)
            if bias := request.options.logit_bias:
                self._changes.append((start, end, np.array([*bias]), np.array([*bias.values()], dtype=np.float64)))
            for first, last, answer_ids in _find_answer_ids(request):
                changes = _compute_penalties(request, answer_ids)
                self._changes += [(start + first, start + last, *change) for change in changes]
            if num_early := int(np.searchsorted(request.output_positions, request.prepared.first_stop_position)):
                stops = np.array([*request.settings.stop_token_ids], dtype=np.int64)
                self._changes.append((start, start + num_early, stops, np.full(len(stops), -np.inf)))
            start = end

    @property
    def is_empty(self) -> bool:
        """True if no logit is changed."""
        return not (self._changes or self._allowed_tokens)

    def apply(self, logits_NV: Tensor, first_row: int) -> Tensor:
        """Change logits of the rows from ``first_row`` on, in place."""
        end_row, device = first_row + len(logits_NV), logits_NV.device
        for start, end, token_ids, values in self._changes:
            rows = slice(max(start - first_row, 0), max(min(end, end_row) - first_row, 0))
            ids = copy_to_device(torch.from_numpy(token_ids), device)
            if isinstance(values, float):
                changed = logits_NV[rows, ids]
                logits_NV[rows, ids] = torch.where(changed > 0.0, changed / values, changed * values)
            else:
                logits_NV[rows, ids] += copy_to_device(torch.from_numpy(values), device).to(logits_NV.dtype)
        for row, token_ids in self._allowed_tokens.items():
            if first_row <= row < end_row:
                ids = copy_to_device(torch.from_numpy(token_ids), device)
                logits_V = logits_NV[row - first_row]
                logits_NV[row - first_row] = torch.full_like(logits_V, float("-inf")).index_copy_(0, ids, logits_V[ids])
        return logits_NV


def _find_answer_ids(request: ActiveRequest) -> Iterator[tuple[int, int, NDArray[np.int64]]]:
    """Tokens of the answer that penalties count, and the first row and the one after the last that they count for: the
    committed ones for all; with speculation for each row also the drafts before it, after which it is verified."""
    answer_ids = request.tokens_L[request.answer_positions[~request.is_masked_L[request.answer_positions]]]
    if request.speculation is None:
        yield 0, len(request.output_positions), answer_ids
        return
    for row in range(len(request.output_positions)):
        yield row, row + 1, np.append(answer_ids, request.speculation.tokens[:row])


def _compute_penalties(
    request: ActiveRequest, answer_ids: NDArray[np.int64]
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float64] | float]]:
    """Tokens and their repetition penalty, then tokens and what the other penalties add to their logits (the order of
    vLLM). Of a canvas all that is given is the prompt."""
    config = request.settings.config
    is_additive = config.presence_penalty != 0.0 or config.frequency_penalty != 0.0
    if config.repetition_penalty == 1.0 and not is_additive:
        return
    if config.repetition_penalty != 1.0:
        given_ids = np.delete(request.tokens_L, request.masked_positions)
        yield np.union1d(given_ids, answer_ids), config.repetition_penalty
    if is_additive:
        token_ids, counts = np.unique(answer_ids, return_counts=True)
        yield token_ids, -(config.presence_penalty + config.frequency_penalty * counts.astype(np.float64))


def exclude_tokens(probs_NV: Tensor, token_ids: Tensor) -> Tensor:
    """Distribution of the other tokens; zero where they have no probability. The argument itself if there are no ids.

    Confidences of positions that predict another token do not count deferred ones, as in LLaDA's code.
    """
    if not len(token_ids):
        return probs_NV
    others_NV = probs_NV.index_fill(1, token_ids, 0.0)
    total_N1 = others_NV.sum(dim=1, keepdim=True)
    return others_NV / total_N1.where(total_N1 > 0.0, 1.0)


def _sample_greedily(logits_NV: Tensor, num_top: int, deferred_token_ids: Tensor) -> Tensor:
    """Most probable token, its probability among the tokens that are not deferred, its log-probability, and ``num_top``
    tokens and their log-probabilities, [3 + 2 T, N] in fp64, without fp64 logits.

    The probability is 1 / (1 + r), where r sums exp(logit - highest logit) over the other tokens: however near 1 it is,
    its distance from 1 is as exact as r in fp32.
    """
    tokens_N1 = logits_NV.argmax(dim=1, keepdim=True)
    differences_NV = logits_NV.sub_(logits_NV.gather(1, tokens_N1))
    top_NT = find_top_tokens(differences_NV, num_top) if num_top else tokens_N1[:, :0]
    top_differences_NT = differences_NV.gather(1, top_NT).double()
    odds_NV = differences_NV.exp_().scatter_(1, tokens_N1, 0.0)
    logprobs_N = -torch.log1p(other_odds_N := odds_NV.sum(dim=1, dtype=torch.float64))
    if len(deferred_token_ids):
        other_odds_N = odds_NV.index_fill_(1, deferred_token_ids, 0.0).sum(dim=1, dtype=torch.float64)
    samples_3N = torch.stack([tokens_N1[:, 0].double(), 1.0 / (1.0 + other_odds_N), logprobs_N])
    return torch.cat([samples_3N, top_NT.T.double(), top_differences_NT.T + logprobs_N])


def find_top_tokens(logits_NV: Tensor, num_top: int) -> Tensor:
    """The most probable tokens [N, T], the most probable first, the lowest id among equals."""
    num_top = min(num_top, logits_NV.shape[1])
    top_NT = keep_top_k(logits_NV, num_top).topk(num_top, dim=1).indices.sort(dim=1).values
    order_NT = logits_NV.gather(1, top_NT).sort(dim=1, descending=True, stable=True).indices
    return top_NT.gather(1, order_NT)


def iterate_chunks(logits_NV: Tensor) -> Iterator[slice]:
    """Slices of positions whose fp64 probabilities are within `PROBABILITY_CHUNK_BYTES`, and on a CPU within
    `CPU_CHUNK_BYTES`."""
    N, V = logits_NV.shape
    budget = PROBABILITY_CHUNK_BYTES
    if logits_NV.device.type == "cpu":
        budget = min(budget, CPU_CHUNK_BYTES)
    size = max(1, budget // (8 * V))
    return (slice(start, start + size) for start in range(0, N, size))


def check_finite(is_finite: NDArray[np.bool_]) -> None:
    """Check the model's probabilities.

    Raises:
        ValueError: one is not finite.
    """
    if not is_finite.all():
        raise ValueError(
            "the model's probabilities are not finite: its weights are corrupt, or its activations overflow in this "
            'dtype; try dtype = "float32"'
        )


def filter_logits(logits_NV: Tensor, config: GenerationConfig, temperature: float) -> Tensor:
    """Apply a temperature (0 counts as 1), then top-k, top-p and min-p, each to what is left (the order of Hugging
    Face).

    Returns the argument itself if nothing changes.
    """
    if temperature not in (0.0, 1.0):
        logits_NV = divide_by_temperature(logits_NV, temperature)
    if config.top_k is not None:
        logits_NV = keep_top_k(logits_NV, config.top_k)
    if config.top_p < 1.0:
        logits_NV = keep_top_p(logits_NV, config.top_p)
    return keep_min_p(logits_NV, config.min_p) if config.min_p > 0.0 else logits_NV


def divide_by_temperature(logits_NV: Tensor, temperature: float | Tensor) -> Tensor:
    """Logits of the tempered distribution, for a temperature above 0, however small; or one for each position,
    [N, 1]."""
    # With the highest logit at 0, a tiny divisor cannot make it overflow.
    return (logits_NV - logits_NV.amax(dim=1, keepdim=True)) / temperature


def keep_top_k(logits_NV: Tensor, top_k: int) -> Tensor:
    """Set all but the k highest logits to -inf: exactly k stay, the lowest ids among equals."""
    if top_k >= logits_NV.shape[1]:
        return logits_NV
    return _keep_highest(logits_NV, _sort_highest(logits_NV, top_k)[:, -1:], top_k)


def keep_top_p(logits_NV: Tensor, top_p: float) -> Tensor:
    """Set all logits outside the nucleus to -inf: the fewest most probable tokens whose probabilities sum to top_p.

    The token that crosses top_p belongs to it, so it is never empty (Holtzman et al. 2019). Among equals the lowest ids
    come first. A CPU sorts `NUM_TOP_P_CANDIDATES` tokens, and all of them only in the rows whose nucleus is larger; a
    GPU sorts all, so that nothing waits for it.
    """
    V = logits_NV.shape[1]
    if logits_NV.device.type != "cpu" or V <= NUM_TOP_P_CANDIDATES:
        return _keep_nucleus(logits_NV, top_p, V)[0]
    filtered_NV, is_complete_N = _keep_nucleus(logits_NV, top_p, NUM_TOP_P_CANDIDATES)
    if not is_complete_N.all():
        filtered_NV[~is_complete_N] = _keep_nucleus(logits_NV[~is_complete_N], top_p, V)[0]
    return filtered_NV


def keep_min_p(logits_NV: Tensor, min_p: float) -> Tensor:
    """Set the logits of tokens to -inf whose probability is less than ``min_p`` times the highest one (Nguyen et al.
    2024, arXiv 2407.01082)."""
    return logits_NV.masked_fill(logits_NV < logits_NV.amax(dim=1, keepdim=True) + math.log(min_p), float("-inf"))


def _keep_nucleus(logits_NV: Tensor, top_p: float, num_candidates: int) -> tuple[Tensor, Tensor]:
    """The logits of `keep_top_p`, [N, V], and whether the most probable tokens that were sorted contain the nucleus,
    [N]; only then are the logits right."""
    sorted_NC = _sort_highest(logits_NV, num_candidates)
    probs_NC = (sorted_NC - logits_NV.logsumexp(dim=1, keepdim=True)).exp_()
    is_inside_NC = probs_NC.cumsum(dim=1).sub_(probs_NC) < top_p  # the more probable tokens do not sum to top_p yet
    size_N1 = is_inside_NC.sum(dim=1, keepdim=True).clamp_min(1)
    return _keep_highest(logits_NV, sorted_NC.gather(1, size_N1 - 1), size_N1), ~is_inside_NC[:, -1]


def _sort_highest(logits_NV: Tensor, count: int) -> Tensor:
    """The highest logits of each row without their ids, the highest first, [N, count]."""
    if logits_NV.device.type != "cpu":
        return logits_NV.topk(count, dim=1).values
    # torch sorts ids along; numpy sorts values alone, with vector instructions.
    negated_NC = -logits_NV.numpy()
    if count < negated_NC.shape[1]:
        negated_NC.partition(count - 1, axis=1)
        negated_NC = negated_NC[:, :count]
    negated_NC.sort(axis=1)
    return torch.from_numpy(np.negative(negated_NC, out=negated_NC))


def _keep_highest(logits_NV: Tensor, lowest_N1: Tensor, count_N1: Tensor | int) -> Tensor:
    """Set all but the ``count_N1`` highest logits, the last of which is ``lowest_N1``, to -inf; among equals the lowest
    ids stay."""
    is_above_NV, is_tie_NV = logits_NV > lowest_N1, logits_NV == lowest_N1
    num_ties_N1 = count_N1 - is_above_NV.sum(dim=1, keepdim=True)
    return logits_NV.masked_fill(
        ~(is_above_NV | is_tie_NV & (is_tie_NV.cumsum(dim=1, dtype=torch.int32) <= num_ties_N1)), float("-inf")
    )


def choose_tokens(probs_NV: Tensor, uniforms_N: Tensor | None) -> Tensor:
    """Choose one token per position, [N]: the most probable one, or a sample by the inverse of the distribution.

    Args:
        probs_NV: probabilities; they need not sum to exactly 1. A token of probability zero is never sampled.
        uniforms_N: a number in [0, 1) per position; None: the most probable token, the lowest id among equals.
    """
    if uniforms_N is None:
        return probs_NV.argmax(dim=1)
    cumulative_NV = probs_NV.cumsum(dim=1)
    is_reached_NV = cumulative_NV > uniforms_N[:, None] * cumulative_NV[:, -1:]
    # argmax returns the first of equals.
    return (is_reached_NV & (probs_NV > 0.0)).to(torch.uint8).argmax(dim=1)
