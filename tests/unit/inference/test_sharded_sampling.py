"""Sampling from the columns of ranks, which are threads here, against `BatchSampler` on whole logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from config.generation import GenerationConfig
from diffusionlm.inference.request_builder import prepare_request
from diffusionlm.inference.requests import ActiveRequest, Predictions, RequestOptions
from diffusionlm.inference.sampling import distributions
from diffusionlm.inference.sampling.sharded_sampling import (
    CombinedDistribution,
    choose_ranks,
    plan_sharded_sampling,
    reduce_columns,
    sample_from_columns,
)
from diffusionlm.inference.sampling.token_sampler import BatchSampler, LogitRows, read_samples
from diffusionlm.inference.settings import resolve_settings
from diffusionlm.kernels.loss_types import VocabularyShard
from diffusionlm.models.transformer import Transformer

VOCAB = 23
CONFIGS: list[dict[str, Any]] = [
    {"remasking_strategy": "low_confidence"},
    {"remasking_strategy": "entropy"},
    {"remasking_strategy": "topk_margin", "suppress_token_ids": tuple(range(12, 23))},
    {"remasking_strategy": "random"},
    {"remasking_strategy": "low_confidence", "temperature": 0.7},
    {"remasking_strategy": "low_confidence", "temperature": 1.3, "confidence_from": "filtered"},
    {"remasking_strategy": "maskgit_plus", "temperature": 1.0, "confidence_of": "most_probable"},
    {"remasking_strategy": "low_confidence", "temperature": 2.0, "confidence_of": "most_probable"},
    {"remasking_strategy": "entropy", "temperature": 3.0, "suppress_token_ids": tuple(range(8, 16))},
    {"remasking_strategy": "entropy", "temperature": 0.4, "confidence_from": "unfiltered"},
    {"remasking_strategy": "topk_margin", "temperature": 1e-310},
    {"remasking_strategy": "ancestral"},
]
"""The last tokens, and with them the mask, and those of one of three ranks are impossible in some of them."""


def make_request(model: Transformer, options: RequestOptions | None = None, **values: Any) -> ActiveRequest:
    config = GenerationConfig.model_validate({"max_new_tokens": 16, "stop_token_ids": (), **values})
    settings = resolve_settings(config, model.config)
    request = ActiveRequest(prepare_request(settings, [1, 2], 7, options or RequestOptions()))
    request.prepare_step()
    return request


def make_logits(count: int) -> Tensor:
    """Also of ties, and of positions that are almost certain."""
    logits_NV = torch.randn(count, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 3
    logits_NV[::3] = logits_NV[::3].round()
    logits_NV[::5] *= 30
    logits_NV[::7] = 0.0
    return logits_NV


def sample_on_ranks(requests: Sequence[ActiveRequest], logits_NV: Tensor, num_ranks: int) -> list[Tensor]:
    """The samples of each rank, [3, N]."""
    num_columns = -(-VOCAB // num_ranks)
    padded = torch.nn.functional.pad(logits_NV, (0, num_ranks * num_columns - VOCAB), value=-math.inf)
    plan = plan_sharded_sampling(requests)
    assert plan is not None
    barrier, messages = Barrier(num_ranks), [torch.empty(0)] * num_ranks

    def run(rank: int) -> Tensor:
        def all_gather(tensor: Tensor) -> Tensor:
            messages[rank] = tensor.clone()
            barrier.wait(30)
            gathered = torch.stack(messages)
            barrier.wait(30)
            return gathered

        def all_reduce_sum(tensor: Tensor) -> None:
            tensor.copy_(all_gather(tensor).sum(dim=0))

        columns = slice(rank * num_columns, (rank + 1) * num_columns)
        first, end = min(columns.start, VOCAB), min(columns.stop, VOCAB)
        shard = VocabularyShard(first, end - first, VOCAB, lambda tensor: None, all_reduce_sum, all_gather)
        model = cast(Transformer, SimpleNamespace(vocabulary_shard=shard))
        return sample_from_columns(model, padded[:, columns].clone(), plan)

    with ThreadPoolExecutor(num_ranks) as threads:
        return [*threads.map(run, range(num_ranks))]


def assert_equal_predictions(request: ActiveRequest, actual: object, expected: object) -> None:
    assert isinstance(actual, Predictions) and isinstance(expected, Predictions)
    assert actual.tokens_N.tolist() == expected.tokens_N.tolist()
    if request.settings.strategy.measure is not None:
        assert np.abs(actual.confidence_N - expected.confidence_N).max() < 1e-12
    assert actual.logprobs_N == pytest.approx(expected.logprobs_N, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 9])
def test_samples_are_those_of_whole_logits(model: Transformer, num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of requests with settings of their own, alone and together, in chunks of a few positions. The last of nine ranks
    has no token."""
    requests = [make_request(model, **config) for config in CONFIGS]
    logits_NV = make_logits(sum(len(request.output_positions) for request in requests))
    expected = BatchSampler(torch.device("cpu")).sample_predictions(LogitRows(logits_NV, requests))
    monkeypatch.setattr(distributions, "CPU_CHUNK_BYTES", 8 * 5 * VOCAB)
    together, *others = sample_on_ranks(requests, logits_NV, num_ranks)
    assert all(torch.equal(other, together) for other in others)
    parts = logits_NV.split([len(request.output_positions) for request in requests])
    joint = read_samples(together, requests)
    for request, part_NV, ours, theirs in zip(requests, parts, joint, expected, strict=True):
        assert_equal_predictions(request, ours, theirs)
        [own] = read_samples(sample_on_ranks([request], part_NV, num_ranks)[0], [request])
        assert_equal_predictions(request, own, theirs)


def test_confidences_near_one_are_exact(model: Transformer) -> None:
    """In fp64 probabilities of 1 - 1e-16 are 1: their order is lost unless what is missing is summed alone."""
    gaps = torch.arange(34.0, 36.0, 0.125, dtype=torch.float64)
    logits_NV = torch.full((16, VOCAB), -math.inf, dtype=torch.float64)
    logits_NV[:, 3], logits_NV[:, 20] = 0.0, -gaps
    parts = [
        reduce_columns(own, first, torch.ones(1, 16))
        for first, own in ((0, logits_NV[:, :12]), (12, logits_NV[:, 12:]))
    ]
    combined = CombinedDistribution(torch.stack(parts), torch.ones(1, 16), 0)
    assert combined.logprobs(torch.zeros(16)).tolist() == pytest.approx(
        [-math.exp(-gap) for gap in gaps.tolist()], rel=1e-14
    )


def test_uniforms_at_the_edges_select_a_possible_token() -> None:
    """Also where a uniform is between the tokens of two ranks."""
    totals_RN = torch.tensor(
        [[0.0, 1.0, 0.3, 1e-300], [2.0, 0.0, 0.3, 1.0], [0.0, 0.0, 0.3, 1e-17]], dtype=torch.float64
    )
    expected = {0.0: [1, 0, 0, 0], 1.0 - 2.0**-53: [1, 0, 2, 1]}
    for uniform, ranks in expected.items():
        ranks_1N, fractions_N = choose_ranks(totals_RN, torch.full((4,), uniform, dtype=torch.float64))
        assert ranks_1N[0].tolist() == ranks
        assert ((fractions_N >= 0.0) & (fractions_N < 1.0)).all()
    random_RN = torch.rand(3, 500, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ends_RN = random_RN.cumsum(dim=0)
    _, fractions_N = choose_ranks(random_RN, ends_RN[0] / ends_RN[2])
    assert ((fractions_N >= 0.0) & (fractions_N < 1.0)).all()


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_values_that_are_not_finite_are_errors(model: Transformer, value: float, temperature: float) -> None:
    request = make_request(model, remasking_strategy="entropy", temperature=temperature)
    for token in (0, 15):
        logits_NV = make_logits(len(request.output_positions))
        logits_NV[2, token] = value
        [result] = read_samples(sample_on_ranks([request], logits_NV, 2)[0], [request])
        assert isinstance(result, ValueError)


@pytest.mark.parametrize(
    "config",
    [
        {"top_k": 3},
        {"top_p": 0.9, "temperature": 1.0},
        {"min_p": 0.1, "temperature": 1.0},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"cfg_scale": 1.0},
        {"remasking_strategy": "p2"},
        {"defer_token_ids": (3,)},
        {"min_new_tokens": 2, "stop_token_ids": (4,)},
    ],
)
def test_settings_that_need_whole_logits(model: Transformer, config: dict[str, Any]) -> None:
    """Also beside a request that needs none."""
    request, other = make_request(model, **config), make_request(model)
    assert plan_sharded_sampling([other]) is not None
    assert plan_sharded_sampling([other, request]) is None


@pytest.mark.parametrize(
    "options",
    [
        RequestOptions(logit_bias={3: 1.0}),
        RequestOptions(num_top_logprobs=1),
        RequestOptions(allowed_token_ids={4: (1, 2)}),
    ],
)
def test_options_that_need_whole_logits(model: Transformer, options: RequestOptions) -> None:
    assert plan_sharded_sampling([make_request(model, options)]) is None
