"""The fused head and loss against logits and F.cross_entropy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from diffusionlm.kernels import chunked_loss, chunking
from diffusionlm.kernels.chunking import chunk_size
from diffusionlm.kernels.cross_entropy import LossInputs, LossOutput, linear_cross_entropy
from diffusionlm.models.patterns import Bidirectional
from diffusionlm.models.transformer import Transformer

MakeModel = Callable[..., Transformer]
TOKENS = torch.randint(0, 18, (20, 12), generator=torch.Generator().manual_seed(0))
ROWS = torch.arange(0, 240, 3)  # 80: more than the 64 rows that a chunk has at least
TARGETS = torch.randint(0, 18, (80,), generator=torch.Generator().manual_seed(1))
WEIGHTS = torch.rand(80, generator=torch.Generator().manual_seed(2)) * 3
WEIGHTS[::7] = 0.0


def naive(model: Transformer, excluded: int | None, weights: torch.Tensor = WEIGHTS) -> tuple[torch.Tensor, ...]:
    logits = model(TOKENS, pattern=Bidirectional()).flatten(0, 1)[ROWS].double()
    if excluded is not None:
        column = torch.zeros(logits.shape[1], dtype=torch.bool)
        column[excluded] = True
        logits = logits.masked_fill(column, -torch.inf)
    nll = F.cross_entropy(logits, TARGETS, reduction="none")
    return (nll * weights).sum(), nll


def fused(model: Transformer, excluded: int | None, weights: torch.Tensor = WEIGHTS) -> LossOutput:
    return model(
        TOKENS,
        pattern=Bidirectional(),
        output_positions=ROWS,
        loss_inputs=LossInputs(TARGETS, weights, excluded_token=excluded),
    )


@pytest.mark.parametrize("chunk_bytes", [32 << 20, 1])
@pytest.mark.parametrize("excluded", [None, 18])
@pytest.mark.parametrize("tied", [True, False])
def test_score_equals_cross_entropy(
    tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch, tied: bool, excluded: int | None, chunk_bytes: int
) -> None:
    monkeypatch.setattr(chunking, "CPU_CHUNK_BYTES", chunk_bytes)
    assert chunk_size(80, 19) == (80 if chunk_bytes > 1 else 40)
    model = tiny_model(tie_word_embeddings=tied)
    expected_sum, expected_nll = naive(model, excluded)
    scored = fused(model, excluded)
    torch.testing.assert_close(scored.nll_N.double(), expected_nll, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(scored.loss_sum.double(), expected_sum, rtol=1e-5, atol=1e-5)
    assert scored.loss_sum.dtype == scored.nll_N.dtype == torch.float32
    assert not scored.nll_N.requires_grad
    names, parameters = zip(*model.named_parameters(), strict=True)
    ours = torch.autograd.grad(scored.loss_sum * 0.5, parameters)
    theirs = torch.autograd.grad(expected_sum * 0.5, parameters)
    for name, our, their in zip(names, ours, theirs, strict=True):
        torch.testing.assert_close(
            our, their, rtol=2e-3, atol=2e-4 * float(their.abs().max()), msg=f"gradient of {name}"
        )


def test_excluded_token_has_probability_zero(tiny_model: MakeModel) -> None:
    model = tiny_model(tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight[18] = model.lm_head.weight[18] * 100  # would dominate, were it counted
    with_it, without = fused(model, None), fused(model, 18)
    assert not torch.allclose(with_it.nll_N, without.nll_N, atol=1e-2)
    (gradient,) = torch.autograd.grad(without.loss_sum, model.lm_head.weight)
    assert gradient[18].abs().max() == 0
    everything = LossInputs(torch.arange(18).repeat(1), torch.ones(18), excluded_token=18)
    hidden = torch.randn(1, 24).expand(18, 24)
    total = torch.exp(-linear_cross_entropy(hidden, model.lm_head.weight, everything).nll_N).sum()
    torch.testing.assert_close(total, torch.tensor(1.0))


def test_score_gradcheck_in_double() -> None:
    hidden = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    head = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    loss_inputs = LossInputs(torch.tensor([0, 1, 2, 3, 3]), torch.tensor([1.0, 0.5, 2.0, 0.0, 3.0]), excluded_token=6)
    assert torch.autograd.gradcheck(lambda h, w: linear_cross_entropy(h, w, loss_inputs).loss_sum, (hidden, head))


def test_large_logits_do_not_overflow() -> None:
    hidden = torch.tensor([[1e4, 0.0], [-1e4, 0.0]], requires_grad=True)
    head = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]], requires_grad=True)
    scored = linear_cross_entropy(hidden, head, LossInputs(torch.tensor([0, 0]), torch.ones(2)))
    torch.testing.assert_close(scored.nll_N, torch.tensor([0.0, 2e4]))
    scored.loss_sum.backward()
    assert hidden.grad is not None and hidden.grad.isfinite().all()


def test_weightless_rows_give_no_gradient(tiny_model: MakeModel) -> None:
    hidden = torch.randn(6, 24, requires_grad=True)
    head = torch.randn(19, 24, requires_grad=True)
    weights = torch.tensor([1.0, 0.0, 2.0, 0.0, 0.0, 1.0])
    linear_cross_entropy(hidden, head, LossInputs(torch.arange(6), weights)).loss_sum.backward()
    assert hidden.grad is not None
    assert (hidden.grad.abs().sum(dim=1) > 0).tolist() == [True, False, True, False, False, True]


@pytest.mark.parametrize("frozen", ["hidden", "head"])
def test_gradient_only_where_wanted(frozen: str) -> None:
    tensors = {"hidden": torch.randn(6, 24), "head": torch.randn(19, 24)}
    wanted = "head" if frozen == "hidden" else "hidden"
    tensors[wanted].requires_grad_()
    loss_inputs = LossInputs(torch.arange(6), torch.rand(6))
    linear_cross_entropy(tensors["hidden"], tensors["head"], loss_inputs).loss_sum.backward()
    expected = torch.autograd.grad(
        (
            F.cross_entropy(tensors["hidden"] @ tensors["head"].T, loss_inputs.targets_N, reduction="none")
            * loss_inputs.weights_N
        ).sum(),
        tensors[wanted],
    )[0]
    torch.testing.assert_close(tensors[wanted].grad, expected, rtol=1e-4, atol=1e-5)
    assert tensors[frozen].grad is None


def test_no_gradient_is_made_without_grad_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation scores under no_grad: three matrix products where one is needed would make it three times as dear."""
    hidden, head = torch.randn(6, 24, requires_grad=True), torch.randn(19, 24, requires_grad=True)
    made: list[object] = []
    original = chunked_loss.accumulate_product
    monkeypatch.setattr(chunked_loss, "accumulate_product", lambda *a, **k: (made.append(a), original(*a, **k))[1])
    loss_inputs = LossInputs(torch.arange(6), torch.ones(6))
    linear_cross_entropy(hidden, head, loss_inputs)
    assert len(made) == 1
    with torch.no_grad():
        linear_cross_entropy(hidden, head, loss_inputs)
    assert len(made) == 1, "the head's gradient was accumulated although nobody can ask for it"


@pytest.mark.parametrize("rows", [0, 1, 64, 65, 1000])
def test_chunks_cover_all_rows(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunking, "CPU_CHUNK_BYTES", 1)
    hidden, head = torch.randn(rows, 3), torch.randn(5, 3)
    targets = torch.randint(0, 5, (rows,))
    nll = linear_cross_entropy(hidden, head, LossInputs(targets, torch.ones(rows))).nll_N
    torch.testing.assert_close(nll, F.cross_entropy(hidden @ head.T, targets, reduction="none"))


def test_bfloat16_within_its_precision(tiny_model: MakeModel) -> None:
    model = tiny_model(tie_word_embeddings=False, scale=0.1)
    expected_sum, expected_nll = naive(model, 18)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scored = fused(model, 18)
    torch.testing.assert_close(scored.nll_N.double(), expected_nll, rtol=0.05, atol=0.05)
    parameters = list(model.parameters())
    ours, theirs = torch.autograd.grad(scored.loss_sum, parameters), torch.autograd.grad(expected_sum, parameters)
    for our, their in zip(ours, theirs, strict=True):
        assert our.dtype == torch.float32
        cosine = F.cosine_similarity(our.flatten(), their.flatten(), dim=0)
        assert cosine > 0.99


def test_accumulation_over_calls_adds_up(tiny_model: MakeModel) -> None:
    """Two scores of halves give the gradient of one score of the whole: sums, never means."""
    model = tiny_model()
    parameters: list[Any] = list(model.parameters())
    whole = torch.autograd.grad(fused(model, 18).loss_sum, parameters)
    first, second = WEIGHTS.clone(), WEIGHTS.clone()
    first[40:], second[:40] = 0.0, 0.0
    halves = [torch.autograd.grad(fused(model, 18, weights).loss_sum, parameters) for weights in (first, second)]
    for total, one, two in zip(whole, *halves, strict=True):
        torch.testing.assert_close(one + two, total, rtol=1e-4, atol=1e-5 * float(total.abs().max()))


# Label smoothing and z-loss


REGULAR = [(0.1, 0.0), (0.0, 0.01), (0.3, 0.02)]


def doubles(rows: int = 80, vocab: int = 19) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(3)
    hidden = torch.randn(rows, 7, generator=rng, dtype=torch.float64, requires_grad=True)
    return hidden, torch.randn(vocab, 7, generator=rng, dtype=torch.float64, requires_grad=True)


def written_out(logits_RV: torch.Tensor, loss_inputs: LossInputs) -> torch.Tensor:
    """Row by row: -sum_v q_v log p_v with q = (1 - s) one-hot + s / n, and z (log of the denominator)^2; [R]."""
    losses = []
    allowed = [token for token in range(logits_RV.shape[1]) if token != loss_inputs.excluded_token]
    for logits_V, target in zip(logits_RV, loss_inputs.targets_N.tolist(), strict=True):
        log_denominator = torch.stack([logits_V[token] for token in allowed]).logsumexp(0)
        log_p = {token: logits_V[token] - log_denominator for token in allowed}
        mean = torch.stack([log_p[token] for token in allowed]).sum() / len(allowed)
        cross_entropy = -(1 - loss_inputs.label_smoothing) * log_p[target] - loss_inputs.label_smoothing * mean
        losses.append(cross_entropy + loss_inputs.z_loss * log_denominator**2)
    return torch.stack(losses)


@pytest.mark.parametrize("chunk_bytes", [32 << 20, 1])
@pytest.mark.parametrize("excluded", [None, 18, 5])
@pytest.mark.parametrize(("smoothing", "z_loss"), REGULAR)
def test_smoothing_and_z_loss_are_their_formula(
    monkeypatch: pytest.MonkeyPatch, smoothing: float, z_loss: float, excluded: int | None, chunk_bytes: int
) -> None:
    monkeypatch.setattr(chunking, "CPU_CHUNK_BYTES", chunk_bytes)
    hidden, head = doubles()
    targets = TARGETS if excluded is None else TARGETS.masked_fill(TARGETS.eq(excluded), 0)
    loss_inputs = LossInputs(targets, WEIGHTS.double(), excluded, label_smoothing=smoothing, z_loss=z_loss)
    scored = linear_cross_entropy(hidden, head, loss_inputs)
    logits = hidden @ head.T
    expected = (written_out(logits, loss_inputs) * loss_inputs.weights_N).sum()
    torch.testing.assert_close(scored.loss_sum, expected, rtol=1e-12, atol=1e-12)
    if excluded is None and z_loss == 0.0:
        reference = F.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)
        torch.testing.assert_close(scored.loss_sum, (reference * loss_inputs.weights_N).sum(), rtol=1e-12, atol=1e-12)
    # The log-likelihoods are reported plain.
    torch.testing.assert_close(
        scored.nll_N, written_out(logits, LossInputs(targets, loss_inputs.weights_N, excluded)).detach()
    )
    for ours, theirs in zip(
        torch.autograd.grad(scored.loss_sum * 0.7, (hidden, head)),
        torch.autograd.grad(expected * 0.7, (hidden, head)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    if excluded is not None:
        assert (
            torch.autograd.grad(linear_cross_entropy(hidden, head, loss_inputs).loss_sum, head)[0][excluded].eq(0).all()
        )


def test_regularised_gradcheck_in_double() -> None:
    hidden, head = doubles(5, 7)
    for excluded in (None, 6):
        loss_inputs = LossInputs(
            torch.tensor([0, 1, 2, 3, 3]),
            torch.tensor([1.0, 0.5, 2.0, 0.0, 3.0]).double(),
            excluded,
            label_smoothing=0.2,
            z_loss=0.1,
        )
        assert torch.autograd.gradcheck(
            lambda h, w, loss_inputs=loss_inputs: linear_cross_entropy(h, w, loss_inputs).loss_sum, (hidden, head)
        )


@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), *REGULAR])
def test_a_row_of_weight_zero_may_be_anything(smoothing: float, z_loss: float) -> None:
    """Rows that fill a bucket: here one that asks for the excluded token, of infinite loss."""
    hidden, head = doubles(6)
    weights = torch.tensor([1.0, 0.0, 2.0, 0.0, 0.5, 1.0], dtype=torch.float64)
    targets = torch.tensor([1, 18, 2, 0, 3, 4])
    loss_inputs = LossInputs(targets, weights, 18, label_smoothing=smoothing, z_loss=z_loss)
    loss = linear_cross_entropy(hidden, head, loss_inputs).loss_sum
    some = weights > 0
    without = LossInputs(targets[some], weights[some], 18, label_smoothing=smoothing, z_loss=z_loss)
    expected = linear_cross_entropy(hidden[some], head, without).loss_sum
    torch.testing.assert_close(loss, expected)
    for ours, theirs in zip(
        torch.autograd.grad(loss, (hidden, head)), torch.autograd.grad(expected, (hidden, head)), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_nothing_scored_is_zero_and_has_a_gradient() -> None:
    """A micro-batch in which nothing was masked."""
    hidden, head = doubles(0)
    loss_inputs = LossInputs(torch.zeros(0, dtype=torch.int64), torch.zeros(0), 18, label_smoothing=0.1, z_loss=0.1)
    loss = linear_cross_entropy(hidden, head, loss_inputs).loss_sum
    assert loss.item() == 0.0
    grads = torch.autograd.grad(loss, (hidden, head))
    assert grads[0].shape == (0, 7) and not grads[1].any()
