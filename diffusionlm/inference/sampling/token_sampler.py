"""From logits to predictions: the token of each position, its confidence and log-probability.

Shapes: N positions of a forward, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffusionlm.diffusion.rng import RngStream
from diffusionlm.inference.requests import ActiveRequest, Predictions
from diffusionlm.inference.sampling.distributions import (
    check_finite,
    choose_tokens,
    exclude_tokens,
    filter_logits,
    find_top_tokens,
    iterate_chunks,
)
from diffusionlm.inference.sampling.logit_changes import LogitChanges
from diffusionlm.inference.sampling.rejection import RejectionSampling
from diffusionlm.inference.settings import MAX_KEPT_SETTINGS, DecodingSettings
from diffusionlm.inference.strategy import TOKEN_PROBABILITY
from diffusionlm.models.tensors import copy_to_device

ChooseTokens = Callable[[Tensor, Tensor | None], Tensor]
"""Chooses tokens from probabilities, [N, V], and uniforms, [N] or None, like `choose_tokens`."""


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

    def sample(
        self, logits_NV: Tensor, requests: Sequence[ActiveRequest], rejection: RejectionSampling | None = None
    ) -> Tensor:
        """Token, confidence and log-probability of each output position of the requests, and its T most probable tokens
        and their log-probabilities, [3 + 2 T, N] in fp64 (which holds token ids exactly). T is the most that one of the
        requests keeps.

        Args:
            logits_NV: logits of the output positions of all requests, in their order.
            requests: either all or none with known texts.
            rejection: of the requests' drafts; None: drafts have no effect on the tokens.
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
                choose: ChooseTokens = choose_tokens
                if rejection is not None:
                    choose = partial(rejection.choose_tokens, first_row=chunk.start)
                samples.append(self._sample_chunk(copy_NV, *values, num_top=num_top, choose=choose))
        return torch.cat(samples, dim=1)

    def _sample_chunk(
        self,
        logits_NV: Tensor,
        uniforms_N: Tensor | None,
        committed_N: Tensor | None,
        known_N: Tensor | None,
        *,
        num_top: int,
        choose: ChooseTokens,
    ) -> Tensor:
        """Token, confidence, log-probability and ``num_top`` alternatives of each position, [3 + 2 T, N] in fp64.

        Args:
            uniforms_N: uniforms of token sampling; None: greedy.
            committed_N: tokens of committed positions, -1 at masked ones; None: all are masked.
            known_N: tokens of a known text, in place of the sampled ones, which the confidences are of.
            choose: `choose_tokens`, or that of `RejectionSampling`.
        """
        config, measure = self._settings.config, self._settings.strategy.measure
        logprobs_NV = logits_NV.log_softmax(dim=1)
        unfiltered_probs_NV = logprobs_NV.exp()
        temperature = self._settings.temperature
        filtered_NV = filter_logits(logits_NV, config, temperature)
        probs_NV = unfiltered_probs_NV if filtered_NV is logits_NV else filtered_NV.softmax(dim=1)
        tokens_N = choose(probs_NV, uniforms_N)
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
        rejections = [
            RejectionSampling(group) if group[0].settings.rejects_drafts else None for group in groups.values()
        ]
        samples = [
            self._get_sampler(group[0].settings).sample(logits.select(group), group, rejection)
            for group, rejection in zip(groups.values(), rejections, strict=True)
        ]
        predictions: dict[int, Predictions | ValueError] = {}
        arrays = _to_arrays(samples, self._share)
        for group, samples_RN, rejection in zip(groups.values(), arrays, rejections, strict=True):
            own = _split_samples(samples_RN, group)
            own = own if rejection is None else rejection.add_draft_probs(own)
            predictions |= zip(map(id, group), own, strict=True)
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
        settings.rejects_drafts,
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
