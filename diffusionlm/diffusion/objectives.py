"""Training objectives: masked diffusion, block diffusion and next-token prediction.

Every objective masks target tokens, sums their weighted cross-entropies and divides by a count over the whole step.
They differ in attention pattern (`layout.py`), distribution and weights of the masks (`corruption.py`), and count. The
code works with sums and counts, never means.

Shapes: B sequences, L tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

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
from diffusionlm.diffusion.segments import NoiseSequences
from diffusionlm.kernels.cross_entropy import LossInputs

LossNormalizer = Literal["targets", "rows", "masked", "masked_rows"]
"""Count that divides the loss.

targets: target tokens of the step. masked: masked tokens of the step. rows: the loss of each sequence is divided by its
target tokens, and their sum by the number of sequences. masked_rows: the same with the masked tokens of each sequence.
"""


class Objective(Protocol):
    """Interface of an objective: corrupt a batch, then build the loss inputs of its forward."""

    def build_noised_batch(self, batch: CleanBatch, key: NoiseKey) -> NoisedBatch:
        """Sample masks and build the inputs of the forward."""

    def build_loss_inputs(self, noised_batch: NoisedBatch, denominator: float) -> LossInputs:
        """Targets and weights of the forward; the weights are divided by the denominator of the step."""


@dataclass(frozen=True)
class DiffusionObjective:
    """Masked diffusion (Sahoo et al. 2024; Nie et al. 2025) or block diffusion (Arriola et al. 2025; Cheng et al. 2025,
    SDAR). With the default loss and estimator the loss is an unbiased estimate of the NELBO in nats per token."""

    config: MaskedDiffusionConfig | BlockDiffusionConfig
    layout: InputLayout
    """Layout of the finished model; a step may have another block length."""
    vocab_size: int

    def build_noised_batch(self, batch: CleanBatch, key: NoiseKey) -> NoisedBatch:
        config, estimator = self.config, self.config.estimator
        weight, normalizer = loss_weighting(config)
        layout = replace(self.layout, block_length=select_block_length(config, key))
        maskable_BL = layout.maskable(batch)
        sequences = NoiseSequences.from_batch(batch)
        maskable_QM = sequences.gather(maskable_BL)
        group_ids_QM = assign_noise_groups(sequences.batch, maskable_QM, noise_grouping(config), layout.block_length)
        samples = sample_masks(group_ids_QM, key, estimator, weight)
        weights, denominator = _normalize_weights(samples, maskable_QM, normalizer)
        replacement_tokens_BL = None
        if estimator.replace_with == "random":
            assert layout.mask_token is not None
            replacement_tokens_QM = sample_replacement_tokens(
                maskable_QM.shape, self.vocab_size, layout.mask_token, key
            )
            replacement_tokens_BL = np.tile(sequences.scatter(replacement_tokens_QM), (len(samples), 1))
        return layout.build_noised_batch(
            batch.repeat(len(samples)),
            np.concatenate([sequences.scatter(sample.masked_BL) for sample in samples]),
            np.concatenate([sequences.scatter(weights_QM) for weights_QM in weights]),
            num_targets=int(maskable_BL.sum()),
            denominator=denominator,
            replacement_tokens_BL=replacement_tokens_BL,
        )

    def build_loss_inputs(self, noised_batch: NoisedBatch, denominator: float) -> LossInputs:
        return _build_loss_inputs(noised_batch, denominator, self.config, self.layout.mask_token)


@dataclass(frozen=True)
class NextTokenObjective:
    """Autoregression: predict every target token from the clean tokens before it. The loss is the exact negative
    log-likelihood in nats per token."""

    config: NextTokenConfig
    layout: InputLayout

    def build_noised_batch(self, batch: CleanBatch, key: NoiseKey) -> NoisedBatch:
        """All target tokens with weight 1; no random numbers are used."""
        maskable_BL = self.layout.maskable(batch)
        total = int(maskable_BL.sum())
        return self.layout.build_noised_batch(
            batch, maskable_BL, np.ones(maskable_BL.shape), num_targets=total, denominator=float(total)
        )

    def build_loss_inputs(self, noised_batch: NoisedBatch, denominator: float) -> LossInputs:
        return _build_loss_inputs(noised_batch, denominator, self.config, self.layout.mask_token)


def build_objective(config: ObjectiveConfig, model: ModelConfig) -> Objective:
    """Build the objective of a config section for a model.

    Raises:
        ValueError: the model has no mask token, or next-token prediction has outputs at the same position.
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
    """Block length of a step: that of its stage, or a random one of several, the same on all ranks."""
    if isinstance(config, MaskedDiffusionConfig):
        return None
    if config.stages:
        return [stage.block_length for stage in config.stages if stage.from_step <= key.step][-1]
    lengths = config.block_lengths
    if len(lengths) == 1:
        return lengths[0]
    return lengths[int(keyed_rng(key.seed, RngStream.BLOCK_LENGTH, key.step).integers(len(lengths)))]


def noise_grouping(config: MaskedDiffusionConfig | BlockDiffusionConfig) -> NoiseGrouping:
    return config.estimator.draw_per or ("row" if isinstance(config, MaskedDiffusionConfig) else "block")


def loss_weighting(config: MaskedDiffusionConfig | BlockDiffusionConfig) -> tuple[LossWeighting, LossNormalizer]:
    """Loss weights and normalizer of ``objective.loss``; ``estimator.weight`` overrides the weights."""
    override = config.estimator.weight
    match config.loss:
        case "elbo":
            return override or "elbo", "targets"
        case "guidelines" | "soft_ce":
            return override or "inverse_p", "rows"
        case "dllm":
            return override or "uniform", "masked_rows" if isinstance(config, MaskedDiffusionConfig) else "rows"
        case "masked_mean":
            return override or "uniform", "masked"


def why_not_nelbo(config: ObjectiveConfig) -> str | None:
    """Why the training loss is not an unbiased estimate of the NELBO per token; None: it is (docs/objectives.md)."""
    if isinstance(config, NextTokenConfig):
        return "it has label smoothing or a z-loss" if config.smoothing or config.z_loss else None
    estimator = config.estimator
    weight, normalizer = loss_weighting(config)
    is_linear = isinstance(estimator, FixedCountMasking) or estimator.schedule.kind == "linear"
    reasons = [
        (weight == "uniform", "masked tokens are not weighted"),
        (weight == "inverse_p" and not is_linear, "weights 1 / p undo a linear schedule only"),
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
    return "; ".join(reason for applies, reason in reasons if applies) or None


def _normalize_weights(
    samples: list[MaskSample], maskable_BL: NDArray[np.bool_], normalizer: LossNormalizer
) -> tuple[list[NDArray[np.float64]], float]:
    """Normalized weights of each sample, and the batch's contribution to the denominator."""
    sizes_B = maskable_BL.sum(axis=1)
    weights = [sample.weights_BL for sample in samples]
    match normalizer:
        case "targets":
            return weights, float(sizes_B.sum())
        case "masked":
            num_masked = sum(int(sample.masked_BL.sum()) for sample in samples)
            return [weights_BL * len(samples) for weights_BL in weights], float(num_masked)
        case "rows":
            divisors = [sizes_B for _ in samples]
        case "masked_rows":
            divisors = [sample.masked_BL.sum(axis=1) for sample in samples]
    scaled = [
        weights_BL / np.maximum(divisors_B, 1)[:, None]
        for weights_BL, divisors_B in zip(weights, divisors, strict=True)
    ]
    return scaled, float((sizes_B > 0).sum())


def _build_loss_inputs(
    noised_batch: NoisedBatch,
    denominator: float,
    config: MaskedDiffusionConfig | BlockDiffusionConfig | NextTokenConfig,
    mask_token: int | None,
) -> LossInputs:
    return LossInputs(
        noised_batch.targets_N,
        noised_batch.weights_N / denominator,
        excluded_token=mask_token,
        label_smoothing=config.smoothing,
        z_loss=config.z_loss,
    )
