"""Trajectories: the whole canvas with steps and log-probabilities, and the same ones again by a replay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from config.generation import GenerationConfig
from diffusionlm.inference.generate import Trajectory, decode, known_request, replay
from diffusionlm.inference.request_builder import prepare_request
from diffusionlm.inference.requests import PreparedRequest, RequestOptions
from diffusionlm.inference.settings import resolve_settings
from diffusionlm.inference.strategies import STRATEGIES
from diffusionlm.models.transformer import Transformer
from diffusionlm.serving.engine import Engine

STOP_TOKEN_IDS = (0, 5, 10, 20)
PROMPTS = ([1], [1, 2, 3], [5, 4, 3, 2, 1], [9] * 8)


def sample(model: Transformer, **keys: Any) -> tuple[list[PreparedRequest], list[Trajectory]]:
    """Answers of 10 tokens at most."""
    config = GenerationConfig(max_new_tokens=10, temperature=1.0, stop_token_ids=STOP_TOKEN_IDS, **keys)
    settings = resolve_settings(config, model.config)
    requests = [prepare_request(settings, prompt, seed) for seed, prompt in enumerate(PROMPTS)]
    trajectories = [item.trajectory for item in decode(model, requests)]
    return requests, [item for item in trajectories if item is not None]


@pytest.mark.parametrize("strategy", [name for name, strategy in STRATEGIES.items() if not strategy.can_remask])
def test_a_replay_is_the_same(strategy: str, blocks: Transformer) -> None:
    """Also of strategies whose order depends on the sampled tokens, which are sampled again, and then replaced."""
    requests, trajectories = sample(blocks, remasking_strategy=strategy)
    for first, second in zip(trajectories, replay(blocks, requests, trajectories), strict=True):
        np.testing.assert_array_equal(second.tokens_L, first.tokens_L)
        np.testing.assert_array_equal(second.step_map_L, first.step_map_L)
        np.testing.assert_allclose(second.logprobs_L, first.logprobs_L, atol=1e-12)


def test_an_engine_replays_the_same_bits(blocks: Transformer) -> None:
    requests, _ = sample(blocks, remasking_strategy="entropy")
    with Engine(blocks, cache_memory=1 << 20, deterministic=True) as engine:
        first = [request.result(60).trajectory for request in engine.submit_prepared(requests)]
    known = [known_request(request, item) for request, item in zip(requests, first, strict=True) if item is not None]
    with Engine(blocks, cache_memory=1 << 20, deterministic=True, max_requests=1) as engine:
        second = [request.result(60).trajectory for request in engine.submit_prepared(known)]
    for one, other in zip(first, second, strict=True):
        assert one is not None and other is not None
        np.testing.assert_array_equal(one.logprobs_L, other.logprobs_L)


def test_the_stop_token_and_what_lies_behind_it(blocks: Transformer) -> None:
    """The canvas has whole blocks. Tokens behind the stop are in it as far as they were committed; what was not stays a
    mask without step and log-probability."""
    requests, trajectories = sample(blocks, remasking_strategy="first_hitting")
    num_stopped = 0
    for request, item in zip(requests, trajectories, strict=True):
        positions = item.committed_positions
        assert not item.is_given_L[positions].any() and np.isfinite(item.logprobs_L[positions]).all()
        assert np.isnan(np.delete(item.logprobs_L, positions)).all()
        assert item.logprob == pytest.approx(np.nansum(item.logprobs_L))
        is_open_L = ~item.is_given_L & (item.step_map_L == 0)
        assert (item.tokens_L[is_open_L] == 22).all()
        stops = [position for position in positions.tolist() if item.tokens_L[position] in STOP_TOKEN_IDS]
        first_stop = next((stop for stop in stops if not is_open_L[:stop].any()), None)
        assert item.text_length == (request.text_length if first_stop is None else first_stop + 1)
        num_stopped += first_stop is not None
    assert 0 < num_stopped < len(requests)
    [generation] = decode(blocks, requests[:1])
    assert generation.trajectory is not None
    first = len(PROMPTS[0])
    shown = generation.trajectory.logprobs_L[first : first + len(generation.logprobs)]
    np.testing.assert_array_equal(shown, generation.logprobs)


def test_a_canvas_keeps_what_was_given(model: Transformer) -> None:
    settings = resolve_settings(GenerationConfig(temperature=1.0, remasking_strategy="random"), model.config)
    request = prepare_request(settings, [1, 22, 3, 22, 22], 4, RequestOptions(is_infill=True))
    [generation] = decode(model, [request])
    item = generation.trajectory
    assert item is not None and item.text_length == 5 and item.seed == 4
    np.testing.assert_array_equal(item.is_given_L, [True, False, True, False, False])
    assert tuple(item.tokens_L.tolist()) == generation.token_ids


def test_an_order_that_does_not_depend_on_samples(blocks: Transformer) -> None:
    """With ``confidence_of`` the first position of a block is the same for all seeds, whatever is sampled there."""

    def first_positions(**keys: Any) -> set[int]:
        settings = resolve_settings(
            GenerationConfig(max_new_tokens=8, temperature=1.0, remasking_strategy="low_confidence", **keys),
            blocks.config,
        )
        requests = [prepare_request(settings, [1, 2, 3, 4], seed) for seed in range(24)]
        trajectories = [item.trajectory for item in decode(blocks, requests)]
        return {int(np.flatnonzero(item.step_map_L == 1)[0]) for item in trajectories if item is not None}

    assert len(first_positions()) > 1
    assert len(first_positions(confidence_of="most_probable")) == 1
