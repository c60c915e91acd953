"""Objectives: denominators, why a loss is not the NELBO, and block lengths over the steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from config.training.objective import BlockDiffusionConfig, MaskedDiffusionConfig, NextTokenConfig
from diffusionlm.diffusion.corruption import assign_noise_groups, sample_masks
from diffusionlm.diffusion.layout import target_positions
from diffusionlm.diffusion.noised_batch import CleanBatch, NoisedBatch, NoiseKey
from diffusionlm.diffusion.objectives import (
    Objective,
    build_objective,
    find_nelbo_deviation,
    noise_grouping,
    select_block_length,
)
from diffusionlm.models.patterns import BlockDiffusion as TwoStreams
from tests.conftest import MakeConfig
from tests.unit.diffusion.noise_cases import BLOCK, LENGTH, MASK, batch_of

ESTIMATORS: list[dict[str, Any]] = [
    {},
    {"complementary": True},
    {"kind": "bernoulli", "schedule": "cosine", "epsilon": 0.01},
    {"kind": "bernoulli", "times": "antithetic", "draw_per": "document"},
    {"kind": "bernoulli", "times": "uniform", "draw_per": "row"},
    {"contiguous_probability": 0.5, "replace_with": "random", "draw_per": "document"},
]
LOSSES = ["targets", "rows", "masked_rows", "masked"]


def parse(kind: str, **values: Any) -> Any:
    """An objective's section; block diffusion with blocks of five."""
    if kind == "masked_diffusion":
        return MaskedDiffusionConfig.model_validate({"estimator": {"kind": "counts"}, **values})
    return BlockDiffusionConfig.model_validate({"block_length": BLOCK, **values})


def with_kind(estimator: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "counts", **estimator}


@pytest.fixture
def build(make_config: MakeConfig) -> Callable[[Any], Objective]:
    return lambda config: build_objective(config, make_config(vocab_size=MASK + 1, mask_token_id=MASK))


def weighted_sum(draw: NoisedBatch, costs_BL: np.ndarray) -> float:
    """Sum of weights times made-up cross-entropies over the denominator: what the step's loss would be."""
    positions = target_positions(draw, "same_position").numpy() % costs_BL.size
    return float((draw.weights_N.numpy() * costs_BL.flatten()[positions]).sum() / draw.denominator)


def by_plain_loops(loss: str, config: Any, batch: CleanBatch, key: NoiseKey, costs_BL: np.ndarray) -> float:
    """The same from the masks, one token after the other, as the papers write it."""
    targets = batch.loss_mask_BL.numpy() & (batch.tokens_BL.numpy() != MASK)
    blocks: Any = config.block_length if isinstance(config, BlockDiffusionConfig) else None
    group_ids = assign_noise_groups(batch, targets, noise_grouping(config), blocks)
    elbo = sample_masks(group_ids, key, config.estimator, "elbo")
    over_p = sample_masks(group_ids, key, config.estimator, "inverse_p")
    rows = [row for row in range(len(targets)) if targets[row].any()]
    total = 0.0
    for part, weighted in zip(elbo, over_p, strict=True):
        share = 1.0 / len(elbo)
        for row in rows:
            masked = np.flatnonzero(part.masked_BL[row])
            n = int(targets[row].sum())
            for position in masked:
                cost = costs_BL[row, position]
                match loss:
                    case "targets":
                        total += part.weights_BL[row, position] * cost / targets.sum()
                    case "rows":
                        total += weighted.weights_BL[row, position] * cost / n / len(rows)
                    case "masked_rows":
                        total += share * cost / len(masked) / len(rows)
                    case "masked":
                        total += cost / sum(value.masked_BL.sum() for value in elbo)
    return total


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=str)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kind", ["masked_diffusion", "block_diffusion"])
def test_losses_have_their_denominators(
    build: Callable[[Any], Objective], kind: str, loss: str, estimator: dict[str, Any]
) -> None:
    config = parse(kind, normalizer=loss, estimator=with_kind(estimator))
    batch, costs = batch_of(10), np.random.default_rng(1).random((10, LENGTH))
    batch.tokens_BL[:, 7] = MASK  # in the data: neither noise nor target
    is_target_BL = batch.loss_mask_BL & (batch.tokens_BL != MASK)
    for step in range(3):
        key = NoiseKey(0, step, 0, 10)
        draw = build(config).build_noised_batch(batch, key)
        expected = by_plain_loops(loss, config, batch, key, costs)
        assert weighted_sum(draw, costs) == pytest.approx(expected, rel=1e-12)
        assert draw.num_targets == int(is_target_BL.sum()) < int(batch.loss_mask_BL.sum())


def test_random_tokens_stand_in_place_of_noise(build: Callable[[Any], Objective]) -> None:
    batch = batch_of(40)
    draw = build(parse("block_diffusion", estimator={"kind": "counts", "replace_with": "random"})).build_noised_batch(
        batch, NoiseKey(0, 0, 0, 40)
    )
    noised, clean = draw.inputs_BS[:, :LENGTH], draw.inputs_BS[:, LENGTH:]
    assert torch.equal(clean, batch.tokens_BL) and not (noised == MASK).any()
    positions = torch.zeros(40 * LENGTH, dtype=torch.bool)
    positions[target_positions(draw, "same_position")] = True
    assert torch.equal(noised.flatten()[~positions], clean.flatten()[~positions])
    assert int((noised != clean).sum()) > 0.8 * int(positions.sum())


def test_a_batch_without_targets(build: Callable[[Any], Objective]) -> None:
    batch = CleanBatch(torch.zeros(3, 5, dtype=torch.int64), torch.zeros(3, 5, dtype=torch.bool))
    for kind in ("masked_diffusion", "block_diffusion"):
        for loss in LOSSES:
            draw = build(parse(kind, normalizer=loss)).build_noised_batch(batch, NoiseKey(0, 0, 0, 3))
            assert (draw.num_targets, draw.denominator, len(draw.positions_N)) == (0, 0.0, 0)
            assert torch.equal(draw.inputs_BS[:, :5], batch.tokens_BL)


# ----------------------------------------------------------------------------------------------------------------------
# What is the NELBO


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"normalizer": "rows"}, "rows weigh the same"),
        ({"normalizer": "masked", "estimator": {"kind": "counts", "weight": "elbo"}}, "divided by masked"),
        ({"normalizer": "masked_rows", "estimator": {"kind": "counts", "weight": "elbo"}}, "divided by masked"),
        ({"label_smoothing": 0.1}, "smoothed"),
        ({"z_loss": 1e-4}, "z-loss"),
        ({"estimator": {"kind": "counts", "weight": "uniform"}}, "not weighted"),
        ({"estimator": {"kind": "counts", "reweight_cap": 1.5}}, "reweight_cap"),
        ({"estimator": {"kind": "counts", "range": [0.2, 0.7]}}, "range"),
        ({"estimator": {"kind": "counts", "contiguous_probability": 0.1}}, "contiguous"),
        ({"estimator": {"kind": "counts", "replace_with": "random"}}, "random tokens"),
        ({"estimator": {"kind": "counts", "position_ratio": 2.0}}, "left to right"),
        ({"estimator": {"kind": "bernoulli", "epsilon": 0.3}}, "epsilon"),
        ({"estimator": {"kind": "bernoulli", "epsilon": 0.0, "min_masking_rate": 0.5}}, "min_masking_rate"),
        (
            {"estimator": {"kind": "bernoulli", "epsilon": 0.0, "schedule": "cosine", "weight": "inverse_p"}},
            "undo a linear schedule only",
        ),
    ],
)
def test_why_a_loss_is_not_the_nelbo(values: dict[str, Any], reason: str) -> None:
    """That it is biased, and others are not: tests/reference/test_nelbo_exact.py."""
    for kind in ("masked_diffusion", "block_diffusion"):
        reasons = find_nelbo_deviation(parse(kind, **values))
        assert reasons is not None and reason in reasons and ";" not in reasons


def test_next_token_is_exact_unless_regularised() -> None:
    assert find_nelbo_deviation(NextTokenConfig()) is None
    assert (
        find_nelbo_deviation(NextTokenConfig(label_smoothing=0.1))
        == find_nelbo_deviation(NextTokenConfig(z_loss=1e-4))
        is not None
    )


# ----------------------------------------------------------------------------------------------------------------------
# Block lengths, next token, score


def test_one_of_several_block_lengths_for_each_step() -> None:
    config = parse("block_diffusion", block_length=[2, 3, 7])
    lengths = [select_block_length(config, NoiseKey(0, step, 0, 8)) for step in range(900)]
    counts = np.array([lengths.count(length) for length in (2, 3, 7)])
    assert counts.sum() == 900
    assert float(((counts - 300) ** 2 / 300).sum()) < 18.4  # 2 degrees of freedom: p = 1e-4
    for first in (1, 5):
        assert [select_block_length(config, NoiseKey(0, step, first, 8)) for step in range(50)] == lengths[:50]
    assert [select_block_length(config, NoiseKey(1, step, 0, 8)) for step in range(50)] != lengths[:50]
    assert select_block_length(parse("block_diffusion", block_length=[5]), NoiseKey(0, 0, 0, 1)) == 5
    assert select_block_length(MaskedDiffusionConfig(), NoiseKey(0, 0, 0, 1)) is None


def test_the_block_length_of_a_step_reaches_groups_and_pattern(build: Callable[[Any], Objective]) -> None:
    config = parse("block_diffusion", block_length=[2, 3, 6])
    objective, batch = (
        build(config),
        CleanBatch(torch.zeros(4, LENGTH, dtype=torch.int64), torch.ones(4, LENGTH).bool()),
    )
    visible = set()
    for step in range(20):
        key = NoiseKey(0, step, 0, 4)
        length = select_block_length(config, key)
        assert length is not None
        draw = objective.build_noised_batch(batch, key)
        assert draw.pattern == TwoStreams(length)
        masked = (draw.inputs_BS[:, :LENGTH] == MASK).view(4, -1, length)
        assert (masked.sum(dim=2) >= 1).all()
        visible.add(length)
    assert visible == {2, 3, 6}


def test_stages_run_in_order(build: Callable[[Any], Objective]) -> None:
    stages = [
        {"from_step": 0, "block_length": LENGTH},
        {"from_step": 5, "block_length": 3},
        {"from_step": 6, "block_length": 1},
    ]
    config = BlockDiffusionConfig.model_validate({"stages": stages})
    lengths = [select_block_length(config, NoiseKey(0, step, 0, 1)) for step in (0, 4, 5, 6, 7, 999)]
    assert lengths == [LENGTH, LENGTH, 3, 1, 1, 1]
    assert (config.final_block_length, config.block_lengths) == (1, (LENGTH, 3, 1))
    batch = CleanBatch(torch.zeros(2, LENGTH, dtype=torch.int64), torch.ones(2, LENGTH).bool())
    shapes = [build(config).build_noised_batch(batch, NoiseKey(0, step, 0, 2)).inputs_BS.shape[1] for step in (4, 5, 6)]
    assert shapes == [LENGTH, 2 * LENGTH, 2 * LENGTH], "one block for the whole row is one stream"


def test_next_token_predicts_every_target(make_config: MakeConfig) -> None:
    objective = build_objective(
        NextTokenConfig(label_smoothing=0.1, z_loss=0.2),
        make_config(vocab_size=MASK + 1, mask_token_id=MASK, logit_alignment="shifted"),
    )
    batch = batch_of(10)
    draw = objective.build_noised_batch(batch, NoiseKey(0, 0, 0, 10))
    assert batch.document_BL is not None
    predicted = batch.loss_mask_BL.clone()
    predicted[:, 0] = False
    predicted[:, 1:] &= batch.document_BL[:, 1:] == batch.document_BL[:, :-1]
    assert torch.equal(draw.inputs_BS, batch.tokens_BL)
    assert torch.equal(target_positions(draw, "shifted"), predicted.flatten().nonzero()[:, 0])
    assert torch.equal(draw.targets_N, batch.tokens_BL[predicted])
    assert draw.weights_N.tolist() == [1.0] * int(predicted.sum())
    assert draw.denominator == draw.num_targets == int(predicted.sum())
    loss_inputs = objective.build_loss_inputs(draw, 2.0)
    assert (loss_inputs.label_smoothing, loss_inputs.z_loss, loss_inputs.excluded_token) == (0.1, 0.2, MASK)
    assert loss_inputs.weights_N.tolist() == [0.5] * len(draw.weights_N)


def test_next_token_needs_shifted_outputs(make_config: MakeConfig) -> None:
    with pytest.raises(ValueError, match=r'model\.logit_alignment = "shifted" \(it is "same_position"\)'):
        build_objective(NextTokenConfig(), make_config())


def test_only_next_token_goes_without_a_mask_token(make_config: MakeConfig) -> None:
    config = make_config(mask_token_id=None, logit_alignment="shifted")
    assert build_objective(NextTokenConfig(), config).build_loss_inputs(
        build_objective(NextTokenConfig(), config).build_noised_batch(batch_of(2), NoiseKey(0, 0, 0, 2)), 1.0
    ).excluded_token is None  # fmt: skip
    for objective in (
        MaskedDiffusionConfig(),
        BlockDiffusionConfig(block_length=1),
        BlockDiffusionConfig(block_length=4),
    ):
        with pytest.raises(ValueError, match="no mask token"):
            build_objective(objective, config)


def test_loss_inputs_divide_and_exclude_the_mask(build: Callable[[Any], Objective]) -> None:
    for smoothing in (0.0, 0.1):
        objective = build(parse("masked_diffusion", label_smoothing=smoothing, z_loss=1e-3))
        draw = objective.build_noised_batch(batch_of(8), NoiseKey(0, 0, 0, 8))
        loss_inputs = objective.build_loss_inputs(draw, denominator=17.0)
        assert torch.equal(loss_inputs.weights_N, draw.weights_N / 17.0)
        assert torch.equal(loss_inputs.targets_N, draw.targets_N)
        assert (loss_inputs.excluded_token, loss_inputs.label_smoothing, loss_inputs.z_loss) == (MASK, smoothing, 1e-3)
