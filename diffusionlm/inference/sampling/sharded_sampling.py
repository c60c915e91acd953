"""Sampling from logits whose columns are divided over ranks, which nobody gathers.

Each rank reduces its columns to a few numbers for each position, which all ranks exchange and combine. A sampled token
takes a second exchange: the ranks have consecutive tokens, so their sums of probabilities say which rank has the token
that the inverse of the distribution selects, and this rank finds it.

Shapes: N positions, C columns of a rank, R ranks, P numbers of a rank for a position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffusionlm.diffusion.rng import RngStream
from diffusionlm.inference.requests import ActiveRequest
from diffusionlm.inference.sampling.distributions import choose_tokens, divide_by_temperature, iterate_chunks
from diffusionlm.inference.sampling.logit_changes import LogitChanges
from diffusionlm.inference.strategy import NEGATIVE_ENTROPY, TOKEN_PROBABILITY, TOP2_MARGIN
from diffusionlm.models.tensors import copy_to_device
from diffusionlm.models.transformer import Transformer

MEASURES = (TOKEN_PROBABILITY, TOP2_MARGIN, NEGATIVE_ENTROPY)
"""Measures of confidence that are computed from the numbers of the ranks."""


@dataclass(frozen=True)
class ShardedSampling:
    """How the tokens of N positions are sampled: the same on all ranks."""

    forbidden_token_ids: tuple[tuple[int, tuple[int, ...]], ...]
    """Numbers of consecutive positions, and their tokens of probability zero."""
    temperatures_TN: NDArray[np.float64]
    """1 at all positions; then, unless all are greedy, the temperature of each position, 1 at greedy ones."""
    uniforms_N: NDArray[np.float64] | None
    """Uniforms of token sampling, NaN at greedy positions. None: all are greedy."""
    measures_N: NDArray[np.int64]
    """Measures of confidence, indices into `MEASURES`."""
    is_tempered_N: NDArray[np.bool_]
    """The confidence is that of the distribution at the temperature."""
    is_of_sample_N: NDArray[np.bool_]
    """The confidence is that of the sampled token, not of the most probable one."""


def plan_sharded_sampling(requests: Sequence[ActiveRequest]) -> ShardedSampling | None:
    """How the next tokens of requests are sampled without whole logits. None: a request needs those."""
    if not requests or any(map(_needs_whole_logits, requests)) or not LogitChanges(requests).is_empty:
        return None
    sizes, settings = [len(request.output_positions) for request in requests], [item.settings for item in requests]
    forbidden = zip(sizes, (item.forbidden_token_ids for item in settings), strict=True)
    temperatures_TN, uniforms_N = np.ones((1, sum(sizes))), None
    if any(item.temperature for item in settings):
        tempered_N = np.repeat([item.temperature or 1.0 for item in settings], sizes)
        temperatures_TN = np.stack([temperatures_TN[0], tempered_N])
        uniforms_N = np.concatenate([_draw_uniforms(request) for request in requests])
    return ShardedSampling(
        tuple((sum(size for size, _ in group), ids) for ids, group in groupby(forbidden, itemgetter(1))),
        temperatures_TN,
        uniforms_N,
        np.repeat([MEASURES.index(item.strategy.measure or TOKEN_PROBABILITY) for item in settings], sizes),
        np.repeat([item.config.confidence_from != "unfiltered" for item in settings], sizes),
        np.repeat([item.config.confidence_of != "most_probable" for item in settings], sizes),
    )


def _draw_uniforms(request: ActiveRequest) -> NDArray[np.float64]:
    if request.settings.temperature:
        return request.draw_uniforms(RngStream.TOKEN_SAMPLING, request.output_positions)
    return np.full(len(request.output_positions), np.nan)


def _needs_whole_logits(request: ActiveRequest) -> bool:
    config, options, strategy = request.settings.config, request.options, request.settings.strategy
    has_filter = config.top_k is not None or config.top_p < 1.0 or config.min_p > 0.0
    is_constrained = bool(request.span_cursors or options.choices or request.is_known)
    needs_probs = has_filter or request.settings.rejects_drafts
    is_measured = strategy.measure in (None, *MEASURES) and not (strategy.can_remask or config.defer_token_ids)
    return needs_probs or is_constrained or not is_measured or request.has_guidance or options.num_top_logprobs > 0


def sample_from_columns(model: Transformer, logits_NC: Tensor, sampling: ShardedSampling) -> Tensor:
    """Token, confidence and log-probability of each position, [3, N] in fp64, on each rank. All ranks call it.

    Args:
        logits_NC: this rank's columns, -inf for padding; changed in place.
    """
    shard = model.vocabulary_shard
    assert shard is not None
    forbid_tokens(logits_NC, shard.first_token, sampling.forbidden_token_ids)

    def read(values_N: NDArray[Any]) -> Tensor:
        return copy_to_device(torch.from_numpy(values_N), logits_NC.device)

    temperatures_TN = read(sampling.temperatures_TN)
    chunks = [*iterate_chunks(logits_NC)]
    parts = [reduce_columns(logits_NC[rows].double(), shard.first_token, temperatures_TN[:, rows]) for rows in chunks]
    parts_RPN = shard.all_gather(torch.cat(parts, dim=1))
    plain = CombinedDistribution(parts_RPN, temperatures_TN, 0)
    tempered = CombinedDistribution(parts_RPN, temperatures_TN, len(temperatures_TN) - 1)
    tokens_N, token_logits_N = plain.tokens_N, plain.highest_N
    if sampling.uniforms_N is not None:
        uniforms_N = read(sampling.uniforms_N)
        ranks_1N, fractions_N = choose_ranks(tempered.totals_RN, uniforms_N)
        divided = (divide_by_temperature(logits_NC[rows].double(), temperatures_TN[-1, rows, None]) for rows in chunks)
        columns = [choose_tokens(own.exp(), fractions_N[rows]) for own, rows in zip(divided, chunks, strict=True)]
        columns_N1 = torch.cat(columns)[:, None]
        samples_N2 = torch.cat([columns_N1 + shard.first_token, logits_NC.gather(1, columns_N1).double()], dim=1)
        _, is_own_N = shard.find_rows(parts_RPN[:, 1].gather(0, ranks_1N)[0].long())
        samples_N2 = samples_N2.where(is_own_N[:, None], 0.0)
        shard.all_reduce_sum(samples_N2)
        greedy_2N = torch.stack([tokens_N, token_logits_N])
        tokens_N, token_logits_N = greedy_2N.where(uniforms_N.isnan(), samples_N2.T).unbind()
    ranked_logits_N = token_logits_N.where(read(sampling.is_of_sample_N), plain.highest_N)
    measures_1N, is_tempered_N = read(sampling.measures_N)[None], read(sampling.is_tempered_N)
    plain_N, tempered_N = (item.confidences(ranked_logits_N).gather(0, measures_1N)[0] for item in (plain, tempered))
    return torch.stack([tokens_N, tempered_N.where(is_tempered_N, plain_N), plain.logprobs(token_logits_N)])


def forbid_tokens(logits_NC: Tensor, first_token: int, forbidden: Sequence[tuple[int, tuple[int, ...]]]) -> None:
    """Set the logits of tokens of probability zero to -inf, in place (`ShardedSampling.forbidden_token_ids`)."""
    parts = torch.split(logits_NC, [size for size, _ in forbidden])
    for part_NC, (_, token_ids) in zip(parts, forbidden, strict=True):
        columns = [token - first_token for token in token_ids if 0 <= token - first_token < logits_NC.shape[1]]
        part_NC.index_fill_(1, copy_to_device(torch.tensor(columns, dtype=torch.long), part_NC.device), -torch.inf)


def reduce_columns(logits_NC: Tensor, first_token: int, temperatures_TN: Tensor) -> Tensor:
    """What all ranks need of this rank's columns in fp64, [P, N].

    The highest logit, the lowest of its tokens, and the second highest logit. Then for each temperature two sums over
    the other columns, where odds are probabilities relative to the highest one: of the odds, and of odds * log(odds).
    A rank without a possible token has a highest logit of -inf, and sums of 0.
    """
    columns_N1 = logits_NC.argmax(dim=1, keepdim=True)
    highest_N1 = logits_NC.gather(1, columns_N1)
    others_NC = logits_NC.scatter(1, columns_N1, -torch.inf)
    parts = [highest_N1[:, 0], (columns_N1[:, 0] + first_token).double(), others_NC.amax(dim=1)]
    differences_NC = others_NC.sub_(highest_N1.where(highest_N1 != -torch.inf, 0.0))
    for temperatures_N in temperatures_TN:
        log_odds_NC = differences_NC / temperatures_N[:, None]
        odds_NC = log_odds_NC.exp()
        # A finite number times odds of 0 is 0, which -inf is not; xlogy would compute the logarithms again.
        log_odds_NC.clamp_(min=torch.finfo(torch.float64).min)
        parts += [odds_NC.sum(dim=1), log_odds_NC.mul_(odds_NC).sum(dim=1)]
    return torch.stack(parts)


class CombinedDistribution:
    """The distribution of each position at a temperature, from the numbers of all ranks (`reduce_columns`)."""

    def __init__(self, parts_RPN: Tensor, temperatures_TN: Tensor, index: int) -> None:
        """``index``: of the temperature."""
        self._temperatures_N = temperatures_TN[index]
        highest_RN, tokens_RN, second_RN = parts_RPN[:, :3].unbind(1)
        odds_RN, entropies_RN = parts_RPN[:, 3 + 2 * index : 5 + 2 * index].unbind(1)
        best_1N = highest_RN.argmax(dim=0, keepdim=True)  # the first of equals has the lowest token
        self.tokens_N, self.highest_N = tokens_RN.gather(0, best_1N)[0], highest_RN.gather(0, best_1N)[0]
        scales_RN = ((highest_RN - self.highest_N) / self._temperatures_N).exp()
        is_other_RN = torch.ones_like(scales_RN).scatter_(0, best_1N, 0.0)
        self.totals_RN = (odds_RN + 1.0) * scales_RN
        """Odds of each rank's tokens, relative to the most probable token of all."""
        self._other_odds_N = ((odds_RN + is_other_RN) * scales_RN).sum(dim=0)
        """Without the most probable token: exact, however near its probability is to 1."""
        self._entropies_N = (entropies_RN * scales_RN + (odds_RN + 1.0) * scales_RN.xlogy(scales_RN)).sum(dim=0)
        self._second_N = highest_RN.where(is_other_RN.bool(), second_RN).amax(dim=0)

    def logprobs(self, logits_N: Tensor) -> Tensor:
        """Log-probabilities of tokens with these logits."""
        return (logits_N - self.highest_N) / self._temperatures_N - self._other_odds_N.log1p()

    def confidences(self, logits_N: Tensor) -> Tensor:
        """Confidence by each of `MEASURES`, [M, N], where ``logits_N`` are those of the tokens that are ranked."""
        differences_N = (logits_N - self.highest_N) / self._temperatures_N
        second_differences_N = (self._second_N - self.highest_N) / self._temperatures_N
        total_N = 1.0 + self._other_odds_N
        negative_entropy_N = self._entropies_N / total_N - self._other_odds_N.log1p()
        return torch.stack([differences_N.exp() / total_N, -second_differences_N.expm1() / total_N, negative_entropy_N])


def choose_ranks(totals_RN: Tensor, uniforms_N: Tensor) -> tuple[Tensor, Tensor]:
    """The rank that has the sampled token of each position [1, N], and what is left of the uniform for its tokens [N],
    in [0, 1)."""
    ends_RN = totals_RN.cumsum(dim=0)
    goals_N = uniforms_N * ends_RN[-1]
    ranks_1N = (ends_RN > goals_N).to(torch.uint8).argmax(dim=0, keepdim=True)
    total_1N = totals_RN.gather(0, ranks_1N)
    fractions_1N = (goals_N - (ends_RN.gather(0, ranks_1N) - total_1N)) / total_1N
    return ranks_1N, fractions_1N[0].clamp(0.0, 1.0 - 2.0**-53)
