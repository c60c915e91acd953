"""The fused head and loss in torch, in all its modes, against its definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diffusionlm.kernels import chunked_loss, chunking, cross_entropy
from diffusionlm.kernels.chunking import chunk_size
from diffusionlm.kernels.cross_entropy import LossInputs, linear_cross_entropy
from tests.kernels.oracle import assert_scored, expect, inputs

OPTIONS: list[tuple[float | None, dict[str, Any]]] = [
    (None, {}),
    (None, {"label_smoothing": 0.1, "z_loss": 0.01}),
    (2.0, {"label_smoothing": 0.2, "z_loss": 0.02}),
]
MODES: list[dict[str, Any]] = [{}, {"gradients": "recompute"}]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("rows", "vocab", "width"), [(1, 2, 1), (7, 5, 3), (129, 11, 3), (2, 1031, 5), (5, 1, 3)])
@pytest.mark.parametrize(("cap", "options"), OPTIONS)
@pytest.mark.parametrize("excludes", [False, True])
def test_double_is_the_definition(
    rows: int, vocab: int, width: int, cap: float | None, options: dict[str, Any], excludes: bool, mode: dict[str, Any]
) -> None:
    excluded = vocab // 2 if excludes and vocab > 1 else None
    hidden, head, loss_inputs = inputs(rows, vocab, width, excluded_token=excluded, **options)
    scored = linear_cross_entropy(hidden, head, loss_inputs, cap, chunk_bytes=1, **mode)
    assert_scored(scored, hidden, head, expect(hidden, head, loss_inputs, cap), 1e-11)
    assert not any(each.requires_grad for each in (scored.nll_N, scored.logsumexp_N, scored.is_hit_N))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-6), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("mode", MODES)
def test_narrow_dtypes_are_within_their_precision(dtype: torch.dtype, tolerance: float, mode: dict[str, Any]) -> None:
    hidden, head, loss_inputs = inputs(70, 33, 5, dtype, excluded_token=32, label_smoothing=0.1, z_loss=0.01)
    scored = linear_cross_entropy(hidden, head, loss_inputs, chunk_bytes=1, **mode)
    expected = expect(hidden, head, loss_inputs)
    assert scored.loss_sum.dtype == scored.nll_N.dtype == scored.logsumexp_N.dtype == torch.float32
    torch.testing.assert_close(scored.nll_N.double(), expected.nll_N, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(scored.loss_sum.double(), expected.loss_sum, rtol=tolerance, atol=tolerance)
    gradients = torch.autograd.grad(scored.loss_sum, (hidden, head))
    for our, their in zip(gradients, (expected.grad_hidden, expected.grad_head), strict=True):
        assert our.dtype == dtype
        torch.testing.assert_close(our.double(), their, rtol=0.0, atol=tolerance * float(their.abs().max()))


@pytest.mark.parametrize("mode", MODES)
def test_gradcheck(mode: dict[str, Any]) -> None:
    hidden, head, loss_inputs = inputs(4, 6, 3, excluded_token=5, label_smoothing=0.2, z_loss=0.1)
    assert torch.autograd.gradcheck(
        lambda h, w: linear_cross_entropy(h, w, loss_inputs, 2.0, **mode).loss_sum, (hidden, head), raise_exception=True
    )


def test_of_equal_logits_the_lowest_id_is_the_likeliest() -> None:
    head = torch.tensor([[1.0], [3.0], [3.0], [2.0], [3.0]])
    for excluded, targets, hits in (
        (None, [0, 1, 2, 3, 4], [False, True, False, False, False]),
        (1, [0, 1, 2, 3, 4], [False, False, True, False, False]),
    ):
        loss_inputs = LossInputs(torch.tensor(targets), torch.ones(5), excluded)
        assert linear_cross_entropy(torch.ones(5, 1), head, loss_inputs).is_hit_N.tolist() == hits  # type: ignore[union-attr]


def test_an_excluded_target_is_impossible_and_gives_its_column_no_gradient() -> None:
    hidden, head, loss_inputs = inputs(3, 5, 4)
    loss_inputs = LossInputs(torch.tensor([4, 1, 4]), torch.tensor([1.0, 1.0, 0.0]), 4)
    scored = linear_cross_entropy(hidden, head, loss_inputs)
    assert scored.nll_N.isinf().tolist() == [True, False, True] and scored.loss_sum.isinf()
    assert torch.autograd.grad(scored.loss_sum, head)[0][4].eq(0.0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_backward_twice_gives_the_same(dtype: torch.dtype) -> None:
    """The last one overwrites what the forward made; none before it may."""
    hidden, head, loss_inputs = inputs(6, 7, 3, dtype)
    loss = linear_cross_entropy(hidden, head, loss_inputs).loss_sum
    first = torch.autograd.grad(loss * 3.0, (hidden, head), retain_graph=True)
    copies = [each.clone() for each in first]
    last = torch.autograd.grad(loss * 3.0, (hidden, head))
    for one, copy, other in zip(first, copies, last, strict=True):
        assert torch.equal(one, copy) and torch.equal(one, other)


@pytest.mark.parametrize("mode", MODES)
def test_second_derivatives_are_refused(mode: dict[str, Any]) -> None:
    hidden, head, loss_inputs = inputs(3, 5, 2)
    loss = linear_cross_entropy(hidden, head, loss_inputs, **mode).loss_sum
    (gradient,) = torch.autograd.grad(loss.square(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize("mode", MODES)
def test_a_given_buffer_takes_the_gradient_of_the_head(mode: dict[str, Any]) -> None:
    hidden, head, loss_inputs = inputs(80, 9, 3, z_loss=0.1)
    expected = torch.autograd.grad(linear_cross_entropy(hidden, head, loss_inputs).loss_sum, (hidden, head))
    buffer = torch.full_like(head, 2.0, requires_grad=False)
    linear_cross_entropy(hidden, head, loss_inputs, head_grad=buffer, chunk_bytes=1, **mode).loss_sum.backward()
    assert head.grad is None and hidden.grad is not None
    torch.testing.assert_close(buffer - 2.0, expected[1])
    torch.testing.assert_close(hidden.grad, expected[0])
    with torch.no_grad():
        before = buffer.clone()
        linear_cross_entropy(hidden, head, loss_inputs, head_grad=buffer, **mode)
    linear_cross_entropy(hidden, head.detach(), loss_inputs, head_grad=buffer, **mode).loss_sum.backward()
    assert torch.equal(buffer, before), "nobody asked for the head's gradient"


def test_a_buffer_beside_recomputing_knows_what_the_loss_is_multiplied_with() -> None:
    hidden, head, loss_inputs = inputs(6, 9, 3)
    (expected,) = torch.autograd.grad(linear_cross_entropy(hidden, head, loss_inputs).loss_sum * 5.0, head)
    buffer = torch.zeros_like(head)
    (linear_cross_entropy(hidden, head, loss_inputs, gradients="recompute", head_grad=buffer).loss_sum * 5.0).backward()
    torch.testing.assert_close(buffer, expected)


@pytest.mark.parametrize(
    "buffer", [torch.zeros(9, 4), torch.zeros(9, 3, dtype=torch.float16), torch.zeros(9, 3, device="meta")]
)
def test_a_buffer_that_does_not_fit_is_refused(buffer: torch.Tensor) -> None:
    hidden, head, loss_inputs = inputs(6, 9, 3, torch.float32)
    with pytest.raises(ValueError, match=r"head_grad is .*needs torch.float32 \(9, 3\) on cpu"):
        linear_cross_entropy(hidden, head, loss_inputs, head_grad=buffer)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("frozen", ["hidden", "head"])
def test_what_is_frozen_costs_nothing(mode: dict[str, Any], frozen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, head, loss_inputs = inputs(6, 9, 3)
    made: list[tuple[bool, bool]] = []
    compute_loss_in_chunks = chunked_loss.compute_loss_in_chunks

    def spy(*arguments: Any) -> chunked_loss.LoopResult:
        result = compute_loss_in_chunks(*arguments)
        made.append((result.grad_hidden_ND is not None, result.grad_head_VD is not None))
        return result

    monkeypatch.setattr(cross_entropy, "compute_loss_in_chunks", spy)
    products: list[object] = []
    accumulate_product = chunked_loss.accumulate_product
    monkeypatch.setattr(
        chunked_loss, "accumulate_product", lambda *a, **k: (products.append(a), accumulate_product(*a, **k))
    )
    (hidden if frozen == "hidden" else head).requires_grad_(False)
    linear_cross_entropy(hidden, head, loss_inputs, **mode).loss_sum.backward()
    assert made[-1] == (frozen == "head", frozen == "hidden")
    assert len(products) == (frozen == "hidden")


def test_nothing_to_score() -> None:
    hidden, head, loss_inputs = inputs(0, 9, 3)
    for mode in MODES:
        scored = linear_cross_entropy(hidden, head, loss_inputs, **mode)
        assert scored.loss_sum == 0.0 and scored.nll_N.shape == (0,)
        gradients = torch.autograd.grad(scored.loss_sum, (hidden, head))
        assert gradients[0].shape == (0, 3) and gradients[1].eq(0.0).all()


def test_huge_logits() -> None:
    hidden, head, loss_inputs = inputs(5, 9, 3)
    hidden = (hidden * 1e4).detach().requires_grad_()
    assert_scored(
        linear_cross_entropy(hidden, head, loss_inputs), hidden, head, expect(hidden, head, loss_inputs), 1e-10
    )


@pytest.mark.parametrize(
    ("backend", "device", "dtype", "expected"),
    [
        ("eager", "cuda", torch.float32, "eager"),
        ("auto", "cpu", torch.float32, "eager"),
        ("auto", "cuda", torch.bfloat16, "triton"),
        ("auto", "cuda", torch.float64, "eager"),
        ("triton", "cuda", torch.float16, "triton"),
    ],
)
def test_backends(
    backend: Any, device: str, dtype: torch.dtype, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked_loss, "_is_triton_installed", lambda: True)
    assert chunked_loss.select_loss_backend(backend, device, dtype) == expected


def test_a_backend_that_cannot_run_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, head, loss_inputs = inputs(3, 5, 2)
    with pytest.raises(ValueError, match='backend "fast" does not exist; choose one of "auto", "eager", "triton"'):
        linear_cross_entropy(hidden, head, loss_inputs, backend="fast")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"computes in float32.*float64"):
        linear_cross_entropy(hidden, head, loss_inputs, backend="triton")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(chunked_loss, "_is_triton_installed", lambda: True)
    with pytest.raises(ValueError, match="needs a CUDA device, and the tensors are on cpu"):
        linear_cross_entropy(hidden.float(), head.float(), loss_inputs, backend="triton")
    monkeypatch.setattr(chunked_loss, "_is_triton_installed", lambda: False)
    with pytest.raises(ValueError, match="needs the package triton, which is not installed"):
        linear_cross_entropy(hidden.float(), head.float(), loss_inputs, backend="triton")
    assert chunked_loss.select_loss_backend("auto", "cuda", torch.float32) == "eager"
    with pytest.raises(ValueError, match='gradients = "never" does not exist'):
        linear_cross_entropy(hidden, head, loss_inputs, gradients="never")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rows", "vocab", "options", "expected"),
    [
        (4096, 32768, {}, 256),  # 32 MiB of fp32 logits, for bf16 too
        (300, 32768, {}, 150),  # two of the same size
        (0, 32768, {}, 1),
        (4096, 32768, {"chunk_bytes": 1}, 64),
        (8192, 151936, {"device": "cuda", "dtype": torch.bfloat16}, 2816),  # 3533 fit: 3 of 2731, in tiles of 128
        (8192, 50304, {"device": "cuda", "dtype": torch.bfloat16}, 8192),  # 10672 would fit
        (10, 50304, {"device": "cuda"}, 128),
        (4096, 10**9, {"device": "cuda"}, 1024),
    ],
)
def test_chunks(rows: int, vocab: int, options: dict[str, Any], expected: int) -> None:
    assert chunk_size(rows, vocab, **options) == expected
    assert chunking.CPU_CHUNK_BYTES == 32 << 20


def _scored(hidden: torch.Tensor, head: torch.Tensor, loss_inputs: LossInputs, **mode: Any) -> tuple[torch.Tensor, ...]:
    scored = linear_cross_entropy(hidden * 2.0, head, loss_inputs, 3.0, **mode)
    assert scored.logsumexp_N is not None and scored.is_hit_N is not None
    return scored.loss_sum * 0.5, scored.nll_N, scored.logsumexp_N, scored.is_hit_N


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("has_buffer", [False, True])
def test_a_compiler_sees_one_operator(mode: dict[str, Any], has_buffer: bool) -> None:
    from torch._dynamo.testing import AotEagerAndRecordGraphs

    torch._dynamo.reset()
    hidden, head, loss_inputs = inputs(9, 11, 5, torch.float32, excluded_token=10, label_smoothing=0.1, z_loss=0.01)
    recorder = AotEagerAndRecordGraphs()
    results = []
    for run in (_scored, torch.compile(_scored, backend=recorder, fullgraph=True)):
        buffers = {"head_grad": torch.zeros(11, 5)} if has_buffer else {}
        outputs = run(hidden, head, loss_inputs, **mode, **buffers)
        gradients = torch.autograd.grad(outputs[0], (hidden, head), allow_unused=True)
        assert (gradients[1] is None) == has_buffer
        results.append((*outputs, gradients[0], buffers["head_grad"] if has_buffer else gradients[1]))
    torch.testing.assert_close(results[0], results[1])
    assert len(recorder.graphs) == 1
    called = [str(node.target) for node in recorder.graphs[0].graph.nodes if node.op == "call_function"]
    assert called.count("diffusionlm.linear_cross_entropy.default") == 1
    assert not any("matmul" in name or "mm" in name for name in called)
