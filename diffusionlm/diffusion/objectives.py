"""Training objectives: masked diffusion, block diffusion and next-token prediction.

Every objective masks target tokens, sums their weighted cross-entropies and divides by a count over the whole step.
They differ in attention pattern (`layout.py`), distribution and weights of the masks (`corruption.py`), and count. The
code works with sums and counts, never means.

Shapes: B sequences, L tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from config.finetune.preference import PreferenceConfig
from config.model import ModelConfig
from config.training.objective import (
    AllMasked,
    BlockDiffusionConfig,
    IndependentMasking,
    LossNormalizer,
    LossWeighting,
    MaskedDiffusionConfig,
    NextTokenConfig,
    NoiseGrouping,
    ObjectiveConfig,
)
from diffusionlm.diffusion.corruption import (
    CART_P,
    MaskSample,
    assign_noise_groups,
    context_adaptive_weights,
    sample_masks,
    sample_replacement_tokens,
)
from diffusionlm.diffusion.layout import InputLayout, anneal_attention, read_attention_bias
from diffusionlm.diffusion.noised_batch import CleanBatch, NoisedBatch, NoiseKey
from diffusionlm.diffusion.preference import PreferenceObjective, WeighedLoss, compute_nll
from diffusionlm.diffusion.rng import RngStream, keyed_rng
from diffusionlm.diffusion.segments import NoiseSequences
from diffusionlm.kernels.cross_entropy import LossInputs
from diffusionlm.models.transformer import Transformer


class Objective(Protocol):
    """Interface of an objective: corrupt a batch, then build the loss inputs of its forward."""

    def build_noised_batch(self, batch: CleanBatch, key: NoiseKey) -> NoisedBatch:
        """Sample masks and build the inputs of the forward."""

    def build_auxiliary_batch(self, batch: CleanBatch) -> NoisedBatch | None:
        """Build the inputs of a second forward, whose loss is added; None: there is none."""
        return None

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
        weight = loss_weighting(config)
        layout = replace(self.layout, block_length=select_block_length(config, key))
        maskable_BL = layout.maskable(batch)
        sequences = NoiseSequences.from_batch(batch)
        maskable_QM = sequences.gather(maskable_BL)
        noise_batch = layout.split_for_noise(sequences.batch)
        group_ids_QM = assign_noise_groups(noise_batch, maskable_QM, noise_grouping(config), layout.block_length)
        samples = sample_masks(group_ids_QM, key, estimator, weight)
        shares = TargetShares.from_batch(sequences, maskable_QM, config.eos_padding_weight)
        weights, denominator, eos_padding_denominator = _normalize_weights(samples, shares, config.normalizer)
        replacement_tokens_BL = None
        if estimator.replace_with == "random":
            assert layout.mask_token is not None
            replacement_tokens_QM = sample_replacement_tokens(
                maskable_QM.shape, self.vocab_size, layout.mask_token, key
            )
            replacement_tokens_BL = np.tile(sequences.scatter(replacement_tokens_QM), (len(samples), 1))
        repeated = batch.repeat(len(samples))
        masked = np.concatenate([sequences.scatter(sample.masked_BL) for sample in samples])
        scattered_weights = np.concatenate([sequences.scatter(weights_QM) for weights_QM in weights])
        if weight == "cart":
            scattered_weights *= context_adaptive_weights(repeated, masked, CART_P)
        noised_batch = layout.build_noised_batch(
            repeated,
            masked,
            scattered_weights,
            num_targets=int(maskable_BL.sum()),
            denominator=denominator,
            replacement_tokens_BL=replacement_tokens_BL,
        )
        noised_batch = replace(noised_batch, eos_padding_denominator=eos_padding_denominator)
        if isinstance(config, MaskedDiffusionConfig):
            pattern = anneal_attention(noised_batch.pattern, masked.shape[1], key, config.anneal_attention_steps)
            noised_batch = replace(noised_batch, pattern=pattern)
        return self._add_next_tokens(noised_batch, batch) if config.next_token_weight else noised_batch

    def _add_next_tokens(self, noised_batch: NoisedBatch, batch: CleanBatch) -> NoisedBatch:
        """Add the next-token loss to the counts, and to the outputs if the clean half is token-causal."""
        config, weights_BL = self.config, self._weigh_next_tokens(batch)
        count = float(weights_BL.sum()) / config.next_token_weight
        if config.normalizer == "outputs":
            noised_batch = replace(noised_batch, denominator=noised_batch.denominator + count)
        if config.normalizer == "masked":
            noised_batch = replace(noised_batch, next_token_denominator=count)
        if self.layout.clean_attention == "block":
            return noised_batch
        return self.layout.add_clean_outputs(noised_batch, batch, weights_BL)

    def build_auxiliary_batch(self, batch: CleanBatch) -> NoisedBatch | None:
        """The next-token loss on the clean tokens, if it has a weight and the first forward does not compute it."""
        if not self.config.next_token_weight or self.layout.clean_attention == "token":
            return None
        layout = self.layout.next_token
        noised_batch = layout.build_noised_batch(batch, layout.maskable(batch), self._weigh_next_tokens(batch))
        return replace(noised_batch, is_auxiliary=True)

    def _weigh_next_tokens(self, batch: CleanBatch) -> NDArray[np.float64]:
        """Weights of the next-token loss, [B, L]; 0 for tokens that no output predicts.

        A token counts as much as in the divisor of the objective: the same, or the same share of its answer.
        """
        config = self.config
        sequences = NoiseSequences.from_batch(batch)
        shares = TargetShares.from_batch(
            sequences, sequences.gather(self.layout.maskable(batch)), config.eos_padding_weight
        )
        weights_QM = config.next_token_weight * shares.values_QM
        if config.normalizer in ("rows", "masked_rows"):
            sizes_Q1 = shares.values_QM.sum(axis=1, keepdims=True)
            weights_QM = weights_QM / np.where(sizes_Q1 > 0.0, sizes_Q1, 1.0)
        return np.where(self.layout.next_token.maskable(batch), sequences.scatter(weights_QM), 0.0)

    def build_loss_inputs(self, noised_batch: NoisedBatch, denominator: float) -> LossInputs:
        return _build_loss_inputs(noised_batch, denominator, self.config, self.layout.mask_token)


@dataclass(frozen=True)
class BalancedLoss:
    """The loss of masked tokens, and a next-token loss scaled to ``weight`` times its value (`objective.balance`). The
    factor is of the whole step, over all ranks, and has no gradient. It is a `ModelLoss`."""

    weight: float
    """`objective.next_token_weight`; the weights of the noise contain it as well."""
    num_measuring_forwards: int = 1

    def measure(self, model: Transformer, noised_batch: NoisedBatch, loss_inputs: LossInputs) -> Tensor:
        """Losses of masked tokens and of next tokens, [2], fp64."""
        loss_N = loss_inputs.weights_N * compute_nll(model, noised_batch, loss_inputs).double()
        assert noised_batch.is_next_token_N is not None, "checked by BlockDiffusionConfig"
        next_token = (loss_N * noised_batch.is_next_token_N).sum()
        return torch.stack([loss_N.sum() - next_token, next_token])

    def weigh(
        self,
        noised_batches: Sequence[NoisedBatch],
        loss_inputs: Sequence[LossInputs],
        measured: Sequence[Any],
        denominator: float,
        all_reduce: Callable[[Tensor], Tensor],
    ) -> list[WeighedLoss]:
        """The loss of each micro-batch, of cross-entropies alone."""
        masked, next_token = all_reduce(torch.stack([*measured]).sum(0)).unbind()
        factor = torch.where(next_token > 0.0, self.weight * masked / next_token, 0.0)
        weighed = []
        for noised_batch, inputs, (masked, next_token) in zip(noised_batches, loss_inputs, measured, strict=True):
            assert noised_batch.is_next_token_N is not None, "checked by BlockDiffusionConfig"
            weights_N = inputs.weights_N * torch.where(noised_batch.is_next_token_N, factor, 1.0)
            weighed.append(WeighedLoss(replace(inputs, weights_N=weights_N), masked + factor * next_token))
        return weighed


@dataclass(frozen=True)
class NextTokenObjective(Objective):
    """Autoregression: predict every target token from the clean tokens before it. The loss is the exact negative
    log-likelihood in nats per token."""

    config: NextTokenConfig
    layout: InputLayout

    def build_noised_batch(self, batch: CleanBatch, key: NoiseKey) -> NoisedBatch:
        """All target tokens with weight 1; no random numbers are used."""
        maskable_BL = self.layout.maskable(batch)
        shares = TargetShares.from_batch(
            NoiseSequences(batch, maskable_BL.shape, None), maskable_BL, self.config.eos_padding_weight
        )
        noised_batch = self.layout.build_noised_batch(
            batch,
            maskable_BL,
            shares.values_QM,
            num_targets=int(maskable_BL.sum()),
            denominator=float(shares.values_QM.sum()),
        )
        return replace(noised_batch, eos_padding_denominator=float(shares.eos_padding_QM.sum()))

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
    if isinstance(config, PreferenceConfig):
        return PreferenceObjective(config, InputLayout.from_config(model, config.block_length))
    _ = model.required_mask_token_id
    return DiffusionObjective(config, build_layout(config, model, config.final_block_length), model.vocab_size)


def build_layout(config: ObjectiveConfig, model: ModelConfig, block_length: int | None) -> InputLayout:
    """The layout of an objective's forwards, for one of its block lengths.

    Raises:
        ValueError: the model has no mask token, or the objective's bias cannot be read.
    """
    layout = InputLayout.from_config(model, block_length)
    if isinstance(config, BlockDiffusionConfig):
        return replace(layout, has_independent_blocks=config.attention == "prompt_and_own_block")
    if isinstance(config, MaskedDiffusionConfig) and config.attention_bias is not None:
        return replace(layout, bias=read_attention_bias(config.attention_bias, model))
    return layout


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


def loss_weighting(config: MaskedDiffusionConfig | BlockDiffusionConfig) -> LossWeighting:
    """Loss weights; without ``estimator.weight`` those that belong to the normalizer."""
    usual: dict[str, LossWeighting] = {"targets": "elbo", "rows": "inverse_p"}
    return config.estimator.weight or usual.get(config.normalizer, "uniform")


def find_nelbo_deviation(config: ObjectiveConfig) -> str | None:
    """Why the training loss is not an unbiased estimate of the NELBO per token; None: it is (docs/objectives.md)."""
    if isinstance(config, PreferenceConfig):
        return "it compares the bounds of answers"
    if isinstance(config, NextTokenConfig):
        has_other_terms = config.label_smoothing or config.z_loss or config.eos_padding_weight != 1.0
        return "it has label smoothing, a z-loss or an eos_padding_weight" if has_other_terms else None
    estimator = config.estimator
    weight, normalizer = loss_weighting(config), config.normalizer
    is_linear = not isinstance(estimator, IndependentMasking) or estimator.schedule.kind == "linear"
    reasons = [
        (weight == "uniform", "masked tokens are not weighted"),
        (weight == "cart", "masked tokens are weighted by their context"),
        (weight == "inverse_p" and not is_linear, "weights 1 / p undo a linear schedule only"),
        (normalizer == "rows", "rows weigh the same whatever their number of targets"),
        (normalizer in ("masked", "masked_rows"), "the sum is divided by masked tokens, not by target tokens"),
        (normalizer == "outputs", "the sum is divided by masked and next tokens, not by target tokens"),
        (isinstance(estimator, AllMasked) and config.longest_block_length != 1, "all tokens of a block are masked"),
        (estimator.reweight_cap is not None, "reweight_cap cuts weights"),
        (estimator.range != (0.0, 1.0), "range leaves noise levels out"),
        (estimator.contiguous_probability > 0.0, "masks are contiguous"),
        (estimator.position_ratio > 1.0, "position_ratio prefers orders from left to right"),
        (estimator.replace_with != "mask", "noise is random tokens"),
        (
            isinstance(estimator, IndependentMasking) and estimator.epsilon > 0.0,
            "epsilon leaves small masked shares out",
        ),
        (
            isinstance(estimator, IndependentMasking) and estimator.min_masking_rate > 0.0,
            "min_masking_rate raises small shares",
        ),
        (config.eos_padding_weight != 1.0, "EOS padding has another weight than answers"),
        (config.next_token_weight > 0.0, "there is a next-token loss"),
        (
            isinstance(config, MaskedDiffusionConfig) and config.anneal_attention_steps > 0,
            "attention is annealed at first",
        ),
        (config.label_smoothing > 0.0, "labels are smoothed"),
        (config.z_loss > 0.0, "there is a z-loss"),
    ]
    return "; ".join(reason for applies, reason in reasons if applies) or None


@dataclass(frozen=True)
class TargetShares:
    """Weight of each target token in divisors: 1, or ``objective.eos_padding_weight`` for EOS padding."""

    values_QM: NDArray[np.float64]
    """0 for other tokens."""
    eos_padding_QM: NDArray[np.float64]
    """The same of EOS padding only."""

    @classmethod
    def from_batch(cls, sequences: NoiseSequences, maskable_QM: NDArray[np.bool_], eos_padding_weight: float) -> Self:
        values_QM = maskable_QM.astype(np.float64)
        if sequences.batch.is_eos_padding_BL is None:
            return cls(values_QM, np.zeros_like(values_QM))
        is_eos_padding_QM = sequences.batch.is_eos_padding_BL.numpy()
        values_QM = np.where(is_eos_padding_QM, eos_padding_weight * values_QM, values_QM)
        return cls(values_QM, np.where(is_eos_padding_QM, values_QM, 0.0))


def _normalize_weights(
    samples: list[MaskSample], shares: TargetShares, normalizer: LossNormalizer
) -> tuple[list[NDArray[np.float64]], float, float]:
    """Normalized weights of each sample, the batch's contribution to the denominator, and that of its EOS padding."""
    weights = [sample.weights_BL * shares.values_QM for sample in samples]
    sizes_Q, eos_padding_sizes_Q = shares.values_QM.sum(axis=1), shares.eos_padding_QM.sum(axis=1)
    match normalizer:
        case "targets":
            return weights, float(sizes_Q.sum()), float(eos_padding_sizes_Q.sum())
        case "masked" | "outputs":
            counts = [
                sum(float(values_QM[sample.masked_BL].sum()) for sample in samples)
                for values_QM in (shares.values_QM, shares.eos_padding_QM)
            ]
            return [weights_QM * len(samples) for weights_QM in weights], counts[0], counts[1]
        case "rows":
            divisors = [sizes_Q for _ in samples]
        case "masked_rows":
            divisors = [(sample.masked_BL * shares.values_QM).sum(axis=1) for sample in samples]
    scaled = [
        weights_QM / np.where(divisors_Q > 0.0, divisors_Q, 1.0)[:, None]
        for weights_QM, divisors_Q in zip(weights, divisors, strict=True)
    ]
    eos_padding_shares_Q = eos_padding_sizes_Q / np.where(sizes_Q > 0.0, sizes_Q, 1.0)
    return scaled, float((sizes_Q > 0.0).sum()), float(eos_padding_shares_Q.sum())


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
        label_smoothing=config.label_smoothing,
        z_loss=config.z_loss,
    )
