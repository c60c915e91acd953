"""Likelihoods of answers against enumeration, windows against `nelbo`, greedy decoding against `generate`; in fp64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from config.evaluation.likelihood import AnswerLikelihoodConfig
from config.generation import GenerationConfig
from diffusionlm.evaluation.likelihood.answers import AnswerBuilder
from diffusionlm.evaluation.likelihood.copies import compute_log_probabilities
from diffusionlm.evaluation.likelihood.scoring import (
    AdaptiveSampler,
    OptionScores,
    OptionsRequest,
    score_documents,
    score_texts,
)
from diffusionlm.evaluation.nelbo import nelbo
from diffusionlm.evaluation.sampler_likelihood import greedy_matches
from diffusionlm.inference.generate import generate
from diffusionlm.models.patterns import Bidirectional, BlockCausal
from diffusionlm.models.transformer import Transformer
from tests.reference.enumeration import exact_units
from tests.unit.evaluation.conftest import MASK, VOCAB

CONTEXT = (2, 0, 1)
TEXT = tuple(np.random.default_rng(3).integers(0, 5, 23).tolist())
SAMPLED = AnswerLikelihoodConfig(max_enumerated_forwards=1, num_mc_samples=24)


@torch.no_grad()
def log_probabilities(model: Transformer, text: list[int], masked: set[int], block_length: int | None) -> list[float]:
    """Log-probability of each masked token, by one forward over the text up to the end of its block."""
    size, shift = block_length or len(text), int(model.config.logit_alignment == "shifted")
    values = []
    for position in sorted(masked):
        block_start = position - position % size
        canvas = [MASK if index in masked and index >= block_start else token for index, token in enumerate(text)][
            : block_start + size
        ]
        pattern = Bidirectional() if block_length is None else BlockCausal(block_length)
        logits_V = model(torch.tensor([canvas]), pattern=pattern)[0, position - shift].clone()
        logits_V[MASK] = -math.inf
        values.append(float(logits_V.log_softmax(-1)[text[position]]))
    return values


@torch.no_grad()
def exact_log_likelihood(
    model: Transformer, context: tuple[int, ...], answer: tuple[int, ...], block_length: int | None
) -> float:
    """Minus the bound, by a second implementation of the model that sums over all masks."""
    text_L = torch.tensor([*context, *answer])
    units = exact_units(model, text_L, block_length, loss_mask_L=torch.arange(len(text_L)) >= len(context))
    return -float(sum(unit.bound() for unit in units))


def score_options(
    model: Transformer,
    context: tuple[int, ...],
    options: Sequence[tuple[int, ...]],
    config: AnswerLikelihoodConfig | None = None,
) -> OptionScores:
    return score_documents(model, [OptionsRequest(context, tuple(options))], config)[0]


def score(
    model: Transformer, context: tuple[int, ...], answer: tuple[int, ...], config: AnswerLikelihoodConfig | None = None
) -> OptionScores:
    return score_options(model, context, [answer], config)


# ----------------------------------------------------------------------------------------------------------------------
# Exact


@pytest.mark.parametrize("which", ["diffusion", "shifted"])
@pytest.mark.parametrize(
    ("context", "answer", "block_length"),
    [
        (CONTEXT, (4, 3, 3, 1), None),
        (CONTEXT, (4, 1, 3, 0, 2, 2), 4),
        ((2, 0), (1, 3, 4, 4), 3),
        ((2, 0, 1, 1), (3,), 4),
        ((2,), (4, 1, 3, 0), 16),
    ],
)
def test_enumeration_is_the_bound(
    which: str,
    context: tuple[int, ...],
    answer: tuple[int, ...],
    block_length: int | None,
    models: dict[str, Transformer],
) -> None:
    """Also where the answer begins inside a block, and the last block is shorter."""
    model = models[which]
    result = score(model, context, answer, AnswerLikelihoodConfig(block_length=block_length, num_mc_samples=15))
    assert result.log_likelihood == pytest.approx(exact_log_likelihood(model, context, answer, block_length), abs=1e-6)
    assert (result.standard_error, result.is_exact, result.num_tokens) == (0.0, True, (len(answer),))


@pytest.mark.parametrize("block_length", [None, 4])
def test_one_token_options_are_read_from_one_output(diffusion: Transformer, block_length: int | None) -> None:
    options = [(token,) for token in range(VOCAB - 1)]
    config = AnswerLikelihoodConfig(block_length=block_length)
    result = score_options(diffusion, CONTEXT, options, config=config)
    assert result.num_forwards == 1 and result.is_exact
    expected = [log_probabilities(diffusion, [*CONTEXT, *option], {3}, block_length)[0] for option in options]
    assert result.log_likelihoods == pytest.approx(expected, abs=1e-6)
    assert sum(map(math.exp, result.log_likelihoods)) == pytest.approx(1.0)


# ----------------------------------------------------------------------------------------------------------------------
# Sampled


@pytest.mark.parametrize(("block_length", "samples"), [(None, 36), (None, 16), (4, 24), (4, 10)])
def test_sampling_is_unbiased_and_knows_its_error(
    diffusion: Transformer, block_length: int | None, samples: int
) -> None:
    """Over seeds: the mean is the exact value, and the spread is what the standard errors say. Orders, then covers."""
    answer = (4, 3, 1, 1, 0, 2)
    exact = score(diffusion, CONTEXT, answer, AnswerLikelihoodConfig(block_length=block_length)).log_likelihood
    config = SAMPLED.model_copy(update={"block_length": block_length, "num_mc_samples": samples})
    scores = [score(diffusion, CONTEXT, answer, config.model_copy(update={"seed": seed})) for seed in range(120)]
    values = np.array([item.log_likelihood for item in scores])
    spread = float(values.std(ddof=1))
    assert abs(values.mean() - exact) < 4 * spread / math.sqrt(len(values))
    assert 0.0 < spread / math.sqrt(len(values)) < 0.01 * abs(exact), "too weak a test"
    reported = math.sqrt(float(np.mean([item.standard_error**2 for item in scores])))
    assert 0.75 < reported / spread < 1.5
    assert not scores[0].is_exact and scores[0].num_forwards <= 2 * samples


def test_common_draws_make_differences_precise(diffusion: Transformer) -> None:
    """Over seeds the error of a difference, by which races are decided, is its spread."""
    options = ((4, 3, 1, 1, 0, 2), (4, 3, 1, 1, 0, 3), (4, 3, 1))
    exact_N = np.array(score_options(diffusion, CONTEXT, options).log_likelihoods)
    config = SAMPLED.model_copy(update={"racing": False})
    builder, values, errors = AnswerBuilder(diffusion.config, config), [], []
    for key in range(100):
        sampler = AdaptiveSampler(builder, OptionsRequest(CONTEXT, options, key), config, "document")
        sampler.read(iter(compute_log_probabilities(diffusion, builder.layout, sampler.add_stage(), 8192)))
        values.append(sampler.build_scores().log_likelihoods)
        errors.append(sampler.difference_errors(0, (1.0,) * 3))
    differences_KN = (np.array(values) - np.array(values)[:, :1])[:, 1:]
    spread_N = differences_KN.std(axis=0, ddof=1)
    assert (abs(differences_KN.mean(axis=0) - (exact_N - exact_N[0])[1:]) < 4 * spread_N / 10).all()
    ratio_N = np.sqrt(np.square(errors).mean(axis=0))[1:] / spread_N
    assert ((ratio_N > 0.7) & (ratio_N < 1.6)).all()


@pytest.mark.slow
def test_racing_decides_each_rule(diffusion: Transformer) -> None:
    """Options of unequal lengths: the race ends once the quotients by length are decided too."""
    rng = np.random.default_rng(2)
    requests = [
        OptionsRequest(CONTEXT, tuple(tuple(rng.integers(0, 5, size).tolist()) for size in (8, 10, 9)), key)
        for key in range(12)
    ]
    lengths = (8.0, 10.0, 9.0)
    both = [replace(request, divisors=((1.0,) * 3, lengths)) for request in requests]
    config = AnswerLikelihoodConfig(num_mc_samples=160, racing_first_draws=4)
    sums, races = score_documents(diffusion, requests, config), score_documents(diffusion, both, config)
    full = score_documents(diffusion, both, config.model_copy(update={"racing": False}))
    chosen = [[int((np.array(score.log_likelihoods) / lengths).argmax()) for score in run] for run in (races, full)]
    assert chosen[0] == chosen[1]
    assert [np.argmax(race.log_likelihoods) for race in races] == [np.argmax(score.log_likelihoods) for score in full]
    costs = [sum(score.num_forwards for score in run) for run in (sums, races, full)]
    assert costs[0] < costs[1] < costs[2] <= 12 * 3 * config.num_mc_samples


# ----------------------------------------------------------------------------------------------------------------------
# Batches


@pytest.mark.parametrize(("which", "block_length"), [("diffusion", None), ("shifted", 2), ("diffusion", 4)])
def test_batches_orders_and_neighbors_change_nothing(
    which: str, block_length: int | None, models: dict[str, Transformer]
) -> None:
    model = models[which]
    rng = np.random.default_rng(1)
    requests = [
        OptionsRequest(
            tuple(rng.integers(0, 5, 1 + index % 5).tolist()), (tuple(rng.integers(0, 5, size).tolist()),), index
        )
        for index, size in enumerate([1, 6, 3, 1, 9, 2])
    ]
    config = AnswerLikelihoodConfig(num_mc_samples=10, block_length=block_length)
    alone = [score_documents(model, [item], config)[0] for item in requests]
    for order, batch_tokens in (([0, 1, 2, 3, 4, 5], 8192), ([5, 3, 1, 4, 2, 0], 8192), ([0, 1, 2, 3, 4, 5], 20)):
        together = score_documents(
            model, [requests[i] for i in order], config.model_copy(update={"batch_tokens": batch_tokens})
        )
        for index, result in zip(order, together, strict=True):
            assert result.log_likelihood == pytest.approx(alone[index].log_likelihood, abs=1e-9)
            assert result.standard_error == pytest.approx(alone[index].standard_error, abs=1e-9)
            assert result.num_forwards == alone[index].num_forwards
            assert (result.num_tokens, result.is_exact) == (alone[index].num_tokens, alone[index].is_exact)


def test_a_mask_token_in_the_context_is_text(diffusion: Transformer) -> None:
    result = score(diffusion, (2, MASK, 1), (4,))
    assert result.log_likelihood == pytest.approx(log_probabilities(diffusion, [2, MASK, 1, 4], {3}, None)[0])


# ----------------------------------------------------------------------------------------------------------------------
# Guidance and the end of text


def assert_same(a: OptionScores, b: OptionScores) -> None:
    assert (a.num_tokens, a.num_forwards, a.is_exact) == (b.num_tokens, b.num_forwards, b.is_exact)
    assert a.log_likelihoods == pytest.approx(b.log_likelihoods, abs=1e-12)
    assert a.standard_errors == pytest.approx(b.standard_errors, abs=1e-12)


@pytest.mark.parametrize("block_length", [None, 2])
@pytest.mark.parametrize("which", ["diffusion", "shifted"])
@torch.no_grad()
def test_guidance(which: str, block_length: int | None, models: dict[str, Transformer]) -> None:
    """Of two tokens, by the three masks of a plain forward each, with and without the context."""
    model = models[which]
    text, scale, shift = [2, 0, 1, 3, 4, 1], 1.5, int(which == "shifted")
    total = 0.0
    for masked in ({4}, {5}, {4, 5}):
        pattern = Bidirectional() if block_length is None else BlockCausal(block_length)
        canvas = [MASK if index in masked else token for index, token in enumerate(text)]
        without = [MASK] * 4 + canvas[4:]
        c_LV, u_LV = (model(torch.tensor([tokens]), pattern=pattern)[0] for tokens in (canvas, without))
        logits_LV = u_LV + (scale + 1.0) * (c_LV - u_LV)
        logits_LV[:, MASK] = -math.inf
        logprobs_LV = logits_LV.log_softmax(-1)
        total += sum(float(logprobs_LV[i - shift, text[i]]) for i in masked) / 2.0
    config = AnswerLikelihoodConfig(block_length=block_length, cfg_scale=scale, batch_tokens=15)
    # Another text with the same clean tokens and another context.
    requests = [OptionsRequest(tuple(text[:n]), (tuple(text[n:]),)) for n in (4, 3)]
    results = score_documents(model, requests, config)
    assert results[0].log_likelihood == pytest.approx(total, abs=1e-6)
    alone = score_documents(model, requests[1:], config)
    assert results[1].log_likelihood == pytest.approx(alone[0].log_likelihood, abs=1e-9)
    plain = score_documents(model, requests[:1], config.model_copy(update={"cfg_scale": 0.0}))
    assert abs(plain[0].log_likelihood - total) > 0.01


@pytest.mark.parametrize("block_length", [None, 4, 2])
def test_end_of_text(diffusion: Transformer, autoregressive: Transformer, block_length: int | None) -> None:
    """Scored it is a token more; unscored it is read where attention reaches it: in the answer's last block."""
    context, answer = CONTEXT, (4, 3, 1)
    config = AnswerLikelihoodConfig(block_length=block_length)
    plain, scored, unscored = (
        score(diffusion, context, answer, config.model_copy(update={"end_of_text": name}))
        for name in ("none", "scored", "unscored")
    )
    assert_same(scored, score(diffusion, context, (*answer, 0), config))
    assert (scored.num_tokens, unscored.num_tokens, plain.num_tokens) == ((4,), (3,), (3,))
    assert (abs(unscored.log_likelihood - plain.log_likelihood) > 1e-6) is (block_length != 2)
    if block_length is None:
        text, values = [*context, *answer, 0], []
        for size in (1, 2, 3):
            for masked in itertools.combinations((3, 4, 5), size):
                logprob = sum(log_probabilities(diffusion, text, set(masked), None))
                values.append(logprob / size / math.comb(3, size))
        assert unscored.log_likelihood == pytest.approx(sum(values), abs=1e-6)
    causal = AnswerLikelihoodConfig(end_of_text="unscored")
    causal_scores = (score(autoregressive, context, answer, config) for config in (causal, None))
    assert_same(*causal_scores)


# ----------------------------------------------------------------------------------------------------------------------
# Whole texts in windows


def nelbo_of_windows(model: Transformer, window: int) -> float:
    """By `nelbo`, a window as a row, in blocks of one token; the first one begins with a token that is not scored."""
    tokens, total = [0, *TEXT], 0.0
    for start in range(0, len(tokens) - 1, window - 1):
        row = torch.tensor([tokens[start : start + window]])
        total -= nelbo(model, row, torch.arange(row.shape[1])[None] > 0, 1).nats
    return total


@pytest.mark.parametrize("window", [2, 7])
@pytest.mark.parametrize("which", ["diffusion", "shifted", "autoregressive"])
def test_windows_are_the_rows_of_nelbo(models: dict[str, Transformer], which: str, window: int) -> None:
    config = AnswerLikelihoodConfig(block_length=1)
    results = score_texts(models[which], [OptionsRequest((0,), (TEXT[:size],)) for size in (3, 23)], window, config)
    assert results[1] == pytest.approx(nelbo_of_windows(models[which], window), abs=1e-6)
    assert 0.0 > results[0] > results[1]


def test_bad_texts(models: dict[str, Transformer]) -> None:
    text = [OptionsRequest((), (TEXT,))]
    for window in (1, 10_000):
        with pytest.raises(ValueError, match=f"window = {window} must be between 2 and"):
            score_texts(models["diffusion"], text, window)
    for changes in ({"cfg_scale": 0.5}, {"end_of_text": "scored"}):
        with pytest.raises(ValueError, match="windows of a text have neither guidance nor an end"):
            score_texts(models["diffusion"], text, config=AnswerLikelihoodConfig.model_validate(changes))
    with pytest.raises(ValueError, match="has no context"):
        score_texts(models["shifted"], text)


# ----------------------------------------------------------------------------------------------------------------------
# Greedy decoding


@pytest.mark.parametrize(
    ("which", "block_length"),
    [("diffusion", None), ("shifted", None), ("shifted", 4), ("diffusion", 1), ("autoregressive", 1)],
)
def test_greedy_continuations_are_those_of_generate(
    models: dict[str, Transformer], which: str, block_length: int | None
) -> None:
    model, contexts = models[which], [(2, 0, 1, 4), (3, 1), (1, 1, 4)]
    length = 6
    values = {"attention": "bidirectional", "block_length": length, "steps": length}
    if block_length is not None:
        values = {"attention": "block_causal", "block_length": block_length, "steps": 2 * length}
    settings = GenerationConfig.model_validate(
        {"max_new_tokens": length, "stop_token_ids": (), "remasking_strategy": "low_confidence", **values}
    )
    config = AnswerLikelihoodConfig(block_length=block_length)
    requests, expected = [], []
    for context in contexts:
        [done] = generate(model, [list(context)], settings)
        for index in range(-1, length):
            tokens = list(done.token_ids)
            if index >= 0:
                tokens[index] = (tokens[index] + 1) % 5
            requests.append(OptionsRequest(context, (tuple(tokens),)))
            expected.append(index < 0)
    assert greedy_matches(model, requests, config) == expected


# ----------------------------------------------------------------------------------------------------------------------
# Bad input


@pytest.mark.parametrize(
    ("which", "context", "options", "changes", "problem"),
    [
        ("diffusion", CONTEXT, [(1,), ()], {}, "option 1 of document 0 is empty"),
        ("diffusion", CONTEXT, [], {}, "document 0 has no options"),
        ("shifted", (), [(1, 2)], {}, "no context"),
        ("autoregressive", (), [(1, 2)], {}, "no context"),
        ("diffusion", CONTEXT, [(1, MASK)], {}, f"mask token {MASK} at index 1"),
        ("diffusion", CONTEXT * 100, [(1,)], {}, "option 0 of document 0 has 301 tokens with its context"),
        ("diffusion", CONTEXT, [(1,), (6,)], {}, "option 1 of document 0: token 6 is outside"),
        ("autoregressive", CONTEXT, [(1,)], {"bidirectional": True}, "no mask token"),
        ("autoregressive", CONTEXT, [(1,)], {"cfg_scale": 1.0}, "cfg_scale = 1.0 needs a model with a mask token"),
    ],
)
def test_bad_input(
    which: str,
    context: tuple[int, ...],
    options: list[tuple[int, ...]],
    changes: dict[str, object],
    problem: str,
    models: dict[str, Transformer],
) -> None:
    with pytest.raises(ValueError, match=problem):
        score_options(models[which], context, options, AnswerLikelihoodConfig(**changes))  # type: ignore[arg-type]
