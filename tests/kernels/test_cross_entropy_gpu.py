"""The fused loss on a GPU: the Triton kernel against the definition, its memory, and no host syncs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from diffusionlm.kernels import chunked_loss
from diffusionlm.kernels.cross_entropy import LossBackend, LossInputs, linear_cross_entropy
from tests.kernels.oracle import assert_loss_close, compute_expected, make_inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
ALL_OPTIONS: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 0.01}


def on_gpu(loss_inputs: LossInputs) -> LossInputs:
    return replace(loss_inputs, targets_N=loss_inputs.targets_N.cuda(), weights_N=loss_inputs.weights_N.cuda())


@pytest.fixture(autouse=True)
def _exact_products() -> Any:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("backend", ["triton", "eager"])
@pytest.mark.parametrize("options", [{}, ALL_OPTIONS])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(
    ("num_positions", "vocab", "width"),
    [(1, 1, 1), (7, 2, 3), (129, 1000, 9), (7, 1031, 5), (5, 16384, 8), (5, 50257, 8)],
)
def test_float_equals_the_definition(
    num_positions: int,
    vocab: int,
    width: int,
    softcap: float | None,
    options: dict[str, Any],
    backend: LossBackend,
) -> None:
    excluded = vocab - 1 if vocab > 1 else None
    hidden, head, loss_inputs = make_inputs(
        num_positions, vocab, width, torch.float32, excluded_token=excluded, **options
    )
    expected = compute_expected(hidden, head, loss_inputs, softcap)
    hidden, head = (tensor.detach().cuda().requires_grad_() for tensor in (hidden, head))
    output = linear_cross_entropy(hidden, head, on_gpu(loss_inputs), softcap, backend=backend)
    assert_loss_close(output, hidden, head, expected, 2e-5)


def test_bfloat16_sums_the_head_gradient_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over several chunks with bf16 factors."""
    monkeypatch.setattr(chunked_loss, "CUDA_CHUNK_BYTES", 1)
    hidden, head, loss_inputs = make_inputs(3000, 777, 64, torch.bfloat16, excluded_token=776, **ALL_OPTIONS)
    hidden = hidden.detach() / 8.0  # logits of a few units, as in training
    expected = compute_expected(hidden, head, loss_inputs)
    hidden, head = (tensor.detach().cuda().requires_grad_() for tensor in (hidden, head))
    output = linear_cross_entropy(hidden, head, on_gpu(loss_inputs))
    torch.testing.assert_close(output.nll_N.double().cpu(), expected.nll_N, rtol=2e-2, atol=5e-2)
    gradients = torch.autograd.grad(output.loss_sum, (hidden, head))
    for gradient, reference in zip(gradients, (expected.grad_hidden, expected.grad_head), strict=True):
        similarity = torch.nn.functional.cosine_similarity(
            gradient.double().cpu().flatten(), reference.flatten(), dim=0
        )
        assert similarity > 0.999


def test_no_host_sync() -> None:
    hidden, head, loss_inputs = make_inputs(300, 1031, 16, torch.float32, excluded_token=1030, **ALL_OPTIONS)
    hidden, head, loss_inputs = (
        hidden.detach().cuda().requires_grad_(),
        head.detach().cuda().requires_grad_(),
        on_gpu(loss_inputs),
    )
    linear_cross_entropy(hidden, head, loss_inputs).loss_sum.backward()  # compiles, which may sync
    torch.cuda.set_sync_debug_mode("error")
    try:
        for backend in ("triton", "eager"):
            linear_cross_entropy(hidden, head, loss_inputs, 3.0, backend=backend).loss_sum.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_memory_is_one_chunk_beside_the_gradients() -> None:
    num_positions, vocab, width = 16384, 65536, 512
    hidden = torch.randn(num_positions, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    head = torch.randn(vocab, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    loss_inputs = LossInputs(
        torch.randint(0, vocab, (num_positions,), device="cuda"), torch.rand(num_positions, device="cuda")
    )
    linear_cross_entropy(hidden, head, loss_inputs).loss_sum.backward()
    hidden.grad = head.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    linear_cross_entropy(hidden, head, loss_inputs).loss_sum.backward()
    gradients = num_positions * width * 2 + vocab * width * (4 + 2)
    assert torch.cuda.max_memory_allocated() - before < gradients + chunked_loss.CUDA_CHUNK_BYTES + (64 << 20)
