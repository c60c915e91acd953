"""The benchmark of optimizers compares equal updates."""

from __future__ import annotations

import torch

from benchmarking.bench_optimizers import OptimizerCase, compare_optimizers, make_parameters
from benchmarking.harness import Settings

CASE = OptimizerCase("tiny", ((2, 4, 3), (1, 3, 4)))


def test_implementations_start_with_equal_parameters() -> None:
    one, other = make_parameters(CASE), make_parameters(CASE)
    assert [tuple(parameter.shape) for parameter in one] == [(4, 3), (4, 3), (3, 4)]
    for a, b in zip(one, other, strict=True):
        assert a is not b and torch.equal(a, b) and a.grad is not None and b.grad is not None
        assert torch.equal(a.grad, b.grad)


def test_table_has_every_case() -> None:
    table = compare_optimizers([CASE], Settings(2, 1, clock="thread"))
    assert [(row[0], row[1], row[3]) for row in table.rows] == [
        ("Muon", "tiny", "torch.optim.Muon"),
        ("Lion", "tiny", "torch.optim.AdamW"),
    ]
    muon, lion = table.column("largest difference of weights")
    assert float(muon) < 1e-3 and lion == "-"
