"""Triton's kernel, interpreted on a CPU, against the definition and against torch's way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from diffusionlm.kernels.cross_entropy import LossInputs, LossOutput, linear_cross_entropy
from tests.kernels.oracle import assert_scored, expect, inputs

pytestmark = pytest.mark.usefixtures("interpreted")

OPTIONS: list[tuple[float | None, dict[str, Any]]] = [
    (None, {}),
    (2.0, {"label_smoothing": 0.2, "z_loss": 0.02}),
]
UseBlocks = Callable[[int], None]


@pytest.fixture
def use_blocks(monkeypatch: pytest.MonkeyPatch) -> UseBlocks:
    """Blocks of so many logits, so that few make several."""

    def use(size: int) -> None:
        from diffusionlm.kernels import triton_cross_entropy

        monkeypatch.setattr(triton_cross_entropy, "BLOCK", size)

    return use


def triton_score(
    hidden: torch.Tensor, head: torch.Tensor, loss_inputs: LossInputs, cap: float | None = None, **mode: Any
) -> LossOutput:
    return linear_cross_entropy(hidden, head, loss_inputs, cap, backend="triton", **mode)


@pytest.mark.parametrize(
    ("rows", "vocab", "width", "block"),
    [
        (1, 1, 1, 64),
        (7, 2, 3, 64),
        (7, 5, 3, 64),
        (2, 1000, 5, 256),
        (3, 1031, 5, 256),
        (2, 1031, 5, 2048),
        (3, 64, 3, 16),
    ],
)
@pytest.mark.parametrize(("cap", "options"), OPTIONS)
@pytest.mark.parametrize("excluded", [None, -1])
def test_float_is_the_definition(
    use_blocks: UseBlocks,
    rows: int,
    vocab: int,
    width: int,
    block: int,
    cap: float | None,
    options: dict[str, Any],
    excluded: int | None,
) -> None:
    use_blocks(block)
    excludes = excluded is not None and vocab > 1
    hidden, head, loss_inputs = inputs(
        rows, vocab, width, torch.float32, excluded_token=vocab - 1 if excludes else None, **options
    )
    scored = triton_score(hidden, head, loss_inputs, cap)
    assert_scored(scored, hidden, head, expect(hidden, head, loss_inputs, cap), 5e-6)
    assert scored.nll_N.dtype == torch.float32 and not scored.nll_N.requires_grad


def test_many_rows_in_several_chunks(use_blocks: UseBlocks) -> None:
    use_blocks(16)
    hidden, head, loss_inputs = inputs(129, 11, 3, torch.float32, excluded_token=5)
    assert_scored(
        triton_score(hidden, head, loss_inputs, chunk_bytes=1), hidden, head, expect(hidden, head, loss_inputs), 5e-6
    )


@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize(("cap", "options"), OPTIONS)
def test_agrees_with_torch_in_bfloat16(
    use_blocks: UseBlocks, cap: float | None, options: dict[str, Any], block: int
) -> None:
    """From the same rounded logits: loss to fp32, gradients to their own rounding."""
    use_blocks(block)
    hidden, head, loss_inputs = inputs(5, 100, 3, torch.bfloat16, excluded_token=99, **options)
    ours, theirs = triton_score(hidden, head, loss_inputs, cap), linear_cross_entropy(hidden, head, loss_inputs, cap)
    torch.testing.assert_close(ours.loss_sum, theirs.loss_sum, rtol=2e-6, atol=2e-6)
    for one, other in (
        (ours.nll_N, theirs.nll_N),
        (ours.logsumexp_N, theirs.logsumexp_N),
        (ours.is_hit_N, theirs.is_hit_N),
    ):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)
    gradients = [torch.autograd.grad(scored.loss_sum, (hidden, head)) for scored in (ours, theirs)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=1e-2 * float(other.abs().max()))


def test_recomputing_and_a_given_buffer_change_no_number(use_blocks: UseBlocks) -> None:
    use_blocks(16)
    hidden, head, loss_inputs = inputs(5, 40, 3, torch.float32, excluded_token=39, z_loss=0.1)
    plain = triton_score(hidden, head, loss_inputs)
    expected = torch.autograd.grad(plain.loss_sum, (hidden, head))
    again = triton_score(hidden, head, loss_inputs, gradients="recompute")
    assert torch.equal(plain.loss_sum, again.loss_sum) and torch.equal(plain.nll_N, again.nll_N)
    for one, other in zip(torch.autograd.grad(again.loss_sum, (hidden, head)), expected, strict=True):
        assert torch.equal(one, other)
    buffer = torch.ones_like(head, requires_grad=False)
    triton_score(hidden, head, loss_inputs, head_grad=buffer).loss_sum.backward()
    assert head.grad is None
    torch.testing.assert_close(buffer - 1.0, expected[1], rtol=1e-5, atol=1e-6)


def test_of_equal_logits_the_lowest_id_is_the_likeliest(use_blocks: UseBlocks) -> None:
    """Within a block and between blocks."""
    head = torch.zeros(40, 1)
    head[[5, 9, 21, 37]] = 3.0
    for block in (8, 64):
        use_blocks(block)
        for excluded, best in ((None, 5), (5, 9), (9, 5)):
            targets = torch.tensor([0, 5, 9, 21, 37])
            is_hit_N = triton_score(torch.ones(5, 1), head, LossInputs(targets, torch.ones(5), excluded)).is_hit_N
            assert is_hit_N is not None and is_hit_N.tolist() == (targets == best).tolist()


def test_huge_logits(use_blocks: UseBlocks) -> None:
    use_blocks(16)
    hidden, head, loss_inputs = inputs(4, 40, 3, torch.float32)
    hidden = (hidden * 1e4).detach().requires_grad_()
    scored, expected = triton_score(hidden, head, loss_inputs), expect(hidden, head, loss_inputs)
    torch.testing.assert_close(scored.nll_N.double(), expected.nll_N, rtol=1e-6, atol=1e-2)
    assert_scored(
        triton_score(hidden, head, loss_inputs, 5.0), hidden, head, expect(hidden, head, loss_inputs, 5.0), 1e-5
    )


def test_a_block_of_nothing_but_the_excluded_token(use_blocks: UseBlocks) -> None:
    use_blocks(1)
    hidden, head, loss_inputs = inputs(3, 4, 3, torch.float32, excluded_token=0)
    assert_scored(triton_score(hidden, head, loss_inputs), hidden, head, expect(hidden, head, loss_inputs), 5e-6)


def test_rows_of_weight_zero_may_be_anything() -> None:
    """Rows that fill a bucket may ask for no token at all, or for the excluded one."""
    hidden, head, _ = inputs(4, 9, 3, torch.float32)
    weights = torch.tensor([1.0, 0.0, 0.0, 2.0])
    scored = triton_score(hidden, head, LossInputs(torch.tensor([1, -100, 8, 2]), weights, 8, label_smoothing=0.1))
    some = weights > 0
    without = LossInputs(torch.tensor([1, 2]), weights[some], 8, label_smoothing=0.1)
    expected = linear_cross_entropy(hidden[some], head, without)
    torch.testing.assert_close(scored.loss_sum, expected.loss_sum)
    gradients = [torch.autograd.grad(each.loss_sum, (hidden, head)) for each in (scored, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_row_of_weight_zero_may_have_infinite_logits() -> None:
    hidden = torch.tensor([[1.0], [1e30]], requires_grad=True)
    head = torch.tensor([[1e30], [0.5], [-0.5]], requires_grad=True)
    loss = triton_score(hidden, head, LossInputs(torch.tensor([1, 1]), torch.tensor([1.0, 0.0]), 0)).loss_sum
    grad_hidden, grad_head = torch.autograd.grad(loss, (hidden, head))
    assert grad_hidden.isfinite().all() and grad_head.isfinite().all() and grad_hidden[1] == 0.0
    loss = triton_score(hidden, head, LossInputs(torch.tensor([1, 1]), torch.tensor([1.0, 0.0]))).loss_sum
    assert torch.autograd.grad(loss, head)[0].isfinite().all()


@pytest.mark.parametrize("target", [-100, 9])
def test_a_target_that_is_no_token_makes_the_loss_no_number(target: int) -> None:
    hidden, head, _ = inputs(2, 9, 3, torch.float32)
    scored = triton_score(hidden, head, LossInputs(torch.tensor([target, 1]), torch.ones(2)))
    assert scored.nll_N.isnan().tolist() == [True, False] and scored.loss_sum.isnan()


def test_an_excluded_target_is_impossible() -> None:
    hidden, head, _ = inputs(2, 5, 3, torch.float32)
    scored = triton_score(hidden, head, LossInputs(torch.tensor([4, 1]), torch.tensor([0.0, 1.0]), 4))
    assert scored.nll_N.isinf().tolist() == [True, False] and scored.loss_sum.isfinite()
    assert torch.autograd.grad(scored.loss_sum, head)[0][4].eq(0.0).all()


def test_nothing_to_score() -> None:
    hidden, head, loss_inputs = inputs(0, 9, 3, torch.float32)
    scored = triton_score(hidden, head, loss_inputs)
    assert scored.loss_sum == 0.0
    assert torch.autograd.grad(scored.loss_sum, head)[0].eq(0.0).all()
