"""Whole texts in windows against `nelbo` of the same windows, and greedy decoding against `generate`; in fp64."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from config.evaluation.likelihood import AnswerLikelihoodConfig
from config.generation import GenerationConfig
from diffusionlm.evaluation.likelihood.greedy import greedy_matches
from diffusionlm.evaluation.likelihood.scoring import OptionScores, OptionsRequest, score_texts
from diffusionlm.evaluation.nelbo import nelbo
from diffusionlm.inference.generate import generate
from diffusionlm.models.transformer import Transformer

TEXT = tuple(np.random.default_rng(3).integers(0, 5, 23).tolist())


@pytest.fixture(scope="module")
def models(diffusion: Transformer, shifted: Transformer, autoregressive: Transformer) -> dict[str, Transformer]:
    return {"diffusion": diffusion, "shifted": shifted, "autoregressive": autoregressive}


def nelbo_of_windows(model: Transformer, prefix: tuple[int, ...], window: int, block_length: int | None) -> float:
    """By `nelbo`, a window as a row; many samples unless it is exact."""
    tokens, total, start = [*prefix, *TEXT], 0.0, 0
    num_context = len(prefix)
    while start + num_context < len(tokens):
        row = torch.tensor([tokens[start : start + window]])
        is_scored = torch.arange(row.shape[1])[None] >= num_context
        copies = 1 if block_length == 1 else 400
        report = nelbo(model, row.repeat(copies, 1), is_scored.repeat(copies, 1), block_length, 1, batch_size=400)
        total -= report.nats / copies
        start, num_context = start + window - 1, 1
    return total


def rolling_log_likelihood(
    model: Transformer,
    tokens: tuple[int, ...],
    window: int | None = None,
    *,
    prefix: tuple[int, ...] = (),
    config: AnswerLikelihoodConfig | None = None,
) -> OptionScores:
    return score_texts(model, [OptionsRequest(prefix, (tokens,))], window, config)[0]


@pytest.mark.parametrize("window", [2, 7, 24])
@pytest.mark.parametrize("which", ["diffusion", "shifted", "autoregressive"])
def test_windows_are_the_rows_of_nelbo(models: dict[str, Transformer], which: str, window: int) -> None:
    config = AnswerLikelihoodConfig(block_length=1)
    result = rolling_log_likelihood(models[which], TEXT, window, prefix=(0,), config=config)
    assert result.log_likelihood == pytest.approx(nelbo_of_windows(models[which], (0,), window, 1), abs=1e-6)
    assert (result.num_tokens, result.is_exact, result.standard_error) == ((23,), True, 0.0)
    assert result.num_forwards == math.ceil(23 / (window - 1))


def test_bad_texts(models: dict[str, Transformer]) -> None:
    for window in (1, 10_000):
        with pytest.raises(ValueError, match=f"window = {window} must be between 2 and"):
            rolling_log_likelihood(models["diffusion"], TEXT, window)
    for changes in ({"cfg_scale": 0.5}, {"end_of_text": "scored"}):
        with pytest.raises(ValueError, match="windows of a text have neither guidance nor an end"):
            rolling_log_likelihood(models["diffusion"], TEXT, config=AnswerLikelihoodConfig.model_validate(changes))
    with pytest.raises(ValueError, match="has no context"):
        rolling_log_likelihood(models["shifted"], TEXT)


# ----------------------------------------------------------------------------------------------------------------------
# Greedy decoding


@pytest.mark.parametrize(
    ("which", "block_length"),
    [*itertools.product(["diffusion", "shifted"], [None, 4, 1]), ("autoregressive", 1)],
)
def test_greedy_continuations_are_those_of_generate(
    models: dict[str, Transformer], which: str, block_length: int | None
) -> None:
    model, contexts = models[which], [(2, 0, 1, 4), (3, 1), (1, 1, 4)]
    length = 6
    values = {"attention": "bidirectional", "block_length": length, "steps": length}
    if block_length is not None:
        values = {"attention": "block_causal", "block_length": block_length, "steps": 2 * length}
    settings = GenerationConfig.model_validate(
        {"max_new_tokens": length, "stop_token_ids": (), "remasking_strategy": "low_confidence", **values}
    )
    config = AnswerLikelihoodConfig(block_length=block_length)
    requests, expected = [], []
    for context in contexts:
        [done] = generate(model, [list(context)], settings)
        for index in range(-1, length):
            tokens = list(done.token_ids)
            if index >= 0:
                tokens[index] = (tokens[index] + 1) % 5
            requests.append(OptionsRequest(context, (tuple(tokens),)))
            expected.append(index < 0)
    assert greedy_matches(model, requests, config) == expected
