"""What is learnt, and how its loss is estimated. docs/objectives.md has the formulae."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from config.base import (
    HalfOpenFraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    Section,
    TupleOf,
)


class LinearScheduleConfig(Section):
    """alpha = 1 - t: LLaDA, MDLM's log-linear noise, SDAR."""

    kind: Literal["linear"] = "linear"


class CosineScheduleConfig(Section):
    """alpha = 1 - cos(pi / 2 (1 - t)): masked share sin(pi t / 2), as in MaskGIT, MD4 and dLLM."""

    kind: Literal["cosine"] = "cosine"


class RaisedCosineScheduleConfig(Section):
    """alpha = (1 + cos(pi t)) / 2: what MMaDA's descendants call cosine."""

    kind: Literal["raised_cosine"] = "raised_cosine"


class CleanCosineScheduleConfig(Section):
    """alpha = cos(pi t / 2): what BD3-LM calls cosine."""

    kind: Literal["clean_cosine"] = "clean_cosine"


class PowerScheduleConfig(Section):
    """alpha = 1 - t ** exponent."""

    kind: Literal["power"] = "power"
    exponent: PositiveFloat = 2.0


class SquareRootScheduleConfig(Section):
    """alpha = 1 - sqrt(t)."""

    kind: Literal["square_root"] = "square_root"


class SigmoidScheduleConfig(Section):
    """Masked share sigmoid(steepness (t - 1/2)), stretched to begin at 0 and end at 1 (MaskGIT's descendants)."""

    kind: Literal["sigmoid"] = "sigmoid"
    steepness: PositiveFloat = 6.0


class LogarithmicScheduleConfig(Section):
    """alpha = 1 - log(1 + t) / log 2 (BD3-LM)."""

    kind: Literal["logarithmic"] = "logarithmic"


def _schedule_from_name(value: object) -> object:
    return {"kind": value} if isinstance(value, str) else value


NoiseScheduleConfig = Annotated[
    LinearScheduleConfig
    | CosineScheduleConfig
    | RaisedCosineScheduleConfig
    | CleanCosineScheduleConfig
    | PowerScheduleConfig
    | SquareRootScheduleConfig
    | SigmoidScheduleConfig
    | LogarithmicScheduleConfig,
    Field(discriminator="kind"),
    BeforeValidator(_schedule_from_name),
]
"""A name, or a table with ``kind`` and its parameters."""

NoiseGrouping = Literal["row", "document", "block"]

LossWeighting = Literal["elbo", "inverse_p", "uniform"]

NoiseLevelRange = Annotated[tuple[Probability, Probability], Field(strict=False)]


class _MaskingOptions(Section):
    """What both estimators know."""

    draw_per: NoiseGrouping | None = None
    """Tokens that share one noise level. None: the row for masked diffusion, the block for block diffusion."""
    range: NoiseLevelRange = (0.0, 1.0)
    """Noise levels are drawn from this part of [0, 1] and weighted as if from all of it (BD3-LM's clipped schedules):
    less variance, but no longer the NELBO."""
    weight: LossWeighting | None = None
    """Factor of a masked token's cross-entropy. elbo: -alpha'(t) / (1 - alpha(t)), or n / k. inverse_p: one over the
    masking probability, or n / k. uniform: 1. None: what `loss` asks for."""
    reweight_cap: Annotated[float, Field(ge=1.0)] | None = None
    """Greatest weight; larger ones are cut to it, which is no longer the NELBO."""
    contiguous_probability: Probability = 0.0
    """Probability that the masked tokens of a unit are one run instead of being scattered; above 0 no longer the
    NELBO."""
    replace_with: Literal["mask", "random"] = "mask"
    """What stands in place of a noised token: the mask token, or any token of the vocabulary, uniformly."""

    @model_validator(mode="after")
    def _check_range(self) -> Self:
        low, high = self.range
        if not low < high:
            raise ValueError(f"range = [{low}, {high}] must rise")
        return self


class FixedCountMasking(_MaskingOptions):
    """Masked counts k, uniform on 1 ... n and stratified over all units of the optimizer step; weight n / k. Exactly
    the NELBO."""

    kind: Literal["counts"] = "counts"
    complementary: bool = False
    """Each row comes twice, the second time with the other tokens masked (LLaDA2); k is then uniform on 0 ... n and the
    weight (n + 1) / 2k, so that the pair is unbiased. Twice the rows in a forward."""


class IndependentMasking(_MaskingOptions):
    """A time t for each unit; each of its tokens is masked with probability p = (1 - epsilon) (1 - alpha(t)) + epsilon.
    LLaDA's, dLLM's, MDLM's and SDAR's estimator; of more variance than counts."""

    kind: Literal["bernoulli"] = "bernoulli"
    schedule: NoiseScheduleConfig = LinearScheduleConfig()
    """alpha(t), the probability that a token is still clean."""
    times: Literal["stratified", "antithetic", "uniform"] = "stratified"
    """stratified: evenly spread over the units of the step. antithetic: in pairs t, 1 - t. uniform: independent."""
    epsilon: HalfOpenFraction = 1e-3
    """Least masking probability, which bounds 1 / p; leaves masked shares below it out of the NELBO."""
    min_masking_rate: HalfOpenFraction = 0.0
    """Smaller masking probabilities are raised to this, which is no longer the NELBO."""


Estimator = Annotated[FixedCountMasking | IndependentMasking, Field(discriminator="kind")]

LossKind = Literal["elbo", "guidelines", "soft_ce", "dllm", "masked_mean"]

SOFT_CE_SMOOTHING = 0.1
"""Label smoothing of loss = "soft_ce", where none is given."""


class _DiffusionConfig(Section):
    """What both diffusion objectives know."""

    loss: LossKind = "elbo"
    """elbo: ELBO weights, over all target tokens of the step. guidelines: 1 / p, each row over its own target tokens,
    mean over rows (LLaDA). soft_ce: that with label smoothing 0.1. dllm: unweighted; masked diffusion over the row's
    masked tokens, block diffusion over its target tokens, mean over rows (dLLM-RL). masked_mean: unweighted, over all
    masked tokens of the step."""
    estimator: Estimator = FixedCountMasking()
    """How masks are drawn and weighted."""
    label_smoothing: HalfOpenFraction | None = None
    """Share of the target distribution that is uniform over the vocabulary. None: 0, or 0.1 with loss = "soft_ce"."""
    z_loss: NonNegativeFloat = 0.0
    """Factor of the squared logarithm of the softmax's denominator, which keeps logits small (PaLM); 1e-4 is usual."""

    @property
    def smoothing(self) -> float:
        """The label smoothing that applies."""
        if self.label_smoothing is not None:
            return self.label_smoothing
        return SOFT_CE_SMOOTHING if self.loss == "soft_ce" else 0.0


class MaskedDiffusionConfig(_DiffusionConfig):
    """Masked diffusion: reconstruct the masked tokens of a row from the others, in both directions."""

    kind: Literal["masked_diffusion"] = "masked_diffusion"

    @property
    def block_lengths(self) -> tuple[None]:
        """No blocks."""
        return (None,)

    @property
    def final_block_length(self) -> None:
        """None: the whole sequence."""
        return None

    @model_validator(mode="after")
    def _check_draw_per(self) -> Self:
        if self.estimator.draw_per == "block":
            raise ValueError(
                'estimator.draw_per = "block" needs blocks: choose "row" or "document", or kind = "block_diffusion"'
            )
        return self


class BlockLengthStage(Section):
    """A part of the training with its own block length."""

    from_step: NonNegativeInt
    """First optimizer step of the stage."""
    block_length: PositiveInt
    """Tokens of a block from then on."""


class BlockDiffusionConfig(_DiffusionConfig):
    """Block diffusion (BD3-LM, SDAR): reconstruct the masked tokens of each block from the block itself and the clean
    blocks before it. block_length 1 is the exact likelihood from left to right; the whole row is masked diffusion."""

    kind: Literal["block_diffusion"] = "block_diffusion"
    block_length: PositiveInt | Annotated[tuple[PositiveInt, ...], Field(strict=False, min_length=1)] | None = None
    """Tokens of a block, counted from each document's start. Several: one of them is drawn for each step, and the model
    serves for all of them. Or give `stages`."""
    stages: TupleOf[BlockLengthStage] = ()
    """Block lengths that change as training goes on, in order; the first from step 0."""

    @model_validator(mode="after")
    def _check_block_lengths(self) -> Self:
        if (self.block_length is None) == (not self.stages):
            raise ValueError("give either block_length or stages")
        if self.stages and self.stages[0].from_step != 0:
            raise ValueError(f"stages[0].from_step = {self.stages[0].from_step} must be 0")
        for before, after in pairwise(self.stages):
            if after.from_step <= before.from_step:
                raise ValueError(f"stages: from_step {after.from_step} must come after {before.from_step}")
        return self

    @property
    def block_lengths(self) -> tuple[int, ...]:
        """All that occur, in the order given."""
        if self.stages:
            return tuple(stage.block_length for stage in self.stages)
        assert self.block_length is not None
        return (self.block_length,) if isinstance(self.block_length, int) else self.block_length

    @property
    def final_block_length(self) -> int:
        """What the finished model is to be used with: the last stage's, or the longest of several."""
        return self.block_lengths[-1] if self.stages else max(self.block_lengths)


class NextTokenConfig(Section):
    """Autoregression: predict each token from those before it. Needs model.logit_alignment = "shifted"."""

    kind: Literal["next_token"] = "next_token"
    label_smoothing: HalfOpenFraction = 0.0
    """Share of the target distribution that is uniform over the vocabulary."""
    z_loss: NonNegativeFloat = 0.0
    """Factor of the squared logarithm of the softmax's denominator."""

    @property
    def smoothing(self) -> float:
        """The label smoothing that applies."""
        return self.label_smoothing

    @property
    def block_lengths(self) -> tuple[int, ...]:
        """Blocks of one token."""
        return (1,)

    @property
    def final_block_length(self) -> int:
        """One."""
        return 1


ObjectiveConfig = Annotated[MaskedDiffusionConfig | BlockDiffusionConfig | NextTokenConfig, Field(discriminator="kind")]
