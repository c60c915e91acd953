"""The fused head and loss on a GPU: Triton's kernel against the definition, its memory, and that nothing waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diffusionlm.kernels.chunking import CUDA_CHUNK_BYTES
from diffusionlm.kernels.cross_entropy import LossBackend, LossInputs, linear_cross_entropy
from tests.kernels.oracle import assert_scored, expect, inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
ALL_OPTIONS: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 0.01}


def on_gpu(loss_inputs: LossInputs) -> LossInputs:
    return LossInputs(
        loss_inputs.targets_N.cuda(),
        loss_inputs.weights_N.cuda(),
        loss_inputs.excluded_token,
        label_smoothing=loss_inputs.label_smoothing,
        z_loss=loss_inputs.z_loss,
    )


@pytest.fixture(autouse=True)
def _exact_products() -> Any:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("backend", ["triton", "eager"])
@pytest.mark.parametrize("options", [{}, ALL_OPTIONS])
@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize(
    ("rows", "vocab", "width"), [(1, 1, 1), (7, 2, 3), (129, 1000, 9), (7, 1031, 5), (5, 16384, 8), (5, 50257, 8)]
)
@pytest.mark.parametrize("mode", [{}, {"gradients": "recompute"}])
def test_float_is_the_definition(
    rows: int,
    vocab: int,
    width: int,
    cap: float | None,
    options: dict[str, Any],
    backend: LossBackend,
    mode: dict[str, Any],
) -> None:
    excluded = vocab - 1 if vocab > 1 else None
    hidden, head, loss_inputs = inputs(rows, vocab, width, torch.float32, excluded_token=excluded, **options)
    expected = expect(hidden, head, loss_inputs, cap)
    hidden, head = (each.detach().cuda().requires_grad_() for each in (hidden, head))
    scored = linear_cross_entropy(hidden, head, on_gpu(loss_inputs), cap, backend=backend, **mode)
    scored_on_cpu = type(scored)(
        scored.loss_sum.cpu(),
        scored.nll_N.cpu(),
        None,
        scored.logsumexp_N.cpu(),  # type: ignore[union-attr]
        scored.is_hit_N.cpu(),  # type: ignore[union-attr]
    )
    gpu_expected = type(expected)(
        expected.loss_sum,
        expected.nll_N,
        expected.logsumexp_N,
        expected.is_hit_N,
        expected.grad_hidden.cuda(),
        expected.grad_head.cuda(),
    )
    assert_scored(scored_on_cpu, hidden, head, gpu_expected, 2e-5)


@pytest.mark.parametrize("mode", [{}, {"gradients": "recompute"}])
def test_bfloat16_and_a_given_buffer(mode: dict[str, Any]) -> None:
    """The head's gradient is summed in fp32: from bf16 factors, in either place, over chunks."""
    hidden, head, loss_inputs = inputs(3000, 777, 64, torch.bfloat16, excluded_token=776, **ALL_OPTIONS)
    hidden = hidden.detach() / 8.0  # logits of a few units, as they are in training
    expected = expect(hidden, head, loss_inputs)
    hidden, head = (each.detach().cuda().requires_grad_() for each in (hidden, head))
    buffer = torch.ones(777, 64, device="cuda")
    scored = linear_cross_entropy(hidden, head, on_gpu(loss_inputs), head_grad=buffer, chunk_bytes=1, **mode)
    torch.testing.assert_close(scored.nll_N.double().cpu(), expected.nll_N, rtol=2e-2, atol=5e-2)
    scored.loss_sum.backward()
    assert head.grad is None and hidden.grad is not None
    for ours, theirs in ((buffer - 1.0, expected.grad_head), (hidden.grad, expected.grad_hidden)):
        flat, other = ours.double().cpu().flatten(), theirs.flatten()
        assert torch.nn.functional.cosine_similarity(flat, other, dim=0) > 0.999
    own = linear_cross_entropy(hidden, head, on_gpu(loss_inputs), chunk_bytes=1, **mode)
    (grad_head,) = torch.autograd.grad(own.loss_sum, head)
    torch.testing.assert_close(grad_head.float(), buffer - 1.0, rtol=2e-2, atol=2e-3 * float(grad_head.abs().max()))


@pytest.mark.parametrize("mode", [{}, {"gradients": "recompute"}])
def test_nothing_waits_for_the_device(mode: dict[str, Any]) -> None:
    hidden, head, loss_inputs = inputs(300, 1031, 16, torch.float32, excluded_token=1030, **ALL_OPTIONS)
    hidden, head, loss_inputs = (
        hidden.detach().cuda().requires_grad_(),
        head.detach().cuda().requires_grad_(),
        on_gpu(loss_inputs),
    )
    linear_cross_entropy(hidden, head, loss_inputs, **mode).loss_sum.backward()  # compiles, and that may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        for backend in ("triton", "eager"):
            linear_cross_entropy(hidden, head, loss_inputs, 3.0, backend=backend, **mode).loss_sum.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_memory_is_one_chunk_beside_the_gradients() -> None:
    rows, vocab, width = 16384, 65536, 512
    hidden = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    head = torch.randn(vocab, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    loss_inputs = LossInputs(torch.randint(0, vocab, (rows,), device="cuda"), torch.rand(rows, device="cuda"))
    linear_cross_entropy(hidden, head, loss_inputs).loss_sum.backward()
    hidden.grad = head.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    linear_cross_entropy(hidden, head, loss_inputs).loss_sum.backward()
    gradients = rows * width * 2 + vocab * width * (4 + 2)
    assert torch.cuda.max_memory_allocated() - before < gradients + CUDA_CHUNK_BYTES + (64 << 20)
