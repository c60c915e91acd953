"""Whole texts in windows against `nelbo` of the same windows, and greedy decoding against `generate`; in fp64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from config.evaluation.likelihood import AnswerLikelihoodConfig
from config.generation import GenerationConfig
from diffusionlm.evaluation.likelihood.scoring import OptionsRequest, score_texts
from diffusionlm.evaluation.nelbo import nelbo
from diffusionlm.evaluation.sampler_likelihood import greedy_matches
from diffusionlm.inference.generate import generate
from diffusionlm.models.transformer import Transformer

TEXT = tuple(np.random.default_rng(3).integers(0, 5, 23).tolist())


@pytest.fixture(scope="module")
def models(diffusion: Transformer, shifted: Transformer, autoregressive: Transformer) -> dict[str, Transformer]:
    return {"diffusion": diffusion, "shifted": shifted, "autoregressive": autoregressive}


def nelbo_of_windows(model: Transformer, window: int) -> float:
    """By `nelbo`, a window as a row, in blocks of one token; the first one begins with a token that is not scored."""
    tokens, total = [0, *TEXT], 0.0
    for start in range(0, len(tokens) - 1, window - 1):
        row = torch.tensor([tokens[start : start + window]])
        total -= nelbo(model, row, torch.arange(row.shape[1])[None] > 0, 1).nats
    return total


@pytest.mark.parametrize("window", [2, 7])
@pytest.mark.parametrize("which", ["diffusion", "shifted", "autoregressive"])
def test_windows_are_the_rows_of_nelbo(models: dict[str, Transformer], which: str, window: int) -> None:
    config = AnswerLikelihoodConfig(block_length=1)
    results = score_texts(models[which], [OptionsRequest((0,), (TEXT[:size],)) for size in (3, 23)], window, config)
    assert results[1] == pytest.approx(nelbo_of_windows(models[which], window), abs=1e-6)
    assert 0.0 > results[0] > results[1]


def test_bad_texts(models: dict[str, Transformer]) -> None:
    text = [OptionsRequest((), (TEXT,))]
    for window in (1, 10_000):
        with pytest.raises(ValueError, match=f"window = {window} must be between 2 and"):
            score_texts(models["diffusion"], text, window)
    for changes in ({"cfg_scale": 0.5}, {"end_of_text": "scored"}):
        with pytest.raises(ValueError, match="windows of a text have neither guidance nor an end"):
            score_texts(models["diffusion"], text, config=AnswerLikelihoodConfig.model_validate(changes))
    with pytest.raises(ValueError, match="has no context"):
        score_texts(models["shifted"], text)


# ----------------------------------------------------------------------------------------------------------------------
# Greedy decoding


@pytest.mark.parametrize(
    ("which", "block_length"),
    [("diffusion", None), ("shifted", None), ("shifted", 4), ("diffusion", 1), ("autoregressive", 1)],
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
