"""The benchmark of the mixture of experts compares the same function."""

from __future__ import annotations

import pytest
import torch

from benchmarking.bench_moe import THEIRS, MoECase, bench_moe, build_ours, build_theirs

CASE = MoECase(tokens=6, hidden_size=16, intermediate_size=8, experts=5, chosen=2)


@pytest.mark.parametrize("implementation", THEIRS)
def test_contestants_compute_the_same(implementation: str) -> None:
    pytest.importorskip("transformers")
    ours = build_ours(CASE)
    theirs = build_theirs(CASE, ours, implementation)
    x = torch.randn(1, 6, 16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-6)
    used = [module.config._experts_implementation for module in theirs.modules() if hasattr(module, "config")]
    assert used == [implementation]


def test_table_has_every_case() -> None:
    pytest.importorskip("transformers")
    table = [line.strip("| ").split(" | ") for line in bench_moe([CASE], rounds=2, warmup=1).splitlines()]
    assert [row[:3] for row in table[2:]] == [
        [precision, "6 x 16, 2 of 5 x 8", call]
        for precision in ("float32", "bfloat16")
        for call in ("forward", "forward and backward")
    ]
    assert all(len(row) == len(table[0]) for row in table)
