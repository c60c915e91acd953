"""The Triton kernel, interpreted on a CPU, against the definition and against the eager backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from diffusionlm.kernels.cross_entropy import LossInputs, LossOutput, linear_cross_entropy
from tests.kernels.oracle import assert_loss_close, compute_expected, make_inputs

pytestmark = pytest.mark.usefixtures("interpreted")

OPTIONS: list[tuple[float | None, dict[str, Any]]] = [
    (None, {}),
    (2.0, {"label_smoothing": 0.2, "z_loss": 0.02}),
]
UseBlocks = Callable[[int], None]


@pytest.fixture
def use_blocks(monkeypatch: pytest.MonkeyPatch) -> UseBlocks:
    """Sets the block size of the kernel, so that a small vocabulary has several blocks."""

    def use(size: int) -> None:
        from diffusionlm.kernels import triton_cross_entropy

        monkeypatch.setattr(triton_cross_entropy, "BLOCK", size)

    return use


def triton_loss(
    hidden: torch.Tensor, head: torch.Tensor, loss_inputs: LossInputs, softcap: float | None = None
) -> LossOutput:
    return linear_cross_entropy(hidden, head, loss_inputs, softcap, backend="triton")


@pytest.mark.parametrize(
    ("num_positions", "vocab", "width", "block"),
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
@pytest.mark.parametrize(("softcap", "options"), OPTIONS)
@pytest.mark.parametrize("excluded", [None, -1])
def test_float_equals_the_definition(
    use_blocks: UseBlocks,
    num_positions: int,
    vocab: int,
    width: int,
    block: int,
    softcap: float | None,
    options: dict[str, Any],
    excluded: int | None,
) -> None:
    use_blocks(block)
    excludes = excluded is not None and vocab > 1
    hidden, head, loss_inputs = make_inputs(
        num_positions, vocab, width, torch.float32, excluded_token=vocab - 1 if excludes else None, **options
    )
    output = triton_loss(hidden, head, loss_inputs, softcap)
    assert_loss_close(output, hidden, head, compute_expected(hidden, head, loss_inputs, softcap), 5e-6)
    assert output.nll_N.dtype == torch.float32 and not output.nll_N.requires_grad


@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize(("softcap", "options"), OPTIONS)
def test_bfloat16_agrees_with_eager(
    use_blocks: UseBlocks, softcap: float | None, options: dict[str, Any], block: int
) -> None:
    """The rounded logits are the same: the loss agrees to fp32, the gradients to the rounding of bf16."""
    use_blocks(block)
    hidden, head, loss_inputs = make_inputs(5, 100, 3, torch.bfloat16, excluded_token=99, **options)
    ours, theirs = (
        triton_loss(hidden, head, loss_inputs, softcap),
        linear_cross_entropy(hidden, head, loss_inputs, softcap),
    )
    torch.testing.assert_close(ours.loss_sum, theirs.loss_sum, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(ours.nll_N, theirs.nll_N, rtol=2e-6, atol=2e-6)
    gradients = [torch.autograd.grad(output.loss_sum, (hidden, head)) for output in (ours, theirs)]
    for gradient, reference in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=2e-2, atol=1e-2 * float(reference.abs().max()))


def test_huge_logits(use_blocks: UseBlocks) -> None:
    use_blocks(16)
    hidden, head, loss_inputs = make_inputs(4, 40, 3, torch.float32)
    hidden = (hidden * 1e4).detach().requires_grad_()
    output, expected = triton_loss(hidden, head, loss_inputs), compute_expected(hidden, head, loss_inputs)
    torch.testing.assert_close(output.nll_N.double(), expected.nll_N, rtol=1e-6, atol=1e-2)
    assert_loss_close(
        triton_loss(hidden, head, loss_inputs, 5.0),
        hidden,
        head,
        compute_expected(hidden, head, loss_inputs, 5.0),
        1e-5,
    )


def test_a_block_with_only_the_excluded_token(use_blocks: UseBlocks) -> None:
    use_blocks(1)
    hidden, head, loss_inputs = make_inputs(3, 4, 3, torch.float32, excluded_token=0)
    assert_loss_close(
        triton_loss(hidden, head, loss_inputs), hidden, head, compute_expected(hidden, head, loss_inputs), 5e-6
    )


def test_weight_zero_allows_any_target() -> None:
    """A position that pads a bucket may have the excluded token as its target, or no token at all."""
    hidden, head, _ = make_inputs(4, 9, 3, torch.float32)
    weights = torch.tensor([1.0, 0.0, 0.0, 2.0])
    output = triton_loss(hidden, head, LossInputs(torch.tensor([1, -100, 8, 2]), weights, 8, label_smoothing=0.1))
    selected = weights > 0
    without = LossInputs(torch.tensor([1, 2]), weights[selected], 8, label_smoothing=0.1)
    expected = linear_cross_entropy(hidden[selected], head, without)
    torch.testing.assert_close(output.loss_sum, expected.loss_sum)
    gradients = [torch.autograd.grad(result.loss_sum, (hidden, head)) for result in (output, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_weight_zero_allows_infinite_logits() -> None:
    hidden = torch.tensor([[1.0], [1e30]], requires_grad=True)
    head = torch.tensor([[1e30], [0.5], [-0.5]], requires_grad=True)
    loss = triton_loss(hidden, head, LossInputs(torch.tensor([1, 1]), torch.tensor([1.0, 0.0]), 0)).loss_sum
    grad_hidden, grad_head = torch.autograd.grad(loss, (hidden, head))
    assert grad_hidden.isfinite().all() and grad_head.isfinite().all() and grad_hidden[1] == 0.0
    loss = triton_loss(hidden, head, LossInputs(torch.tensor([1, 1]), torch.tensor([1.0, 0.0]))).loss_sum
    assert torch.autograd.grad(loss, head)[0].isfinite().all()


@pytest.mark.parametrize("target", [-100, 9])
def test_a_target_outside_the_vocabulary_gives_nan(target: int) -> None:
    hidden, head, _ = make_inputs(2, 9, 3, torch.float32)
    output = triton_loss(hidden, head, LossInputs(torch.tensor([target, 1]), torch.ones(2)))
    assert output.nll_N.isnan().tolist() == [True, False] and output.loss_sum.isnan()
