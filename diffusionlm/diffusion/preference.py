"""Preferences by evidence bounds: DPO and its relatives with bounds in place of log-likelihoods (VRPO, LLaDA 1.5).

B(y), the evidence bound of an answer, is the negative of its NELBO summed over its tokens; the formulae are in
`config.finetune.preference`. A row has two conversations: the chosen and the rejected one of a pair, or a labeled
example and its prompt with the answer of another one (`append_mismatch`).

Shapes: B rows, L tokens, Q = 2 B answers of M tokens at most, P pairs or labeled examples, N output positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from config.finetune.preference import (
    DPOLossConfig,
    IPOLossConfig,
    KTOLossConfig,
    ORPOLossConfig,
    PreferenceConfig,
    PreferenceLossConfig,
    SimPOLossConfig,
)
from config.training.objective import NoiseGrouping
from diffusionlm.diffusion.corruption import assign_noise_groups, choose_masked_in_groups, masked_counts_at_levels
from diffusionlm.diffusion.layout import InputLayout, target_positions
from diffusionlm.diffusion.noised_batch import CleanBatch, NoisedBatch, NoiseKey
from diffusionlm.diffusion.rng import RngStream, keyed_rng
from diffusionlm.diffusion.segments import NoiseSequences
from diffusionlm.kernels.loss_types import LossInputs
from diffusionlm.models.lora import before_training
from diffusionlm.models.transformer import Transformer


@dataclass(frozen=True)
class PreferenceObjective:
    """Masks the answers of pairs several times. The loss follows from `weigh_answers`, whose result depends on the
    model and its reference."""

    config: PreferenceConfig
    layout: InputLayout

    @property
    def num_draws(self) -> int:
        """Masked versions of each answer. Blocks of one token are masked whole, so one version is exact."""
        return 1 if self.layout.block_length == 1 else self.config.num_draws

    def build_noised_batch(self, batch: CleanBatch, key: NoiseKey) -> NoisedBatch:
        """Draw the masks, the same for all models that are compared.

        Args:
            batch: rows of two conversations with one segment each.
        """
        maskable_BL = self.layout.maskable(batch)
        answers = NoiseSequences.from_batch(batch)
        maskable_QM = answers.gather(maskable_BL)
        assert len(maskable_QM) == 2 * len(maskable_BL), "each row has two answers"
        grouping: NoiseGrouping = "row" if self.layout.block_length is None else "block"
        group_ids_QM = assign_noise_groups(answers.batch, maskable_QM, grouping, self.layout.block_length)
        draws = _draw_masks(group_ids_QM, key, self.num_draws)
        noised_batch = self.layout.build_noised_batch(
            batch.repeat(len(draws)),
            np.concatenate([answers.scatter(masked_QM) for masked_QM, _ in draws]),
            np.concatenate([answers.scatter(weights_QM / len(draws)) for _, weights_QM in draws]),
            num_targets=int(maskable_BL.sum()),
            denominator=float(len(maskable_BL)),
        )
        ids_QM = np.broadcast_to(np.arange(len(maskable_QM))[:, None], maskable_QM.shape)
        ids_BL = torch.from_numpy(answers.scatter(ids_QM)).flatten()
        positions_N = target_positions(noised_batch, self.layout.alignment) % len(ids_BL)
        assert answers.batch.is_eos_padding_BL is not None
        lengths_Q = torch.from_numpy(maskable_QM & ~answers.batch.is_eos_padding_BL.numpy()).sum(1).clamp(min=1)
        return replace(
            noised_batch,
            answers_N=ids_BL[positions_N],
            answer_lengths_Q=lengths_Q,
            is_desirable_P1=batch.is_desirable_B1,
            num_rows=len(maskable_BL),
        )

    def build_auxiliary_batch(self, batch: CleanBatch) -> None:
        """None: there is no auxiliary loss."""

    def build_loss_inputs(self, noised_batch: NoisedBatch, denominator: float) -> LossInputs:
        """Targets and weights whose weighted sum is the NELBO of all answers, over the number of pairs."""
        weights_N = noised_batch.weights_N / denominator
        return LossInputs(noised_batch.targets_N, weights_N, excluded_token=self.layout.mask_token)


def _draw_masks(
    group_ids_QM: NDArray[np.int64], key: NoiseKey, num_draws: int
) -> list[tuple[NDArray[np.bool_], NDArray[np.float64]]]:
    """Masks and weights of each draw: the weighted sum of a draw is an unbiased estimate of each answer's NELBO.

    The levels of the first half of the draws are evenly spaced over [0, 1/2); the others are opposite to them, 1 - u,
    and mask the tokens that come last in the order of their partner. A single draw has a level in [0, 1).
    """
    shape = (num_draws, *group_ids_QM.shape)
    masked, weights = np.zeros(shape, dtype=np.bool_), np.zeros(shape)
    half = max(1, num_draws // 2)
    for answer, group_ids_M in enumerate(group_ids_QM):
        positions = np.flatnonzero(group_ids_M >= 0)
        if len(positions) == 0:
            continue
        group_ids, sizes_G = group_ids_M[positions], np.bincount(group_ids_M[positions])
        rng = keyed_rng(key.seed, RngStream.MASKS, key.step, key.first_sequence + answer)
        order_G = np.stack([rng.permutation(half) for _ in sizes_G], axis=1)
        levels_G = (order_G + rng.random(len(sizes_G))) / max(num_draws, 1)
        for draw in range(half):
            seed = int(rng.integers(2**63))
            pair = [(draw, levels_G[draw])]
            if num_draws > 1:
                pair.append((half + draw, 1.0 - levels_G[draw]))
            for index, level_G in pair:
                counts_G = masked_counts_at_levels(level_G, sizes_G)
                is_opposite = index >= half and num_draws > 1
                chosen_G = sizes_G - counts_G if is_opposite else counts_G
                is_chosen = choose_masked_in_groups(group_ids, chosen_G, np.random.default_rng(seed))
                is_masked = ~is_chosen if is_opposite else is_chosen
                masked[index, answer, positions] = is_masked
                weights[index, answer, positions] = np.where(is_masked, (sizes_G / counts_G)[group_ids], 0.0)
    return list(zip(masked, weights, strict=True))


def sum_by_answer(noised_batch: NoisedBatch, nll_N: Tensor) -> Tensor:
    """Estimated NELBO of the chosen and the rejected answer of each pair in nats, [P, 2], fp64."""
    assert noised_batch.answers_N is not None and noised_batch.num_rows is not None
    sums_Q = torch.zeros(2 * noised_batch.num_rows, dtype=torch.float64, device=nll_N.device)
    weighted_N = torch.where(noised_batch.weights_N != 0.0, noised_batch.weights_N * nll_N.double(), 0.0)
    return sums_Q.index_add(0, noised_batch.answers_N, weighted_N).view(-1, 2)


def compute_losses(
    loss: PreferenceLossConfig,
    scores_P2: Tensor,
    is_desirable_P1: Tensor | None = None,
    divergence: Tensor | None = None,
) -> Tensor:
    """The loss of each pair, or labeled example, [P].

    ``scores_P2``: bounds less those of the reference, and per token, as the loss says. ``divergence``: KTO's z, 0-d.
    """
    difference_P = scores_P2[:, 0] - scores_P2[:, 1]
    match loss:
        case DPOLossConfig():
            return F.softplus(-loss.beta * difference_P)
        case IPOLossConfig():
            return (difference_P - 0.5 / loss.beta).square()
        case SimPOLossConfig():
            return F.softplus(-loss.beta * (difference_P - loss.gamma_beta_ratio))
        case ORPOLossConfig():
            log_p_P2 = scores_P2.clamp(max=-1e-12)  # at probability 1 the odds are infinite
            log_odds_P2 = log_p_P2 - torch.log(-torch.expm1(log_p_P2))
            return loss.beta * F.softplus(log_odds_P2[:, 1] - log_odds_P2[:, 0]) - scores_P2[:, 0]
        case KTOLossConfig():
            assert is_desirable_P1 is not None and divergence is not None
            argument_P = loss.beta * (scores_P2[:, 0] - divergence)
            return torch.where(
                is_desirable_P1[:, 0],
                loss.desirable_weight * torch.sigmoid(-argument_P),
                loss.undesirable_weight * torch.sigmoid(argument_P),
            )


@dataclass(frozen=True)
class PreferenceResults:
    """Losses of the pairs, or labeled examples, of a micro-batch, and what is logged of them, fp64."""

    losses_P: Tensor
    margins_P: Tensor
    """Reward of the first answer over that of the second one."""
    rewards_P2: Tensor
    is_desirable_P1: Tensor | None
    """Labels of the first answers. None: they are chosen, and the second ones rejected."""

    def sum_metrics(self) -> Tensor:
        """Sums of accuracy, margin and the rewards of good and bad answers, and their denominators, [2, 4]."""
        labels_P1, good_P, bad_P = self.is_desirable_P1, *self.rewards_P2.unbind(1)
        if labels_P1 is None:
            counts_P4 = torch.ones(len(good_P), 4, dtype=torch.float64, device=good_P.device)
        else:  # no pairs, so neither accuracy nor margin
            counts_P4 = F.pad(torch.cat([labels_P1, ~labels_P1], dim=1).double(), (2, 0))
            bad_P = good_P
        values_P4 = torch.stack([(self.margins_P > 0).double(), self.margins_P, good_P, bad_P], dim=1)
        return torch.stack([(values_P4 * counts_P4).sum(0), counts_P4.sum(0)])


@dataclass(frozen=True)
class WeighedLoss:
    """The loss of a micro-batch as a weighted cross-entropy."""

    loss_inputs: LossInputs
    """Their weighted sum has the gradient of the loss."""
    loss: Tensor
    """Its value, divided by the denominator of the step, 0-d."""
    preferences: PreferenceResults | None = None
    """What is logged of preferences. None: another objective."""
    observe: Callable[[Tensor], None] | None = None
    """Called with the negative log-likelihoods of the forward, [N]. None: they are not looked at."""


class ModelLoss(Protocol):
    """A loss whose weights depend on what the model computes.

    A step calls `measure` for all micro-batches, without gradient, then `weigh`; then each has its forward and
    backward with these weights, so no activations are kept for several forwards.
    """

    @property
    def num_measuring_forwards(self) -> int:
        """Number of forwards that `measure` makes of a micro-batch."""

    def measure(self, model: Transformer, noised_batch: NoisedBatch, loss_inputs: LossInputs) -> Any:
        """What `weigh` has to know of a micro-batch."""

    def weigh(
        self,
        noised_batches: Sequence[NoisedBatch],
        loss_inputs: Sequence[LossInputs],
        measured: Sequence[Any],
        denominator: float,
        all_reduce: Callable[[Tensor], Tensor],
    ) -> list[WeighedLoss]:
        """The loss of each micro-batch.

        Args:
            loss_inputs: with the weights of noise, divided by ``denominator``, that of the step.
            measured: results of `measure`.
            all_reduce: sums a tensor over all ranks; all of them call it.
        """


@dataclass(frozen=True)
class PreferenceLoss:
    """A loss, and the model before preference training, on the noise of the model that is trained."""

    config: PreferenceLossConfig
    reference: Transformer | None = None
    """None: the trained model as its adapter was at the start, or without it (`before_training`); or none at all."""

    @property
    def num_measuring_forwards(self) -> int:
        """Of the model, and of its reference."""
        return 1 + self.config.has_reference

    def measure(self, model: Transformer, noised_batch: NoisedBatch, loss_inputs: LossInputs) -> Tensor:
        """The bound of each answer, less that of the reference if the loss has one, [P, 2], fp64."""
        nelbo_P2 = sum_by_answer(noised_batch, compute_nll(model, noised_batch, loss_inputs))
        if not self.config.has_reference:
            return -nelbo_P2
        reference = model if self.reference is None else self.reference
        with before_training(model) if self.reference is None else nullcontext():
            return sum_by_answer(noised_batch, compute_nll(reference, noised_batch, loss_inputs)) - nelbo_P2

    def weigh(
        self,
        noised_batches: Sequence[NoisedBatch],
        loss_inputs: Sequence[LossInputs],
        measured: Sequence[Any],
        denominator: float,
        all_reduce: Callable[[Tensor], Tensor],
    ) -> list[WeighedLoss]:
        """The losses from the bounds of answers. KTO's reference point is a mean over the step and all ranks."""
        divergence = None
        if self.config.is_unpaired:
            divergence = (all_reduce(torch.cat([*measured])[:, 1].sum()) / denominator).clamp(min=0.0)
        weighed = []
        for noised_batch, inputs, gains_P2 in zip(noised_batches, loss_inputs, measured, strict=True):
            inputs, results = self.add_weights(noised_batch, inputs, gains_P2, divergence)
            weighed.append(WeighedLoss(inputs, results.losses_P.sum() / denominator, results))
        return weighed

    def add_weights(
        self, noised_batch: NoisedBatch, loss_inputs: LossInputs, gains_P2: Tensor, divergence: Tensor | None = None
    ) -> tuple[LossInputs, PreferenceResults]:
        """Loss inputs whose weighted sum has the gradient of the losses, and these. `measure` returned the gains."""
        assert noised_batch.answers_N is not None and noised_batch.answer_lengths_Q is not None
        config, labels_P1 = self.config, noised_batch.is_desirable_P1
        lengths_P2 = noised_batch.answer_lengths_Q.view(-1, 2) if config.is_per_token else 1
        with torch.enable_grad():
            gains_P2 = gains_P2.detach().requires_grad_()
            scores_P2 = gains_P2 / lengths_P2
            losses_P = compute_losses(config, scores_P2, labels_P1, divergence)
            (slope_P2,) = torch.autograd.grad(losses_P.sum(), gains_P2)
        scores_P2, losses_P = scores_P2.detach(), losses_P.detach()
        margins_P = config.beta * (scores_P2[:, 0] - scores_P2[:, 1])
        weights_N = loss_inputs.weights_N * -slope_P2.flatten()[noised_batch.answers_N]
        results = PreferenceResults(losses_P, margins_P, config.beta * scores_P2, labels_P1)
        return replace(loss_inputs, weights_N=weights_N), results


@torch.no_grad()
def compute_nll(model: Transformer, noised_batch: NoisedBatch, loss_inputs: LossInputs) -> Tensor:
    """Negative log-likelihood of each target, [N], in nats, without gradient."""
    nll_N: Tensor = noised_batch.run(model, loss_inputs=loss_inputs).nll_N
    return nll_N
