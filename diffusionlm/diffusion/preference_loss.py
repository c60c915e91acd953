"""The losses of preferences by the model and its reference."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from config.finetune.preference import PreferenceLossConfig
from diffusionlm.diffusion.noised_batch import NoisedBatch
from diffusionlm.diffusion.preference import compute_losses, sum_by_answer
from diffusionlm.kernels.loss_types import LossInputs
from diffusionlm.models.lora import before_training
from diffusionlm.models.transformer import Transformer


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
class PreferenceLoss:
    """A loss, and the model before preference training, on the noise of the model that is trained.

    A step calls `measure` for all micro-batches, then `add_weights` before the forward and backward of each. That
    forward computes the gradient, so no activations are kept for several forwards.
    """

    config: PreferenceLossConfig
    reference: Transformer | None = None
    """None: the trained model as its adapter was at the start, or without it (`before_training`); or none at all."""

    @torch.no_grad()
    def measure(self, model: Transformer, noised_batch: NoisedBatch, loss_inputs: LossInputs) -> Tensor:
        """The bound of each answer, less that of the reference if the loss has one, [P, 2], fp64."""
        nelbo_P2 = sum_by_answer(noised_batch, _compute_nll(model, noised_batch, loss_inputs))
        if not self.config.has_reference:
            return -nelbo_P2
        reference = model if self.reference is None else self.reference
        with before_training(model) if self.reference is None else nullcontext():
            return sum_by_answer(noised_batch, _compute_nll(reference, noised_batch, loss_inputs)) - nelbo_P2

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


def _compute_nll(model: Transformer, noised_batch: NoisedBatch, loss_inputs: LossInputs) -> Tensor:
    output = model(
        noised_batch.inputs_BS,
        pattern=noised_batch.pattern,
        output_positions=noised_batch.positions_N,
        loss_inputs=loss_inputs,
    )
    nll_N: Tensor = output.nll_N
    return nll_N
