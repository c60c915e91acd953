"""Policy gradients and estimates of log-probabilities against the enumeration of all answers of a small model."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from config.finetune.rl import BoundConfig
from diffusionlm.diffusion.noised_batch import NoiseKey
from diffusionlm.inference.blocks import TextSegments
from diffusionlm.models.transformer import Transformer
from diffusionlm.rl import logprobs as logprobs_module
from diffusionlm.rl.logprobs import ScoredText, build_rows
from diffusionlm.rl.policy import ScoredAnswers, combine, compute_advantages
from tests.policy_answers import UNGROUPED, Answers, FixedAnswers, rl_config, sample_answers
from tests.reference.enumeration import (
    Places,
    PlainModel,
    exact_units,
    log_probabilities,
    mask_weight,
    subsets,
)
from tests.reference.policy_estimates import (
    ESTIMATORS,
    ONE_BY_ONE,
    PROMPT,
    TOKENS,
    assess,
    compute_logprobs,
    draw_rewards,
    enumerate_answers,
    estimate_answers,
    exact_gradient,
    flatten,
    policy_gradient,
    small_model,
)

CASES: list[Any] = [
    (None, "same_position", "low_confidence", ()),
    (None, "shifted", "random", (1,)),
    (2, "same_position", "low_confidence", (2,)),
    (2, "shifted", "topk_margin", ()),
    (3, "same_position", "entropy", (1,)),
    (1, "shifted", "sequential", (2,)),
]
"""Block length, alignment, strategy and stop tokens."""


Case = tuple[int | None, str, str, tuple[int, ...]]


def build_case(case: Case, num_tokens: int = 4) -> tuple[Transformer, Answers]:
    block_length, alignment, strategy, stops = case
    model = small_model(block_length, logit_alignment=alignment)
    keys: dict[str, Any] = ONE_BY_ONE if strategy == "low_confidence" else {"remasking_strategy": strategy}
    return model, enumerate_answers(model, max_new_tokens=num_tokens, stop_token_ids=stops, **keys)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_probabilities_of_all_trajectories_sum_to_one(case: Case) -> None:
    """Stop tokens shorten some of them. With a random order they do for each seed, whose order is one."""
    model, answers = build_case(case)
    logprobs = [item.logprob for item in answers.trajectories]
    assert math.fsum(np.exp(logprobs)) == pytest.approx(1.0, abs=1e-12)
    np.testing.assert_allclose(compute_logprobs(model, answers).detach(), logprobs, atol=1e-9)
    assert (len(answers.requests) < 81) == bool(case[3])


@pytest.mark.parametrize(
    ("case", "count"),
    [
        (CASES[0], 800),
        pytest.param(CASES[0], 20000, marks=pytest.mark.slow),
        pytest.param(CASES[2], 2000, marks=pytest.mark.slow),
    ],
)
def test_frequencies_of_rollouts_are_the_probabilities(case: Case, count: int) -> None:
    """Chi-square over all trajectories."""
    model, answers = build_case(case, num_tokens=3)
    settings = answers.settings.config.model_dump(exclude_unset=True)
    sampled = sample_answers(model, [PROMPT] * count, range(1000, 1000 + count), **settings)
    seen = Counter(item.tokens_L.tobytes() for item in sampled.trajectories)
    expected = np.array([count * math.exp(item.logprob) for item in answers.trajectories])
    observed = np.array([seen[item.tokens_L.tobytes()] for item in answers.trajectories])
    assert observed.sum() == count
    is_frequent = expected >= 5
    observed, expected = (np.append(own[is_frequent], own[~is_frequent].sum()) for own in (observed, expected))
    chi2, degrees = float(((observed - expected) ** 2 / np.maximum(expected, 1.0)).sum()), len(expected) - 1
    assert degrees >= 10 and chi2 < degrees + 4.5 * math.sqrt(2 * degrees)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("baseline", [0.0, 0.4])
def test_the_policy_gradient_is_that_of_the_expected_reward(case: Case, baseline: float) -> None:
    """All trajectories by their probabilities. With several inner steps, too, whose first ratio is 1."""
    model, answers = build_case(case, num_tokens=3)
    rewards, exact = draw_rewards(answers), compute_logprobs(model, answers).detach().exp().numpy()
    expected = flatten(exact_gradient(model, answers, rewards))
    assert expected.abs().max() > 1e-2
    configs: list[dict[str, Any]] = [{}, {"inner_steps": 2, "clip": 0.2}]
    for keys in configs:
        actual = policy_gradient(model, answers, exact * (rewards - baseline), **keys)
        torch.testing.assert_close(actual, expected, rtol=0.0, atol=1e-9)


@pytest.mark.parametrize(("kind", "factor"), [("none", 1.0), ("leave_one_out", 1.0), ("centered", 2.0)])
def test_baselines_of_groups_are_unbiased(kind: str, factor: float) -> None:
    """Over all groups of two answers; a mean with the answer itself takes a share 1 / G off the gradient."""
    model, answers = build_case(CASES[2], num_tokens=3)
    rewards, exact = draw_rewards(answers), compute_logprobs(model, answers).detach().exp().numpy()
    pairs = np.array(list(itertools.product(range(len(rewards)), repeat=2)))
    advantages = compute_advantages(rewards[pairs], kind) * exact[pairs].prod(1, keepdims=True) / 2
    totals = np.bincount(pairs.flatten(), weights=advantages.flatten())
    expected = flatten(exact_gradient(model, answers, rewards))
    torch.testing.assert_close(factor * policy_gradient(model, answers, totals), expected, rtol=0.0, atol=1e-9)


class FixedOrder:
    """In place of random numbers: permutations that begin with these numbers."""

    def __init__(self, first: tuple[int, ...]) -> None:
        self.first = first

    def permutation(self, count: int) -> np.ndarray:
        return np.array([*self.first, *(number for number in range(count) if number not in self.first)])


@pytest.mark.parametrize("sampled_steps", [1, 2])
@pytest.mark.parametrize("block_length", [None, 3])
def test_sampled_steps_are_unbiased(
    block_length: int | None, sampled_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mean over all selections of rows."""
    model, answers = build_case((block_length, "same_position", "low_confidence", ()))
    num_rows = 4 if block_length is None else 3
    rewards, exact = draw_rewards(answers), compute_logprobs(model, answers).detach().exp().numpy()
    gradients = []
    for selected in itertools.combinations(range(num_rows), sampled_steps):
        monkeypatch.setattr(logprobs_module, "keyed_rng", lambda *_, first=selected: FixedOrder(first))
        keys = {"kind": "replay", "sampled_steps": sampled_steps}
        gradients.append(policy_gradient(model, answers, exact * rewards, logprobs=keys))
    expected = flatten(exact_gradient(model, answers, rewards))
    torch.testing.assert_close(torch.stack(gradients).mean(0), expected, rtol=0.0, atol=1e-9)
    assert (gradients[0] - expected).abs().max() > 1e-3


# ----------------------------------------------------------------------------------------------------------------------
# Estimates by random masks


class Enumeration:
    """Log p of each token of an answer under every set of masks of its block."""

    def __init__(self, model: Transformer, tokens_L: Tensor, block_length: int | None) -> None:
        plain, length = PlainModel(model), len(tokens_L)
        self.blocks: list[dict[Places, dict[int, float]]] = []
        positions_L = torch.arange(length)
        blocks_L = positions_L // (block_length or length)
        for number in blocks_L[len(PROMPT) :].unique().tolist():
            places = [place for place in range(len(PROMPT), length) if blocks_L[place] == number]
            end, values = places[-1] + 1, {}
            for masked in subsets(places):
                inputs_L = tokens_L[:end].clone()
                inputs_L[list(masked)] = TOKENS
                may_see = blocks_L[:end, None] >= blocks_L[:end]
                log_p = log_probabilities(plain(inputs_L[None], positions_L[:end], may_see)[0][0]).detach()
                values[masked] = {place: float(log_p[place, tokens_L[place]]) for place in masked}
            self.blocks.append(values)

    def log_likelihood(self) -> float:
        """Of decoding in a random order, one token at a time."""
        total = 0.0
        for values in self.blocks:
            places = max(values, key=len)
            orders = [
                math.exp(sum(values[tuple(sorted(order[first:]))][place] for first, place in enumerate(order)))
                for order in itertools.permutations(places)
            ]
            total += math.log(math.fsum(orders) / len(orders))
        return total

    def upper_bound(self, beta: float) -> float:
        """Sum over tokens of (1/beta) log E[p^beta] over the masks that hide the token."""
        total = 0.0
        for values in self.blocks:
            for place in max(values, key=len):
                size = len(max(values, key=len))
                terms = [
                    mask_weight(len(masked), size) * math.exp(beta * own[place])
                    for masked, own in values.items()
                    if place in masked
                ]
                total += math.log(math.fsum(terms)) / beta
        return total


def some_answers(block_length: int | None, count: int = 3) -> tuple[Transformer, Answers]:
    """Some of all answers of four tokens."""
    model = small_model(block_length)
    answers = enumerate_answers(model, max_new_tokens=4)
    return model, Answers(answers.settings, answers.requests[:count], answers.trajectories[5:80:30][:count])


def own_texts(answers: Answers, block_length: int | None) -> list[ScoredText]:
    segments = TextSegments((0,))
    return [
        ScoredText.from_trajectory(item, block_length, segments, is_replayed=False) for item in answers.trajectories
    ]


@pytest.mark.parametrize("block_length", [None, 2, 3])
def test_the_mean_over_all_masks_is_the_evidence_bound(block_length: int | None) -> None:
    """Each pair of a mask and its complement has the value that is due to it, and all of them come. In a block of n
    tokens k is uniform on 0 .. n, so a set of k tokens has the probability 1 / ((n + 1) C(n, k))."""
    model, answers = some_answers(block_length, 1)
    [text] = own_texts(answers, block_length)
    loader = FixedAnswers(model, rl_config(**UNGROUPED, logprobs="bound"), answers, [1.0])
    sizes = np.bincount(text.blocks_J)
    values: list[dict[frozenset[Places], float]] = [{} for _ in sizes]
    for step in range(150):
        tokens_J = loader.token_values(step).numpy()
        [rows] = build_rows(BoundConfig(), [text], NoiseKey(0, step, 0, 1))
        for block in range(len(sizes)):
            own = np.flatnonzero(text.blocks_J == block)
            masks = frozenset(masked for row in rows if (masked := tuple(np.intersect1d(row.tokens, own).tolist())))
            value = float(tokens_J[own].sum())
            assert values[block].setdefault(masks, value) == pytest.approx(value, abs=1e-12)
    tokens_L = torch.tensor(answers.trajectories[0].tokens_L)
    is_target = torch.arange(len(tokens_L)) >= len(PROMPT)
    units = exact_units(model, tokens_L, block_length, loss_mask_L=is_target)
    for size, unit, own_values in zip(sizes.tolist(), units, values, strict=True):
        assert len(own_values) == 2 ** (size - 1)  # a mask and its complement are one pair
        mean = 0.0
        for masks, value in own_values.items():
            num_masked = len(min(masks, key=len)) if len(masks) > 1 else 0
            mean += 2.0 / ((size + 1) * math.comb(size, num_masked)) * value
        assert mean == pytest.approx(-float(unit.bound().detach()), abs=1e-9)


@pytest.mark.parametrize("block_length", [None, 2])
@pytest.mark.parametrize("scale", [pytest.param(0.3, marks=pytest.mark.slow), 0.8])
def test_bounds_contain_the_log_likelihood(block_length: int | None, scale: float) -> None:
    """Of a random order. The upper one holds for each answer if beta is at least the number of tokens of a block, or of
    the text (Hoelder); with a smaller one it holds up to a constant (SPG, theorem 1), and here on average."""
    gaps = []
    for seed in range(2):
        model = small_model(block_length, scale, seed)
        answers = enumerate_answers(model, max_new_tokens=4)
        for item in answers.trajectories[::5]:
            tokens_L = torch.tensor(item.tokens_L)
            exact = Enumeration(model, tokens_L, block_length)
            is_target = torch.arange(len(tokens_L)) >= len(PROMPT)
            units = exact_units(model, tokens_L, block_length, loss_mask_L=is_target)
            lower, log_p = -sum(float(unit.bound().detach()) for unit in units), exact.log_likelihood()
            assert lower <= log_p + 1e-12
            assert log_p <= exact.upper_bound(4.0 if block_length is None else 2.0) + 1e-12
            gaps.append(exact.upper_bound(1.5) - log_p)
    assert np.mean(gaps) > 0.0 > np.min(gaps)


@pytest.mark.parametrize("block_length", [None, 2])
def test_the_sandwich_combines_powers(block_length: int | None) -> None:
    """With every mask of an answer as a row the upper bound is exact, of negative advantages alone."""
    model, answers = some_answers(block_length)
    config = rl_config(logprobs={"kind": "sandwich", "beta": 1.5})
    tokens_L = torch.tensor(answers.trajectories[0].tokens_L)
    exact = Enumeration(model, tokens_L, block_length)
    tokens, coefficients, values = list[int](), list[float](), list[float]()
    for own in exact.blocks:
        size = len(max(own, key=len))
        for masked, logprobs in own.items():
            tokens += [place - len(PROMPT) for place in masked]
            coefficients += [mask_weight(len(masked), size)] * len(masked)
            values += logprobs.values()
    for advantage in (-1.0, 1.0):
        scored = ScoredAnswers(
            torch.tensor(tokens),
            torch.tensor(coefficients, dtype=torch.float64),
            torch.zeros(4, dtype=torch.int64),
            torch.ones(4).double(),
            torch.full((4,), advantage).double(),
            torch.full((1,), 4.0).double(),
            torch.zeros(4).double(),
            (len(tokens),),
        )
        total = float(combine(config, scored, torch.tensor(values, dtype=torch.float64)).sum())
        is_target = torch.arange(len(tokens_L)) >= len(PROMPT)
        units = exact_units(model, tokens_L, block_length, loss_mask_L=is_target)
        lower = -sum(float(unit.bound().detach()) for unit in units)
        assert total == pytest.approx(exact.upper_bound(1.5) if advantage < 0.0 else lower, abs=1e-9)


def test_mean_field_is_the_prompt_alone() -> None:
    model, answers = some_answers(None)
    loader = FixedAnswers(model, rl_config(**UNGROUPED, logprobs="mean_field"), answers, [1.0] * 3)
    for item, value in zip(answers.trajectories, estimate_answers(loader, 0), strict=True):
        own = Enumeration(model, torch.tensor(item.tokens_L), None).blocks[0]
        assert value == pytest.approx(sum(own[2, 3, 4, 5].values()), abs=1e-9)


def test_a_share_of_the_prompt_may_be_masked() -> None:
    """In the inputs alone: targets are the tokens of the answer."""
    model, answers = some_answers(None)
    config = rl_config(**UNGROUPED, logprobs={"kind": "mean_field", "prompt_masking": 0.4})
    loader, counts = FixedAnswers(model, config, answers, [1.0] * 3), []
    for step in range(40):
        [batch] = loader.next_step(step).noised_batches
        hidden = batch.inputs_BS[:, : len(PROMPT) + 4] == TOKENS
        assert hidden[:, len(PROMPT) :].all() and len(batch.targets_N) == 12
        counts.append(float(hidden[:, : len(PROMPT)].double().mean()))
    assert np.mean(counts) == pytest.approx(0.4, abs=0.13)


def test_coupled_is_half_of_both() -> None:
    """Half of mean field, and half of a mask and its complement over their shares (DiffuCoder)."""
    model, answers = some_answers(None)
    config = rl_config(**UNGROUPED, logprobs={"kind": "coupled", "low": 0.3, "high": 0.3})
    loader = FixedAnswers(model, config, answers, [1.0] * 3)
    texts = own_texts(answers, None)
    exact = [Enumeration(model, torch.tensor(item.tokens_L), None).blocks[0] for item in answers.trajectories]
    for step in range(10):
        values = loader.token_values(step).view(3, 4).numpy()
        rows = build_rows(config.logprobs, texts, NoiseKey(0, step, 0, 3))
        for answer, (_, first, second) in enumerate(rows):
            for row, share in ((first, 0.3), (second, 0.7)):
                masked = tuple((row.tokens + 2).tolist())
                for token in row.tokens.tolist():
                    own = exact[answer][masked][token + 2]
                    expected = 0.5 * exact[answer][2, 3, 4, 5][token + 2] + 0.5 * own / share
                    assert values[answer, token] == pytest.approx(expected, abs=1e-9)
            assert sorted([*first.tokens, *second.tokens]) == [0, 1, 2, 3]


def test_the_table_of_estimators_shows_what_is_exact() -> None:
    model = small_model(2)
    answers = enumerate_answers(model, max_new_tokens=4)
    exact = assess(model, answers, ESTIMATORS["replay"], 1)
    assert abs(exact.bias) < 1e-9 and exact.deviation == 0.0 and exact.cosine == pytest.approx(1.0, abs=1e-12)
    assert exact.forwards == 2.0
    biased = assess(model, answers, ESTIMATORS["mean_field"], 1)
    assert biased.cosine < 0.99 and abs(biased.bias) > 1e-2 and biased.forwards == 1.0
    sampled = assess(model, answers, ESTIMATORS["replay, sampled_steps = 1"], 12)
    assert sampled.deviation > 0.1 and sampled.forwards == 1.0
