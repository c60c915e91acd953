"""Optimizers, the settings of their groups of parameters, and learning-rate schedules."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from config.base import (
    FloatTuple,
    Fraction,
    HalfOpenFraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    Section,
)

PARAMETER_GROUPS = ("hidden", "head", "embed", "router", "scalar")
"""Matrices of the blocks; the head where it is not the embedding; the embedding; the routers of a mixture of experts;
norms and biases."""

Betas = Annotated[FloatTuple, Field(min_length=2, max_length=2)]


class LRScheduleConfig(Section):
    """Learning rate over a run, as a factor of each group's own: linear warm-up, then the shape of its kind."""

    kind: Literal["linear", "cosine", "constant", "warmup_stable_decay"] = "linear"
    """Shape after the warm-up. warmup_stable_decay: the full rate, then a decay over the last steps."""
    warmup_steps: NonNegativeInt | None = None
    """Steps of warm-up; None: `warmup_fraction` of the run."""
    warmup_fraction: HalfOpenFraction = 0.05
    """Warm-up as a share of the run."""
    decay_steps: PositiveInt | None = None
    """Of warmup_stable_decay: the last steps, over which the rate falls; None: `decay_fraction` of the run."""
    decay_fraction: Fraction | None = None
    """Of warmup_stable_decay: the decay as a share of the run; None: 0.2."""
    decay_shape: Literal["linear", "cosine", "sqrt"] | None = None
    """Of warmup_stable_decay, over the decay's progress x: 1 - x, half a cosine, or 1 - sqrt(x); None: linear."""
    final_factor: Probability = 0.0
    """Where the decay ends, as a factor of the full rate."""

    @model_validator(mode="after")
    def _check_decay_keys(self) -> Self:
        given = [name for name in ("decay_steps", "decay_fraction", "decay_shape") if getattr(self, name) is not None]
        if given and self.kind != "warmup_stable_decay":
            raise ValueError(
                f'{given[0]} is for kind = "warmup_stable_decay", and this is kind = "{self.kind}": change the kind or '
                f"leave {given[0]} out"
            )
        if len(given) > 1 and given[:2] == ["decay_steps", "decay_fraction"]:
            raise ValueError("give decay_steps or decay_fraction, not both")
        return self

    def num_warmup_steps(self, max_steps: int) -> int:
        """Steps of warm-up of a run of ``max_steps``."""
        return round(self.warmup_fraction * max_steps) if self.warmup_steps is None else self.warmup_steps

    def num_decay_steps(self, max_steps: int) -> int:
        """Last steps of a run of ``max_steps`` over which warmup_stable_decay falls.

        Raises:
            ValueError: warm-up and decay together are longer than the run.
        """
        share = 0.2 if self.decay_fraction is None else self.decay_fraction
        decay = round(share * max_steps) if self.decay_steps is None else self.decay_steps
        warmup = self.num_warmup_steps(max_steps)
        if warmup + decay > max_steps:
            raise ValueError(
                f"schedule: a warm-up of {warmup} and a decay of {decay} steps are longer than the run of {max_steps}: "
                "lower schedule.warmup_steps or schedule.decay_steps (or their fractions)"
            )
        return decay


def _check_betas(betas: tuple[float, ...] | None) -> None:
    if betas is not None and not all(0.0 <= beta < 1.0 for beta in betas):
        raise ValueError(f"betas = {list(betas)} must lie in [0, 1)")


def _check_fallback(kind: str, fallback: bool) -> None:
    if fallback and not kind.endswith("8bit"):
        raise ValueError(f'fallback is for kind = "{kind}8bit"; leave it out')


class AdamWGroup(Section):
    """What a group that AdamW updates has of its own; what is None is that of the optimizer."""

    learning_rate: PositiveFloat | None = None
    """At the top of the schedule."""
    betas: Betas | None = None
    """Decay of the first and second moment, each in [0, 1)."""
    eps: PositiveFloat | None = None
    """Added to the root of the second moment."""
    weight_decay: NonNegativeFloat | None = None
    """None: the optimizer's for matrices that decay, else 0."""

    @model_validator(mode="after")
    def _check_betas_range(self) -> Self:
        _check_betas(self.betas)
        return self


class LionGroup(Section):
    """What a group that Lion updates has of its own; what is None is that of the optimizer."""

    learning_rate: PositiveFloat | None = None
    """At the top of the schedule."""
    betas: Betas | None = None
    """Of the update and of the moment, each in [0, 1)."""
    weight_decay: NonNegativeFloat | None = None
    """None: the optimizer's for matrices that decay, else 0."""

    @model_validator(mode="after")
    def _check_betas_range(self) -> Self:
        _check_betas(self.betas)
        return self


class MuonGroup(Section):
    """What the hidden matrices have of their own; what is None is that of the optimizer, where it may stand as well."""

    learning_rate: PositiveFloat | None = None
    """At the top of the schedule."""
    momentum: HalfOpenFraction | None = None
    """Nesterov momentum."""
    weight_decay: NonNegativeFloat | None = None
    """Decoupled, times the learning rate."""
    adjust_lr: Literal["match_rms_adamw", "original"] | None = None
    """How the rate grows with the shape of a matrix."""
    precision: Literal["auto", "bfloat16", "float32"] | None = None
    """Of the orthogonalisation's products."""


class AdamW(Section):
    """Decoupled weight decay (Loshchilov and Hutter 2019); matrices decay, norms and biases do not."""

    kind: Literal["adamw", "adamw8bit"] = "adamw"
    """adamw8bit: moments of 8 bits (Dettmers et al. 2022), by the package bitsandbytes."""
    learning_rate: PositiveFloat = 3e-3
    """At the top of the schedule."""
    betas: Betas = (0.9, 0.98)
    """Decay of the first and second moment, each in [0, 1)."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegativeFloat = 0.1
    """Of matrices outside embedding and head."""
    fallback: bool = False
    """Of adamw8bit: go on with adamw, and say so, where bitsandbytes cannot be used."""
    hidden: AdamWGroup | None = None
    """Matrices of the blocks."""
    head: AdamWGroup | None = None
    """The head where it is not the embedding; does not decay unless it says so."""
    embed: AdamWGroup | None = None
    """The embedding; does not decay unless it says so."""
    router: AdamWGroup | None = None
    """Routers of a mixture of experts."""
    scalar: AdamWGroup | None = None
    """Norms and biases; do not decay unless they say so."""

    @model_validator(mode="after")
    def _check_values(self) -> Self:
        _check_betas(self.betas)
        _check_fallback(self.kind, self.fallback)
        return self


class Lion(Section):
    """The sign of an average of gradients (Chen et al. 2023), with decoupled weight decay."""

    kind: Literal["lion", "lion8bit"] = "lion"
    """lion8bit: a moment of 8 bits (Dettmers et al. 2022), by the package bitsandbytes."""
    learning_rate: PositiveFloat = 3e-4
    """At the top of the schedule; a third to a tenth of AdamW's, since every weight moves by this much in a step."""
    betas: Betas = (0.9, 0.99)
    """Of the update and of the moment, each in [0, 1)."""
    weight_decay: NonNegativeFloat = 1.0
    """Of matrices outside embedding and head."""
    fallback: bool = False
    """Of lion8bit: go on with lion, and say so, where bitsandbytes cannot be used."""
    hidden: LionGroup | None = None
    """Matrices of the blocks."""
    head: LionGroup | None = None
    """The head where it is not the embedding; does not decay unless it says so."""
    embed: LionGroup | None = None
    """The embedding; does not decay unless it says so."""
    router: LionGroup | None = None
    """Routers of a mixture of experts."""
    scalar: LionGroup | None = None
    """Norms and biases; do not decay unless they say so."""

    @model_validator(mode="after")
    def _check_values(self) -> Self:
        _check_betas(self.betas)
        _check_fallback(self.kind, self.fallback)
        return self


class Muon(Section):
    """Muon (Jordan et al. 2024) for the matrices of the blocks, AdamW for everything else."""

    kind: Literal["muon"] = "muon"
    learning_rate: PositiveFloat = 0.01
    """Of the hidden matrices, scaled by `adjust_lr`."""
    momentum: HalfOpenFraction = 0.95
    """Nesterov momentum."""
    weight_decay: NonNegativeFloat = 0.1
    """Of the hidden matrices."""
    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Factor of the rate of a matrix: 0.2 sqrt(max(rows, columns)), the root mean square of AdamW's updates (Liu et al.
    2025), or sqrt(max(1, rows / columns)) (Jordan et al. 2024)."""
    precision: Literal["auto", "bfloat16", "float32"] = "auto"
    """Of the orthogonalisation's products. auto: bfloat16 where the processor has it."""
    hidden: MuonGroup | None = None
    """Matrices of the blocks; what it gives goes before the keys above."""
    rest: AdamW = AdamW(weight_decay=0.0)
    """All others, unless the tables below say otherwise."""
    head: AdamWGroup | None = None
    """The head where it is not the embedding."""
    embed: AdamWGroup | None = None
    """The embedding."""
    router: AdamWGroup | None = None
    """Routers of a mixture of experts."""
    scalar: AdamWGroup | None = None
    """Norms and biases; do not decay unless they say so."""

    @model_validator(mode="after")
    def _check_rest_groups(self) -> Self:
        inside = next((name for name in PARAMETER_GROUPS if getattr(self.rest, name) is not None), None)
        if inside is not None:
            raise ValueError(f"[optimizer.rest.{inside}] is called [optimizer.{inside}] here")
        return self


Optimizer = Annotated[AdamW | Lion | Muon, Field(discriminator="kind")]


KEY_HINTS = {
    **{
        f"optimizer.muon.{group}": f'is [optimizer.{group}] here, in an [optimizer] with kind = "muon"'
        for group in PARAMETER_GROUPS
    },
    **{
        f"optimizer.{section}{key}": advice.format(section)
        for section in ("", *(f"{group}." for group in PARAMETER_GROUPS))
        for key, advice in {
            "max_learning_rate": "is called optimizer.{}learning_rate here",
            "initial_learning_rate": "is not needed here: the warm-up (schedule.warmup_steps) rises from its first "
            "step on to optimizer.{}learning_rate",
            "min_learning_rate": "is schedule.final_factor here, a factor of optimizer.{}learning_rate and of every "
            "other group's rate",
        }.items()
    },
    "optimizer.cosine_cycle_iters": "is training.max_steps here: the schedule ends with the run",
    "optimizer.lr_decay_iters": "is training.max_steps here: the schedule ends with the run",
    "optimizer.wsd_decay_iters": 'is schedule.decay_steps here, with schedule.kind = "warmup_stable_decay"',
    "optimizer.wsd_decay_style": 'is schedule.decay_shape here, with schedule.kind = "warmup_stable_decay"',
    "optimizer.adjust_lr_fn": "is called optimizer.adjust_lr here",
}
"""Keys of related projects, and where the same thing is said here."""
