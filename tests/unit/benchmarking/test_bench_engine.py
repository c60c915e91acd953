"""The benchmarks of the engine: what they compare, count and print, on tiny models."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from benchmarking.harness import Settings
from benchmarking.serving import bench_autoregressive, bench_engine
from benchmarking.serving.callers import (
    CallerRequest,
    count_equal,
    draw_requests,
    split_batches,
    static_limit,
)
from config.model import ModelConfig

SHAPE = ModelConfig(
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=128,
    max_position_embeddings=512,
    vocab_size=128,
    mask_token_id=127,
    block_length=4,
)


def settings(**options: Any) -> Settings:
    return Settings(rounds=2, options=argparse.Namespace(**options))


def test_requests_have_unequal_lengths_of_whole_blocks() -> None:
    requests = draw_requests(SHAPE, 200, 48, seed=3)
    assert requests[:7] == draw_requests(SHAPE, 7, 48, seed=3)
    for lengths in ({len(request.prompt) for request in requests}, {request.new_tokens for request in requests}):
        assert lengths == {12, 24, 36, 48}
    assert all(max(request.prompt) < 127 for request in requests)


def test_the_limit_of_static_batches() -> None:
    requests = [CallerRequest([1], length) for length in (10, 30, 20, 20, 5)]
    assert [len(batch) for batch in split_batches(requests, 2)] == [2, 2, 1]
    # Two places for 30, 20 and 5 rounds.
    assert static_limit(requests, 2) == 2 * (30 + 20 + 5) / 85
    assert static_limit(requests[2:4], 2) == 1.0
    assert count_equal([(1, 2), (3,)], [(1, 2), (4,), (5,)]) == 1


def test_the_engine_is_compared_with_equal_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_engine, "SHAPE", SHAPE)
    monkeypatch.setattr(bench_engine, "LONGEST", 12)
    report = bench_engine.run(settings(concurrency=[2], requests=3, alone=1))
    speeds, rounds = report.tables
    assert speeds.column("decoder") == ["one at a time", "engine", "static, leave", "static, padded"]
    # In each of 2 rounds 1 answer of one at a time with the engine's, twice, and 2 * (1 + 3) of the static ones.
    assert [cell for cell in speeds.column("equal answers") if cell] == ["20 of 20"]
    # 3 answers of 12 tokens in two places take 24 forwards, and 36 steps.
    assert rounds.column("requests per round") == ["1.5"]


@pytest.mark.slow
def test_autoregressive_answers_are_those_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    shapes = {
        name: SHAPE.model_copy(
            update={
                "block_length": shape.block_length,
                "logit_alignment": shape.logit_alignment,
                "mask_token_id": shape.mask_token_id and 127,
            }
        )
        for name, shape in bench_autoregressive.SHAPES.items()
    }
    monkeypatch.setattr(bench_autoregressive, "SHAPES", shapes)
    small = SHAPE.model_copy(update={"mask_token_id": 100})
    monkeypatch.setattr(bench_autoregressive, "SHAPE", small)
    monkeypatch.setattr(bench_autoregressive, "LONGEST", 24)
    report = bench_autoregressive.run(settings(concurrency=[2], requests=4))
    speeds, rounds = report.tables
    assert speeds.column("equal answers") == ["8 of 8", ""]
    next_tokens, three = (int(cell.replace(",", "")) for cell in rounds.column("rounds"))
    assert three < next_tokens
