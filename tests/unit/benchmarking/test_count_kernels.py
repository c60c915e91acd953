"""Counts of operators and bytes."""

from __future__ import annotations

import torch

from benchmarking.bench_infer import random_model
from benchmarking.serving.bench_first_text import SHAPE
from benchmarking.serving.count_kernels import KernelCounter, count_rounds, count_row_buckets, find_bucket


def test_operators_and_bytes() -> None:
    a, b, table = torch.ones(2, 3), torch.ones(3, 5), torch.ones(100, 4)
    with KernelCounter() as counter:
        torch.mm(a, b.t().t()).view(10)
        torch.empty(7)
        table[torch.tensor([1, 2])]
        table.index_copy_(0, torch.tensor([3]), torch.ones(1, 4))
    counts = dict(counter.operators)
    assert {name: counts[name] for name in ("mm", "index", "index_copy_")} == {"mm": 1, "index": 1, "index_copy_": 1}
    assert not counts.keys() & {"t", "view", "empty"}
    with KernelCounter() as counter:
        torch.mm(a, b)
    assert counter.num_bytes == 4 * (6 + 15 + 10)
    index = torch.tensor([1, 2])
    with KernelCounter() as counter:
        table[index]
    assert counter.num_bytes == 16 + 2 * 2 * 4 * 4  # the index, rows that are read and rows that are written


def test_kernels_depend_on_the_number_of_shapes_and_not_of_requests() -> None:
    """On a GPU sequences with equally many inputs and similar lengths are one computation."""
    model = random_model(SHAPE, seed=0)
    few, many = (count_rounds(model, number, 2) for number in (16, 48))
    assert {counts.num_requests for counts in few} == {16} and {counts.num_requests for counts in many} == {48}
    # 2 layers, blocks of 4 or 8 inputs, and lengths of 12 to 264: 6 powers of two.
    assert max(counts.num_attention_kernels for counts in many) <= 2 * 2 * 6
    assert max(counts.num_kernels for counts in many) <= 1.3 * max(counts.num_kernels for counts in few)


def test_buckets() -> None:
    assert [find_bucket(rows) for rows in (1, 8, 9, 2048, 2049)] == [8, 8, 16, 2048, None]
    rows = count_row_buckets(random_model(SHAPE, seed=0), 2, 3)
    assert sum(rows) > 0 and min(rows) >= 4
