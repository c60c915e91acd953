"""Losses as others publish them, written out plainly, on the masks that the product drew.

The transcriptions take full logits of a second implementation of the model (`enumeration.py`) and share nothing with
the code under test. Their masking probabilities are recovered from what was drawn. One difference to all of them is
kept apart: their softmax lets the mask token compete, here it has probability zero (SUBS), so that they get logits
without it.

Shapes: B rows, L tokens, V tokens without the mask token.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from config.training.objective import (
    BlockDiffusionConfig,
    IndependentMasking,
    MaskedDiffusionConfig,
)
from diffusionlm.diffusion.corruption import assign_noise_groups, sample_masks
from diffusionlm.diffusion.noised_batch import CleanBatch, NoisedBatch, NoiseKey
from diffusionlm.diffusion.objectives import build_objective
from diffusionlm.diffusion.schedules import CosineSchedule, LinearSchedule
from diffusionlm.models.transformer import Transformer
from tests.conftest import MakeModel
from tests.reference.enumeration import PlainModel, score_batch, spans

VOCAB, MASK = 7, 6
B, L = 4, 12
KEY = NoiseKey(seed=8, step=2, first_sequence=0, num_sequences_in_step=B)
PROMPT = torch.tensor([4, 0, 8, 4])
"""Prompt tokens of each row."""
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 7, [0] * 12, [0] * 3 + [1] * 4 + [2] * 5, [0] * 8 + [1] * 4])


@pytest.fixture(scope="module")
def model(tiny_model: MakeModel) -> Transformer:
    return tiny_model(torch.float64, vocab_size=VOCAB, mask_token_id=MASK, eos_token_id=0, pad_token_id=0)


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(0, MASK, (B, L))


def ours(
    model: Transformer, config: MaskedDiffusionConfig | BlockDiffusionConfig, batch: CleanBatch
) -> tuple[Tensor, NoisedBatch]:
    """The product's loss, and what it drew."""
    objective = build_objective(config, model.config)
    draw = objective.build_noised_batch(batch, KEY)
    return score_batch(model, objective, draw, draw.denominator).loss_sum, draw


def probabilities(
    config: MaskedDiffusionConfig | BlockDiffusionConfig, batch: CleanBatch, unit: Any, draw: NoisedBatch
) -> Tensor:
    """Masking probability of each masked token, 1 elsewhere, [B, L]: one over the weight that the same noise gets.

    That they are right is another test's matter (`test_drawn_times_probabilities_and_weights_fit_together`).
    """
    assert isinstance(config.estimator, IndependentMasking)
    group_ids_BL = assign_noise_groups(batch, batch.loss_mask_BL.numpy(), unit, 4)
    (noise,) = sample_masks(group_ids_BL, KEY, config.estimator, "inverse_p")
    np.testing.assert_array_equal(noise.masked_BL, draw.inputs_BS[:, :L].numpy() == MASK)
    return torch.from_numpy(1.0 / np.where(noise.masked_BL, noise.weights_BL, 1.0))


def assert_same_loss_and_gradient(
    model: Transformer, one: Tensor, other: Tensor, *, rtol: float = 1e-10, atol: float = 1e-12
) -> None:
    torch.testing.assert_close(one, other, rtol=rtol, atol=atol)
    parameters = list(model.parameters())
    gradients = (torch.autograd.grad(value, parameters) for value in (one, other))
    for (name, _), first, second in zip(model.named_parameters(), *gradients, strict=True):
        torch.testing.assert_close(first, second, rtol=rtol, atol=atol, msg=partial("{}: {}".format, name))
    assert float(one.detach()) > 0.1


def bidirectional_logits(model: Transformer, noisy_BL: Tensor) -> Tensor:
    """[B, L, V], without the mask token's."""
    return PlainModel(model)(noisy_BL, torch.arange(noisy_BL.shape[1]))[0][..., :MASK]


def everything(tokens: Tensor) -> Tensor:
    return torch.ones_like(tokens, dtype=torch.bool)


def answers(tokens: Tensor) -> Tensor:
    return torch.arange(tokens.shape[1]) >= PROMPT[:, None]


# ----------------------------------------------------------------------------------------------------------------------
# LLaDA, as its guidelines have it


def llada_sft_loss(logits: Tensor, input_ids: Tensor, noisy: Tensor, p_mask: Tensor, prompt_lengths: Tensor) -> Tensor:
    answer_lengths = (input_ids.shape[1] - prompt_lengths)[:, None].expand(input_ids.shape)
    noisy = torch.where(torch.arange(input_ids.shape[1]) < prompt_lengths[:, None], input_ids, noisy)
    masked_indices = noisy == MASK
    token_loss = F.cross_entropy(logits[masked_indices], input_ids[masked_indices], reduction="none")
    return (token_loss / p_mask[masked_indices] / answer_lengths[masked_indices]).sum() / input_ids.shape[0]


@pytest.mark.parametrize("times", ["stratified", "uniform", "antithetic"])
@pytest.mark.parametrize("prompt", [torch.zeros_like(PROMPT), PROMPT], ids=["pretraining", "sft"])
def test_llada(model: Transformer, tokens: Tensor, prompt: Tensor, times: Any) -> None:
    config = MaskedDiffusionConfig(normalizer="rows", estimator=IndependentMasking(times=times))
    batch = CleanBatch(tokens, torch.arange(L) >= prompt[:, None])
    loss, draw = ours(model, config, batch)
    p_mask = probabilities(config, batch, "row", draw)
    logits = bidirectional_logits(model, draw.inputs_BS)
    assert_same_loss_and_gradient(model, loss, llada_sft_loss(logits, tokens, draw.inputs_BS, p_mask, prompt))


# ----------------------------------------------------------------------------------------------------------------------
# Qwen3LLada


def soft_ce_loss(logits: Tensor, input_ids: Tensor, masked: Tensor, p_mask: Tensor, smoothing: float = 0.1) -> Tensor:
    log_p = logits.log_softmax(-1)
    hard = -log_p.gather(-1, input_ids[..., None])[..., 0]
    soft = -log_p.mean(-1)
    per_token = ((1 - smoothing) * hard + smoothing * soft) / p_mask
    return per_token[masked].sum() / input_ids.numel()


@pytest.mark.parametrize(("floor", "cap"), [(0.0, math.inf), (0.3, 2.0)])
def test_soft_ce(model: Transformer, tokens: Tensor, floor: float, cap: float) -> None:
    """min_masking_rate raises p before masks are drawn; reweight_cap c bounds the weight by c afterwards."""
    options: dict[str, Any] = {"min_masking_rate": floor} if floor else {}
    capped = options | ({"reweight_cap": cap} if floor else {})
    config = MaskedDiffusionConfig(normalizer="rows", label_smoothing=0.1, estimator=IndependentMasking(**capped))
    batch = CleanBatch(tokens, everything(tokens))
    loss, draw = ours(model, config, batch)
    p_mask = probabilities(MaskedDiffusionConfig(estimator=IndependentMasking(**options)), batch, "row", draw)
    assert (p_mask < 0.5).any() and (not floor or p_mask.min() == pytest.approx(floor))
    logits = bidirectional_logits(model, draw.inputs_BS)
    theirs = soft_ce_loss(logits, tokens, draw.inputs_BS == MASK, p_mask.clamp(min=1 / cap))
    assert_same_loss_and_gradient(model, loss, theirs)


# ----------------------------------------------------------------------------------------------------------------------
# dLLM, MDLM


def dllm_loss(logits: Tensor, input_ids: Tensor, labels: Tensor, masked: Tensor, w: Tensor) -> Tensor:
    """loss_norm_type "token"."""
    token_nll = F.cross_entropy(logits.transpose(1, 2), input_ids, reduction="none") * w * masked
    return token_nll.sum() / (labels != -100).sum()


def dllm_weight(schedule: str, t: Tensor) -> Tensor:
    """Their denominator carries 1e-6 more."""
    if schedule == "linear":
        alpha, slope = 1 - t, -torch.ones_like(t)
    else:
        alpha = 1 - torch.cos(math.pi / 2 * (1 - t))
        slope = -math.pi / 2 * torch.sin(math.pi / 2 * (1 - t))
    return -slope / (1 - alpha)


@pytest.mark.parametrize("schedule", [LinearSchedule(), CosineSchedule()], ids=lambda config: config.kind)
def test_dllm_mdlm(model: Transformer, tokens: Tensor, schedule: Any) -> None:
    config = MaskedDiffusionConfig(estimator=IndependentMasking(schedule=schedule, epsilon=0.0))
    batch = CleanBatch(tokens, answers(tokens))
    loss, draw = ours(model, config, batch)
    p = probabilities(config, batch, "row", draw)
    t = p if schedule.kind == "linear" else 2 / math.pi * torch.asin(p)
    labels = torch.where(batch.loss_mask_BL, tokens, -100)
    logits = bidirectional_logits(model, draw.inputs_BS)
    theirs = dllm_loss(logits, tokens, labels, draw.inputs_BS == MASK, dllm_weight(schedule.kind, t))
    assert_same_loss_and_gradient(model, loss, theirs, rtol=1e-9, atol=1e-10)


# ----------------------------------------------------------------------------------------------------------------------
# SDAR, dLLM-RL


def sdar_loss(
    model: Transformer, input_ids: Tensor, documents: Tensor, labels: Tensor, masked: Tensor, p_mask: Tensor
) -> Tensor:
    """Each document as [noisy | clean], one behind the other; positions begin with the document; block 4."""
    losses = []
    for row, document_L in enumerate(documents):
        copies = [torch.arange(start, end).repeat(2) for start, end in spans(document_L, len(document_L))]
        order = torch.cat(copies)
        positions = torch.cat([copy - copy[0] for copy in copies])
        is_clean = torch.cat([torch.arange(len(copy)) >= len(copy) // 2 for copy in copies])
        is_same, block = document_L[order][:, None] == document_L[order], positions // 4
        own = is_same & (is_clean[:, None] == is_clean) & (block[:, None] == block)
        earlier = is_same & is_clean & (block[:, None] > block)
        x, is_noisy = input_ids[row, order], masked[row, order] & ~is_clean
        logits = PlainModel(model)(torch.where(is_noisy, MASK, x)[None], positions, own | earlier)[0][0, :, :MASK]
        token_loss = F.cross_entropy(logits[is_noisy], x[is_noisy], reduction="none")
        losses.append((token_loss / p_mask[row, order][is_noisy]).sum())
    return torch.stack(losses).sum() / (labels != -100).sum()


def test_sdar(model: Transformer, tokens: Tensor) -> None:
    """Rotations begin at each document there and at the row here: fp32 angles leave 1e-8."""
    estimator = IndependentMasking(draw_per="document", weight="inverse_p")
    config = BlockDiffusionConfig(block_length=4, estimator=estimator)
    is_target = torch.rand(B, L) < 0.8
    batch = CleanBatch(tokens, is_target, DOCUMENTS)
    loss, draw = ours(model, config, batch)
    p_mask = probabilities(config, batch, "document", draw)
    labels = torch.where(is_target, tokens, -100)
    theirs = sdar_loss(model, tokens, DOCUMENTS, labels, draw.inputs_BS[:, :L] == MASK, p_mask)
    assert_same_loss_and_gradient(model, loss, theirs, rtol=1e-6, atol=1e-6)
    masked = draw.inputs_BS[:, :L] == MASK
    levels = [p_mask[row][masked[row] & (DOCUMENTS[row] == number)].unique() for row in range(B) for number in range(3)]
    assert max(len(group_levels) for group_levels in levels) == 1, "one level for a document"
    assert len(torch.cat(levels).unique()) == sum(len(group_levels) for group_levels in levels) > B, "each has its own"


def test_dllm_rl_full_attention_sft(model: Transformer, tokens: Tensor) -> None:
    """Mean over the row's masked tokens, mean over rows, no weight; levels from 0.1 to 0.9."""
    config = MaskedDiffusionConfig(
        normalizer="masked_rows", estimator=IndependentMasking(range=(0.1, 0.9), epsilon=0.0, times="uniform")
    )
    batch = CleanBatch(tokens, answers(tokens))
    loss, draw = ours(model, config, batch)
    logits, losses = bidirectional_logits(model, draw.inputs_BS), []
    for row in range(B):
        masked = draw.inputs_BS[row] == MASK
        losses.append(F.cross_entropy(logits[row, masked], tokens[row, masked], reduction="mean"))
    assert_same_loss_and_gradient(model, loss, torch.stack(losses).mean())
    p = probabilities(config, batch, "row", draw)[draw.inputs_BS == MASK]
    assert p.min() >= 0.1 and p.max() <= 0.9


def test_dllm_rl_block_sft(model: Transformer, tokens: Tensor) -> None:
    """[prompt | response | noisy response], each row by itself; prompts are whole blocks, so that both count the same.

    Minus the sum of log p over the masked, over the response's length, mean over rows.
    """
    config = BlockDiffusionConfig(
        block_length=4, normalizer="rows", estimator=IndependentMasking(weight="uniform", range=(0.1, 0.9), epsilon=0.0)
    )
    batch = CleanBatch(tokens, answers(tokens))
    loss, draw = ours(model, config, batch)
    losses = []
    for row in range(B):
        prompt = int(PROMPT[row])
        response = L - prompt
        noisy = draw.inputs_BS[row, prompt:L]
        sequence = torch.cat([tokens[row], noisy])
        positions = torch.cat([torch.arange(L), torch.arange(prompt, L)])
        block, is_noisy = positions // 4, torch.arange(L + response) >= L
        clean_rule = ~is_noisy[:, None] & ~is_noisy & (block[:, None] >= block)
        earlier_rule = is_noisy[:, None] & ~is_noisy & (block[:, None] > block)
        own_rule = is_noisy[:, None] & is_noisy & (block[:, None] == block)
        logits, _ = PlainModel(model)(sequence[None], positions, clean_rule | earlier_rule | own_rule)
        log_p = logits[0, L:, :MASK].log_softmax(-1).gather(1, tokens[row, prompt:, None])[:, 0]
        losses.append(-log_p[noisy == MASK].sum() / response)
    assert_same_loss_and_gradient(model, loss, torch.stack(losses).mean())
