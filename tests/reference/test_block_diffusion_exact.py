"""Block diffusion against block-by-block forwards of a second implementation with a cache, and against enumeration."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from config.training.objective import BlockDiffusionConfig, MaskedDiffusionConfig
from diffusionlm.diffusion.layout import InputLayout
from diffusionlm.diffusion.noised_batch import CleanBatch
from diffusionlm.diffusion.objectives import build_objective
from diffusionlm.models import patterns
from diffusionlm.models.transformer import Transformer
from tests.conftest import MakeModel
from tests.reference.enumeration import (
    Cache,
    PlainModel,
    as_masks,
    exact_units,
    mask_weight,
    score_batch,
    spans,
    subsets,
)

VOCAB, MASK, L = 6, 5, 12
EXACT: dict[str, Any] = {"rtol": 0.0, "atol": 1e-12}
PACKED = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 2, 2, 2, 2, 2], [3, 3, 3, 3, 4, 4, 4, 4, 4, 4, 4, 4]])


@pytest.fixture(scope="module", params=["same_position", "shifted"])
def model(tiny_model: MakeModel, request: pytest.FixtureRequest) -> Transformer:
    return small(tiny_model, request.param)


def small(tiny_model: MakeModel, alignment: str, **changes: object) -> Transformer:
    vocabulary = {"vocab_size": VOCAB, "mask_token_id": MASK, "eos_token_id": 0, "pad_token_id": 0}
    return tiny_model(
        torch.float64, scale=0.4, logit_alignment=alignment, attention_bias=True, **{**vocabulary, **changes}
    )


@torch.no_grad()
@pytest.mark.parametrize("block_length", [1, 2, 3, 4, L])
def test_all_outputs_of_both_streams_equal_the_sequential_forward(tiny_model: MakeModel, block_length: int) -> None:
    """Packed, with the row's positions: exact. The clean stream is the block-causal forward of the clean tokens."""
    model = small(tiny_model, "same_position", tie_word_embeddings=False)
    x, noisy = torch.randint(0, MASK, (2, L)), torch.randint(0, VOCAB, (2, L))
    logits = model(torch.cat([noisy, x], 1), pattern=patterns.BlockDiffusion(block_length, PACKED))
    plain = PlainModel(model)
    for row in range(2):
        for start, end in spans(PACKED[row], L):
            past: Cache | None = None
            for first in range(start, end, block_length):
                last = min(first + block_length, end)
                positions = torch.arange(first, last)
                of_noisy, _ = plain(noisy[row : row + 1, first:last], positions, past=past)
                of_clean, past = plain(x[row : row + 1, first:last], positions, past=past)
                torch.testing.assert_close(logits[row, first:last], of_noisy[0], **EXACT)
                torch.testing.assert_close(logits[row, L + first : L + last], of_clean[0], **EXACT)
    causal = model(x, pattern=patterns.BlockCausal(block_length, PACKED))
    torch.testing.assert_close(logits[:, L:], causal, **EXACT)


# ----------------------------------------------------------------------------------------------------------------------
# Values and gradients, all masks enumerated

SHORT = torch.tensor([0, 4, 2, 2, 1, 3])
"""One row, which enumeration covers."""
TWO_DOCUMENTS = torch.tensor([0, 0, 0, 0, 1, 1])
TARGETS = torch.tensor([False, True, True, False, True, True])
WITH_MASK_TOKEN = torch.tensor([0, 4, MASK, 2, 1, 3])
"""Its mask token is data: always there, never scored."""


def gradients(value: Tensor, model: Transformer) -> dict[str, Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(value, parameters, retain_graph=True), strict=True))


def enumerated(
    model: Transformer,
    tokens_L: Tensor,
    block_length: int | None,
    document_ids_L: Tensor | None,
    loss_mask_L: Tensor | None,
    per: str,
) -> tuple[Tensor, int]:
    """Every mask of the units through the product's layout, score and model, weighted n / k and by its probability.

    per "document": all masks of a document at once, so that all of its blocks are noisy together; what is drawn for the
    one is then the sum over the blocks.
    """
    config = MaskedDiffusionConfig() if block_length is None else BlockDiffusionConfig(block_length=block_length)
    objective, layout = build_objective(config, model.config), InputLayout.from_config(model.config, block_length)
    targets = torch.ones_like(tokens_L, dtype=torch.bool) if loss_mask_L is None else loss_mask_L
    row = CleanBatch(tokens_L[None], targets[None], None if document_ids_L is None else document_ids_L[None])
    maskable = layout.maskable(row)[0]
    sets, probabilities_times_weights = [], []
    for start, end in spans(document_ids_L, len(tokens_L)):
        length = block_length if per == "block" and block_length is not None else end - start
        for first in range(start, end, length):
            places = [i for i in range(first, min(first + length, end)) if maskable[i]]
            for M in subsets(places):
                sets.append(M)
                # 1 / (n C(n, k)) times n / k
                probabilities_times_weights.append(mask_weight(len(M), len(places)))
    masked = as_masks(sets, len(tokens_L)).numpy()
    many = CleanBatch(
        row.tokens_BL.repeat(len(sets), 1),
        row.loss_mask_BL.repeat(len(sets), 1),
        None if row.document_BL is None else row.document_BL.repeat(len(sets), 1),
    )
    weights = masked * np.array(probabilities_times_weights)[:, None]
    count = int(maskable.sum())
    draw = layout.build_noised_batch(many, masked, weights, num_targets=count, denominator=float(count))
    return score_batch(model, objective, draw, 1.0).loss_sum, count


@pytest.mark.parametrize("per", ["block", "document"])
@pytest.mark.parametrize(
    ("tokens", "documents", "targets"),
    [
        (SHORT, None, None),
        (SHORT, TWO_DOCUMENTS, None),
        (SHORT, TWO_DOCUMENTS, TARGETS),
        (SHORT, None, TARGETS),
        (WITH_MASK_TOKEN, TWO_DOCUMENTS, None),
    ],
    ids=["plain", "packed", "packed-prompt", "prompt", "mask-token"],
)
@pytest.mark.parametrize("block_length", [None, 1, 2, 3, 4, 6])
def test_enumerated_objective_and_its_gradient(
    model: Transformer,
    block_length: int | None,
    tokens: Tensor,
    documents: Tensor | None,
    targets: Tensor | None,
    per: str,
) -> None:
    ours, count = enumerated(model, tokens, block_length, documents, targets, per)
    units = exact_units(model, tokens, block_length, document_ids_L=documents, loss_mask_L=targets)
    exact = torch.stack([unit.bound() for unit in units]).sum()
    assert count == sum(max(len(M) for M in unit.sets) for unit in units)
    torch.testing.assert_close(ours, exact, rtol=1e-13, atol=0.0)
    expected = gradients(exact, model)
    for name, gradient in gradients(ours, model).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-12, msg=partial("{}{}".format, name))
