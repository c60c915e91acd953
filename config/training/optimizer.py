"""Optimizers, the options of their parameter groups, and the learning-rate schedule."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from config.base import (
    Fraction,
    HalfOpenFraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    Probability,
    Section,
    TupleOf,
)

PARAMETER_GROUPS = ("hidden", "head", "embed", "router", "scalar")
"""Matrices of the blocks; the head if it is not tied; the embedding; MoE routers; norms and biases."""


def _check_betas(betas: tuple[float, ...]) -> tuple[float, ...]:
    if not all(0.0 <= beta < 1.0 for beta in betas):
        raise ValueError(f"betas = {list(betas)} must lie in [0, 1)")
    return betas


Betas = Annotated[TupleOf[float], Field(min_length=2, max_length=2), AfterValidator(_check_betas)]


class LRScheduleConfig(Section):
    """Learning rate over a run, as a factor of each group's rate: linear warm-up, then the shape of ``kind``."""

    kind: Literal["linear", "cosine", "constant", "warmup_stable_decay"] = "linear"
    """Shape after the warm-up. warmup_stable_decay: the full rate, then a decay over the last steps."""
    warmup_steps: NonNegativeInt | None = None
    """Steps of warm-up; None: `warmup_fraction` of the run."""
    warmup_fraction: HalfOpenFraction = 0.05
    """Warm-up as a fraction of the run."""
    decay_fraction: Fraction | None = None
    """For warmup_stable_decay: fraction of the run, at its end, in which the rate falls; None: 0.2."""
    decay_shape: Literal["linear", "cosine", "sqrt"] | None = None
    """For warmup_stable_decay, with x the progress of the decay: 1 - x, half a cosine, or 1 - sqrt(x); None: linear."""
    final_factor: Probability = 0.0
    """Factor of the full rate at the end of the decay."""

    @model_validator(mode="after")
    def _check_decay_keys(self) -> Self:
        key = next((name for name in ("decay_fraction", "decay_shape") if getattr(self, name) is not None), None)
        if key is not None and self.kind != "warmup_stable_decay":
            raise ValueError(f'{key} needs kind = "warmup_stable_decay", but kind = "{self.kind}": remove one of them')
        return self

    def num_warmup_steps(self, max_steps: int) -> int:
        """Number of warm-up steps in a run of ``max_steps``."""
        return round(self.warmup_fraction * max_steps) if self.warmup_steps is None else self.warmup_steps

    def num_decay_steps(self, max_steps: int) -> int:
        """Number of last steps in which warmup_stable_decay lowers the rate, in a run of ``max_steps``.

        Raises:
            ValueError: warm-up and decay together are longer than the run.
        """
        fraction = 0.2 if self.decay_fraction is None else self.decay_fraction
        decay = round(fraction * max_steps)
        warmup = self.num_warmup_steps(max_steps)
        if warmup + decay > max_steps:
            raise ValueError(
                f"schedule: {warmup} warm-up steps and {decay} decay steps are more than the {max_steps} steps of the "
                "run: lower schedule.warmup_steps, or their fractions"
            )
        return decay


class ParameterGroup(Section):
    """Options of one parameter group; None: the optimizer's value."""

    learning_rate: PositiveFloat | None = None
    """Peak learning rate."""
    weight_decay: NonNegativeFloat | None = None
    """None: the optimizer's value for groups that decay, else 0."""


class OptimizerSection(Section):
    """Options of all optimizers. A ``kind`` that ends in 8bit has 8-bit moments."""

    implementation: ClassVar[str]
    """Module of `diffusionlm.optim` and class, as in "adamw:AdamW"; it is imported when an optimizer is built."""
    option_keys: ClassVar[tuple[str, ...]]
    """Keys of the section that are options of its parameter groups."""
    num_moments: ClassVar[int]
    """Moments of a parameter; of Muon, those of a hidden matrix."""

    kind: str
    fallback: bool = False
    """For 8-bit moments: use those of float32, with a warning, if the package bitsandbytes is not available."""
    head: ParameterGroup | None = None
    """The head if it is not tied to the embedding; no decay by default, but with Muon that of `rest`."""
    embed: ParameterGroup | None = None
    """The embedding; no decay by default, but with Muon that of `rest`."""
    router: ParameterGroup | None = None
    """MoE routers."""
    scalar: ParameterGroup | None = None
    """Norms and biases; no decay by default."""

    def group_options(self, group: str, *, decays: bool) -> dict[str, Any]:
        """Options of a parameter group, by key: the section's values, overridden by the group's table.

        Args:
            decays: whether the section's weight decay applies to the group.
        """
        options = {key: getattr(self, key) for key in self.option_keys}
        if not decays:
            options["weight_decay"] = 0.0
        table = None if group == "hidden" else getattr(self, group)
        return options if table is None else options | table.model_dump(exclude_none=True)

    @model_validator(mode="after")
    def _check_fallback(self) -> Self:
        if self.fallback and not self.is_quantized:
            raise ValueError(f'fallback needs a kind that ends in 8bit, but kind = "{self.kind}": remove fallback')
        return self

    @property
    def is_quantized(self) -> bool:
        """True if moments have 8 bits. Blocks of elements then share a scale, so matrices must not be sharded by
        rows."""
        return self.kind.endswith("8bit")

    @property
    def state_floats_per_parameter(self) -> float:
        """Size of the optimizer state of a parameter, in float32 numbers."""
        return self.num_moments * (0.25 if self.is_quantized else 1.0)


class AdamWConfig(OptimizerSection):
    """AdamW (Loshchilov and Hutter 2019): decoupled weight decay for matrices, none for norms and biases."""

    implementation = "adamw:AdamW"
    option_keys = ("learning_rate", "betas", "eps", "weight_decay")
    num_moments = 2

    kind: Literal["adamw", "adamw8bit"] = "adamw"
    """adamw8bit: 8-bit moments (Dettmers et al. 2022); needs the package bitsandbytes."""
    learning_rate: PositiveFloat = 3e-3
    """Peak learning rate."""
    betas: Betas = (0.9, 0.98)
    """Decay of the first and second moment, each in [0, 1)."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegativeFloat = 0.1
    """Weight decay of matrices outside embedding and head."""


class LionConfig(OptimizerSection):
    """Lion (Chen et al. 2023): the sign of an average of gradients, with decoupled weight decay."""

    implementation = "lion:Lion"
    option_keys = ("learning_rate", "betas", "weight_decay")
    num_moments = 1

    kind: Literal["lion", "lion8bit"] = "lion"
    """lion8bit: an 8-bit moment (Dettmers et al. 2022); needs the package bitsandbytes."""
    learning_rate: PositiveFloat = 3e-4
    """Peak learning rate. Every weight moves by it in each step, so use a third to a tenth of AdamW's."""
    betas: Betas = (0.9, 0.99)
    """Decay of the average that gives the sign, and of the moment, each in [0, 1)."""
    weight_decay: NonNegativeFloat = 1.0
    """Weight decay of matrices outside embedding and head."""


class MuonConfig(OptimizerSection):
    """Muon (Jordan et al. 2024) for the matrices of the blocks, AdamW for all other parameters."""

    implementation = "muon:Muon"
    option_keys = ("learning_rate", "momentum", "weight_decay", "precision")
    num_moments = 1

    kind: Literal["muon"] = "muon"
    learning_rate: PositiveFloat = 0.01
    """Peak learning rate of the hidden matrices. It is multiplied by 0.2 sqrt(max(rows, columns)), so that updates have
    AdamW's root mean square (Liu et al. 2025)."""
    momentum: HalfOpenFraction = 0.95
    """Nesterov momentum."""
    weight_decay: NonNegativeFloat = 0.1
    """Weight decay of the hidden matrices."""
    precision: Literal["auto", "bfloat16", "float32"] = "auto"
    """Dtype of the matrix products of the orthogonalization. auto: bfloat16 if the processor supports it natively."""
    rest: AdamWConfig = AdamWConfig(weight_decay=0.0)
    """All other parameters, unless a table of their group overrides it."""

    @model_validator(mode="after")
    def _check_rest_groups(self) -> Self:
        group = next((name for name in PARAMETER_GROUPS[1:] if getattr(self.rest, name) is not None), None)
        if group is not None:
            raise ValueError(f"[optimizer.rest.{group}] is not a table of muon: name it [optimizer.{group}]")
        return self

    @property
    def grouped_rest(self) -> AdamWConfig:
        """`rest` with the group tables of this section."""
        return self.rest.model_copy(update={group: getattr(self, group) for group in PARAMETER_GROUPS[1:]})


OptimizerConfig = Annotated[AdamWConfig | LionConfig | MuonConfig, Field(discriminator="kind")]
