"""Losses of models that keep text token-causal: one forward against two, and the losses as others publish them.

The published ones are written out on full logits of a second implementation of the model (`enumeration.py`), with masks
and noise levels that are read from what the product drew.

Shapes: B rows, L tokens, V tokens without the mask token.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from config.finetune.preference import PreferenceConfig
from config.training.objective import AllMasked, BlockDiffusionConfig, FixedCountMasking, IndependentMasking
from diffusionlm.diffusion.corruption import assign_noise_groups, sample_masks
from diffusionlm.diffusion.noised_batch import CleanBatch, NoisedBatch, NoiseKey
from diffusionlm.diffusion.objectives import BalancedLoss, DiffusionObjective, build_objective
from diffusionlm.diffusion.preference import compute_nll, sum_by_answer
from diffusionlm.evaluation.nelbo import nelbo
from diffusionlm.models.patterns import Causal
from diffusionlm.models.transformer import Transformer
from tests.conftest import MakeModel
from tests.reference.enumeration import PlainModel, score_batch

VOCAB, MASK = 9, 8
B, L, BLOCK = 3, 10, 4
KEY = NoiseKey(seed=2, step=4, first_sequence=0, num_sequences_in_step=B)
NEMOTRON = {"logit_alignment": "same_position", "clean_alignment": "shifted"}
I_DLM = {"logit_alignment": "shifted", "clean_alignment": "shifted", "noisy_attention": "token"}
WEDLM = {**NEMOTRON, "noisy_attention": "visible_first"}
ALIGNMENTS = [
    pytest.param(NEMOTRON, id="Nemotron"),
    pytest.param(I_DLM, id="I-DLM"),
    pytest.param(WEDLM, id="WeDLM"),
]


@pytest.fixture
def make(tiny_model: MakeModel) -> Any:
    return lambda **options: tiny_model(
        torch.float64, vocab_size=VOCAB, mask_token_id=MASK, eos_token_id=0, pad_token_id=0, **options
    )


def make_batch(prompt: int = 0, *, is_packed: bool = False) -> CleanBatch:
    tokens = torch.randint(0, MASK, (B, L), generator=torch.Generator().manual_seed(1))
    documents = torch.tensor([[0] * 6 + [1] * 4, [0] * 10, [0] * 3 + [1] * 5 + [2] * 2]) if is_packed else None
    return CleanBatch(tokens, (torch.arange(L) >= prompt).expand(B, L).clone(), documents)


def config_of(**values: Any) -> BlockDiffusionConfig:
    return BlockDiffusionConfig.model_validate({"block_length": BLOCK, "clean_attention": "token", **values})


def gradients(model: Transformer, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def assert_same(model: Transformer, one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(gradients(model, one), gradients(model, other), rtol=1e-9, atol=1e-12)
    assert float(one.detach()) > 0.1


# ----------------------------------------------------------------------------------------------------------------------
# One forward


@pytest.mark.parametrize("options", ALIGNMENTS)
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"block_length": 1},
        {"block_length": L, "normalizer": "rows"},
        {"block_length": 100, "estimator": AllMasked()},
        {"estimator": FixedCountMasking(complementary=True), "normalizer": "masked_rows"},
        {"estimator": IndependentMasking(), "normalizer": "outputs", "eos_padding_weight": 0.5},
        {"stages": [{"from_step": 0, "block_length": 1}, {"from_step": 4, "block_length": 3}], "block_length": None},
    ],
    ids=str,
)
@pytest.mark.parametrize("is_packed", [False, True])
def test_one_forward_equals_two(make: Any, options: Any, values: dict[str, Any], is_packed: bool) -> None:
    """The masked tokens alone in the same halves, and the next tokens in a causal forward of their own."""
    model, batch = make(**options), make_batch(2, is_packed=is_packed)
    batch = replace(batch, is_eos_padding_BL=batch.loss_mask_BL & (torch.arange(L) >= L - 2))
    objective = build_objective(config_of(next_token_weight=0.7, **values), model.config)
    draw = objective.build_noised_batch(batch, KEY)
    assert objective.build_auxiliary_batch(batch) is None and (draw.positions_N.diff() > 0).all()
    masked = build_objective(config_of(**values), model.config).build_noised_batch(batch, KEY)
    assert masked.is_next_token_N is None and torch.equal(masked.inputs_BS, draw.inputs_BS)
    assert isinstance(objective, DiffusionObjective)
    two_forwards = replace(objective, layout=replace(objective.layout, clean_attention="block"))
    causal = two_forwards.build_auxiliary_batch(batch)
    assert causal is not None and isinstance(causal.pattern, Causal) and len(causal.positions_N) > 10
    one = score_batch(model, objective, draw, draw.denominator).loss_sum
    two = [score_batch(model, objective, part, draw.denominator).loss_sum for part in (masked, causal)]
    assert_same(model, one, two[0] + two[1])
    for term, expected in zip(draw.split_terms(), two, strict=True):
        torch.testing.assert_close(score_batch(model, objective, term, draw.denominator).loss_sum, expected)


def test_balance_is_the_ratio_of_the_step(make: Any) -> None:
    """Over two micro-batches and the sums of another rank. It has no gradient."""
    model, batch = make(**NEMOTRON), make_batch()
    objective = build_objective(config_of(next_token_weight=0.5, balance=True), model.config)
    draws = [objective.build_noised_batch(batch.select(rows), KEY) for rows in (slice(0, 1), slice(1, 3))]
    denominator, others = sum(draw.denominator for draw in draws), torch.tensor([0.5, 0.1], dtype=torch.float64)
    inputs = [objective.build_loss_inputs(draw, denominator) for draw in draws]
    loss = BalancedLoss(0.5)
    measured = [loss.measure(model, draw, own) for draw, own in zip(draws, inputs, strict=True)]
    weighed = loss.weigh(draws, inputs, measured, denominator, lambda sums: sums + others)
    parts = [
        [score_batch(model, objective, term, denominator).loss_sum for term in draw.split_terms()] for draw in draws
    ]
    masked, next_token = (torch.stack(terms).sum() for terms in zip(*parts, strict=True))
    expected = masked + 0.5 * ((masked + 0.5) / (next_token + 0.1)).detach() * next_token
    torch.testing.assert_close(sum(part.loss for part in weighed), expected.detach())
    total = torch.stack(
        [
            model(
                draw.inputs_BS, pattern=draw.pattern, output_positions=draw.positions_N, loss_inputs=part.loss_inputs
            ).loss_sum
            for draw, part in zip(draws, weighed, strict=True)
        ]
    ).sum()
    assert_same(model, total, expected)


@torch.no_grad()
@pytest.mark.parametrize("options", ALIGNMENTS)
def test_preferences_have_the_bounds_of_answers(make: Any, options: Any) -> None:
    """Of two packed answers, by the same halves as those of each answer alone; exact for blocks of one token."""
    model = make(**options)
    documents = torch.tensor([[0] * 5 + [1] * 5])
    tokens = torch.randint(0, MASK, (1, L), generator=torch.Generator().manual_seed(5))
    is_target = torch.tensor([[False, False, True, True, True] * 2])
    batch = CleanBatch(tokens, is_target, documents, documents, torch.zeros_like(is_target))
    objective = build_objective(PreferenceConfig(block_length=1, num_draws=2), model.config)
    draw = objective.build_noised_batch(batch, NoiseKey(0, 0, 0, 2))
    bounds = sum_by_answer(draw, compute_nll(model, draw, objective.build_loss_inputs(draw, 1.0)))
    for answer, own in enumerate((slice(0, 5), slice(5, 10))):
        alone = nelbo(model, tokens[:, own], is_target[:, own], block_length=1)
        assert float(bounds[0, answer]) == pytest.approx(3 * alone.nats_per_token, abs=1e-6)  # fp32 angles


# ----------------------------------------------------------------------------------------------------------------------
# Published losses


def two_halves(model: Transformer, draw: NoisedBatch, *, is_causal_noise: bool) -> tuple[Tensor, Tensor]:
    """Logits of the noisy and of the clean copy, [B, L, V], under the mask of the table of attention."""
    i, j = torch.arange(L)[:, None], torch.arange(L)
    own = (i // BLOCK == j // BLOCK) & ((j <= i) | (not is_causal_noise))
    mask = torch.cat([torch.cat([own, j // BLOCK < i // BLOCK], 1), torch.cat([own & False, j <= i], 1)])
    logits, _ = PlainModel(model)(draw.inputs_BS, torch.arange(L).repeat(2), mask)
    return logits[:, :L, :MASK], logits[:, L:, :MASK]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)


def nemotron_sums(model: Transformer, batch: CleanBatch, draw: NoisedBatch, p_B1: Tensor) -> tuple[Tensor, ...]:
    """D and A of the released code, and their counts: |M| and the labels."""
    noisy, clean = two_halves(model, draw, is_causal_noise=False)
    is_masked = draw.inputs_BS[:, :L] == MASK
    diffusion = (cross_entropy(noisy, batch.tokens_BL) / p_B1)[is_masked].sum()
    is_label = batch.loss_mask_BL[:, 1:]
    autoregressive = cross_entropy(clean[:, :-1], batch.tokens_BL[:, 1:])[is_label].sum()
    return diffusion, autoregressive, is_masked.sum(), is_label.sum()


NEMOTRON_NOISE = {"kind": "bernoulli", "times": "uniform", "draw_per": "row", "weight": "inverse_p"}


@pytest.mark.parametrize("name", ["Megatron-Bridge", "NeMo", "released"])
@pytest.mark.parametrize("prompt", [0, 3])
def test_nemotron_losses(make: Any, name: str, prompt: int) -> None:
    """0.3 is the weight of diffusion: over 0.3, the weight of the next token is 1 / 0.3."""
    model, batch = make(**NEMOTRON), make_batch(prompt)
    weight = 1.0 if name == "released" else 1 / 0.3
    normalizer = "masked" if name == "NeMo" else "outputs"
    config = config_of(normalizer=normalizer, estimator=NEMOTRON_NOISE, next_token_weight=weight)
    objective = build_objective(config, model.config)
    draw = objective.build_noised_batch(batch, KEY)
    group_ids_BL = assign_noise_groups(batch, batch.loss_mask_BL.numpy(), "row", BLOCK)
    (noise,) = sample_masks(group_ids_BL, KEY, config.estimator, "inverse_p")
    p_B1 = torch.from_numpy(1.0 / noise.weights_BL.max(axis=1, keepdims=True))
    d, a, num_masked, num_labels = nemotron_sums(model, batch, draw, p_B1)
    scaled = draw
    if name == "NeMo":
        expected = 0.3 * d / num_masked + a / num_labels
        assert draw.next_token_denominator is not None and draw.next_token_denominator == num_labels
        scaled = draw.scale_next_tokens(draw.denominator / draw.next_token_denominator)
    else:
        expected = (d + a if name == "released" else 0.3 * d + 1.0 * a) / (num_masked + num_labels)
    ours = score_batch(model, objective, scaled, draw.denominator).loss_sum
    assert_same(model, ours * (1.0 if name == "released" else 0.3), expected)


@pytest.mark.parametrize("weight", [0.2, 1.0])
def test_i_dlm_loss(make: Any, weight: float) -> None:
    """All answer tokens masked; each of them is the target of the output before it, in both copies. NeMo's counts."""
    model, batch = make(**I_DLM), make_batch(3)
    objective = build_objective(config_of(estimator=AllMasked(), next_token_weight=weight), model.config)
    draw = objective.build_noised_batch(batch, KEY)
    assert torch.equal(draw.inputs_BS[:, :L] == MASK, batch.loss_mask_BL)
    noisy, clean = two_halves(model, draw, is_causal_noise=True)
    terms = [cross_entropy(logits[:, 2:-1], batch.tokens_BL[:, 3:]).sum() / (B * (L - 3)) for logits in (noisy, clean)]
    ours = score_batch(model, objective, draw, draw.denominator).loss_sum
    assert_same(model, ours, terms[0] + weight * terms[1])


def test_expected_weights_of_the_terms(make: Any) -> None:
    """Per token and in the mean over noise, bound : next token is 0.3 : 1 for Megatron-Bridge, and 0.6 : 1 for NeMo:
    w = 3.3 and 1.7 with normalizer = "targets"."""
    model, rows = make(**NEMOTRON), 4000
    tokens = torch.zeros(rows, L, dtype=torch.int64)
    batch, key = CleanBatch(tokens, tokens == 0), NoiseKey(0, 0, 0, rows)
    config = config_of(normalizer="masked", estimator=NEMOTRON_NOISE, next_token_weight=1.0)
    draw = build_objective(config, model.config).build_noised_batch(batch, key)
    masked, next_token = draw.split_terms()
    weight_of_bound = float(masked.weights_N.sum()) / rows / L
    assert weight_of_bound == pytest.approx(1.0, rel=0.03), "1 / p of each masked token"
    num_labels = float(next_token.weights_N.sum())
    assert num_labels == draw.next_token_denominator == rows * (L - 1)
    nemo = 0.3 * weight_of_bound / draw.denominator * rows * L
    assert nemo == pytest.approx(0.6, rel=0.05)
