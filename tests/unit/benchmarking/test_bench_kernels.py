"""The benchmark of the fused loss compares implementations of the same gradients."""

from __future__ import annotations

import pytest
import torch

from benchmarking import bench_kernels
from benchmarking.bench_kernels import (
    BASELINE,
    IGNORE_INDEX,
    OURS,
    HeadCase,
    build_losses,
    compare_losses,
    make_inputs,
    measure_error,
    step,
)

CASE = HeadCase(12, 5, 4, 31, torch.float32, "cpu", 1)


def test_all_implementations_compute_the_same_gradients() -> None:
    inputs = make_inputs(CASE)
    assert inputs.targets_P.eq(IGNORE_INDEX).sum() == 7 and inputs.targets_P[inputs.positions_N].ge(0).all()
    losses = build_losses("cpu")
    expected = step(losses["full logits"], inputs)
    assert expected[0].ne(0.0).any(dim=1).sum() == 5
    for loss in losses.values():
        torch.testing.assert_close(step(loss, inputs), expected)
        assert measure_error(CASE, loss) < 1e-6
    assert measure_error(CASE, lambda inputs: losses[OURS](inputs) * 1.01) == pytest.approx(0.01, rel=1e-3)


def test_a_row_for_each_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_kernels, "measure_peak", lambda case, name: 3 << 20)
    rows = compare_losses(CASE, rounds=2)
    assert [row[1] for row in rows] == list(build_losses("cpu"))
    names = (OURS, BASELINE)
    assert [row[1] for row in compare_losses(CASE, rounds=2, names=names)] == list(names)
    assert {row[0] for row in rows} == {"5 of 12 x 4 x 31 float32"} and {row[5] for row in rows} == {"3"}
    assert CASE.teraflops == pytest.approx(6 * 5 * 4 * 31 / 1e12)
