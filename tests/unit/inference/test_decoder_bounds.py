"""Bounds that are known in advance: memory of the cache, and steps until a request is done."""

from __future__ import annotations

import numpy as np
import pytest

from config.generation import GenerationConfig
from diffusionlm.inference.decoder import Decoder
from diffusionlm.inference.request_builder import prepare_request
from diffusionlm.inference.requests import ActiveRequest
from diffusionlm.inference.settings import resolve_settings
from diffusionlm.models.transformer import Transformer
from diffusionlm.serving.engine import Engine
from tests.decoding_jobs import check_pages, limit_decoder

MAX_REQUESTS, MAX_TOKENS = 3, 6
LIMITS = {
    "few tokens": limit_decoder(
        num_pages=60, page_size=4, max_requests=MAX_REQUESTS, max_num_batched_tokens=MAX_TOKENS
    ),
    "few pages": limit_decoder(num_pages=11, page_size=4, max_requests=MAX_REQUESTS, max_num_batched_tokens=MAX_TOKENS),
    "shared pages": limit_decoder(
        11, 4, max_requests=MAX_REQUESTS, max_num_batched_tokens=MAX_TOKENS, prefix_cache=True
    ),
}


@pytest.mark.parametrize("name", LIMITS)
def test_each_request_ends_within_a_number_of_steps(blocks: Transformer, name: str) -> None:
    """A new request arrives in every step, so there are always younger ones that want inputs and pages.

    The oldest request keeps its pages, and has a turn in every `MAX_REQUESTS` steps: it reads a block of its text or
    takes a step. It so is done after that many steps for each of its turns, and then the next one is the oldest.
    """
    rng = np.random.default_rng(5)
    decoder = Decoder(blocks, *LIMITS[name])
    requests: list[ActiveRequest] = []
    ends: list[int] = []
    arrivals: dict[int, int] = {}
    num_decoder_steps = 0
    while num_decoder_steps < 60 or decoder.has_work:
        if num_decoder_steps < 60:
            prompt = [number % 20 for number in range(int(rng.integers(1, 30)))]
            settings = resolve_settings(
                GenerationConfig(max_new_tokens=int(rng.integers(1, 12)), stop_token_ids=()), blocks.config
            )
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


def test_a_long_prompt_does_not_hold_up_its_neighbors(blocks: Transformer) -> None:
    """A budget splits it: others decode in every step, and a short prompt behind it waits for one part only."""
    config = GenerationConfig(max_new_tokens=8, denoising_steps=4, stop_token_ids=())

    def add(length: int) -> ActiveRequest:
        settings = resolve_settings(config, blocks.config)
        request = ActiveRequest(prepare_request(settings, [1] * length))
        decoder.add(request)
        return request

    def count_steps(request: ActiveRequest) -> int:
        steps = 0
        while not request.final_token_ids():
            decoded = {id(other) for other in decoder.step().decoded}
            assert id(neighbor) in decoded
            steps += 1
        return steps

    decoder = Decoder(blocks, *limit_decoder(num_pages=60, page_size=4, max_num_batched_tokens=12))
    neighbor = add(4)
    decoder.step()
    steps_alone = count_steps(add(4))
    decoder = Decoder(blocks, *limit_decoder(num_pages=60, page_size=4, max_num_batched_tokens=12))
    neighbor = add(4)
    decoder.step()
    long = add(32)
    assert count_steps(add(4)) <= steps_alone + 1
    assert not long.final_token_ids()


@pytest.mark.parametrize("cache_bytes", [1 << 14, 100_000, 1 << 17])
def test_keys_and_values_are_within_their_memory(blocks: Transformer, cache_bytes: int) -> None:
    """What is allocated, once, is at most the budget and less than a page below it."""
    with Engine(blocks, cache_bytes=cache_bytes, page_size=8) as engine:
        cache = engine._decoder.cache
        assert cache is not None
        num_bytes = sum(storage.nbytes for storage in (*cache.keys_KTH, *cache.values_KTH))
        assert cache_bytes - num_bytes // engine.status.num_pages < num_bytes <= cache_bytes
        for length in (1, 8, 20):
            engine.submit([1] * length, GenerationConfig(max_new_tokens=8)).result(60)
        assert sum(storage.nbytes for storage in (*cache.keys_KTH, *cache.values_KTH)) == num_bytes
