"""What a step computes and moves, against counts on paper."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from diffusionlm.kernels.cross_entropy import LossInputs
from diffusionlm.models.patterns import Bidirectional
from diffusionlm.models.transformer import Transformer
from diffusionlm.training.block_wrapping import checkpoint_activations
from profiling.flops import step_flops
from profiling.roofline.operators import Operator, record_operators

MakeModel = Callable[..., Transformer]
B, L = 2, 8
WIDTHS = {"hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 8}


def record_step(model: Transformer, dtype: torch.dtype = torch.float32) -> list[Operator]:
    """Forward and backward at all positions, clipping, and a step of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    loss_inputs = LossInputs(torch.zeros(B * L, dtype=torch.int64), torch.ones(B * L))
    with record_operators(model, [optimizer]) as recorder:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            output = model(
                torch.zeros(B, L, dtype=torch.int64),
                pattern=Bidirectional(),
                output_positions=torch.arange(B * L),
                loss_inputs=loss_inputs,
            )
        output.loss_sum.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return recorder.operators


def flops_of(operators: Sequence[Operator], part: str, phase: str) -> int:
    return sum(operator.flops for operator in operators if (operator.part, operator.phase) == (part, phase))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_of_each_part(tiny_model: MakeModel, dtype: torch.dtype) -> None:
    model = tiny_model(num_hidden_layers=2, **WIDTHS)
    operators = record_step(model, dtype)
    D, F, V, rows = 24, 40, model.config.vocab_size, B * L
    forward = {
        "projections": 2 * 2 * rows * D * 4 * D,
        "attention": 2 * 2 * 2 * B * L * L * D,
        "feed-forward": 2 * 2 * rows * 3 * D * F,
    }
    for part, flops in forward.items():
        assert flops_of(operators, part, "forward") == flops, part
        assert flops_of(operators, part, "backward") == 2 * flops, part
    assert flops_of(operators, "head and loss", "forward") == 3 * 2 * rows * D * V  # with both gradients
    total = step_flops(model.config, V, positions=rows, scored=rows, pairs=[B * L * L] * 2)
    assert sum(operator.flops for operator in operators) == total
    assert {operator.dtype for operator in operators if operator.products} == {dtype}


def test_layers_of_products(tiny_model: MakeModel) -> None:
    operators = record_step(tiny_model(num_hidden_layers=2, **WIDTHS))
    for phase in ("forward", "backward"):
        flops = [sum(op.flops for op in operators if op.phase == phase and op.layer == layer) for layer in (0, 1)]
        assert flops[0] == flops[1] > 0


def test_recomputed_products(tiny_model: MakeModel) -> None:
    """Those of the forward but the last one of a block, whose output no backward needs: torch stops before it."""
    model = tiny_model(num_hidden_layers=2, **WIDTHS)
    checkpoint_activations(model, "full")
    operators = record_step(model)
    for part, share in (("projections", 1.0), ("attention", 1.0), ("feed-forward", 2 / 3)):
        assert flops_of(operators, part, "recomputed") == share * flops_of(operators, part, "forward") > 0


def test_bytes_of_the_optimizer(tiny_model: MakeModel) -> None:
    """AdamW reads weights, gradients and two moments, and writes all but the gradients."""
    model = tiny_model(**WIDTHS)
    [update] = [op for op in record_step(model) if op.name == "_fused_adamw_"]
    sizes = [parameter.numel() for parameter in model.parameters()]
    counters = 4 * len(sizes)  # number of steps of each tensor, which is read
    assert update.part == "optimizer" and update.num_bytes == 28 * sum(sizes) + counters


def test_bytes_of_casts(tiny_model: MakeModel) -> None:
    """Autocast reads each weight of a projection in float32 and writes it in bfloat16."""
    model = tiny_model(num_hidden_layers=1, **WIDTHS)
    sizes = {
        tuple(weight.shape): 6 * weight.numel()
        for name, weight in model.named_parameters()
        if name.endswith("proj.weight")
    }
    casts = [op for op in record_step(model, torch.bfloat16) if op.part == "casts" and op.phase == "forward"]
    found = {op.call.tensors[0].shape: op.num_bytes for op in casts if op.call is not None}
    assert {shape: found.get(shape) for shape in sizes} == sizes


class TestBytesOfAnOperator:
    """Bytes of single operators, within the forward of a model."""

    @pytest.fixture
    def count(self, tiny_model: MakeModel) -> Callable[[Callable[[], Tensor]], int]:
        model = tiny_model(**WIDTHS)

        def run(call: Callable[[], Tensor]) -> int:
            with record_operators(model) as recorder:
                call()
            [operator] = recorder.operators
            return operator.num_bytes

        return run

    def test_elementwise(self, count: Callable[[Callable[[], Tensor]], int]) -> None:
        x, row = torch.ones(4, 6), torch.ones(6)
        assert count(lambda: x + x) == 3 * 4 * 24
        assert count(lambda: x * row.expand(4, 6)) == 4 * (24 + 6 + 24)
        assert count(lambda: x.add_(1.0)) == 2 * 4 * 24
        assert count(lambda: x.zero_()) == 4 * 24
        assert count(lambda: x.double()) == 12 * 24

    def test_rows(self, count: Callable[[Callable[[], Tensor]], int]) -> None:
        table, indices = torch.ones(100, 6), torch.tensor([1, 2, 3])
        rows = torch.ones(3, 6)
        assert count(lambda: table[indices]) == 2 * 4 * 18 + 24
        assert count(lambda: table.index_copy_(0, indices, rows)) == 2 * 4 * 18 + 24
        assert count(lambda: table.index_add_(0, indices, rows)) == 3 * 4 * 18 + 24

    def test_product(self, count: Callable[[Callable[[], Tensor]], int]) -> None:
        left, right, out = torch.ones(3, 4), torch.ones(4, 5), torch.ones(3, 5)
        assert count(lambda: torch.mm(left, right, out=out)) == 4 * (12 + 20 + 15)
        assert count(lambda: torch.addmm(out, left, right, out=out)) == 4 * (12 + 20 + 2 * 15)
