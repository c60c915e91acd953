"""The published estimators of answer likelihoods, and the tables of the benchmark, with tiny models."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from benchmarking.evaluation import bench_likelihood
from benchmarking.evaluation.published_likelihood import DRAWS, estimate_answer
from benchmarking.harness import Settings
from diffusionlm.diffusion.layout import InputLayout
from diffusionlm.evaluation.likelihood.conditional import conditional_likelihood
from diffusionlm.models.transformer import Transformer

CONTEXT, ANSWER = [2, 0, 1], [4, 3, 1, 0]


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Transformer]) -> Transformer:
    values = {"vocab_size": 12, "mask_token_id": 11, "eos_token_id": 0, "pad_token_id": 0, "num_hidden_layers": 1}
    return tiny_model(torch.float32, max_position_embeddings=128, **values)


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("block_length", [None, 2])
def test_published_estimators_are_unbiased(model: Transformer, name: str, block_length: int | None) -> None:
    exact = conditional_likelihood(model, CONTEXT, ANSWER, block_length=block_length).log_likelihood
    layout = InputLayout.from_config(model.config, block_length)
    values = [
        estimate_answer(model, layout, CONTEXT, ANSWER, DRAWS[name], np.random.default_rng(seed), num_rows=64)
        for seed in range(40)
    ]
    assert abs(np.mean(values) - exact) < 4 * np.std(values, ddof=1) / math.sqrt(len(values))
    assert np.std(values) < 0.2 * abs(exact), "too weak a test"


def test_tables(model: Transformer) -> None:
    tokens = np.random.default_rng(0).integers(1, 11, 400)
    items = bench_likelihood.Items(tokens)
    options = argparse.Namespace(lengths=[4], items=1, seeds=20, documents=1)
    settings = Settings(rounds=2, options=options)
    errors = bench_likelihood.build_error_table(model, items, settings)
    [row] = errors.rows
    assert len(row) == len(errors.header) and row[0] == "4"
    assert row[errors.header.index("exact: forwards")] == "15"
    assert float(row[errors.header.index("fewer at equal error, than Bernoulli")]) > 1.0
    for block_length in (None, 4):
        table = bench_likelihood.build_time_table(model, items, settings, block_length)
        assert table.column("forwards per item")[0] == "512"
        assert all(0.0 < float(forwards) < 512 for forwards in table.column("forwards per item")[1:])
    packing = bench_likelihood.build_packing_table(model, items, settings)
    assert [row[0] for row in packing.rows] == ["padded", "packed"]
