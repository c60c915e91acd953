"""Noise in batches with images: positions of images, prompts and padding stay as they are, in all objectives."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from config.finetune.preference import PreferenceConfig
from config.training.objective import BlockDiffusionConfig, MaskedDiffusionConfig, NextTokenConfig
from diffusionlm.diffusion.layout import target_positions
from diffusionlm.diffusion.noised_batch import CleanBatch, NoisedBatch, NoiseKey
from diffusionlm.diffusion.objectives import build_objective
from diffusionlm.models.vision.inputs import ImageInputs
from tests.image_rows import LENGTH, SMALL, build_example
from tests.qwen3_vl_oracle import IMAGE

KEY = NoiseKey(seed=3, step=1, first_sequence=0, num_sequences_in_step=8)
OBJECTIVES: dict[str, Any] = {
    "masked": MaskedDiffusionConfig(),
    "masked twice": MaskedDiffusionConfig.model_validate({"estimator": {"kind": "counts", "complementary": True}}),
    "uniform noise": MaskedDiffusionConfig.model_validate({"estimator": {"kind": "counts", "replace_with": "random"}}),
    "block": BlockDiffusionConfig(block_length=3),
    "own blocks": BlockDiffusionConfig(block_length=3, attention="prompt_and_own_block"),
    "with next token": MaskedDiffusionConfig(next_token_weight=0.5),
    "next token": NextTokenConfig(),
    "one forward": BlockDiffusionConfig(block_length=3, clean_attention="token", next_token_weight=0.5),
    "shifted block": BlockDiffusionConfig(block_length=3),
    "preferences": PreferenceConfig(num_draws=4),
    "preferences in blocks": PreferenceConfig(num_draws=2, block_length=3),
}
SHIFTED = ("next token", "shifted block")
NUM_COPIES = {"masked twice": 2, "preferences": 4, "preferences in blocks": 2}
TWO_STREAMS = ("block", "one forward", "shifted block", "preferences in blocks")


def noise(name: str, batch: CleanBatch) -> list[NoisedBatch]:
    """The forwards of an objective."""
    alignment = "shifted" if name in SHIFTED else "same_position"
    clean_alignment = "shifted" if name == "one forward" else None
    options = {"logit_alignment": alignment, "clean_alignment": clean_alignment}
    objective = build_objective(OBJECTIVES[name], SMALL.model_copy(update=options))
    forwards = (objective.build_noised_batch(batch, KEY), objective.build_auxiliary_batch(batch))
    return [forward for forward in forwards if forward is not None]


def find_features(images: ImageInputs, shape: tuple[int, ...]) -> Tensor:
    """Feature row of each position, -1 where there is none."""
    rows = torch.full((math.prod(shape),), -1)
    rows[images.indices_M] = images.feature_rows_M
    return rows.view(shape)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_only_answers_are_noised(name: str) -> None:
    batch = build_example()
    assert batch.images is not None
    clean_rows = find_features(batch.images, batch.tokens_BL.shape)
    assert torch.equal(clean_rows >= 0, batch.tokens_BL == IMAGE)
    forwards, shape = noise(name, batch), batch.tokens_BL.shape
    copies, streams = NUM_COPIES.get(name, 1), 1 + (name in TWO_STREAMS)
    assert len(forwards) == (2 if name == "with next token" else 1)
    for noised in forwards:
        assert noised.inputs_BS.shape == (copies * shape[0], streams * shape[1])
        context_BS = ~batch.loss_mask_BL.repeat(copies, streams)
        assert torch.equal(noised.inputs_BS[context_BS], batch.tokens_BL.repeat(copies, streams)[context_BS])
        assert noised.images is not None
        assert torch.equal(find_features(noised.images, noised.inputs_BS.shape), clean_rows.repeat(copies, streams))
        assert torch.equal(noised.images.positions_3BS, batch.images.positions_3BS.repeat(1, copies, streams))
        is_shifted = noised.is_auxiliary or name in SHIFTED
        targets_N = target_positions(noised, "shifted" if is_shifted else "same_position") % shape.numel()
        if noised.is_next_token_N is not None:
            targets_N += noised.is_next_token_N
        assert len(targets_N) and batch.loss_mask_BL.flatten()[targets_N].all()
        assert torch.equal(noised.targets_N, batch.tokens_BL.flatten()[targets_N])


def test_targets_at_images_are_refused() -> None:
    batch = build_example()
    loss_mask_BL = batch.loss_mask_BL.clone()
    loss_mask_BL[0, 2:4] = True  # of the image at 2 to 5
    with pytest.raises(ValueError, match="True at 2 of 14 image positions"):
        replace(batch, loss_mask_BL=loss_mask_BL)


def test_selected_rows_have_their_images() -> None:
    batch = build_example()
    assert batch.images is not None and batch.images.grids == ((2, 2), (1, 3), (3, 1))
    assert batch.select(slice(3, 4)).images is None
    own = batch.select(slice(1, 3)).images
    assert own is not None and own.grids == ((2, 2), (3, 1)) and own.patches_PC is not None
    assert len(own.digests) == 2 and len(own.patches_PC) == 4 * (4 + 3)
    assert batch.images.patches_PC is not None
    expected = torch.cat([batch.images.patches_PC[:16], batch.images.patches_PC[28:]])
    assert torch.equal(own.patches_PC, expected)
    assert torch.equal(find_features(own, (2, LENGTH)) >= 0, batch.tokens_BL[1:3] == IMAGE)


def test_copies_to_a_device_have_the_images() -> None:
    (noised,) = noise("block", build_example())
    copy = noised.to(torch.device("meta"))
    assert copy.images is not None and copy.images.patches_PC is not None and copy.images.patches_PC.is_meta
    assert copy.images.indices_M.is_meta and copy.images.positions_3BS.is_meta
    assert copy.on_host is not None and copy.on_host.images is noised.images
