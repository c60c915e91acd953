"""``[objective]``: what the model learns, and how its loss is estimated. docs/objectives.md has the formulas."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from config.base import (
    ConfigPath,
    HalfOpenFraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Probability,
    Section,
    TupleOf,
)
from config.finetune.preference import BlockLengths, PreferenceConfig
from config.model import BlockAttention
from diffusionlm.diffusion.schedules import LinearSchedule, NoiseSchedule

NoiseGrouping = Literal["row", "document", "block"]

LossWeighting = Literal["elbo", "inverse_p", "uniform", "cart"]

NoiseLevelRange = Annotated[tuple[Probability, Probability], Field(strict=False)]


class _MaskingOptions(Section):
    """Options shared by both masking estimators."""

    draw_per: NoiseGrouping | None = None
    """Noise group: the tokens that share one noise level. None: row for masked diffusion, block for block diffusion."""
    range: NoiseLevelRange = (0.0, 1.0)
    """Noise levels are sampled from this interval and weighted as if from [0, 1] (clipped schedules of BD3-LM): less
    variance, but no longer the NELBO."""
    weight: LossWeighting | None = None
    """Loss weight of a masked token. elbo: -alpha'(t) / (1 - alpha(t)), or n / k with kind = "counts". inverse_p: one
    over the masking probability, or n / k. uniform: 1. cart: by the visible tokens near it (Dream), masked diffusion
    only. None: elbo with normalizer = "targets", inverse_p with "rows", else uniform."""
    reweight_cap: Annotated[float, Field(ge=1.0)] | None = None
    """Largest loss weight; larger ones are reduced to it, which is no longer the NELBO."""
    contiguous_probability: Probability = 0.0
    """Probability that the masked tokens of a noise group are contiguous; above 0 no longer the NELBO."""
    position_ratio: Annotated[float, Field(ge=1.0, le=1e6)] = 1.0
    """Above 1 the later targets of a noise group are masked more, as decoding goes rather from left to right: the first
    one has this many times the rate of the last one, geometrically between them (docs/objectives.md). The loss is the
    bound for orders in which the next token is drawn by these rates. 1: all orders are equally probable."""
    replace_with: Literal["mask", "random"] = "mask"
    """Replacement of a masked token: the mask token, or a uniformly random token of the vocabulary."""

    @model_validator(mode="after")
    def _check_range(self) -> Self:
        low, high = self.range
        if not low < high:
            raise ValueError(f"range = [{low}, {high}]: the first number must be less than the second")
        if self.position_ratio > 1.0 and self.contiguous_probability > 0.0:
            raise ValueError(
                f"position_ratio = {self.position_ratio} and contiguous_probability = {self.contiguous_probability} "
                "both select the masked positions: set position_ratio = 1, or contiguous_probability = 0"
            )
        return self


class FixedCountMasking(_MaskingOptions):
    """Mask k of the n target tokens of a noise group, with weight n / k. k is uniform on 1 ... n and stratified over
    all groups of the optimizer step. An unbiased estimate of the NELBO."""

    kind: Literal["counts"] = "counts"
    complementary: bool = False
    """Use each row twice, the second time with the complementary mask (LLaDA2). k is then uniform on 0 ... n and the
    weight (n + 1) / 2k, so that the pair is unbiased. A forward has twice the rows."""

    @model_validator(mode="after")
    def _check_complements(self) -> Self:
        if self.complementary and self.position_ratio > 1.0:
            raise ValueError(
                f"position_ratio = {self.position_ratio} masks later targets more, and complementary = true masks the "
                "others the second time: set position_ratio = 1, or complementary = false"
            )
        return self


class IndependentMasking(_MaskingOptions):
    """Sample a time t for each noise group and mask each of its target tokens with probability
    p = (1 - epsilon) (1 - alpha(t)) + epsilon. The estimator of LLaDA, dLLM, MDLM and SDAR; it has more variance than
    counts."""

    kind: Literal["bernoulli"] = "bernoulli"
    schedule: NoiseSchedule = LinearSchedule()
    """alpha(t), the probability that a token is still clean."""
    times: Literal["stratified", "antithetic", "uniform"] = "stratified"
    """stratified: evenly spaced over the noise groups of the step. antithetic: in pairs t, 1 - t. uniform:
    independent."""
    epsilon: HalfOpenFraction = 1e-3
    """Smallest masking probability, which bounds 1 / p; masked shares below it are missing from the NELBO."""
    min_masking_rate: HalfOpenFraction = 0.0
    """Smaller masking probabilities are raised to this, which is no longer the NELBO."""


class AllMasked(Section):
    """Mask all target tokens, with weight 1: a whole block is predicted in one forward, for drafts of several tokens
    (I-DLM, TiDAR). The NELBO for blocks of one token only."""

    kind: Literal["all_masked"] = "all_masked"
    draw_per: ClassVar[NoiseGrouping | None] = None
    range: ClassVar[tuple[float, float]] = (0.0, 1.0)
    weight: ClassVar[LossWeighting | None] = None
    reweight_cap: ClassVar[float | None] = None
    contiguous_probability: ClassVar[float] = 0.0
    position_ratio: ClassVar[float] = 1.0
    replace_with: ClassVar[Literal["mask", "random"]] = "mask"


Estimator = Annotated[FixedCountMasking | IndependentMasking | AllMasked, Field(discriminator="kind")]

LossNormalizer = Literal["targets", "rows", "masked_rows", "masked", "outputs"]


class _DiffusionConfig(BlockLengths, Section):
    """Options shared by masked and block diffusion."""

    normalizer: LossNormalizer = "targets"
    """Divisor of the sum of the masked tokens' weighted cross-entropies. `estimator.weight` has the weights.
    targets: all target tokens of the step. rows: each row's sum is divided by its target tokens, then the mean over
    rows (LLaDA). masked_rows: each row's sum is divided by its masked tokens, then the mean over rows (dLLM-RL).
    masked: all masked tokens of the step; a next-token loss is divided by its own targets. outputs: all masked tokens
    and targets of the next-token loss of the step, both terms."""
    estimator: Estimator = FixedCountMasking()
    """Sampling and weighting of masks."""
    label_smoothing: HalfOpenFraction = 0.0
    """Share of the target distribution that is uniform over the vocabulary."""
    z_loss: NonNegativeFloat = 0.0
    """Factor of the squared log of the softmax denominator, which keeps logits small (PaLM); 1e-4 is usual."""
    eos_padding_weight: NonNegativeFloat = 1.0
    """Loss weight, and share in the divisor, of a target token that is padding after an answer
    (`data.source.chat.eos_padding`), relative to other target tokens."""
    next_token_weight: NonNegativeFloat = 0.0
    """Weight of a next-token loss on the clean tokens, divided like the loss. Output i - 1 predicts token i. With
    clean_attention = "token" it is of the same forward; else of a causal forward of its own, because in a block-causal
    one outputs know the tokens after them."""
    mask_noise_steps: NonNegativeInt = 0
    """Add noise to the embedding of the mask token in this many first steps, while its row is untrained (LLaDA2)."""


class MaskedDiffusionConfig(_DiffusionConfig):
    """Masked diffusion: predict the masked tokens of a row from all others, in both directions."""

    kind: Literal["masked_diffusion"] = "masked_diffusion"
    anneal_attention_steps: NonNegativeInt = 0
    """Adapt an autoregressive model: in step s of these (from 1), a token after the query is visible with probability
    s / anneal_attention_steps (DiffuLLaMA). 0: attention is bidirectional from the start."""
    attention_bias: ConfigPath | None = None
    """File (.npy, or .safetensors with one tensor) of a bias of the attention, [L, L] or [heads, L, L] by positions of
    the row: numbers are added to the scores, -inf or false hides a key. Needs data.rows = "padded"; set
    generation.attention_bias to the same file for inference."""

    @model_validator(mode="after")
    def _check_attention(self) -> Self:
        if self.attention_bias is not None and self.anneal_attention_steps:
            raise ValueError("attention_bias and anneal_attention_steps both set the attention: remove one")
        if self.estimator.draw_per == "block":
            raise ValueError(
                'estimator.draw_per = "block" needs blocks: choose "row" or "document", or kind = "block_diffusion"'
            )
        if isinstance(self.estimator, AllMasked):
            raise ValueError('estimator.kind = "all_masked" leaves nothing to read: set kind = "block_diffusion"')
        return self


class BlockLengthStage(Section):
    """A stage of the training with its own block length."""

    from_step: NonNegativeInt
    """First optimizer step of the stage."""
    block_length: PositiveInt
    """Tokens of a block during the stage."""


class BlockDiffusionConfig(_DiffusionConfig):
    """Block diffusion (BD3-LM, SDAR): predict the masked tokens of each block from the block itself and the clean
    blocks before it. block_length = 1 is the exact left-to-right likelihood; the whole row is masked diffusion."""

    kind: Literal["block_diffusion"] = "block_diffusion"
    block_length: PositiveInt | Annotated[tuple[PositiveInt, ...], Field(strict=False, min_length=1)] | None = None
    """Tokens of a block, counted from the start of each document. A list: each step uses a random one of them, and the
    model can decode with any. Set either this or `stages`."""
    attention: Literal["block_diffusion", "prompt_and_own_block"] = "block_diffusion"
    """block_diffusion: a block sees the clean blocks before it. prompt_and_own_block: an answer token sees the prompt
    and its own block only, in one stream of noisy tokens; blocks are counted from the end of the prompt (the tokens
    before the first target), and an answer is one document (`turns = "expand"`). Set generation.attention alike."""
    clean_attention: BlockAttention = "block"
    """block: clean blocks see their later tokens, too. token: they are token-causal, and the model is an autoregressive
    one as well, whose next-token loss comes from the same forward (Nemotron-Labs-Diffusion, I-DLM). Needs
    model.clean_alignment = "shifted"; model.noisy_attention is the attention of the noisy blocks."""
    balance: bool = False
    """Multiply next_token_weight by stop_gradient(loss of masked tokens / next-token loss) of the step (I-DLM). A
    forward without gradient measures both before."""
    stages: TupleOf[BlockLengthStage] = ()
    """Block lengths that change during training, in order; the first stage starts at step 0."""

    @model_validator(mode="after")
    def _check_blocks(self) -> Self:
        if self.estimator.weight == "cart":
            raise ValueError(
                'estimator.weight = "cart" needs kind = "masked_diffusion": a block sees no tokens after it'
            )
        if self.clean_attention == "token" and self.attention == "prompt_and_own_block":
            raise ValueError(
                'clean_attention = "token" is of the clean half, which attention = "prompt_and_own_block" has not: set '
                'clean_attention = "block"'
            )
        if self.balance and not (self.next_token_weight and self.clean_attention == "token"):
            raise ValueError(
                f"balance = true weighs the next-token loss of one forward: set next_token_weight (it is "
                f'{self.next_token_weight}) and clean_attention = "token"'
            )
        if (self.block_length is None) == (not self.stages):
            raise ValueError("set either block_length or stages")
        if self.stages and self.stages[0].from_step != 0:
            raise ValueError(f"stages[0].from_step = {self.stages[0].from_step} must be 0")
        for before, after in pairwise(self.stages):
            if after.from_step <= before.from_step:
                raise ValueError(f"stages: from_step {after.from_step} must come after {before.from_step}")
        return self

    @property
    def block_lengths(self) -> tuple[int, ...]:
        """All block lengths, in order."""
        if self.stages:
            return tuple(stage.block_length for stage in self.stages)
        assert self.block_length is not None
        return (self.block_length,) if isinstance(self.block_length, int) else self.block_length

    @property
    def final_block_length(self) -> int:
        """Block length for decoding with the finished model: that of the last stage, or the longest of a list."""
        return self.block_lengths[-1] if self.stages else max(self.block_lengths)


class NextTokenConfig(BlockLengths, Section):
    """Autoregression: predict each token from those before it. Needs model.logit_alignment = "shifted"."""

    kind: Literal["next_token"] = "next_token"
    label_smoothing: HalfOpenFraction = 0.0
    """Share of the target distribution that is uniform over the vocabulary."""
    z_loss: NonNegativeFloat = 0.0
    """Factor of the squared log of the softmax denominator."""
    eos_padding_weight: NonNegativeFloat = 1.0
    """Loss weight, and share in the divisor, of a target token that is padding after an answer
    (`data.source.chat.eos_padding`), relative to other target tokens."""

    @property
    def block_lengths(self) -> tuple[int, ...]:
        return (1,)


ObjectiveConfig = Annotated[
    MaskedDiffusionConfig | BlockDiffusionConfig | NextTokenConfig | PreferenceConfig, Field(discriminator="kind")
]
