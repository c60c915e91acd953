"""Rows that score answers give the log-probabilities with which they were decoded; other decodings are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from config.finetune.rl import ReplayConfig
from config.generation import GenerationConfig
from diffusionlm.diffusion.noised_batch import NoiseKey
from diffusionlm.evaluation.sampler_likelihood import check_exact_likelihood, sampler_likelihood
from diffusionlm.inference.blocks import TextSegments
from diffusionlm.inference.generate import replay
from diffusionlm.inference.request_builder import prepare_request
from diffusionlm.inference.requests import RequestOptions
from diffusionlm.inference.settings import resolve_settings
from diffusionlm.inference.strategies import STRATEGIES
from diffusionlm.models.transformer import Transformer
from diffusionlm.rl.logprobs import ScoredText, build_rows
from diffusionlm.rl.rollouts import check_trainable
from tests.conftest import MakeModel
from tests.policy_answers import (
    UNGROUPED,
    Answers,
    FixedAnswers,
    rl_config,
    sample_answers,
    token_logprobs,
    trainable_settings,
    trajectories_of,
)

MASK = 18
PROMPTS = ([1], [1, 2, 3], [5, 4, 3, 2, 1], [9] * 8)
STOPS = {"stop_token_ids": (0, 5, 10)}


def trainable_keys(model: Transformer, strategy: str) -> dict[str, Any] | None:
    """Keys of a strategy for rollouts: as it is, or with confidences of the most probable token. None: no way."""
    for keys in ({}, {"confidence_of": "most_probable"}):
        try:
            trainable_settings(model, remasking_strategy=strategy, **keys)
        except ValueError:
            continue
        return {"remasking_strategy": strategy, **keys}
    return None


def scored(model: Transformer, answers: Answers, **logprobs: Any) -> NDArray[np.float64]:
    """Log p of all tokens by rows, in micro-batches of three rows."""
    config = rl_config(**UNGROUPED, logprobs={"kind": "replay", **logprobs})
    rewards = [1.0] * len(answers.requests)
    return FixedAnswers(model, config, answers, rewards, micro_batch_size=3).token_values().numpy()


@pytest.mark.parametrize(
    ("block_length", "alignment"),
    [
        (None, "same_position"),
        (2, "shifted"),
        (4, "same_position"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [(None, "shifted"), (1, "same_position"), (1, "shifted"), (2, "same_position"), (4, "shifted")]
        ),
    ],
)
def test_rows_of_a_replay_are_the_steps_of_decoding(
    block_length: int | None, alignment: str, tiny_model: MakeModel
) -> None:
    """Every trainable strategy; prompts that are no multiple of a block, and answers that end in the last one."""
    model = tiny_model(torch.float64, block_length=block_length, logit_alignment=alignment)
    attention = "bidirectional" if block_length is None else "block_causal"
    names = []
    for strategy in STRATEGIES:
        keys = trainable_keys(model, strategy)
        if keys is None:
            continue
        names.append(strategy)
        answers = sample_answers(model, PROMPTS, max_new_tokens=7, attention=attention, **STOPS, **keys)
        np.testing.assert_allclose(scored(model, answers), token_logprobs(answers), atol=1e-9, err_msg=strategy)
        for one, other in zip(answers.trajectories, replay(model, answers.requests, answers.trajectories), strict=True):
            np.testing.assert_array_equal(one.step_map_L, other.step_map_L)
            np.testing.assert_allclose(one.logprobs_L, other.logprobs_L, atol=1e-12)
    assert set(STRATEGIES) - set(names) == {"random_topk", "p2", "remdm_cap", "remdm_loop"}


def test_parts_of_a_text_with_bidirectional_attention(tiny_model: MakeModel) -> None:
    """Blocks that are decoded one after the other, while those behind are masked and attended to."""
    model = tiny_model(torch.float64)
    answers = sample_answers(
        model, PROMPTS, max_new_tokens=7, block_length=3, remasking_strategy="entropy", denoising_steps=2, **STOPS
    )
    np.testing.assert_allclose(scored(model, answers), token_logprobs(answers), atol=1e-9)


def test_blocks_of_turns(tiny_model: MakeModel) -> None:
    """Chats whose blocks are counted anew behind each answer."""
    model = tiny_model(torch.float64, block_length=4)
    settings = trainable_settings(
        model, max_new_tokens=7, remasking_strategy="entropy", block_origin="turn", block_length=4, **STOPS
    )
    chats: list[tuple[list[int], tuple[int, ...]]] = [([1, 2, 3, 4, 5, 6], (3,)), ([7, 8], ()), ([9] * 9, (2, 7))]
    requests = [
        prepare_request(settings, prompt, seed, RequestOptions(segment_starts=starts))
        for seed, (prompt, starts) in enumerate(chats)
    ]
    answers = Answers(settings, requests, trajectories_of(model, requests))
    np.testing.assert_allclose(scored(model, answers), token_logprobs(answers), atol=1e-9)
    counted_from_zero = [
        prepare_request(settings, prompt, seed, RequestOptions()) for seed, (prompt, _) in enumerate(chats)
    ]
    wrong = scored(model, Answers(settings, counted_from_zero, answers.trajectories))
    assert np.abs(wrong - token_logprobs(answers)).max() > 1e-3


@pytest.mark.parametrize("block_length", [None, 4])
def test_canvases(block_length: int | None, tiny_model: MakeModel) -> None:
    """Masked spans of a text, with text between and behind them."""
    model = tiny_model(torch.float64, block_length=block_length)
    settings = trainable_settings(model, remasking_strategy="entropy")
    canvases = ([1, MASK, MASK, 4, MASK, 6, 7, MASK, MASK, MASK, 2], [MASK, 3, MASK])
    requests = [
        prepare_request(settings, canvas, seed, RequestOptions(is_infill=True)) for seed, canvas in enumerate(canvases)
    ]
    answers = Answers(settings, requests, trajectories_of(model, requests))
    np.testing.assert_allclose(scored(model, answers), token_logprobs(answers), atol=1e-9)


@pytest.mark.parametrize("block_length", [None, 2, 4])
def test_the_sum_is_the_likelihood_under_the_sampler(block_length: int | None, tiny_model: MakeModel) -> None:
    """An independent computation, of every strategy that has one."""
    model = tiny_model(torch.float64, block_length=block_length)
    attention, num_compared = "bidirectional" if block_length is None else "block_causal", 0
    prompts = [[3, 2, 1]] * 4
    for strategy in STRATEGIES:
        config = GenerationConfig(
            max_new_tokens=5, temperature=1.0, attention=attention, remasking_strategy=strategy, stop_token_ids=()
        )
        try:
            check_exact_likelihood(resolve_settings(config, model.config))
        except ValueError:
            continue
        keys = trainable_keys(model, strategy)
        assert keys is not None
        answers = sample_answers(model, prompts, max_new_tokens=5, attention=attention, stop_token_ids=(), **keys)
        ends = [request.text_length for request in answers.requests]
        if any(len(item.tokens_L) != end for item, end in zip(answers.trajectories, ends, strict=True)):
            continue  # the last block goes on behind the text
        texts = torch.tensor(np.stack([item.tokens_L for item in answers.trajectories]))
        is_target = (torch.arange(texts.shape[1]) >= 3).expand(texts.shape)
        report = sampler_likelihood(model, texts, is_target, config.model_copy(update={"max_new_tokens": None}))
        sums = [item.logprob for item in answers.trajectories]
        np.testing.assert_allclose(sums, [-nats for nats in report.row_nats], atol=1e-9, err_msg=strategy)
        np.testing.assert_allclose(scored(model, answers).reshape(4, -1).sum(1), sums, atol=1e-9)
        num_compared += 1
    assert num_compared >= 5


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"remasking_strategy": "low_confidence"}, 'remasking_strategy = "low_confidence"'),
        ({"remasking_strategy": "low_confidence_dynamic"}, 'confidence_of = "most_probable"'),
        ({"remasking_strategy": "remdm_cap"}, 'remasking_strategy = "remdm_cap" masks tokens again'),
        ({"remasking_strategy": "random_topk"}, "alg_temp = 0"),
        ({"remasking_strategy": "entropy", "alg_temp": 0.5}, "alg_temp"),
        ({"temperature": 0.8}, "temperature = 0.8"),
        ({"temperature": 0.0}, "temperature = 0.0"),
        ({"top_k": 3}, "top_k = 3"),
        ({"top_p": 0.9}, "top_p = 0.9"),
        ({"min_p": 0.1}, "min_p = 0.1"),
        ({"min_new_tokens": 2, **STOPS}, "min_new_tokens = 2"),
        ({"cfg_scale": 1.0}, "cfg_scale = 1.0"),
        ({"suppress_token_ids": (3,)}, "suppress_token_ids"),
        ({"cache": "prefix"}, "cache = prefix"),
        ({"cache": "dual"}, "cache = dual"),
        ({"canvas": "growing"}, "canvas = growing"),
    ],
    ids=str,
)
def test_what_no_row_can_score_is_refused(keys: dict[str, Any], named: str, tiny_model: MakeModel) -> None:
    base = {"remasking_strategy": "entropy", "temperature": 1.0, "max_new_tokens": 8, "block_length": 4}
    settings = resolve_settings(GenerationConfig(**(base | keys)), tiny_model().config)
    with pytest.raises(ValueError, match=named):
        check_trainable(settings)


# ----------------------------------------------------------------------------------------------------------------------
# Rows of an answer with known steps

STEPS = np.array([1, 3, 2, 2, 4, 6, 6, 5])
"""Of eight tokens behind two of the prompt: two blocks of four, or one text."""


def text(block_length: int | None) -> ScoredText:
    blocks = np.zeros(8, np.int64) if block_length is None else np.arange(8) // block_length
    return ScoredText(np.arange(10), np.arange(2, 10), blocks, STEPS, np.array([], dtype=np.int64))


def row_tokens(config: ReplayConfig, block_length: int | None, seed: int = 0) -> list[list[int]]:
    [rows] = build_rows(config, [text(block_length)], NoiseKey(seed, 0, 0, 1))
    return [row.tokens.tolist() for row in rows]


def test_rows_follow_the_steps_of_all_blocks_at_once() -> None:
    """A row of blocks has the r-th step of each; bidirectional attention has a row for each step."""
    assert row_tokens(ReplayConfig(), None) == [[0], [2, 3], [1], [4], [7], [5, 6]]
    assert row_tokens(ReplayConfig(), 4) == [[0, 4], [2, 3, 7], [1, 5, 6]]
    assert row_tokens(ReplayConfig(shrink=2), None) == [[0, 2, 3], [1, 4], [5, 6, 7]]
    assert row_tokens(ReplayConfig(shrink=2), 4) == [[0, 2, 3, 4, 7], [1, 5, 6]]
    assert row_tokens(ReplayConfig(shrink=9), 4) == [[0, 1, 2, 3, 4, 5, 6, 7]]
    [rows] = build_rows(ReplayConfig(), [text(4)], NoiseKey(0, 0, 0, 1))
    hidden = [np.flatnonzero(row.is_hidden_L).tolist() for row in rows]
    assert hidden == [[2, 3, 4, 5, 6, 7, 8, 9], [3, 4, 5, 7, 8, 9], [3, 7, 8]]


def test_blocks_of_one_token_are_one_row() -> None:
    assert row_tokens(ReplayConfig(), 1) == [[0, 1, 2, 3, 4, 5, 6, 7]]


def test_sampled_steps_weigh_what_they_leave_out() -> None:
    """S of m rows, each one equally often, with the weight m / S; not more rows than there are."""
    counts = np.zeros(6)
    for seed in range(300):
        [rows] = build_rows(ReplayConfig(sampled_steps=2), [text(None)], NoiseKey(seed, 0, 0, 1))
        assert len(rows) == 2 and all(row.weight == 3.0 for row in rows)
        tokens = [row.tokens.tolist() for row in rows]
        counts[[row_tokens(ReplayConfig(), None).index(own) for own in tokens]] += 1
    assert ((counts - 100) ** 2 / 100).sum() < 20.5  # p about 1e-3
    assert row_tokens(ReplayConfig(sampled_steps=9), None) == row_tokens(ReplayConfig(), None)


def test_open_positions_stay_masked(tiny_model: MakeModel) -> None:
    """What no forward committed behind a stop token is masked in every row, and scored in none."""
    model = tiny_model(torch.float64)
    answers = sample_answers(
        model, [[1, 2]] * 8, max_new_tokens=8, remasking_strategy="first_hitting", stop_token_ids=(0, 1, 2, 3, 4, 5, 6)
    )
    num_open = 0
    for item in answers.trajectories:
        own = ScoredText.from_trajectory(item, None, TextSegments((0,)), is_replayed=True)
        is_open_L = ~item.is_given_L & (item.step_map_L == 0)
        num_open += int(is_open_L.sum())
        [rows] = build_rows(ReplayConfig(), [own], NoiseKey(0, 0, 0, 1))
        for row in rows:
            assert row.is_hidden_L[is_open_L].all() and not row.is_hidden_L[item.is_given_L].any()
        assert sorted(np.concatenate([row.tokens for row in rows])) == list(range(len(item.committed_positions)))
        short = ScoredText.from_trajectory(item, None, TextSegments((0,)), is_replayed=False)
        assert len(short.tokens_L) == item.text_length and short.positions_J.tolist() == list(
            range(2, item.text_length)
        )
    assert num_open > 8
