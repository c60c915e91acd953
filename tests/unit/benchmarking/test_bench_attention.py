"""The benchmark of attention times the backends that its tables name."""

from __future__ import annotations

import pytest
import torch

from benchmarking.bench_attention import compare_dense, compare_tiled, pattern_step, prepare_step
from benchmarking.harness import Settings
from config.training.runtime import AttentionBackend
from diffusionlm.models import attention_backends
from diffusionlm.models.patterns import BlockDiffusion

SETTINGS = Settings(rounds=2, warmup=1)


def test_dense_backends_are_timed_in_every_precision() -> None:
    table = compare_dense((8, 16), SETTINGS, tokens=32)
    assert [row[:2] for row in table.rows] == [
        ["float32", "8"],
        ["float32", "16"],
        ["bfloat16", "8"],
        ["bfloat16", "16"],
    ]
    assert {len(row) for row in table.rows} == {len(table.header)}


def test_tiles_are_timed_in_every_precision_and_pattern() -> None:
    table = compare_tiled([(8, 2)], SETTINGS, tokens=32)
    assert [row[:4] for row in table.rows] == [
        ["float32", "BlockDiffusion", "8", "2"],
        ["float32", "BlockCausal", "8", "2"],
        ["bfloat16", "BlockDiffusion", "8", "2"],
        ["bfloat16", "BlockCausal", "8", "2"],
    ]
    assert {len(row) for row in table.rows} == {len(table.header)}
    skipped = table.column("pairs skipped")[0]
    assert skipped == "31.2%", "8 noisy queries attend to 8 noisy and 6 clean keys of 16, 8 clean ones to 8"


@pytest.mark.parametrize("backend", ["eager", "sdpa", "tiled"])
def test_pattern_steps_use_the_backend(backend: AttentionBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    backends: list[AttentionBackend] = []
    original = attention_backends.PatternAttention.backend_for

    def spy(self: attention_backends.PatternAttention, q: torch.Tensor) -> AttentionBackend:
        backends.append(original(self, q))
        return backends[-1]

    monkeypatch.setattr(attention_backends.PatternAttention, "backend_for", spy)
    pattern_step(BlockDiffusion(2), backend, 16, torch.float32, 32)()
    prepare_step(BlockDiffusion(2), backend, 16, torch.float32)()
    assert backends == [backend] * 2
