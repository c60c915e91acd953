"""The reference of preference training, and the loss of pairs by it and the model."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from diffusionlm.diffusion.noised_batch import NoisedBatch
from diffusionlm.diffusion.preference import preference_margins, sum_by_answer, weigh_answers
from diffusionlm.kernels.loss_types import LossInputs
from diffusionlm.models.lora import before_training
from diffusionlm.models.transformer import Transformer


@dataclass(frozen=True)
class PairLosses:
    """Loss and margin of the pairs of a micro-batch, [P], fp64."""

    losses_P: Tensor
    margins_P: Tensor
    """Positive: the model prefers the chosen answer more than the reference does."""


@dataclass(frozen=True)
class PreferenceReference:
    """The model before preference training, on the noise of the model that is trained."""

    model: Transformer | None
    """None: the trained model as its adapter was at the start, or without it (`before_training`)."""
    beta: float

    @torch.no_grad()
    def add_dpo_weights(
        self, model: Transformer, noised_batch: NoisedBatch, loss_inputs: LossInputs
    ) -> tuple[LossInputs, PairLosses]:
        """Loss inputs whose weighted sum has the gradient of the loss of the pairs, and that loss.

        A forward of the model and one of its reference, without gradients. The forward that follows computes the
        gradient, so no activations are kept for several forwards.
        """
        nelbo_P2 = sum_by_answer(noised_batch, _compute_nll(model, noised_batch, loss_inputs))
        reference = model if self.model is None else self.model
        with before_training(model) if self.model is None else nullcontext():
            reference_P2 = sum_by_answer(noised_batch, _compute_nll(reference, noised_batch, loss_inputs))
        losses_P, factors_N = weigh_answers(noised_batch, nelbo_P2, reference_P2, self.beta)
        margins_P = preference_margins(nelbo_P2, reference_P2, self.beta)
        return replace(loss_inputs, weights_N=loss_inputs.weights_N * factors_N), PairLosses(losses_P, margins_P)


def _compute_nll(model: Transformer, noised_batch: NoisedBatch, loss_inputs: LossInputs) -> Tensor:
    output = model(
        noised_batch.inputs_BS,
        pattern=noised_batch.pattern,
        output_positions=noised_batch.positions_N,
        loss_inputs=loss_inputs,
    )
    nll_N: Tensor = output.nll_N
    return nll_N
