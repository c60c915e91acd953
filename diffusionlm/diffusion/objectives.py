"""Training objectives: a draw, then the model's score of it. Sums and counts, never means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from config.objective import MaskedDiffusion
from diffusionlm.diffusion.batch import Batch, Draw, DrawKey
from diffusionlm.diffusion.corruption import draw_masks, masked_draw
from diffusionlm.kernels.cross_entropy import Score


class Objective(Protocol):
    """What the loop and the loader know of an objective."""

    def draw(self, batch: Batch, key: DrawKey) -> Draw:
        """Everything that chance decides, before the forward."""

    def score(self, draw: Draw, denominator: float) -> Score:
        """What the model is asked to score, divided by the step's target tokens."""


@dataclass(frozen=True)
class MaskedDiffusionObjective:
    """Masked diffusion (Sahoo et al. 2024; Nie et al. 2025): the sum divided by the number of target tokens estimates
    the NELBO in nats per token."""

    config: MaskedDiffusion
    mask_token: int

    def draw(self, batch: Batch, key: DrawKey) -> Draw:
        """Mask target tokens of every row."""
        masked_BL, weights_BL = draw_masks(batch, key, self.config.estimator)
        return masked_draw(batch, masked_BL, weights_BL, self.mask_token)

    def score(self, draw: Draw, denominator: float) -> Score:
        """The masked rows, without the mask token among the answers."""
        return Score(draw.targets_R, draw.weights_R / denominator, excluded_token=self.mask_token)


def build_objective(config: MaskedDiffusion, mask_token: int) -> Objective:
    """The objective of a config section."""
    return MaskedDiffusionObjective(config, mask_token)
