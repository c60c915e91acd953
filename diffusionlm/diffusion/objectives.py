"""Training objectives: a draw, then the model's score of it. Sums and counts, never means.

All objectives are one: noise some targets, score them, weight them, divide by a count of the whole step. They differ in
who sees whom (`layout.py`), in the draw and its weights (`corruption.py`), and in the count.

Shapes: B rows, L tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from config.model import ModelConfig
from config.objective import (
    BlockDiffusionConfig,
    FixedCountMasking,
    IndependentMasking,
    LossWeighting,
    MaskedDiffusionConfig,
    NextTokenConfig,
    NoiseGrouping,
    ObjectiveConfig,
)
from diffusionlm.diffusion.corruption import MaskSample, assign_noise_groups, sample_masks, sample_replacement_tokens
from diffusionlm.diffusion.layout import InputLayout
from diffusionlm.diffusion.noised_batch import CleanBatch, NoisedBatch, NoiseKey
from diffusionlm.diffusion.rng import RngStream, keyed_rng
from diffusionlm.kernels.cross_entropy import LossInputs

LossNormalizer = Literal["targets", "rows", "masked", "masked_rows"]
"""What sums are divided by: the step's target tokens; each row's target tokens, then the number of rows; the step's
masked tokens; each row's masked tokens, then the number of rows."""


class Objective(Protocol):
    """What the loop and the loader know of an objective."""

    def build_noised_batch(self, batch: CleanBatch, key: NoiseKey) -> NoisedBatch:
        """Everything that chance decides, before the forward."""

    def build_loss_inputs(self, noised_batch: NoisedBatch, denominator: float) -> LossInputs:
        """What the model is asked to score, divided by the step's denominator."""


@dataclass(frozen=True)
class DiffusionObjective:
    """Masked diffusion (Sahoo et al. 2024; Nie et al. 2025) or block diffusion (Arriola et al. 2025; Cheng et al. 2025,
    SDAR). With the default loss and estimator, the sum over the denominator estimates the NELBO in nats per token."""

    config: MaskedDiffusionConfig | BlockDiffusionConfig
    layout: InputLayout
    """Its block length, where there are blocks, is that of the finished model."""
    vocab_size: int

    def build_noised_batch(self, batch: CleanBatch, key: NoiseKey) -> NoisedBatch:
        """Noise target tokens of every row."""
        config, estimator = self.config, self.config.estimator
        weight, normalizer = loss_weighting(config)
        layout = replace(self.layout, block_length=select_block_length(config, key))
        maskable_BL = layout.maskable(batch)
        group_ids_BL = assign_noise_groups(batch, maskable_BL, noise_grouping(config), layout.block_length)
        noises = sample_masks(group_ids_BL, key, estimator, weight)
        weights, denominator = _normalize_weights(noises, maskable_BL, normalizer)
        replacement_tokens_BL = None
        if estimator.replace_with == "random":
            assert layout.mask_token is not None
            replacement_tokens_BL = sample_replacement_tokens(
                maskable_BL.shape, self.vocab_size, layout.mask_token, key
            )
        if len(noises) > 1:
            batch = _repeat_batch(batch, len(noises))
            replacement_tokens_BL = (
                None if replacement_tokens_BL is None else np.tile(replacement_tokens_BL, (len(noises), 1))
            )
        return layout.build_noised_batch(
            batch,
            np.concatenate([noise.masked_BL for noise in noises]),
            weights,
            num_targets=int(maskable_BL.sum()),
            denominator=denominator,
            replacement_tokens_BL=replacement_tokens_BL,
        )

    def build_loss_inputs(self, noised_batch: NoisedBatch, denominator: float) -> LossInputs:
        """The noised tokens, without the mask token among the answers."""
        return _build_loss_inputs(noised_batch, denominator, self.config, self.layout.mask_token)


@dataclass(frozen=True)
class NextTokenObjective:
    """Autoregression: every target, from the clean tokens before it. Its mean is the exact negative log-likelihood."""

    config: NextTokenConfig
    layout: InputLayout

    def build_noised_batch(self, batch: CleanBatch, key: NoiseKey) -> NoisedBatch:
        """All targets, weight 1: nothing is left to chance."""
        maskable_BL = self.layout.maskable(batch)
        total = int(maskable_BL.sum())
        return self.layout.build_noised_batch(
            batch, maskable_BL, np.ones(maskable_BL.shape), num_targets=total, denominator=float(total)
        )

    def build_loss_inputs(self, noised_batch: NoisedBatch, denominator: float) -> LossInputs:
        """All targets."""
        return _build_loss_inputs(noised_batch, denominator, self.config, self.layout.mask_token)


def build_objective(config: ObjectiveConfig, model: ModelConfig) -> Objective:
    """The objective of a config section, for a model.

    Raises:
        ValueError: they do not go together: no mask token, or outputs of the other alignment.
    """
    if isinstance(config, NextTokenConfig):
        if model.logit_alignment != "shifted":
            raise ValueError(
                'objective.kind = "next_token" predicts token i by output i - 1: set model.logit_alignment = "shifted"'
                f' (it is "{model.logit_alignment}")'
            )
        return NextTokenObjective(config, InputLayout.from_config(model, 1))
    _ = model.required_mask_token_id
    block_length = config.final_block_length if isinstance(config, BlockDiffusionConfig) else None
    return DiffusionObjective(config, InputLayout.from_config(model, block_length), model.vocab_size)


def select_block_length(config: MaskedDiffusionConfig | BlockDiffusionConfig, key: NoiseKey) -> int | None:
    """The step's block length: of the stage it falls into, or one of several, the same for all ranks."""
    if isinstance(config, MaskedDiffusionConfig):
        return None
    if config.stages:
        return [stage.block_length for stage in config.stages if stage.from_step <= key.step][-1]
    lengths = config.block_lengths
    if len(lengths) == 1:
        return lengths[0]
    return lengths[int(keyed_rng(key.seed, RngStream.BLOCK_LENGTH, key.step).integers(len(lengths)))]


def noise_grouping(config: MaskedDiffusionConfig | BlockDiffusionConfig) -> NoiseGrouping:
    """Tokens that share a noise level."""
    return config.estimator.draw_per or ("row" if isinstance(config, MaskedDiffusionConfig) else "block")


def loss_weighting(config: MaskedDiffusionConfig | BlockDiffusionConfig) -> tuple[LossWeighting, LossNormalizer]:
    """Weights and count of a loss; the weights may be set otherwise."""
    chosen = config.estimator.weight
    match config.loss:
        case "elbo":
            return chosen or "elbo", "targets"
        case "guidelines" | "soft_ce":
            return chosen or "inverse_p", "rows"
        case "dllm":
            return chosen or "uniform", "masked_rows" if isinstance(config, MaskedDiffusionConfig) else "rows"
        case "masked_mean":
            return chosen or "uniform", "masked"


def why_not_nelbo(config: ObjectiveConfig) -> str | None:
    """Why the training loss is no unbiased estimate of the NELBO per token; None where it is (docs/objectives.md)."""
    if isinstance(config, NextTokenConfig):
        smoothed = config.smoothing or config.z_loss
        return "it has label smoothing or a z-loss" if smoothed else None
    estimator = config.estimator
    weight, normalizer = loss_weighting(config)
    linear = isinstance(estimator, FixedCountMasking) or estimator.schedule.kind == "linear"
    reasons = [
        (weight == "uniform", "masked tokens are not weighted"),
        (weight == "inverse_p" and not linear, "weights 1 / p undo a linear schedule only"),
        (normalizer == "rows", "rows weigh the same whatever their number of targets"),
        (normalizer in ("masked", "masked_rows"), "the sum is divided by masked tokens, not by target tokens"),
        (estimator.reweight_cap is not None, "reweight_cap cuts weights"),
        (estimator.range != (0.0, 1.0), "range leaves noise levels out"),
        (estimator.contiguous_probability > 0.0, "masks are contiguous"),
        (estimator.replace_with != "mask", "noise is random tokens"),
        (
            isinstance(estimator, IndependentMasking) and estimator.epsilon > 0.0,
            "epsilon leaves small masked shares out",
        ),
        (
            isinstance(estimator, IndependentMasking) and estimator.min_masking_rate > 0.0,
            "min_masking_rate raises small shares",
        ),
        (config.smoothing > 0.0, "labels are smoothed"),
        (config.z_loss > 0.0, "there is a z-loss"),
    ]
    found = [reason for holds, reason in reasons if holds]
    return "; ".join(found) or None


def _normalize_weights(
    noises: list[MaskSample], maskable_BL: NDArray[np.bool_], normalizer: LossNormalizer
) -> tuple[NDArray[np.float64], float]:
    """Weights of all parts, one below the other, and the batch's part of the denominator."""
    masked = np.concatenate([noise.masked_BL for noise in noises])
    weights = np.concatenate([noise.weights_BL for noise in noises])
    sizes_B = maskable_BL.sum(axis=1)
    match normalizer:
        case "targets":
            return weights, float(sizes_B.sum())
        case "masked":
            return weights * len(noises), float(masked.sum())
        case "rows":
            each = np.tile(sizes_B, len(noises))
        case "masked_rows":
            each = masked.sum(axis=1)
    return weights / np.maximum(each, 1)[:, None], float((sizes_B > 0).sum())


def _repeat_batch(batch: CleanBatch, num_copies: int) -> CleanBatch:
    def repeat(tensor: Tensor) -> Tensor:
        return tensor.repeat(num_copies, 1)

    documents = None if batch.document_BL is None else repeat(batch.document_BL)
    return CleanBatch(repeat(batch.tokens_BL), repeat(batch.loss_mask_BL), documents)


def _build_loss_inputs(
    draw: NoisedBatch,
    denominator: float,
    config: MaskedDiffusionConfig | BlockDiffusionConfig | NextTokenConfig,
    mask_token: int | None,
) -> LossInputs:
    return LossInputs(
        draw.targets_N,
        draw.weights_N / denominator,
        excluded_token=mask_token,
        label_smoothing=config.smoothing,
        z_loss=config.z_loss,
    )
