"""Optimizers and learning-rate schedules."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from config.base import (
    FloatTuple,
    HalfOpenFraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    Probability,
    Section,
)


class Schedule(Section):
    """Learning rate over a run, as a factor of each group's own: linear warm-up, then the decay."""

    kind: Literal["linear", "cosine", "constant"] = "linear"
    """Shape after the warm-up."""
    warmup_steps: NonNegativeInt | None = None
    """Steps of warm-up; None: `warmup_fraction` of the run."""
    warmup_fraction: HalfOpenFraction = 0.05
    """Warm-up as a share of the run."""
    final_factor: Probability = 0.0
    """Where the decay ends, as a factor of the full rate."""


class AdamW(Section):
    """Decoupled weight decay (Loshchilov and Hutter 2019); matrices decay, norms and biases do not."""

    kind: Literal["adamw"] = "adamw"
    learning_rate: PositiveFloat = 3e-3
    """At the top of the schedule."""
    betas: Annotated[FloatTuple, Field(min_length=2, max_length=2)] = (0.9, 0.98)
    """Decay of the first and second moment, each in [0, 1)."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegativeFloat = 0.1
    """Of matrices outside the embedding."""

    @model_validator(mode="after")
    def _betas_below_one(self) -> Self:
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError(f"betas = {list(self.betas)} must lie in [0, 1)")
        return self


class Muon(Section):
    """Muon (Jordan et al. 2024) for the matrices of the blocks, AdamW for everything else."""

    kind: Literal["muon"] = "muon"
    learning_rate: PositiveFloat = 0.01
    """Of the hidden matrices, scaled to AdamW's root mean square."""
    momentum: HalfOpenFraction = 0.95
    """Nesterov momentum."""
    weight_decay: NonNegativeFloat = 0.1
    """Of the hidden matrices."""
    rest: AdamW = AdamW(weight_decay=0.0)
    """Embedding, head, norms and biases."""


Optimizer = Annotated[AdamW | Muon, Field(discriminator="kind")]
