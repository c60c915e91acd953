"""Counts of operators and bytes."""

from __future__ import annotations

import torch

from benchmarking.bench_infer import random_model
from benchmarking.serving.bench_first_text import SHAPE
from benchmarking.serving.count_kernels import (
    KernelCounter,
    RoundShape,
    count_rounds,
    describe_rounds,
    list_round_shapes,
)
from diffusionlm.inference.graphs.graphed_forward import MIN_USES
from diffusionlm.inference.graphs.static_batch import StaticShape


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


def test_rounds_by_graphs() -> None:
    rounds = list_round_shapes(random_model(SHAPE, seed=0), 2, 3)
    assert min(one.num_rows for one in rounds) >= 4
    for one in rounds:
        assert one.shape is None or one.num_rows <= one.shape.num_parts * one.shape.num_queries
    shape, other = StaticShape(3, 4, 64), StaticShape(1, 4, 64)
    few = [RoundShape(8, shape)] * (MIN_USES + 2) + [RoundShape(4, other)] * 2 + [RoundShape(300, None)] * 3
    assert describe_rounds(few) == ["15", "65.9", "80%", "13%", "1", "45%"]
