"""Losses and likelihoods of noisy blocks whose tokens precede their masks (WeDLM), by whole forwards of one block each,
for which the inputs, their position ids and a mask of all pairs are written out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ddp.context_parallel import PatternShard
from ddp.mesh import Axis
from diffusionlm.diffusion.layout import InputLayout
from diffusionlm.diffusion.noised_batch import CleanBatch
from diffusionlm.evaluation.likelihood.copies import MaskedCopy, compute_log_probabilities
from diffusionlm.evaluation.nelbo import compute_masked_nll
from diffusionlm.models.patterns import DenseBias
from diffusionlm.models.transformer import Transformer
from tests.conftest import MakeModel

VOCAB, MASK, BLOCK, B, L = 9, 8, 4, 3, 10
WEDLM = {"block_length": BLOCK, "clean_alignment": "shifted", "noisy_attention": "visible_first"}


@pytest.fixture
def model(tiny_model: MakeModel) -> Transformer:
    ids = {"vocab_size": VOCAB, "mask_token_id": MASK, "eos_token_id": 0, "pad_token_id": 0}
    return tiny_model(torch.float64, **ids, **WEDLM)


@torch.no_grad()
def score_plainly(model: Transformer, text: list[int], is_masked: list[bool]) -> NDArray[np.float64]:
    """Log-probabilities of the masked tokens of a text, of the others nan."""
    scores = np.full(len(text), np.nan)
    for first in range(0, len(text), BLOCK):
        end = min(first + BLOCK, len(text))
        order = [*range(first), *sorted(range(first, end), key=lambda position: (is_masked[position], position))]
        inputs = [MASK if is_masked[position] and position >= first else text[position] for position in order]
        is_causal = torch.ones(end, end, dtype=torch.bool).tril()
        logits_LV = model(torch.tensor([inputs]), pattern=DenseBias(is_causal), positions=torch.tensor([order]))[0]
        logits_LV[:, MASK] = -torch.inf
        for row, position in enumerate(order):
            if row >= first and is_masked[position]:
                scores[position] = float(logits_LV[row].log_softmax(-1)[text[position]])
    return scores


def make_batch(*, is_packed: bool) -> tuple[CleanBatch, NDArray[np.bool_], list[list[int]]]:
    """Rows, masks, and the first positions of the documents of each row."""
    generator = torch.Generator().manual_seed(1)
    tokens_BL = torch.randint(0, MASK, (B, L), generator=generator)
    masked_BL = (torch.rand(B, L, generator=generator) < 0.5).numpy()
    documents_BL = torch.tensor([[0] * 6 + [1] * 4, [0] * 10, [0] * 3 + [1] * 5 + [2] * 2]) if is_packed else None
    starts = [[0, 6], [0], [0, 3, 8]] if is_packed else [[0]] * B
    return CleanBatch(tokens_BL, torch.ones(B, L, dtype=torch.bool), documents_BL), masked_BL, starts


@pytest.mark.parametrize("backend", ["eager", "tiled"])
@pytest.mark.parametrize("is_packed", [False, True])
def test_losses_are_those_of_plain_forwards(model: Transformer, is_packed: bool, backend: Any) -> None:
    model.attention_backend = backend
    batch, masked_BL, starts = make_batch(is_packed=is_packed)
    layout = InputLayout.from_config(model.config, BLOCK)
    nll_BL = compute_masked_nll(model, layout, batch, masked_BL)
    model.attention_backend = "auto"
    expected = np.full((B, L), np.nan)
    for row, own_starts in enumerate(starts):
        for start, end in zip(own_starts, [*own_starts[1:], L], strict=True):
            text, is_masked = batch.tokens_BL[row, start:end].tolist(), masked_BL[row, start:end].tolist()
            expected[row, start:end] = score_plainly(model, text, is_masked)
    np.testing.assert_allclose(
        nll_BL, -expected, rtol=1e-6 if is_packed else 1e-11
    )  # positions of the row rotate in fp32
    noised = layout.build_noised_batch(batch, masked_BL, np.ones((B, L)))
    assert (noised.positions_N.diff() > 0).all(), "outputs ascend"


def test_likelihoods_of_copies_are_those_of_plain_forwards(model: Transformer) -> None:
    text, masked = [3, 1, 4, 1, 5, 2, 6, 5, 3, 5], [[4, 6], [5], [4, 5, 7], [8]]
    copies, expected = [], []
    for positions in masked:
        start = positions[0] // BLOCK * BLOCK
        tokens = np.array(
            [MASK if start + i in positions else token for i, token in enumerate(text[start : start + 4])]
        )
        targets = np.array([text[position] for position in positions])
        copies.append(MaskedCopy(np.array(text[:8]), 0, start, tokens, np.array(positions), targets))
        is_masked = [position in positions for position in range(len(text))]
        expected.append(score_plainly(model, text, is_masked)[positions])
    ours = compute_log_probabilities(model, InputLayout.from_config(model.config, BLOCK), copies, 64)
    np.testing.assert_allclose(np.concatenate(ours), np.concatenate(expected), rtol=1e-11)


def test_parts_of_a_row_have_the_positions_of_its_inputs(model: Transformer) -> None:
    batch, masked_BL, _ = make_batch(is_packed=False)
    tokens = CleanBatch(batch.tokens_BL[:, :8], batch.loss_mask_BL[:, :8])
    noised = InputLayout.from_config(model.config, BLOCK).build_noised_batch(tokens, masked_BL[:, :8], np.ones((B, 8)))
    whole_BS = noised.pattern.default_positions(16, "cpu")
    inputs_BL, is_visible_BL = noised.inputs_BS[:, :8], noised.inputs_BS[:, :8] != MASK
    assert torch.equal(inputs_BL[is_visible_BL], tokens.tokens_BL.gather(1, whole_BS[:, :8])[is_visible_BL])
    for rank in range(2):
        shard = PatternShard(noised.pattern, Axis(2, rank, None))
        assert torch.equal(shard.default_positions(8, "cpu"), shard.select(whole_BS, dim=1))
