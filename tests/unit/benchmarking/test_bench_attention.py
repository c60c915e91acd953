"""The benchmark of attention measures what its tables say."""

from __future__ import annotations

import pytest
import torch

from benchmarking.bench_attention import bench_blocks, pattern_step, prepare_step
from config.runtime import AttentionBackend
from diffusionlm.models import attention_backends
from diffusionlm.models.patterns import BlockDiffusion


def test_blocks_are_timed_in_every_precision_and_pattern() -> None:
    table = [
        line.strip("| ").split(" | ") for line in bench_blocks([(8, 2)], rounds=2, warmup=1, tokens=32).splitlines()
    ]
    assert [row[:4] for row in table[2:]] == [
        ["float32", "BlockDiffusion", "8", "2"],
        ["float32", "BlockCausal", "8", "2"],
        ["bfloat16", "BlockDiffusion", "8", "2"],
        ["bfloat16", "BlockCausal", "8", "2"],
    ]
    assert all(len(row) == len(table[0]) for row in table[2:])
    assert table[2][4] == "31.2%", "8 noisy queries meet 8 noisy and 6 clean keys of 16, 8 clean ones 8"


@pytest.mark.parametrize("backend", ["eager", "sdpa", "tiled"])
def test_steps_use_the_backend_asked_for(backend: AttentionBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[AttentionBackend] = []
    original = attention_backends.PatternAttention.backend_for

    def spy(self: attention_backends.PatternAttention, q: torch.Tensor) -> AttentionBackend:
        used.append(original(self, q))
        return used[-1]

    monkeypatch.setattr(attention_backends.PatternAttention, "backend_for", spy)
    pattern_step(BlockDiffusion(2), backend, 16, torch.float32, 32)()
    prepare_step(BlockDiffusion(2), backend, 16, torch.float32)()
    assert used == [backend] * 2
