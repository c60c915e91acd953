"""Preferences: DPO written out with single forwards, and the draws of evidence bounds."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from config.finetune.lora import LoraConfig
from config.finetune.preference import DPOLossConfig, PreferenceConfig
from diffusionlm.diffusion.noised_batch import CleanBatch, NoisedBatch, NoiseKey
from diffusionlm.diffusion.objectives import build_objective
from diffusionlm.diffusion.preference import (
    PreferenceLoss,
    PreferenceObjective,
    PreferenceResults,
    compute_losses,
    sum_by_answer,
)
from diffusionlm.models.lora import adapter_modules, add_adapter, keep_start
from diffusionlm.models.patterns import Bidirectional, Causal
from diffusionlm.models.transformer import Transformer
from diffusionlm.training.block_wrapping import compile_blocks
from tests.conftest import MakeModel

MASK = 18
LENGTH = 12
PAIRS = [(([1, 2, 3], [4, 5, 6]), ([1, 2, 3], [7, 8])), (([9], [10, 11]), ([9], [12, 13, 14, 15]))]
"""Prompt and answer of the chosen and the rejected conversation."""


def pair_batch(pairs: Any = PAIRS) -> CleanBatch:
    """One row for each pair: both conversations, then padding."""
    shape = (len(pairs), LENGTH)
    tokens, targets = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.bool)
    documents = torch.full(shape, -1)
    for row, pair in enumerate(pairs):
        start = 0
        for index, (prompt, answer) in enumerate(pair):
            end = start + len(prompt) + len(answer)
            tokens[row, start:end] = torch.tensor([*prompt, *answer])
            targets[row, start + len(prompt) : end] = True
            documents[row, start:end] = index
            start = end
    return CleanBatch(tokens, targets, documents, documents.clone(), torch.zeros(shape, dtype=torch.bool))


def build(model: Transformer, **options: Any) -> PreferenceObjective:
    objective = build_objective(PreferenceConfig(**options), model.config)
    assert isinstance(objective, PreferenceObjective)
    return objective


def backward(
    model: Transformer, loss: PreferenceLoss, noised_batch: NoisedBatch, objective: PreferenceObjective
) -> PreferenceResults:
    """The losses of the pairs; the gradients of their mean are added to the model's."""
    loss_inputs = objective.build_loss_inputs(noised_batch, noised_batch.denominator)
    gains_P2 = loss.measure(model, noised_batch, loss_inputs)
    loss_inputs, results = loss.add_weights(noised_batch, loss_inputs, gains_P2, gains_P2[:, 1].mean().clamp(min=0.0))
    output = model(
        noised_batch.inputs_BS,
        pattern=noised_batch.pattern,
        output_positions=noised_batch.positions_N,
        loss_inputs=loss_inputs,
    )
    output.total_loss.backward()
    return results


def dpo(reference: Transformer | None, beta: float) -> PreferenceLoss:
    return PreferenceLoss(DPOLossConfig(beta=beta), reference)


def log_likelihood(model: Transformer, prompt: list[int], answer: list[int]) -> Tensor:
    """Token by token, each in a forward of its own; the mask token has probability zero."""
    total = torch.zeros((), dtype=torch.float64)
    is_shifted = model.config.logit_alignment == "shifted"
    for index, token in enumerate(answer):
        before = [*prompt, *answer[:index]]
        logits = model(torch.tensor([before if is_shifted else [*before, MASK]]), pattern=Causal())[0, -1]
        logits = logits.masked_fill(torch.arange(len(logits)) == MASK, -math.inf)
        total = total + F.log_softmax(logits, dim=-1)[token]
    return total


@pytest.mark.slow
@pytest.mark.parametrize("has_adapters", [False, True])
def test_compiled_blocks_compute_the_same(has_adapters: bool, tiny_model: MakeModel) -> None:
    """The forwards without gradients run uncompiled, in between those that are compiled; the adapters are off in some
    of them. The noise of each step has other positions."""
    results: list[Any] = []
    for is_compiled in (False, True):
        model, reference = (tiny_model(torch.float64, seed=seed, num_hidden_layers=3) for seed in (1, 2))
        if has_adapters:
            add_adapter(model, LoraConfig(rank=2))
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if name.endswith("lora_B"):
                        parameter.fill_(0.1)
        if is_compiled:
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            compile_blocks(model, "aot_eager")
        preferences = dpo(None if has_adapters else reference, 0.3)
        objective = build(model, block_length=2)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for step in range(3):
            noised_batch = objective.build_noised_batch(pair_batch(), NoiseKey(0, step, 0, 4))
            losses = backward(model, preferences, noised_batch, objective)
            results += [losses.losses_P, losses.margins_P]
        results += [parameter.grad for parameter in trained]
    half = len(results) // 2
    assert all(gradient.abs().max() > 1e-6 for gradient in results[6:half])
    torch.testing.assert_close(results[half:], results[:half], rtol=1e-10, atol=1e-10)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 2


@pytest.mark.parametrize("alignment", ["shifted", "same_position"])
def test_blocks_of_one_token_are_dpo(alignment: str, tiny_model: MakeModel) -> None:
    model, reference = (tiny_model(torch.float64, seed=seed, logit_alignment=alignment) for seed in (1, 2))
    objective = build(model, block_length=1)
    noised_batch = objective.build_noised_batch(pair_batch(), NoiseKey(0, 0, 0, 4))
    losses = backward(model, dpo(reference, 0.3), noised_batch, objective)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()

    expected = []
    for pair in PAIRS:
        (chosen, rejected), (chosen_before, rejected_before) = (
            [log_likelihood(policy, *conversation) for conversation in pair] for policy in (model, reference)
        )
        expected.append(-F.logsigmoid(0.3 * ((chosen - chosen_before) - (rejected - rejected_before))))
    losses_P = torch.stack(expected)
    torch.testing.assert_close(losses.losses_P, losses_P.detach())
    losses_P.mean().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, msg=name)


def single_bounds(model: Transformer, noised_batch: NoisedBatch, batch: CleanBatch) -> Tensor:
    """The bounds of all answers, [P, 2], with gradient: each masked version of a conversation alone."""
    assert batch.document_BL is not None
    bounds = []
    for row, documents_L in enumerate(batch.document_BL):
        for document in (0, 1):
            part, total = documents_L == document, torch.zeros((), dtype=torch.float64)
            versions = noised_batch.inputs_BS[row :: len(batch.tokens_BL), part]
            for tokens in versions:
                is_masked = tokens == MASK
                logits = model(tokens[None], pattern=Bidirectional())[0][is_masked]
                logits = logits.masked_fill(torch.arange(logits.shape[1]) == MASK, -math.inf)
                clean = batch.tokens_BL[row, part][is_masked]
                share = int(batch.loss_mask_BL[row, part].sum()) / int(is_masked.sum()) / len(versions)
                total = total + share * F.log_softmax(logits, dim=-1).gather(1, clean[:, None]).sum()
            bounds.append(total)
    return torch.stack(bounds).view(-1, 2)


@pytest.mark.parametrize("kind", ["dpo", "ipo", "simpo", "orpo", "kto"])
def test_the_objective_is_that_of_single_sequences(kind: str, tiny_model: MakeModel) -> None:
    """Losses and gradients. EOS padding counts in the bounds and not in the lengths, and a loss without reference calls
    none."""
    model, reference = (tiny_model(torch.float64, seed=seed) for seed in (2, 1))
    calls = {"model": 0, "reference": 0}
    for name, module in (("model", model), ("reference", reference)):
        module.register_forward_pre_hook(lambda *_, name=name: calls.update({name: calls[name] + 1}))
    labels, batch = torch.tensor([[True], [False]]), pair_batch()
    assert batch.is_eos_padding_BL is not None
    batch.is_eos_padding_BL[1, 6:8] = True  # the last two of the second rejected answer
    if kind == "kto":
        batch = replace(batch, is_desirable_B1=labels)
    objective = build(model, num_draws=4, loss=kind)
    loss = PreferenceLoss(objective.config.loss, reference)
    noised_batch = objective.build_noised_batch(batch, NoiseKey(0, 0, 0, 4))
    results = backward(model, loss, noised_batch, objective)
    assert calls == {"model": 2, "reference": int(loss.config.has_reference)}
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()

    scores_P2 = single_bounds(model, noised_batch, batch)
    if loss.config.has_reference:
        scores_P2 = scores_P2 - single_bounds(reference, noised_batch, batch).detach()
    divergence = scores_P2[:, 1].mean().detach().clamp(min=0.0)
    assert kind != "kto" or divergence > 0
    if loss.config.is_per_token:
        scores_P2 = scores_P2 / torch.tensor([[3, 2], [2, 2]])
    losses_P = compute_losses(loss.config, scores_P2, labels, divergence)
    close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)  # rotations are float32, of other positions here
    close(results.losses_P, losses_P.detach())
    losses_P.mean().backward()
    for name, parameter in model.named_parameters():
        close(gradients[name], parameter.grad, msg=name)


def test_an_adapter_is_compared_with_its_base(tiny_model: MakeModel) -> None:
    """The same as with a copy of the base; the adapter is on again afterwards."""
    model, base = tiny_model(torch.float64), tiny_model(torch.float64)
    add_adapter(model, LoraConfig(rank=2, targets="all-linear", trainable_tokens=(4, MASK)))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter))
    objective = build(model, num_draws=2)
    noised_batch = objective.build_noised_batch(pair_batch(), NoiseKey(0, 3, 0, 4))
    losses, expected = (backward(model, dpo(reference, 0.2), noised_batch, objective) for reference in (None, base))
    torch.testing.assert_close(losses.margins_P, expected.margins_P)
    assert losses.margins_P.abs().min() > 0.01


@pytest.mark.parametrize(
    "options", [{}, {"dora": True}, {"trainable_tokens": (4, MASK)}, {"dropout": 0.3, "targets": ("q_proj", "up_proj")}]
)
@pytest.mark.parametrize("ties", [False, True])
def test_an_adapter_that_goes_on_is_compared_with_its_start(
    options: dict[str, Any], ties: bool, tiny_model: MakeModel
) -> None:
    """The same as with a whole copy of the model at the start, whose weights have the adapter in them."""
    model = tiny_model(torch.float64, tie_word_embeddings=ties)
    add_adapter(model, LoraConfig(rank=2, **options))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with torch.no_grad():
        for parameter in trained:
            parameter.add_(0.3 * torch.randn_like(parameter))
    keep_start(model)
    copied = tiny_model(torch.float64, tie_word_embeddings=ties)
    with torch.no_grad():
        for name, module in adapter_modules(model):
            copied.get_submodule(name).weight.copy_(module.effective_weight())  # type: ignore[operator]
    objective = build(model, num_draws=2)
    noised_batch = objective.build_noised_batch(pair_batch(), NoiseKey(0, 3, 0, 4))
    first = backward(model, dpo(None, 0.2), noised_batch, objective)
    assert first.margins_P.tolist() == [0.0, 0.0]
    gradients = []
    with torch.no_grad():
        for parameter in trained:
            parameter.add_(0.3 * torch.randn_like(parameter))
    margins = []
    for reference in (None, copied):
        model.zero_grad()
        margins.append(backward(model, dpo(reference, 0.2), noised_batch, objective).margins_P)
        gradients.append([parameter.grad for parameter in trained])
    assert margins[0].abs().min() > 0.01
    torch.testing.assert_close(margins[0], margins[1], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("block_length", "num_draws"), [(None, 1), (None, 2), (None, 6), (2, 4)])
@pytest.mark.slow
def test_draws_are_unbiased(block_length: int | None, num_draws: int, tiny_model: MakeModel) -> None:
    """Each token has the mean weight 1, and of an answer of n tokens each number of masks is equally often."""
    objective = build(tiny_model(), block_length=block_length, num_draws=num_draws)
    batch, steps = pair_batch(), 250
    weights = torch.zeros(steps, *batch.tokens_BL.shape, dtype=torch.float64)
    counts = np.zeros(5)
    for step in range(steps):
        noised_batch = objective.build_noised_batch(batch, NoiseKey(1, step, 0, 4))
        S = noised_batch.inputs_BS.shape[1]
        rows, positions = noised_batch.positions_N // S, noised_batch.positions_N % S
        weights[step].index_put_((rows % 2, positions % LENGTH), noised_batch.weights_N, accumulate=True)
        assert noised_batch.answers_N is not None
        of_answer = noised_batch.answers_N == 3  # of four tokens
        counts += np.bincount(np.bincount(rows[of_answer], minlength=2 * num_draws)[1::2], minlength=5)
    mean, error = weights.mean(0), weights.std(0) / math.sqrt(steps)
    target = batch.loss_mask_BL.double()
    assert bool(((mean - target).abs() <= 4 * error + 1e-12).all())
    if block_length is None:
        share = counts / counts.sum()
        assert share[0] == 0 and np.abs(share[1:] - 0.25).max() < 4 * math.sqrt(0.25 * 0.75 / steps)


def test_opposite_draws_vary_less_than_independent_ones(tiny_model: MakeModel) -> None:
    """Where a token is harder the more tokens are masked: as in a model, but in closed form."""
    batch = pair_batch(PAIRS[1:])
    estimates: dict[int, list[Tensor]] = {1: [], 4: []}
    for num_draws, values in estimates.items():
        objective = build(tiny_model(), num_draws=num_draws)
        for step in range(120):
            noised_batch = objective.build_noised_batch(batch, NoiseKey(2, step, 0, 2))
            assert noised_batch.answers_N is not None
            draw_and_answer_N = noised_batch.positions_N // LENGTH * 2 + noised_batch.answers_N
            num_masked_N = torch.bincount(draw_and_answer_N)[draw_and_answer_N]
            values.append(sum_by_answer(noised_batch, 1.0 + 0.5 * num_masked_N)[0])
    single, paired = (torch.stack(values) for values in estimates.values())
    torch.testing.assert_close(paired.mean(0), single.mean(0), rtol=0.05, atol=0.0)
    assert bool((paired.var(0) < 0.5 * single.var(0) / 4).all())
