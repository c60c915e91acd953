"""Recording and replay of the matrix products of a step."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.flop_counter import FlopCounterMode

from benchmarking.implementations.matrix_products import MatrixProduct, MatrixSpec, StepProducts
from benchmarking.implementations.training import TrainCase, build_ours
from config.bench.training import BenchShape

TINY = BenchShape.model_validate(
    {
        "shape": "tiny",
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "head_dim": 16,
        "vocab_size": 64,
        "max_position_embeddings": 32,
    }
)


def test_a_linear_layer_has_three_products() -> None:
    weight = torch.randn(5, 4, requires_grad=True)
    x = torch.randn(7, 4, requires_grad=True)
    products = StepProducts.of(lambda: F.linear(x, weight).square().sum().backward())
    dtype = torch.float32
    assert dict(products.plain) == {
        MatrixProduct(MatrixSpec((7, 4), False, dtype), MatrixSpec((4, 5), True, dtype)): 1,
        MatrixProduct(MatrixSpec((5, 7), True, dtype), MatrixSpec((7, 4), False, dtype)): 1,
        MatrixProduct(MatrixSpec((7, 5), False, dtype), MatrixSpec((5, 4), False, dtype)): 1,
    }
    assert not products.attention
    assert products.flops == 3 * 2 * 7 * 4 * 5


def test_products_are_counted_by_kind() -> None:
    a, b, total = torch.randn(3, 2, 4), torch.randn(3, 4, 5), torch.randn(3, 2, 5)
    out = torch.empty(3, 2, 5)

    def step() -> None:
        torch.bmm(a, b)
        torch.bmm(a, b, out=out)
        torch.baddbmm(total, a, b)
        torch.addmm(total[0], a[0], b[0], out=out[0])

    products = StepProducts.of(step)
    assert sorted((product.is_added, len(product.first.shape), times) for product, times in products.plain.items()) == [
        (False, 3, 2),
        (True, 2, 1),
        (True, 3, 1),
    ]
    assert products.count == 4 and products.flops == 2 * 2 * 4 * 5 * (3 * 3 + 1)


@pytest.mark.parametrize(("causal", "heads"), [(False, 6), (True, 3)])
def test_fused_attention_is_its_batched_products(causal: bool, heads: int) -> None:
    q, k, v = (torch.randn(2, 3, 8, 16, requires_grad=True) for _ in range(3))
    products = StepProducts.of(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal).sum().backward())
    assert not products.plain and products.count == 6
    assert products.flops == 6 * 2 * heads * 8 * 8 * 16
    assert {product.first.shape[0] for product in products.attention} == {heads}


def test_the_products_of_a_step_are_those_that_torch_counts() -> None:
    step = build_ours(TrainCase(TINY, "bfloat16", "cpu", threads=1, seed=0)).step
    products = StepProducts.of(step)
    with FlopCounterMode(display=False) as counter:
        step()
    assert products.flops == pytest.approx(counter.get_total_flops(), rel=0.02)
    assert {product.first.dtype for product in products.plain} == {torch.bfloat16} and not products.attention


@pytest.mark.parametrize("is_added", [False, True])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_a_replayed_product_has_shape_layout_and_dtype(batch: tuple[int, ...], is_added: bool) -> None:
    first = MatrixSpec((*batch, 2, 4), True, torch.bfloat16)
    tensor = first.make("cpu")
    assert MatrixSpec.of(tensor) == first and tensor.abs().max() > 0
    product = MatrixProduct(first, MatrixSpec((*batch, 4, 5), False, torch.bfloat16), is_added)
    call = product.prepare("cpu")
    before = call().clone()
    assert before.shape == (*batch, 2, 5) and before.dtype == torch.bfloat16
    # A second call changes the output only if the product is added to it.
    assert torch.equal(call(), before) is not is_added
    again = StepProducts.of(call)
    assert dict(again.plain) == {product: 1}


def test_a_replay_is_the_same_products_again() -> None:
    step = build_ours(TrainCase(TINY, "float32", "cpu", threads=1, seed=0)).step
    products = StepProducts.of(step)
    again = StepProducts.of(products.replay("cpu"))
    assert products.attention and again.count == products.count and again.flops == products.flops
    assert products.plain.items() <= again.plain.items()


@pytest.mark.slow
def test_compiled_attention_runs_inside_of_a_recording() -> None:
    """Objectives with blocks use it on a GPU; torch's eager form of it refuses a dispatch mode."""
    q = torch.randn(1, 2, 128, 16)
    attend = torch.compile(flex_attention)
    outputs = []
    StepProducts.of(lambda: outputs.append(attend(q, q, q)))
    torch.testing.assert_close(outputs[0], F.scaled_dot_product_attention(q, q, q))
