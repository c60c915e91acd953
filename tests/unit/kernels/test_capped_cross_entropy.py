"""Soft-capped logits in the fused head and loss, against autograd through logits written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from diffusionlm.kernels import chunking, eager_cross_entropy
from diffusionlm.kernels.cross_entropy import LossInputs, linear_cross_entropy

REGULAR = [(0.0, 0.0), (0.1, 0.0), (0.0, 0.01), (0.3, 0.02)]


def doubles(rows: int, vocab: int = 19) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(3)
    hidden = torch.randn(rows, 7, generator=rng, dtype=torch.float64, requires_grad=True)
    return hidden, torch.randn(vocab, 7, generator=rng, dtype=torch.float64, requires_grad=True)


def scores(rows: int, excluded: int | None = None, **options: Any) -> LossInputs:
    rng = torch.Generator().manual_seed(4)
    targets = torch.randint(0, 5, (rows,), generator=rng)
    weights = torch.rand(rows, generator=rng, dtype=torch.float64)
    weights[::7] = 0.0
    return LossInputs(targets, weights, excluded, **options)


def expected_loss(hidden: torch.Tensor, head: torch.Tensor, loss_inputs: LossInputs, cap: float) -> torch.Tensor:
    logits = cap * torch.tanh(hidden @ head.T / cap)
    if loss_inputs.excluded_token is not None:
        assert loss_inputs.targets_N.lt(loss_inputs.excluded_token).all()
        logits = torch.cat(
            [logits[:, : loss_inputs.excluded_token], logits[:, loss_inputs.excluded_token + 1 :]], dim=1
        )
    loss = F.cross_entropy(logits, loss_inputs.targets_N, reduction="none", label_smoothing=loss_inputs.label_smoothing)
    return ((loss + loss_inputs.z_loss * logits.logsumexp(-1).square()) * loss_inputs.weights_N).sum()


@pytest.mark.parametrize("chunk_bytes", [32 << 20, 1])
@pytest.mark.parametrize("excluded", [None, 18, 5])
@pytest.mark.parametrize(("smoothing", "z_loss"), REGULAR)
@pytest.mark.parametrize("cap", [0.5, 3.0, 1e6])
def test_loss_and_gradient_are_those_of_capped_logits(
    monkeypatch: pytest.MonkeyPatch, cap: float, smoothing: float, z_loss: float, excluded: int | None, chunk_bytes: int
) -> None:
    monkeypatch.setattr(chunking, "CPU_CHUNK_BYTES", chunk_bytes)
    hidden, head = doubles(80)
    loss_inputs = scores(80, excluded, label_smoothing=smoothing, z_loss=z_loss)
    scored = linear_cross_entropy(hidden, head, loss_inputs, cap)
    expected = expected_loss(hidden, head, loss_inputs, cap)
    torch.testing.assert_close(scored.loss_sum, expected, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(each * 0.7, (hidden, head)) for each in (scored.loss_sum, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-11)
    plain = LossInputs(loss_inputs.targets_N, torch.ones_like(loss_inputs.weights_N), excluded)
    torch.testing.assert_close(scored.nll_N.sum(), expected_loss(hidden, head, plain, cap).detach())


def test_no_cap_is_no_change() -> None:
    hidden, head = doubles(80)
    loss_inputs = scores(80, 18, label_smoothing=0.1, z_loss=0.01)
    one, other = linear_cross_entropy(hidden, head, loss_inputs), linear_cross_entropy(hidden, head, loss_inputs, None)
    assert torch.equal(one.loss_sum, other.loss_sum)
    assert not torch.allclose(one.loss_sum, linear_cross_entropy(hidden, head, loss_inputs, 3.0).loss_sum)


def test_gradcheck() -> None:
    hidden, head = doubles(5, 7)
    loss_inputs = scores(5, 6, label_smoothing=0.2, z_loss=0.1)
    assert torch.autograd.gradcheck(lambda h, w: linear_cross_entropy(h, w, loss_inputs, 2.0).loss_sum, (hidden, head))


def test_the_cap_is_taken_in_float32() -> None:
    """In bf16 capped logits would be so coarse that neighbours fall together."""
    hidden, head = (each.detach().bfloat16() for each in doubles(40))
    loss_inputs = scores(40)
    ours = linear_cross_entropy(hidden, head, loss_inputs, 3.0)
    capped = 3.0 * torch.tanh((hidden @ head.T).float() / 3.0)
    torch.testing.assert_close(ours.nll_N, F.cross_entropy(capped, loss_inputs.targets_N, reduction="none"))


def test_huge_logits_are_the_cap_and_have_no_slope() -> None:
    hidden = torch.tensor([[1e4, 0.0], [-1e4, 0.0]], requires_grad=True)
    head = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]], requires_grad=True)
    scored = linear_cross_entropy(hidden, head, LossInputs(torch.tensor([0, 0]), torch.ones(2)), 5.0)
    logits = torch.tensor([[5.0, -5.0, 0.0], [-5.0, 5.0, 0.0]])
    torch.testing.assert_close(scored.nll_N, F.cross_entropy(logits, torch.tensor([0, 0]), reduction="none"))
    (gradient,) = torch.autograd.grad(scored.loss_sum, head)
    assert gradient.isfinite().all() and gradient[:2].eq(0.0).all()


def test_without_gradients_no_slope_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, head = doubles(6)
    kept: list[torch.Tensor | None] = []
    original = eager_cross_entropy._apply_softcap
    monkeypatch.setattr(
        eager_cross_entropy, "_apply_softcap", lambda *arguments: (kept.append(original(*arguments)), kept[-1])[1]
    )
    with torch.no_grad():
        linear_cross_entropy(hidden, head, scores(6), 2.0)
    assert kept == [None]
    linear_cross_entropy(hidden, head, scores(6), 2.0)
    assert kept[1] is not None and kept[1].shape == (6, 19)
