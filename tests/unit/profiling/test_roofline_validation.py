"""Rates of this machine's operators, and the prediction of its steps. Times are not asserted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarking.implementations.training import TrainCase, build_ours
from config.bench.training import BenchShape, BenchTrainConfig, BenchTrainSection
from profiling.roofline import calibration
from profiling.roofline.calibration import Calibration, kind_of
from profiling.roofline.operators import Operator, OperatorCall, TensorUse, record_operators
from profiling.roofline.validation import HOST, predict_parts, validate

SHAPE = BenchShape(
    name="small",
    vocab_size=64,
    batch_size=2,
    num_hidden_layers=1,
    hidden_size=32,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=48,
    max_position_embeddings=16,
)


def addition(rows: int, part: str = "norms", dtype: torch.dtype = torch.float32) -> Operator:
    x = torch.ones(rows, 16, dtype=dtype)
    uses = TensorUse(0, x.nbytes, dtype)
    call = OperatorCall.of(torch.ops.aten.add.Tensor, (x, x), {})
    return Operator("add", part, "forward", None, (), (uses, uses), (uses,), call, 0.0)


def test_kinds_of_operators() -> None:
    large = addition(128)
    assert kind_of(large) == kind_of(addition(127)) != kind_of(addition(16))
    assert kind_of(large) != kind_of(addition(256, dtype=torch.bfloat16))
    transposed = replace(large, call=OperatorCall.of(torch.ops.aten.add.Tensor, (torch.ones(16, 128).T,) * 2, {}))
    assert kind_of(large) != kind_of(transposed)


def test_prediction_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call takes the overhead, and for each byte what the largest call of its kind takes beyond it."""
    operators = [addition(128), addition(64, "residuals"), addition(128, "residuals")]
    model = Calibration(operators)
    assert model.num_kinds == 1
    ticks = iter(range(1000))
    monkeypatch.setattr(calibration, "read_clock", lambda: float(next(ticks)))  # every measurement takes a second
    monkeypatch.setattr(calibration, "CHAIN_LENGTH", 5)
    model.sample()
    overhead = 1 / 5
    assert predict_parts(operators, model, 0)["norms"] == pytest.approx(1.0)
    parts = predict_parts(operators, model)
    assert parts["residuals"] == pytest.approx(overhead + (1.0 - overhead) / 2 + 1.0)
    assert parts[HOST] == 0.0  # a third of the chain is less than the overhead


def test_calls_are_repeated_with_new_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operator of a step can be called again, and leaves the model as it is."""
    monkeypatch.setattr(calibration, "COLD_BYTES", 1 << 10)
    implementation = build_ours(TrainCase(SHAPE, "bfloat16", "cpu", 1, 0))
    model = implementation.model
    implementation.step()
    with record_operators(model, implementation.optimizers) as recorder:  # type: ignore[arg-type]
        implementation.step()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    Calibration(recorder.operators).sample()
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert all(operator.seconds >= 0.0 for operator in recorder.operators)


def test_report_of_a_small_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "COLD_BYTES", 1 << 10)
    bench = BenchTrainSection(rounds=2, warmup=0, threads=1, objectives=("masked_diffusion", "block_diffusion"))
    report = validate(BenchTrainConfig(shapes=(SHAPE,), bench=bench))
    summary, parts = report.tables
    assert summary.column("objective") == 2 * ["masked diffusion"] + 2 * ["block diffusion, 16"]
    assert summary.column("precision") == 2 * ["float32", "bfloat16"]
    assert len(parts.rows) == 4 and "optimizer" in parts.header
