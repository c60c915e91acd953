"""The benchmark of the mixture of experts compares the same function."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarking.bench_moe import PEERS, MoECase, build_ours, build_peer, compare_moe
from benchmarking.harness import Settings

CASE = MoECase(tokens=6, hidden_size=16, intermediate_size=8, experts=5, experts_per_token=2)


@pytest.mark.parametrize("implementation", PEERS)
def test_implementations_compute_the_same(implementation: str) -> None:
    pytest.importorskip("transformers")
    ours = build_ours(CASE)
    peer = build_peer(CASE, ours, implementation)
    x = torch.randn(1, 6, 16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(ours(x), peer(x), rtol=1e-5, atol=1e-6)
    modules: list[Any] = [module for module in peer.modules() if hasattr(module, "config")]
    assert [module.config._experts_implementation for module in modules] == [implementation]


def test_table_has_every_case() -> None:
    pytest.importorskip("transformers")
    table = compare_moe([CASE], Settings(2, 1))
    assert [row[:3] for row in table.rows] == [
        [precision, "6 x 16, 2 of 5 x 8", call]
        for precision in ("float32", "bfloat16")
        for call in ("forward", "forward and backward")
    ]
    assert {len(row) for row in table.rows} == {len(table.header)}
