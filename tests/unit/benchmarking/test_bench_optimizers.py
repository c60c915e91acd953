"""The benchmark of optimizers compares equal updates."""

from __future__ import annotations

import time

import torch

from benchmarking.bench_optimizers import OptimizerCase, bench_optimizers, make_parameters

CASE = OptimizerCase("tiny", ((2, 4, 3), (1, 3, 4)))


def test_contestants_start_alike() -> None:
    one, other = make_parameters(CASE), make_parameters(CASE)
    assert [tuple(each.shape) for each in one] == [(4, 3), (4, 3), (3, 4)]
    for a, b in zip(one, other, strict=True):
        assert a is not b and torch.equal(a, b) and a.grad is not None and b.grad is not None
        assert torch.equal(a.grad, b.grad)


def test_table_has_every_case() -> None:
    table = [
        line.strip("| ").split(" | ")
        for line in bench_optimizers([CASE], rounds=2, warmup=1, clock=time.thread_time).splitlines()
    ]
    assert [(row[0], row[1], row[3]) for row in table[2:]] == [
        ("Muon", "tiny", "torch.optim.Muon"),
        ("Lion", "tiny", "torch.optim.AdamW"),
    ]
    assert float(table[2][-1]) < 1e-3 and table[3][-1] == "-"
