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
from config.objective import Bernoulli, BlockDiffusion, Counts, MaskedDiffusion, NextToken, Unit, Weight
from config.objective import Objective as ObjectiveConfig
from diffusionlm.diffusion.corruption import Noise, draw_noise, replacement_tokens, unit_numbers
from diffusionlm.diffusion.layout import Layout
from diffusionlm.diffusion.noised_batch import Batch, Draw, DrawKey
from diffusionlm.diffusion.rng import Stream, generator
from diffusionlm.kernels.cross_entropy import Score

Per = Literal["targets", "rows", "masked", "masked_rows"]
"""What sums are divided by: the step's target tokens; each row's target tokens, then the number of rows; the step's
masked tokens; each row's masked tokens, then the number of rows."""


class Objective(Protocol):
    """What the loop and the loader know of an objective."""

    def draw(self, batch: Batch, key: DrawKey) -> Draw:
        """Everything that chance decides, before the forward."""

    def score(self, draw: Draw, denominator: float) -> Score:
        """What the model is asked to score, divided by the step's denominator."""


@dataclass(frozen=True)
class DiffusionObjective:
    """Masked diffusion (Sahoo et al. 2024; Nie et al. 2025) or block diffusion (Arriola et al. 2025; Cheng et al. 2025,
    SDAR). With the default loss and estimator, the sum over the denominator estimates the NELBO in nats per token."""

    config: MaskedDiffusion | BlockDiffusion
    layout: Layout
    """Its block length, where there are blocks, is that of the finished model."""
    vocab_size: int

    def draw(self, batch: Batch, key: DrawKey) -> Draw:
        """Noise target tokens of every row."""
        config, estimator = self.config, self.config.estimator
        weight, per = weighting(config)
        layout = replace(self.layout, block_length=block_length_at(config, key))
        eligible_BL = layout.eligible(batch)
        units_BL = unit_numbers(batch, eligible_BL, draw_unit(config), layout.block_length)
        noises = draw_noise(units_BL, key, estimator, weight)
        weights, denominator = _normalised(noises, eligible_BL, per)
        replacement_BL = None
        if estimator.replace_with == "random":
            assert layout.mask_token is not None
            replacement_BL = replacement_tokens(eligible_BL.shape, self.vocab_size, layout.mask_token, key)
        if len(noises) > 1:
            batch = _repeated(batch, len(noises))
            replacement_BL = None if replacement_BL is None else np.tile(replacement_BL, (len(noises), 1))
        return layout.draw(
            batch,
            np.concatenate([noise.masked_BL for noise in noises]),
            weights,
            num_targets=int(eligible_BL.sum()),
            denominator=denominator,
            replacement_BL=replacement_BL,
        )

    def score(self, draw: Draw, denominator: float) -> Score:
        """The noised tokens, without the mask token among the answers."""
        return _score(draw, denominator, self.config, self.layout.mask_token)


@dataclass(frozen=True)
class NextTokenObjective:
    """Autoregression: every target, from the clean tokens before it. Its mean is the exact negative log-likelihood."""

    config: NextToken
    layout: Layout

    def draw(self, batch: Batch, key: DrawKey) -> Draw:
        """All targets, weight 1: nothing is left to chance."""
        eligible_BL = self.layout.eligible(batch)
        total = int(eligible_BL.sum())
        return self.layout.draw(
            batch, eligible_BL, np.ones(eligible_BL.shape), num_targets=total, denominator=float(total)
        )

    def score(self, draw: Draw, denominator: float) -> Score:
        """All targets."""
        return _score(draw, denominator, self.config, self.layout.mask_token)


def build_objective(config: ObjectiveConfig, model: ModelConfig) -> Objective:
    """The objective of a config section, for a model.

    Raises:
        ValueError: they do not go together: no mask token, or outputs of the other alignment.
    """
    if isinstance(config, NextToken):
        if model.logit_alignment != "shifted":
            raise ValueError(
                'objective.kind = "next_token" predicts token i by output i - 1: set model.logit_alignment = "shifted"'
                f' (it is "{model.logit_alignment}")'
            )
        return NextTokenObjective(config, Layout.of(model, 1))
    _ = model.mask_token
    block_length = config.final_block_length if isinstance(config, BlockDiffusion) else None
    return DiffusionObjective(config, Layout.of(model, block_length), model.vocab_size)


def block_length_at(config: MaskedDiffusion | BlockDiffusion, key: DrawKey) -> int | None:
    """The step's block length: of the stage it falls into, or one of several, the same for all ranks."""
    if isinstance(config, MaskedDiffusion):
        return None
    if config.stages:
        return [stage.block_length for stage in config.stages if stage.from_step <= key.step][-1]
    lengths = config.block_lengths
    if len(lengths) == 1:
        return lengths[0]
    return lengths[int(generator(key.seed, Stream.BLOCK_LENGTH, key.step).integers(len(lengths)))]


def draw_unit(config: MaskedDiffusion | BlockDiffusion) -> Unit:
    """Tokens that share a noise level."""
    return config.estimator.draw_per or ("row" if isinstance(config, MaskedDiffusion) else "block")


def weighting(config: MaskedDiffusion | BlockDiffusion) -> tuple[Weight, Per]:
    """Weights and count of a loss; the weights may be set otherwise."""
    chosen = config.estimator.weight
    match config.loss:
        case "elbo":
            return chosen or "elbo", "targets"
        case "guidelines" | "soft_ce":
            return chosen or "inverse_p", "rows"
        case "dllm":
            return chosen or "uniform", "masked_rows" if isinstance(config, MaskedDiffusion) else "rows"
        case "masked_mean":
            return chosen or "uniform", "masked"


def why_not_nelbo(config: ObjectiveConfig) -> str | None:
    """Why the training loss is no unbiased estimate of the NELBO per token; None where it is (docs/objectives.md)."""
    if isinstance(config, NextToken):
        smoothed = config.smoothing or config.z_loss
        return "it has label smoothing or a z-loss" if smoothed else None
    estimator = config.estimator
    weight, per = weighting(config)
    linear = isinstance(estimator, Counts) or estimator.schedule.kind == "linear"
    reasons = [
        (weight == "uniform", "masked tokens are not weighted"),
        (weight == "inverse_p" and not linear, "weights 1 / p undo a linear schedule only"),
        (per == "rows", "rows weigh the same whatever their number of targets"),
        (per in ("masked", "masked_rows"), "the sum is divided by masked tokens, not by target tokens"),
        (estimator.reweight_cap is not None, "reweight_cap cuts weights"),
        (estimator.range != (0.0, 1.0), "range leaves noise levels out"),
        (estimator.contiguous_probability > 0.0, "masks are contiguous"),
        (estimator.replace_with != "mask", "noise is random tokens"),
        (isinstance(estimator, Bernoulli) and estimator.epsilon > 0.0, "epsilon leaves small masked shares out"),
        (isinstance(estimator, Bernoulli) and estimator.min_masking_rate > 0.0, "min_masking_rate raises small shares"),
        (config.smoothing > 0.0, "labels are smoothed"),
        (config.z_loss > 0.0, "there is a z-loss"),
    ]
    found = [reason for holds, reason in reasons if holds]
    return "; ".join(found) or None


def _normalised(noises: list[Noise], eligible_BL: NDArray[np.bool_], per: Per) -> tuple[NDArray[np.float64], float]:
    """Weights of all parts, one below the other, and the batch's part of the denominator."""
    masked = np.concatenate([noise.masked_BL for noise in noises])
    weights = np.concatenate([noise.weights_BL for noise in noises])
    sizes_B = eligible_BL.sum(axis=1)
    match per:
        case "targets":
            return weights, float(sizes_B.sum())
        case "masked":
            return weights * len(noises), float(masked.sum())
        case "rows":
            each = np.tile(sizes_B, len(noises))
        case "masked_rows":
            each = masked.sum(axis=1)
    return weights / np.maximum(each, 1)[:, None], float((sizes_B > 0).sum())


def _repeated(batch: Batch, times: int) -> Batch:
    def repeat(tensor: Tensor) -> Tensor:
        return tensor.repeat(times, 1)

    documents = None if batch.document_BL is None else repeat(batch.document_BL)
    return Batch(repeat(batch.tokens_BL), repeat(batch.is_target_BL), documents)


def _score(
    draw: Draw, denominator: float, config: MaskedDiffusion | BlockDiffusion | NextToken, mask_token: int | None
) -> Score:
    return Score(
        draw.targets_R,
        draw.weights_R / denominator,
        excluded_token=mask_token,
        label_smoothing=config.smoothing,
        z_loss=config.z_loss,
    )
