"""The comparison of the engine: its requests, and equal answers on tiny models."""

from __future__ import annotations

import argparse
import importlib.util

import pytest

from benchmarking.serving import compare_engine
from benchmarking.serving.compare_engine import draw_requests, run
from tests.unit.benchmarking.cases import SIZES, read_tables

SHAPE = compare_engine.SHAPE.model_copy(update={**SIZES, "vocab_size": 128, "mask_token_id": 127})


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_engine, "SHAPE", SHAPE)
    monkeypatch.setattr(compare_engine, "LONGEST", 12)


def measure(*peers: str) -> dict[str, list[str]]:
    options = argparse.Namespace(rounds=2, threads=1, concurrency=[2], requests=3, alone=1, peers=list(peers))
    [columns] = read_tables(run(options))
    return columns


def test_requests_have_unequal_lengths_of_whole_blocks() -> None:
    requests = draw_requests(SHAPE, 200, 48, seed=3)
    assert requests[:7] == draw_requests(SHAPE, 7, 48, seed=3)
    for lengths in ({len(request.prompt) for request in requests}, {request.new_tokens for request in requests}):
        assert lengths == {12, 24, 36, 48}
    assert all(max(request.prompt) < 127 for request in requests)


def test_the_engine_is_compared_with_equal_answers() -> None:
    columns = measure()
    assert columns["against"] == ["one at a time", "static, leave", "static, padded"]
    assert columns["equal answers"] == ["2 of 2", "6 of 6", "6 of 6"]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_autoregressive_answers_are_those_of_transformers() -> None:
    columns = measure("transformers")
    assert columns["against"][3:] == ["transformers, next tokens"] * 2
    assert columns["equal answers"][3:] == ["6 of 6", ""]
