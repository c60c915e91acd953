"""Losses of preferences: values of TRL, gradients of the papers' formulae, and what is logged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor

from config.finetune.preference import PreferenceLossConfig
from diffusionlm.diffusion.noised_batch import NoisedBatch
from diffusionlm.diffusion.preference import PreferenceLoss, PreferenceResults
from diffusionlm.kernels.loss_types import LossInputs
from diffusionlm.models.patterns import Bidirectional

CHOSEN, REJECTED = (-3.0, -12.5, -0.4), (-5.5, -9.0, -7.25)
"""Log-likelihoods of three pairs, in nats."""
REFERENCE_CHOSEN, REFERENCE_REJECTED = (-3.5, -11.0, -0.9), (-5.0, -10.5, -6.0)
LENGTHS = ((2, 4), (9, 5), (1, 6))
DIVERGENCE = 0.4

Formula = Callable[..., Tensor]


def log_sigmoid(x: Tensor) -> Tensor:
    return -torch.log1p(torch.exp(-x))


def dpo(w: Tensor, v: Tensor, n: Tensor, r: Tensor) -> Tensor:
    return -log_sigmoid(0.3 * ((w - r[:, 0]) - (v - r[:, 1])))


def ipo(w: Tensor, v: Tensor, n: Tensor, r: Tensor) -> Tensor:
    return ((w - r[:, 0]) / n[:, 0] - (v - r[:, 1]) / n[:, 1] - 1 / 0.6) ** 2


def simpo(w: Tensor, v: Tensor, n: Tensor, r: Tensor) -> Tensor:
    return -log_sigmoid(2.0 / n[:, 0] * w - 2.0 / n[:, 1] * v - 1.0)


def orpo(w: Tensor, v: Tensor, n: Tensor, r: Tensor) -> Tensor:
    p_w, p_l = torch.exp(w / n[:, 0]), torch.exp(v / n[:, 1])
    odds_ratio = (p_w / (1 - p_w)) / (p_l / (1 - p_l))
    return -w / n[:, 0] - 0.1 * torch.log(torch.sigmoid(torch.log(odds_ratio)))


PAIRED: dict[str, tuple[dict[str, Any], Formula, list[float]]] = {
    "dpo": ({"kind": "dpo", "beta": 0.3}, dpo, [0.5543552444685271, 1.2411538747320878, 0.46471175467299347]),
    "ipo": ({"kind": "ipo", "beta": 0.3}, ipo, [1.668402777777778, 4.551111111111111, 0.918402777777778]),
    "simpo": ({"kind": "simpo"}, simpo, [1.501929081345373, 0.7859814952091445, 0.4316139461466541]),
    "orpo": ({"kind": "orpo"}, orpo, [1.5778501593668528, 1.4356488858521292, 0.4190185786121607]),
}
"""Options, the formula of the paper, and what TRL 0.12.2 computes from the same log-likelihoods: `dpo_loss`, `cpo_loss`
with gamma 1.0, and `odds_ratio_loss` with the supervised loss per token."""


def weigh(
    options: dict[str, Any], log_likelihoods_P2: Tensor, reference_P2: Tensor, labels: list[bool] | None = None
) -> tuple[PreferenceResults, Tensor]:
    """Results, and the gradient with respect to the log-likelihoods, one position being an answer."""
    loss: PreferenceLossConfig = TypeAdapter(PreferenceLossConfig).validate_python(options)
    num_answers = log_likelihoods_P2.numel()
    one_each = torch.arange(num_answers)
    noised_batch = NoisedBatch(
        one_each[None], Bidirectional(), one_each, one_each, torch.ones(num_answers), answers_N=one_each,
        answer_lengths_Q=torch.tensor(LENGTHS).flatten()[:num_answers],
        is_desirable_P1=None if labels is None else torch.tensor(labels)[:, None],
    )  # fmt: skip
    gains_P2 = log_likelihoods_P2.detach() - reference_P2 if loss.has_reference else log_likelihoods_P2
    divergence = torch.tensor(DIVERGENCE, dtype=torch.float64)
    inputs = LossInputs(one_each, torch.ones(num_answers, dtype=torch.float64))
    weighted, results = PreferenceLoss(loss).add_weights(noised_batch, inputs, gains_P2, divergence)
    return results, -weighted.weights_N.view(-1, 2)


@pytest.mark.parametrize(("options", "formula", "expected"), PAIRED.values(), ids=PAIRED)
def test_losses_of_pairs(options: dict[str, Any], formula: Formula, expected: list[float]) -> None:
    values_P2, reference_P2 = (
        torch.tensor(pairs, dtype=torch.float64).T.contiguous()
        for pairs in ((CHOSEN, REJECTED), (REFERENCE_CHOSEN, REFERENCE_REJECTED))
    )
    values_P2.requires_grad_()
    losses_P = formula(*values_P2.unbind(1), torch.tensor(LENGTHS).double(), reference_P2)
    (gradient_P2,) = torch.autograd.grad(losses_P.sum(), values_P2)
    results, actual_P2 = weigh(options, values_P2, reference_P2)
    assert results.losses_P.tolist() == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(results.losses_P, losses_P.detach(), rtol=1e-12, atol=0.0)
    torch.testing.assert_close(actual_P2, gradient_P2, rtol=1e-12, atol=0.0)
    sums_2M = results.sum_metrics()
    assert sums_2M[1].tolist() == [3.0] * 4
    assert sums_2M[0, 0] == (results.rewards_P2[:, 0] > results.rewards_P2[:, 1]).sum()
    torch.testing.assert_close(sums_2M[0, 1], sums_2M[0, 2] - sums_2M[0, 3])


def test_losses_of_labeled_answers() -> None:
    """As TRL's `kto_loss`; the answers of other prompts, in the second column, have no gradient."""
    options = {"kind": "kto", "beta": 0.3, "desirable_weight": 1.0, "undesirable_weight": 1.25}
    expected = {True: [0.49250056244937956, 0.6387631751488418, 0.49250056244937956]}
    expected[False] = [0.5411338687931821, 0.7271992210522954, 0.4733955060111654]
    for is_desirable, values, reference in (
        (True, CHOSEN, REFERENCE_CHOSEN),
        (False, REJECTED, REFERENCE_REJECTED),
    ):
        values_P2, reference_P2 = (
            torch.tensor([row, (-9.0, -8.0, -7.0)], dtype=torch.float64).T for row in (values, reference)
        )
        results, actual_P2 = weigh(options, values_P2, reference_P2, [is_desirable] * 3)
        assert results.losses_P.tolist() == pytest.approx(expected[is_desirable], rel=1e-12)
        reward_P = values_P2[:, 0].clone().requires_grad_()
        z = 0.3 * (reward_P - reference_P2[:, 0] - DIVERGENCE)
        value_P = torch.sigmoid(z) if is_desirable else 1.25 * torch.sigmoid(-z)
        losses_P = (1.0 if is_desirable else 1.25) - value_P  # lambda_y - v(x, y), eq. 8
        (gradient_P,) = torch.autograd.grad(losses_P.sum(), reward_P)
        torch.testing.assert_close(results.losses_P, losses_P.detach(), rtol=1e-12, atol=0.0)
        torch.testing.assert_close(actual_P2[:, 0], gradient_P, rtol=1e-12, atol=0.0)
        assert not actual_P2[:, 1].any()
        counts = [0.0, 0.0, 3.0 * is_desirable, 3.0 * (not is_desirable)]
        sums_2M = results.sum_metrics()
        assert sums_2M[1].tolist() == counts
        assert float(sums_2M[0].sum()) == pytest.approx(0.3 * float((values_P2 - reference_P2)[:, 0].sum()))


@pytest.mark.parametrize("log_likelihood", [0.0, -1e-15, -1e4])
def test_odds_stay_finite(log_likelihood: float) -> None:
    values_P2 = torch.tensor([[log_likelihood, -3.0], [-3.0, log_likelihood]]).double()
    results, gradient_P2 = weigh({"kind": "orpo"}, values_P2, values_P2)
    assert bool(results.losses_P.isfinite().all()) and bool(gradient_P2.isfinite().all())
