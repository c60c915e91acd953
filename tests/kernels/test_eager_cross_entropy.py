"""The eager fused loss against its definition, and the selection of a backend."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from diffusionlm.kernels import chunked_loss, cross_entropy, eager_cross_entropy
from diffusionlm.kernels.chunked_loss import chunk_size
from diffusionlm.kernels.cross_entropy import LossInputs, linear_cross_entropy
from diffusionlm.kernels.loss_types import HeadRows
from profiling import triton_setup
from tests.fake_cuda import fake_cuda
from tests.kernels.oracle import assert_loss_close, compute_expected, make_inputs

OPTIONS: list[tuple[float | None, dict[str, Any]]] = [
    (None, {}),
    (None, {"label_smoothing": 0.1}),
    (None, {"z_loss": 0.01}),
    (0.5, {}),
    (2.0, {"label_smoothing": 0.2, "z_loss": 0.02}),
]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 64 positions, the minimum on a CPU."""
    monkeypatch.setattr(chunked_loss, "CPU_CHUNK_BYTES", 1)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
    ("num_positions", "vocab", "width"), [(1, 2, 1), (7, 5, 3), (129, 11, 3), (2, 1031, 5), (5, 1, 3)]
)
@pytest.mark.parametrize(("softcap", "options"), OPTIONS)
@pytest.mark.parametrize("excludes", [False, True])
def test_double_equals_the_definition(
    num_positions: int, vocab: int, width: int, softcap: float | None, options: dict[str, Any], excludes: bool
) -> None:
    excluded = vocab // 2 if excludes and vocab > 1 else None
    hidden, head, loss_inputs = make_inputs(num_positions, vocab, width, excluded_token=excluded, **options)
    output = linear_cross_entropy(hidden, head, loss_inputs, softcap)
    assert_loss_close(output, hidden, head, compute_expected(hidden, head, loss_inputs, softcap), 1e-11)
    assert not output.nll_N.requires_grad


def test_more_positions_than_a_subchunk() -> None:
    hidden, head, loss_inputs = make_inputs(600, 5, 3, z_loss=0.01)
    assert len(hidden) > 2 * eager_cross_entropy.CPU_SUBCHUNK_SIZE
    output = linear_cross_entropy(hidden, head, loss_inputs)
    assert_loss_close(output, hidden, head, compute_expected(hidden, head, loss_inputs), 1e-11)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-6), (torch.bfloat16, 3e-2)])
def test_narrow_dtypes_are_within_their_precision(dtype: torch.dtype, tolerance: float) -> None:
    hidden, head, loss_inputs = make_inputs(70, 33, 5, dtype, excluded_token=32, label_smoothing=0.1, z_loss=0.01)
    output = linear_cross_entropy(hidden, head, loss_inputs)
    expected = compute_expected(hidden, head, loss_inputs)
    assert output.loss_sum.dtype == output.nll_N.dtype == torch.float32
    torch.testing.assert_close(output.nll_N.double(), expected.nll_N, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(output.loss_sum.double(), expected.loss_sum, rtol=tolerance, atol=tolerance)
    gradients = torch.autograd.grad(output.loss_sum, (hidden, head))
    for gradient, reference in zip(gradients, (expected.grad_hidden, expected.grad_head), strict=True):
        assert gradient.dtype == dtype
        torch.testing.assert_close(
            gradient.double(), reference, rtol=0.0, atol=tolerance * float(reference.abs().max())
        )


def test_the_softcap_is_computed_in_float32() -> None:
    """In bf16 capped logits are so coarse that neighbors become equal."""
    hidden, head, loss_inputs = make_inputs(40, 19, 7, torch.bfloat16)
    output = linear_cross_entropy(hidden.detach(), head.detach(), loss_inputs, 3.0)
    capped = 3.0 * torch.tanh((hidden @ head.T).float() / 3.0)
    torch.testing.assert_close(output.nll_N, F.cross_entropy(capped, loss_inputs.targets_N, reduction="none").detach())


def test_an_excluded_target_has_infinite_loss_and_no_gradient() -> None:
    hidden, head, _ = make_inputs(3, 5, 4)
    loss_inputs = LossInputs(torch.tensor([4, 1, 4]), torch.tensor([1.0, 1.0, 0.0]), 4)
    output = linear_cross_entropy(hidden, head, loss_inputs)
    assert output.nll_N.isinf().tolist() == [True, False, True] and output.loss_sum.isinf()
    assert torch.autograd.grad(output.loss_sum, head)[0][4].eq(0.0).all()


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.3, "z_loss": 0.02}])
def test_weight_zero_removes_a_position_of_infinite_loss(options: dict[str, float]) -> None:
    hidden, head, _ = make_inputs(6, 19, 7)
    weights = torch.tensor([1.0, 0.0, 2.0, 0.0, 0.5, 1.0], dtype=torch.float64)
    targets = torch.tensor([1, 18, 2, 0, 3, 4])
    loss = linear_cross_entropy(hidden, head, LossInputs(targets, weights, 18, **options)).loss_sum
    selected = weights > 0
    expected = linear_cross_entropy(
        hidden[selected], head, LossInputs(targets[selected], weights[selected], 18, **options)
    ).loss_sum
    torch.testing.assert_close(loss, expected)
    gradients = [torch.autograd.grad(total, (hidden, head)) for total in (loss, expected)]
    torch.testing.assert_close(*gradients)
    assert (gradients[0][0].abs().sum(dim=1) > 0).tolist() == selected.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_backward_twice_gives_the_same(dtype: torch.dtype) -> None:
    """Only the last backward may overwrite the gradients of the forward."""
    hidden, head, loss_inputs = make_inputs(6, 7, 3, dtype)
    loss = linear_cross_entropy(hidden, head, loss_inputs).loss_sum
    first = torch.autograd.grad(loss * 3.0, (hidden, head), retain_graph=True)
    copies = [gradient.clone() for gradient in first]
    last = torch.autograd.grad(loss * 3.0, (hidden, head))
    for gradient, copy, other in zip(first, copies, last, strict=True):
        assert torch.equal(gradient, copy) and torch.equal(gradient, other)


def test_second_derivatives_raise() -> None:
    hidden, head, loss_inputs = make_inputs(3, 5, 2)
    loss = linear_cross_entropy(hidden, head, loss_inputs).loss_sum
    (gradient,) = torch.autograd.grad(loss.square(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize("frozen", ["hidden", "head", "both", "no_grad"])
def test_gradients_that_are_not_required_are_not_computed(frozen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, head, loss_inputs = make_inputs(6, 9, 3)
    computed: list[tuple[bool, bool]] = []
    compute_loss_in_chunks = chunked_loss.compute_loss_in_chunks

    def spy(*arguments: Any) -> Any:
        result = compute_loss_in_chunks(*arguments)
        computed.append((result[2] is not None, result[3] is not None))
        return result

    monkeypatch.setattr(cross_entropy, "compute_loss_in_chunks", spy)
    slopes: list[torch.Tensor | None] = []
    apply_softcap = eager_cross_entropy._apply_softcap

    def spy_softcap(*arguments: Any) -> torch.Tensor | None:
        slopes.append(apply_softcap(*arguments))
        return slopes[-1]

    monkeypatch.setattr(eager_cross_entropy, "_apply_softcap", spy_softcap)
    hidden.requires_grad_(frozen not in ("hidden", "both"))
    head.requires_grad_(frozen not in ("head", "both"))
    with torch.set_grad_enabled(frozen != "no_grad"):
        loss = linear_cross_entropy(hidden, head, loss_inputs, 2.0).loss_sum
    assert computed == [(frozen == "head", frozen == "hidden")]
    assert [slope is not None for slope in slopes] == [loss.requires_grad]
    if loss.requires_grad:
        loss.backward()
    assert (hidden.grad is not None, head.grad is not None) == computed[0]


def test_no_positions() -> None:
    """A micro-batch in which no token is masked."""
    hidden, head, loss_inputs = make_inputs(0, 9, 3, excluded_token=8, label_smoothing=0.1)
    output = linear_cross_entropy(hidden, head, loss_inputs)
    assert output.loss_sum == 0.0 and output.nll_N.shape == (0,)
    gradients = torch.autograd.grad(output.loss_sum, (hidden, head))
    assert gradients[0].shape == (0, 3) and gradients[1].eq(0.0).all()


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_huge_logits(softcap: float | None) -> None:
    hidden, head, loss_inputs = make_inputs(5, 9, 3)
    hidden = (hidden * 1e4).detach().requires_grad_()
    output = linear_cross_entropy(hidden, head, loss_inputs, softcap)
    assert_loss_close(output, hidden, head, compute_expected(hidden, head, loss_inputs, softcap), 1e-10)


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
def test_select_loss_backend(
    backend: Any, device: str, dtype: torch.dtype, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_setup, "find_triton_problem", lambda: None)
    assert chunked_loss.select_loss_backend(backend, device, dtype) == expected


def test_a_backend_that_cannot_run_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, head, loss_inputs = make_inputs(3, 5, 2)
    with pytest.raises(ValueError, match=r'"fast".*"auto", "eager", "triton"'):
        linear_cross_entropy(hidden, head, loss_inputs, backend="fast")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="use float32"):
        linear_cross_entropy(hidden, head, loss_inputs, backend="triton")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(triton_setup, "is_triton_installed", lambda: True)
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        linear_cross_entropy(hidden.float(), head.float(), loss_inputs, backend="triton")
    monkeypatch.setattr(triton_setup, "is_triton_installed", lambda: False)
    with pytest.raises(ValueError, match="install it"):
        linear_cross_entropy(hidden.float(), head.float(), loss_inputs, backend="triton")
    assert chunked_loss.select_loss_backend("auto", "cuda", torch.float32) == "eager"


@pytest.mark.parametrize("fails", [False, True])
def test_partial_sums_are_not_rounded(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags of the GPU's products are off while the chunks are computed, and as before afterwards."""
    flags = torch.backends.cuda.matmul
    inside = []

    def observe(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        inside.append([getattr(flags, name) for name in chunked_loss.REDUCED_PRECISION_FLAGS])
        if fails:
            raise RuntimeError("out of memory")
        return eager_cross_entropy.compute_chunk_loss(*arguments)

    monkeypatch.setattr(chunked_loss, "load_loss_backend", lambda backend: observe)
    hidden, head, loss_inputs = make_inputs(3, 5, 2)
    before = (flags.allow_bf16_reduced_precision_reduction, flags.allow_fp16_reduced_precision_reduction)
    assert before == (True, True)
    with pytest.raises(RuntimeError, match="out of memory") if fails else nullcontext():
        linear_cross_entropy(hidden, head, loss_inputs)
    assert inside == [[False, False]]
    after = (flags.allow_bf16_reduced_precision_reduction, flags.allow_fp16_reduced_precision_reduction)
    assert after == before


@pytest.mark.skipif(
    not hasattr(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction_split_k"),
    reason="this version of torch has no setting of split sums",
)
def test_the_setting_of_split_sums_is_left_alone() -> None:
    flags = torch.backends.cuda.matmul
    flags.allow_bf16_reduced_precision_reduction = (False, False)
    try:
        for _ in range(2):
            with chunked_loss.wide_reductions():
                assert not flags.allow_bf16_reduced_precision_reduction_split_k
        assert not flags.allow_bf16_reduced_precision_reduction_split_k
        assert not flags.allow_bf16_reduced_precision_reduction
    finally:
        flags.allow_bf16_reduced_precision_reduction = (True, True)


@pytest.mark.parametrize(
    ("num_positions", "vocab", "options", "expected"),
    [
        (4096, 32768, {}, 256),  # 32 MiB of fp32 logits, for bf16 too
        (300, 32768, {}, 150),  # two of the same size
        (0, 32768, {}, 1),
        (4096, 10**9, {}, 64),
        (8192, 151936, {"device": "cuda", "dtype": torch.bfloat16}, 2816),  # 3533 fit: 3 of 2731, in tiles of 128
        (8192, 50304, {"device": "cuda", "dtype": torch.bfloat16}, 8192),  # 10672 would fit
        (10, 50304, {"device": "cuda"}, 128),
        (4096, 10**9, {"device": "cuda"}, 1024),
    ],
)
def test_chunk_size(num_positions: int, vocab: int, options: dict[str, Any], expected: int) -> None:
    assert chunk_size(num_positions, vocab, **options) == expected


def _half_loss(hidden: torch.Tensor, head: torch.Tensor, loss_inputs: LossInputs) -> tuple[torch.Tensor, torch.Tensor]:
    output = linear_cross_entropy(hidden * 2.0, head, loss_inputs, 3.0)
    return output.loss_sum * 0.5, output.nll_N


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 0.01}])
@pytest.mark.slow
def test_a_compiled_graph_has_one_operator(options: dict[str, float]) -> None:
    from torch._dynamo.testing import AotEagerAndRecordGraphs

    torch._dynamo.reset()
    hidden, head, loss_inputs = make_inputs(9, 11, 5, torch.float32, excluded_token=10, **options)
    recorder = AotEagerAndRecordGraphs()
    results = []
    for run in (_half_loss, torch.compile(_half_loss, backend=recorder, fullgraph=True)):
        loss, nll_N = run(hidden, head, loss_inputs)
        results.append((loss, nll_N, *torch.autograd.grad(loss, (hidden, head))))
    torch.testing.assert_close(results[0], results[1])
    assert len(recorder.graphs) == 1
    calls = [str(node.target) for node in recorder.graphs[0].graph.nodes if node.op == "call_function"]
    assert calls.count("diffusionlm.linear_cross_entropy.default") == 1
    assert not any("matmul" in name or "mm" in name for name in calls)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_trained_rows_of_a_head_have_the_gradients_of_a_whole_one(softcap: float | None) -> None:
    """In several chunks; the frozen head has none."""
    generator = torch.Generator().manual_seed(0)
    N, D, V, ids = 150, 6, 19, torch.tensor([4, 17])
    hidden, head, rows = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((N, D), (V, D), (2, D))
    )
    targets = torch.randint(18, (N,), generator=generator)
    loss_inputs = LossInputs(targets, torch.rand(N, generator=generator), excluded_token=18)
    results = []
    for is_whole in (True, False):
        inputs = [hidden.clone().requires_grad_(), rows.clone().requires_grad_()]
        if is_whole:
            output = linear_cross_entropy(inputs[0], head.index_copy(0, ids, inputs[1]), loss_inputs, softcap)
        else:
            output = linear_cross_entropy(inputs[0], head, loss_inputs, softcap, head_rows=HeadRows(ids, inputs[1]))
        gradients = torch.autograd.grad(output.loss_sum, inputs)
        results.append([output.loss_sum.detach(), output.nll_N, *gradients])
    torch.testing.assert_close(results[1], results[0])


def test_products_on_a_gpu_have_no_temporaries() -> None:
    """Of bfloat16 hidden states: products are stored and accumulated where they belong, in their dtype."""
    with fake_cuda() as record, torch.device("cuda"):
        hidden = torch.ones(3000, 16, dtype=torch.bfloat16, requires_grad=True)
        head = torch.ones(300_000, 16, dtype=torch.bfloat16, requires_grad=True)
        inputs = LossInputs(torch.ones(3000, dtype=torch.int64), torch.ones(3000))
        record.launches.clear()
        linear_cross_entropy(hidden, head, inputs)
    num_chunks = 2
    counts = record.count()
    assert (counts["mm"], counts["addmm"]) == (2 * num_chunks, num_chunks)
    products = [launch for launch in record.launches if launch.is_product]
    assert [launch.outputs[0].dtype for launch in products] == [torch.bfloat16, torch.bfloat16, torch.float32] * 2
    largest = max(tensor.numel() for launch in record.launches for tensor in launch.outputs if not launch.is_product)
    assert largest <= 3000, "sums and weights of positions"
