"""The loss of a policy gradient against plain autograd, advantages by hand, and the section [rl]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from config.finetune.rl import PRESETS, KLConfig, RLConfig
from diffusionlm.models.patterns import BlockCausal
from diffusionlm.models.transformer import Transformer
from diffusionlm.rl.policy import ScoredAnswers, compute_advantages, compute_loss, estimate_kl
from tests.conftest import MakeModel
from tests.policy_answers import (
    PROMPTS,
    UNGROUPED,
    Answers,
    FixedAnswers,
    rl_config,
    sample_answers,
)

NAN = float("nan")
REWARDS = (1.0, -0.5, 0.0, 2.0)
LENGTHS = (3, 1, 2)
"""Tokens of three answers, for values that are known."""


def answers_of(advantages: list[float], weights: list[float] | None = None) -> ScoredAnswers:
    """Each token is scored once."""
    number = sum(LENGTHS)
    answers_J = torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS))
    return ScoredAnswers(
        torch.arange(number),
        torch.ones(number, dtype=torch.float64),
        answers_J,
        torch.tensor(weights or [1.0] * number, dtype=torch.float64),
        torch.tensor(advantages, dtype=torch.float64)[answers_J],
        torch.tensor(LENGTHS, dtype=torch.float64),
        torch.zeros(number, dtype=torch.float64),
        (number,),
    )


NEW = torch.tensor([-1.0, -0.3, -2.0, -0.7, -1.5, -0.2], dtype=torch.float64)
OLD = torch.tensor([-1.4, -0.3, -1.2, -0.1, -1.6, -1.0], dtype=torch.float64)
REFERENCE = torch.tensor([-0.9, -0.8, -1.7, -0.7, -0.5, -3.0], dtype=torch.float64)


def by_hand(config: RLConfig, advantages: list[float], new: Tensor) -> Tensor:
    """The formulae of the papers, one answer after the other."""
    total, first = torch.zeros((), dtype=torch.float64), 0
    low, high = (0.0, float("inf")) if config.clip is None else (1.0 - config.clip, 1.0 + config.clip)
    for advantage, length in zip(advantages, LENGTHS, strict=True):
        own = slice(first, first + length)
        first += length
        share = 1.0 / length if config.divisor == "length" else 1.0
        log_ratio = new[own] - OLD[own]
        if config.ratio == "sequence":
            ratio = torch.exp(log_ratio.mean())
            total = total - torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
        else:
            of_tokens = 1 + log_ratio - log_ratio.detach() if config.ratio == "none" else torch.exp(log_ratio)
            for ratio in of_tokens:
                total = total - share * torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
        if config.kl is not None:
            distances = REFERENCE[own] - new[own]
            if config.kl.per == "answer":
                distances, share = distances.mean()[None], 1.0
            k = {
                "k1": -distances,
                "k2": distances**2 / 2,
                "k3": torch.exp(distances) - 1 - distances,
            }[config.kl.estimator]
            total = total + config.kl.coefficient * share * k.sum()
    return total


def replace_estimator(config: RLConfig, estimator: str) -> RLConfig:
    assert config.kl is not None
    return config.model_copy(update={"kl": config.kl.model_copy(update={"estimator": estimator})})


@pytest.mark.parametrize(
    ("ratio", "divisor", "clip"),
    [
        ("token", "answers", None), ("token", "answers", 0.2), ("token", "length", 0.2), ("sequence", "answers", None),
        ("sequence", "answers", 0.2), ("none", "length", None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kl", [None, ("k1", "token"), ("k2", "answer"), ("k3", "token"), ("k3", "answer")], ids=str)
def test_the_loss_is_that_of_the_formulae(
    kl: tuple[str, str] | None, clip: float | None, ratio: str, divisor: str
) -> None:
    """Values and gradients, with ratios within the limits and beyond both of them for both signs. k1 has the gradient
    of k2."""
    penalty = None if kl is None else {"coefficient": 0.3, "estimator": kl[0], "per": kl[1]}
    config = rl_config(clip=clip, ratio=ratio, divisor=divisor, kl=penalty, inner_steps=2)
    for advantages in ([1.0, -2.0, 0.5], [-1.0, 2.0, -0.5]):
        new = NEW.clone().requires_grad_()
        terms = compute_loss(config, answers_of(advantages), new, OLD, REFERENCE)
        expected = by_hand(config, advantages, new)
        torch.testing.assert_close(terms.loss, expected, rtol=1e-12, atol=1e-12)
        if kl is not None and kl[0] == "k1":
            expected = by_hand(replace_estimator(config, "k2"), advantages, new)
        (actual,), (wanted,) = (torch.autograd.grad(loss, new, retain_graph=True) for loss in (terms.loss, expected))
        torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)


def test_clipping_has_two_sides_for_each_sign() -> None:
    """Only where the ratio has gone the way that the advantage wants is the gradient 0."""
    config = rl_config(clip=0.2, inner_steps=2)
    new = (OLD + torch.tensor([0.3, -0.3, 0.1, 0.0, 0.0, 0.0])).requires_grad_()
    for advantage, clipped in ((1.0, [True, False, False]), (-1.0, [False, True, False])):
        terms = compute_loss(config, answers_of([advantage, 0.0, 0.0]), new, OLD, None)
        assert terms.is_clipped[:3].tolist() == clipped
        (gradient,) = torch.autograd.grad(terms.loss, new)
        assert (gradient[:3] == 0.0).tolist() == clipped


def test_weights_of_sampled_steps_multiply_gains_and_penalties() -> None:
    weights = [3.0, 1.0, 2.0, 1.0, 1.0, 4.0]
    config = rl_config(divisor="length", kl={"coefficient": 0.3, "estimator": "k2"}, inner_steps=2)
    advantages = [1.0, -2.0, 0.5]
    actual = compute_loss(config, answers_of(advantages, weights), NEW, OLD, REFERENCE).loss
    lengths = torch.repeat_interleave(torch.tensor(LENGTHS), torch.tensor(LENGTHS))
    values = -torch.tensor([1.0, 1.0, 1.0, -2.0, 0.5, 0.5]) * (NEW - OLD).exp() + 0.15 * (REFERENCE - NEW) ** 2
    torch.testing.assert_close(actual, (torch.tensor(weights) / lengths * values).sum())


def test_penalties_of_the_same_model_are_zero() -> None:
    zeros = torch.zeros(3, dtype=torch.float64)
    for estimator in ("k1", "k2", "k3"):
        assert not estimate_kl(KLConfig(coefficient=1.0, estimator=estimator), zeros).any()


def test_far_ratios_stay_finite() -> None:
    new = (OLD + 4000.0).requires_grad_()
    config = rl_config(kl={"coefficient": 1.0, "estimator": "k3"}, inner_steps=2)
    terms = compute_loss(config, answers_of([1.0, -1.0, 1.0]), new, OLD, -new.detach())
    (gradient,) = torch.autograd.grad(terms.loss, new)
    assert terms.loss.isfinite() and gradient.isfinite().all()


# ----------------------------------------------------------------------------------------------------------------------
# A model, its reference and a second inner step


@pytest.fixture
def answers(tiny_model: MakeModel) -> tuple[Transformer, Answers]:
    """A model in fp64, and answers to two prompts."""
    model = tiny_model(torch.float64, block_length=2)
    prompts = [[1, 2, 3], [1, 2, 3], [4, 5], [4, 5]]
    return model, sample_answers(model, prompts, max_new_tokens=5, remasking_strategy="entropy", stop_token_ids=(0, 7))


def logprobs_by_logits(model: Transformer, answers: Answers) -> list[Tensor]:
    """Log p of each token of each answer from the logits of single forwards, with gradient."""
    values = []
    for item in answers.trajectories:
        tokens_L, steps_L = torch.tensor(item.tokens_L), torch.tensor(item.step_map_L)
        own = []
        for position in item.committed_positions.tolist():
            is_hidden_L = (steps_L >= steps_L[position]) | ((steps_L == 0) & ~torch.tensor(item.is_given_L))
            inputs_L = torch.where(is_hidden_L, 18, tokens_L)
            logits = model(inputs_L[None], pattern=BlockCausal(2))[0, position]
            own.append(logits[:18].log_softmax(-1)[tokens_L[position]])
        values.append(torch.stack(own))
    return values


@pytest.mark.parametrize("micro_batch_size", [0, 3])
@pytest.mark.parametrize(
    "keys",
    [
        {"clip": 0.2, "kl": {"coefficient": 0.1}},
        {"clip": 0.05, "divisor": "tokens", "kl": {"coefficient": 0.1, "estimator": "k2", "per": "answer"}},
        {"ratio": "sequence", "clip": 0.1, "kl": {"coefficient": 0.1, "reference": "old"}},
    ],
    ids=str,
)
def test_weights_give_the_gradient_of_the_loss(
    keys: dict[str, Any], micro_batch_size: int, answers: tuple[Transformer, Answers], tiny_model: MakeModel
) -> None:
    """A second inner step on a changed model, with a reference: as plain autograd through logits."""
    model, own = answers
    reference = tiny_model(torch.float64, seed=5, block_length=2)
    config = rl_config(**UNGROUPED, inner_steps=2, **keys)
    loader = FixedAnswers(model, config, own, REWARDS, micro_batch_size=micro_batch_size, reference=reference)
    loader.backward(0)
    old = [values.detach() for values in logprobs_by_logits(model, own)]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    loss, gradients = loader.backward(1)
    model.zero_grad()

    new = logprobs_by_logits(model, own)
    compared = old if config.kl is not None and config.kl.reference == "old" else logprobs_by_logits(reference, own)
    total = torch.zeros((), dtype=torch.float64)
    assert config.clip is not None and config.kl is not None
    for values, before, other, advantage in zip(new, old, compared, REWARDS, strict=True):
        share = 1.0 / len(values) if config.divisor == "length" else 1.0
        log_ratio = values - before
        ratio = log_ratio.exp() if config.ratio == "token" else log_ratio.mean().exp()
        clipped = ratio.clamp(1 - config.clip, 1 + config.clip)
        gains = torch.minimum(ratio * advantage, clipped * advantage).sum()
        distances = other.detach() - values
        if config.kl.per == "answer":
            penalty = distances.mean() ** 2 / 2
        else:
            penalty = share * (distances.exp() - 1 - distances).sum()
        total = total - (share if config.ratio == "token" else 1.0) * gains + config.kl.coefficient * penalty
    total = total / (sum(map(len, new)) if config.divisor == "tokens" else 4)
    assert loss == pytest.approx(float(total.detach()), abs=1e-9)
    expected = torch.autograd.grad(total, list(model.parameters()))
    for actual, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=0.0, atol=1e-9)
    assert 0.0 < loader.loss.metrics["rl/clip_share"] < 1.0


@pytest.mark.parametrize("kind", ["replay", "bound", "sandwich", "mean_field", "coupled"])
def test_the_gradient_is_the_slope_of_the_loss(kind: str, answers: tuple[Transformer, Answers]) -> None:
    """Of a second inner step along a random direction, with the masks of the first one; also of the upper bound."""
    model, own = answers
    ratio = "sequence" if kind in ("bound", "sandwich") else "token"
    penalty = {"coefficient": 0.1, "reference": "old"}
    config = rl_config(**UNGROUPED, logprobs=kind, ratio=ratio, inner_steps=2, kl=penalty)
    loader = FixedAnswers(model, config, own, REWARDS)
    loader.backward(0)
    directions = [torch.randn_like(parameter) for parameter in model.parameters()]

    @torch.no_grad()
    def move(distance: float) -> None:
        for parameter, direction in zip(model.parameters(), directions, strict=True):
            parameter.add_(distance * direction)

    move(0.01)
    gradients = loader.backward(1)[1]
    slope = sum(float((own * other).sum()) for own, other in zip(gradients, directions, strict=True))
    losses = []
    for distance in (1e-5, -2e-5):
        move(distance)
        losses.append(loader.backward(1)[0])
    assert slope == pytest.approx((losses[0] - losses[1]) / 2e-5, rel=1e-5)
    assert abs(slope) > 1e-2


def test_the_first_inner_step_has_ratio_one(answers: tuple[Transformer, Answers]) -> None:
    """Bits: the ratio is 1, the penalty 0, nothing is clipped; and the gradient is that without all of these."""
    model, own = answers
    rewards = [1.0, -0.5, 0.25, 2.0]
    plain = FixedAnswers(model, rl_config(**UNGROUPED), own, rewards).backward()[1]
    config = rl_config(**UNGROUPED, inner_steps=2, clip=0.2, kl={"coefficient": 0.1, "reference": "old"})
    loader = FixedAnswers(model, config, own, rewards)
    gradients = loader.backward(0)[1]
    names = ("rl/ratio_mean", "rl/ratio_deviation", "rl/clip_share", "rl/kl")
    assert [loader.loss.metrics[name] for name in names] == [1.0, 0.0, 0.0, 0.0]
    for actual, wanted in zip(gradients, plain, strict=True):
        assert torch.equal(actual, wanted)


@pytest.mark.parametrize("kind", ["centered", "leave_one_out", "standardized", "softmax"])
def test_equal_rewards_give_no_gradient(kind: str, answers: tuple[Transformer, Answers]) -> None:
    model, own = answers
    loader = FixedAnswers(model, rl_config(advantage=kind), own, [0.1, 0.1, 0.7, 0.7])
    loss, gradients = loader.backward()
    assert loss == 0.0 and not any(gradient.any() for gradient in gradients)


def test_answers_without_a_reward_have_no_penalty(answers: tuple[Transformer, Answers], tiny_model: MakeModel) -> None:
    """Also where a rank has no others."""
    model, own = answers
    config = rl_config(**UNGROUPED, kl={"coefficient": 0.1})
    reference = tiny_model(torch.float64, seed=5, block_length=2)
    loader = FixedAnswers(model, config, own, [NAN] * 4, reference=reference)
    loss, gradients = loader.backward()
    assert loss == 0.0 and not any(gradient.any() for gradient in gradients)
    alone = FixedAnswers(model, config, own, [NAN, 1.0, NAN, 0.0], reference=reference).backward()[0]
    assert alone != 0.0


def test_groups_outside_the_limits_are_left_out(answers: tuple[Transformer, Answers]) -> None:
    model, own = answers
    rewards = [0.0, 1.0, 1.0, 0.9]
    config = rl_config(max_reward=0.9)
    limited = FixedAnswers(model, config, own, rewards).backward()[1]
    expected = FixedAnswers(model, rl_config(), own, [0.0, 1.0, 0.95, 0.95]).backward()[1]
    for actual, wanted in zip(limited, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=0.0, atol=1e-12)
    assert any(gradient.any() for gradient in limited)


# ----------------------------------------------------------------------------------------------------------------------
# Advantages


def softmax_weights(centered: np.ndarray) -> np.ndarray:
    positive, negative = np.exp(centered), np.exp(-centered)
    result: np.ndarray = positive / positive.sum() - negative / negative.sum()
    return result


FORMULAE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "centered": lambda rewards: rewards - rewards.mean(),
    "leave_one_out": lambda rewards: rewards - (rewards.sum() - rewards) / (len(rewards) - 1),
    "standardized": lambda rewards: (rewards - rewards.mean()) / rewards.std(),
    "softmax": lambda rewards: softmax_weights(rewards - rewards.mean()),
    "none": lambda rewards: rewards,
}


@pytest.mark.parametrize("kind", FORMULAE)
def test_advantages(kind: str) -> None:
    """Answers without a reward have no advantage, and count in no mean."""
    rewards = np.array([[1.0, 0.0, 0.25, 3.0], [2.0, NAN, 1.0, NAN], [NAN] * 4, [0.1] * 4, [NAN, 0.5, NAN, NAN]])
    actual = compute_advantages(rewards, kind)
    np.testing.assert_allclose(actual[0], FORMULAE[kind](rewards[0]), atol=1e-14)
    np.testing.assert_allclose(actual[1, [0, 2]], FORMULAE[kind](np.array([2.0, 1.0])), atol=1e-14)
    assert (actual[1, [1, 3]] == 0.0).all() and (actual[2] == 0.0).all()
    if kind == "none":
        assert actual[3].tolist() == [0.1] * 4 and actual[4].tolist() == [0.0, 0.5, 0.0, 0.0]
    else:
        assert (actual[3:] == 0.0).all()


# ----------------------------------------------------------------------------------------------------------------------
# The section [rl]


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name: str) -> None:
    """Their keys exist, their values are those of the config, and keys of the config win."""
    assert PRESETS[name].keys() <= RLConfig.model_fields.keys()
    config, explicit = rl_config(preset=name), rl_config(**PRESETS[name])
    assert config.model_dump(exclude={"preset"}) == explicit.model_dump(exclude={"preset"})
    assert rl_config(preset=name, inner_steps=7).inner_steps == 7
    if "kl" in PRESETS[name]:
        changed = rl_config(preset=name, kl={"estimator": "k2"}).kl
        assert changed is not None and config.kl is not None
        assert (changed.estimator, changed.coefficient) == ("k2", config.kl.coefficient)
    assert name in RLConfig.model_fields["preset"].annotation.__args__[0].__args__  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"prompts": PROMPTS | {"repeats": 1}}, "prompts.repeats = 1"),
        ({"kl": {"coefficient": 0.1, "reference": "old", "model": "somewhere"}}, "kl.model has no effect"),
        ({"logprobs": {"kind": "replay", "sampled_steps": 2}, "ratio": "sequence"}, "logprobs.sampled_steps"),
        ({"logprobs": "bound", "value": {}}, "value has advantages of all steps"),
        ({"logprobs": {"kind": "replay", "sampled_steps": 2}, "kl": {"coefficient": 0.1, "per": "answer"}}, "kl.per"),
        ({"logprobs": "bound", "inner_steps": 2}, 'set ratio = "sequence" or "none"'),
        ({"ratio": "sequence", "divisor": "tokens"}, "divides by the tokens of the answer"),
        ({"ratio": "none", "clip": 0.2}, "clip = 0.2 limits ratios"),
        ({"logprobs": {"kind": "coupled", "low": 0.9}}, "low = 0.9 must be at most high"),
        ({"min_reward": 0.8, "max_reward": 0.2}, "min_reward = 0.8 must be at most"),
        ({"logprobs": "exact"}, "logprobs"),
        ({"logprobs": {"kind": "sandwich", "beta": 0.5}}, "beta"),
        ({"clip": 0.0}, "clip"),
        ({"preset": "grpo"}, "preset"),
        ({"kl": {}}, "coefficient"),
        ({"prompts": {"kind": "perplexity"}}, "prompts"),
    ],
    ids=str,
)
def test_mistakes_in_the_config(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        rl_config(**keys)
