"""How many grids of 4 x 4 Sudoku are valid when an ideal denoiser is sampled in few steps: a law of the samplers alone.

The expected shares come from an independent simulation with the same ideal denoiser. By confidence it lets chance
decide between equals, as `random_topk` does: in an empty grid all cells are equal, and neighbours, which would come
first, constrain each other.

Shapes: B requests, L cells, N grids, V digits and the mask.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from config.generation import GenerationConfig
from diffusionlm.inference.generate import generate
from diffusionlm.models.varlen import VarlenBatch
from tests.reference.enumeration import table_config
from tests.reference.test_ideal_denoisers import shidoku_grids

CELLS, DIGITS, SAMPLES = 16, 4, 500
GRIDS = shidoku_grids()


class Ideal:
    """The exact distribution of every open cell, given the others; any digit where no grid fits any more."""

    def __init__(self) -> None:
        self.config = table_config(DIGITS, CELLS)
        self.lm_head = SimpleNamespace(weight=torch.zeros(1))
        self.is_digit_NLV = torch.nn.functional.one_hot(GRIDS, DIGITS + 1).double()

    def __call__(self, tokens_1Q: Tensor, *, pattern: VarlenBatch) -> Tensor:
        assert self.config.mask_token_id is not None
        tokens_BL = tokens_1Q.view(-1, CELLS)
        is_open_BL = tokens_BL == self.config.mask_token_id
        clashes_BN = (~is_open_BL).double().sum(1, keepdim=True) - torch.einsum(
            "blv,nlv->bn", torch.nn.functional.one_hot(tokens_BL, DIGITS + 1).double(), self.is_digit_NLV
        )
        fits_BN = (clashes_BN == 0).double()
        counts_BLV = torch.einsum("bn,nlv->blv", fits_BN, self.is_digit_NLV)
        counts_BLV[fits_BN.sum(1) == 0] = 1.0
        return counts_BLV.log().flatten(0, 1)[pattern.output_positions()]


def share_of_valid(strategy: str, steps: int) -> float:
    config = GenerationConfig(
        max_new_tokens=CELLS, remasking_strategy=strategy, steps=steps, temperature=1.0, stop_token_ids=()
    )
    model: Any = Ideal()
    samples = torch.tensor([done.token_ids for done in generate(model, [[]] * SAMPLES, config)])
    return float((samples[:, None] == GRIDS).all(2).any(1).double().mean())


@pytest.mark.parametrize(
    ("strategy", "steps", "ideal"),
    [
        ("ancestral", 4, 0.123),
        pytest.param("ancestral", 16, 0.619, marks=pytest.mark.slow),
        pytest.param("ancestral", 64, 0.888, marks=pytest.mark.slow),
        ("equal_counts", 4, 0.207),
        pytest.param("equal_counts", 8, 0.589, marks=pytest.mark.slow),
        pytest.param("equal_counts", 16, 1.0, marks=pytest.mark.slow),
        ("random_topk", 4, 0.159),
        pytest.param("random_topk", 8, 0.440, marks=pytest.mark.slow),
        pytest.param("random_topk", 16, 1.0, marks=pytest.mark.slow),
    ],
)
def test_valid_grids_of_an_ideal_denoiser(strategy: str, steps: int, ideal: float) -> None:
    error = (ideal * (1.0 - ideal) / SAMPLES) ** 0.5
    assert share_of_valid(strategy, steps) == pytest.approx(ideal, abs=4.0 * error + 1e-9)
