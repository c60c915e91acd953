"""Requests that join, wait, are preempted and leave: each answer is that of the request alone. Memory of the cache and
steps until a request is done are bounded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from config.generation import GenerationConfig
from diffusionlm.inference.decoder import Decoder
from diffusionlm.inference.generate import Generation, decode, to_generation
from diffusionlm.inference.request_builder import prepare_request
from diffusionlm.inference.requests import ActiveRequest, RequestOptions
from diffusionlm.models.transformer import Transformer
from diffusionlm.serving.engine import Engine
from tests.decoding_jobs import (
    BLOCKS,
    CANVASES,
    LIMITS,
    MASK,
    Job,
    add_requests,
    assert_same,
    check_pages,
    drain,
    limit_decoder,
    make_jobs,
    run_all,
    settings_of,
)


def alone(model: Transformer, jobs: list[Job]) -> list[Generation]:
    return [decode(model, [prepared])[0] for prepared in jobs]


@pytest.fixture(scope="module")
def expected(request: pytest.FixtureRequest) -> Callable[[str], tuple[Transformer, list[Job], list[Generation]]]:
    """Model, jobs and the answer of each alone, by name of the model; computed once."""
    known: dict[str, tuple[Transformer, list[Job], list[Generation]]] = {}

    def get(name: str) -> tuple[Transformer, list[Job], list[Generation]]:
        if name not in known:
            model: Transformer = request.getfixturevalue(name)
            options = CANVASES if name == "model" else BLOCKS
            jobs = make_jobs(model, options, 16)
            known[name] = (model, jobs, alone(model, jobs))
        return known[name]

    return get


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("name", ["blocks", "shifted_blocks", "model"])
def test_answers_do_not_depend_on_neighbors(name: str, limits: str, expected: Callable[..., Any]) -> None:
    model, jobs, answers = expected(name)
    rng = np.random.default_rng(3)
    order = rng.permutation(len(jobs)).tolist()
    arrivals = rng.integers(0, 30, len(jobs)).tolist()
    decoder = Decoder(model, *LIMITS[limits])
    results = run_all(decoder, [jobs[index] for index in order], arrivals)
    for index, result in zip(order, results, strict=True):
        assert_same(result, answers[index])
    counts = decoder.counts
    assert counts.num_request_steps == sum(answer.num_forwards for answer in answers)
    if name == "blocks":
        assert (counts.num_preemptions > 0) == (limits in ("few pages", "everything"))
        if limits == "shared pages":
            assert counts.num_prefix_hits > 0


def test_a_prompt_is_read_in_parts_beside_others(blocks: Transformer) -> None:
    """Neither waits for the other."""
    settings = settings_of(blocks, max_new_tokens=12)
    jobs = [prepare_request(settings, [1]), prepare_request(settings, list(range(20)))]
    decoder = Decoder(blocks, *limit_decoder(num_pages=20, page_size=4, max_num_batched_tokens=12))
    [first] = add_requests(decoder, jobs[0])
    decoder.step()
    [second] = add_requests(decoder, jobs[1])
    progress = []
    while not second.num_forwards:
        before = decoder.counts.num_batched_tokens
        assert first in decoder.step().decoded
        progress.append((second.cached_length, decoder.counts.num_batched_tokens - before))
    assert [length for length, _ in progress] == [8, 16, 20]
    assert [num_tokens for _, num_tokens in progress][:-1] == [12, 12]
    drain(decoder, first, second)
    for request, answer in zip((first, second), alone(blocks, jobs), strict=True):
        assert_same(to_generation(request), answer)


def test_the_youngest_gives_way_until_someone_is_served(blocks: Transformer) -> None:
    """Two long readings, a budget for one, and pages for the older one alone."""
    settings = settings_of(blocks, denoising_steps=1)
    canvas = [MASK if position in (1, 32) else position % 20 for position in range(36)]
    jobs = [
        prepare_request(settings, [1] * 36),
        prepare_request(settings, canvas, options=RequestOptions(is_infill=True)),
    ]
    decoder = Decoder(blocks, *limit_decoder(num_pages=12, page_size=4, max_num_batched_tokens=8))
    for result, answer in zip(run_all(decoder, jobs, [0, 0]), alone(blocks, jobs), strict=True):
        assert_same(result, answer)


def test_the_end_is_reported_in_its_step(blocks: Transformer) -> None:
    decoder = Decoder(blocks, *LIMITS["plenty"])
    [request] = add_requests(decoder, prepare_request(settings_of(blocks, max_new_tokens=3, denoising_steps=1), [1]))
    result = decoder.step()
    assert result.decoded == result.finished == (request,) and not decoder.has_work


def test_preempted_requests_do_not_count_as_cached(blocks: Transformer) -> None:
    settings = settings_of(blocks, max_new_tokens=28)
    decoder = Decoder(blocks, *limit_decoder(num_pages=13, page_size=4, prefix_cache=True))
    requests = add_requests(decoder, *(prepare_request(settings, [number] * 9) for number in (1, 2)))
    drain(decoder, *requests)
    assert decoder.counts.num_preemptions > 0
    assert [request.num_cached_tokens for request in requests] == [0, 0] and decoder.counts.num_prefix_hits == 0


def test_an_error_ends_its_own_request(blocks: Transformer) -> None:
    """A single token has logits that are not finite; who may not use it is decoded."""
    broken = copy.deepcopy(blocks)
    with torch.no_grad():
        broken.model.embed_tokens.weight[3] = torch.nan
    jobs = [prepare_request(settings_of(blocks, suppress_token_ids=(3,)), prompt) for prompt in ([1, 2], [3, 4])]
    decoder = Decoder(broken, *LIMITS["plenty"])
    good, bad = add_requests(decoder, *jobs)
    drain(decoder, good, bad)
    assert good.error is None and "not finite" in str(bad.error)
    with pytest.raises(ValueError, match="not finite"):
        decode(broken, jobs)
    assert_same(to_generation(good), alone(blocks, jobs[:1])[0])


MAX_REQUESTS, MAX_TOKENS = 3, 6
TIGHT_LIMITS = {
    "few tokens": limit_decoder(
        num_pages=60, page_size=4, max_requests=MAX_REQUESTS, max_num_batched_tokens=MAX_TOKENS
    ),
    "few pages": limit_decoder(num_pages=11, page_size=4, max_requests=MAX_REQUESTS, max_num_batched_tokens=MAX_TOKENS),
    "shared pages": limit_decoder(
        11, 4, max_requests=MAX_REQUESTS, max_num_batched_tokens=MAX_TOKENS, prefix_cache=True
    ),
}


@pytest.mark.parametrize("name", TIGHT_LIMITS)
def test_each_request_ends_within_a_number_of_steps(blocks: Transformer, name: str) -> None:
    """A new request arrives in every step, so there are always younger ones that want inputs and pages.

    The oldest request keeps its pages, and has a turn in every `MAX_REQUESTS` steps: it reads a block of its text or
    takes a step. It so is done after that many steps for each of its turns, and then the next one is the oldest.
    """
    rng = np.random.default_rng(5)
    decoder = Decoder(blocks, *TIGHT_LIMITS[name])
    requests: list[ActiveRequest] = []
    ends: list[int] = []
    arrivals: dict[int, int] = {}
    num_decoder_steps = 0
    while num_decoder_steps < 60 or decoder.has_work:
        if num_decoder_steps < 60:
            prompt = [number % 20 for number in range(int(rng.integers(1, 30)))]
            settings = settings_of(blocks, max_new_tokens=int(rng.integers(1, 12)), stop_token_ids=())
            requests.append(ActiveRequest(prepare_request(settings, prompt)))
            arrivals[id(requests[-1])] = num_decoder_steps
            ends.append(0)
            decoder.add(requests[-1])
        finished = {id(request) for request in decoder.step().finished}
        num_decoder_steps += 1
        check_pages(decoder, requests)
        assert decoder.pool.num_owned <= decoder.pool.num_pages
        for index, request in enumerate(requests):
            if id(request) in finished:
                ends[index] = num_decoder_steps
    bound = 0
    for request, end in zip(requests, ends, strict=True):
        num_blocks = -(-int(request.masked_positions[0]) // 4)
        num_steps = sum(len(block.unmasking_schedule) for block in request.prepared.blocks)
        # It cannot begin before it has arrived, and waits for those before it at most as long as they may take.
        bound = max(bound, arrivals[id(request)]) + MAX_REQUESTS * (num_blocks + num_steps)
        assert 0 < end <= bound
    assert (decoder.counts.num_preemptions > 0) == (name != "few tokens")


@pytest.mark.parametrize("cache_bytes", [1 << 14, 100_000, 1 << 17])
def test_keys_and_values_are_within_their_memory(blocks: Transformer, cache_bytes: int) -> None:
    """What is allocated, once, is at most the budget and less than a page below it."""
    with Engine(blocks, cache_memory=cache_bytes, page_size=8) as engine:
        cache = engine._decoder.cache
        assert cache is not None
        num_bytes = sum(storage.nbytes for storage in (*cache.keys_KTH, *cache.values_KTH))
        assert cache_bytes - num_bytes // engine.status.num_pages < num_bytes <= cache_bytes
        for length in (1, 8, 20):
            engine.submit([1] * length, GenerationConfig(max_new_tokens=8)).result(60)
        assert sum(storage.nbytes for storage in (*cache.keys_KTH, *cache.values_KTH)) == num_bytes


@pytest.mark.parametrize("name", ["low_confidence", "p2"])
def test_each_request_defers_its_own_tokens(model: Transformer, name: str) -> None:
    """Whose probabilities do not count in the confidences of other positions."""
    jobs = [
        prepare_request(settings_of(model, max_new_tokens=12, remasking_strategy=name, defer_token_ids=ids), [1, 2])
        for ids in ((), (3, 5, 8), tuple(range(12)))
    ]
    results = run_all(Decoder(model, *LIMITS["plenty"]), jobs, [0, 0, 0])
    for result, answer in zip(results, alone(model, jobs), strict=True):
        assert_same(result, answer)
    assert len({answer.step_map for answer in results}) == 3
