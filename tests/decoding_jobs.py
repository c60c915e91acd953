"""Requests of many kinds for tests of the decoder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from config.generation import GenerationConfig
from config.serving.server import EngineLimits
from diffusionlm.inference.decoder import Decoder
from diffusionlm.inference.generate import Generation, to_generation
from diffusionlm.inference.request_builder import prepare_request
from diffusionlm.inference.requests import ActiveRequest, PreparedRequest, RequestOptions
from diffusionlm.inference.settings import DecodingSettings, resolve_settings
from diffusionlm.models.row_adapters import ModelAdapter
from diffusionlm.models.transformer import Transformer
from tests.reference.enumeration import table_config

MASK = 22
Job = PreparedRequest

BLOCKS: list[dict[str, Any]] = [
    {"denoising_steps": 2},
    {"remasking_strategy": "low_confidence_dynamic", "confidence_threshold": 0.5, "block_length": 8},
    {"temperature": 0.8, "top_k": 5, "block_length": 2, "repetition_penalty": 1.3, "frequency_penalty": 0.7},
    {"remasking_strategy": "p2", "temperature": 1.0, "presence_penalty": 0.9, "min_p": 0.1},
    {"remasking_strategy": "random", "denoising_steps": 3},
    {"cfg_scale": 1.5, "block_length": 8},
    {"cache": "none"},
    {"block_length": 1, "stop_token_ids": (3, 5, 7), "min_new_tokens": 2},
]
CANVASES: list[dict[str, Any]] = [
    {"block_length": 4, "cache": "none"},
    {"block_length": 4, "cache": "prefix", "denoising_steps": 2},
    {"block_length": 4, "cache": "dual", "temperature": 0.7},
    {"block_length": 6, "cache": "dual", "cfg_scale": 1.0},
    {"cache": "none", "remasking_strategy": "p2", "temperature": 1.0, "steps": 9},
    {"block_length": 4, "attention": "prompt_and_own_block", "cache": "none"},
]


def limit_decoder(num_pages: int, page_size: int = 16, **keys: Any) -> tuple[int, EngineLimits]:
    """Pages and limits of a decoder, without a prefix cache unless the keys say otherwise."""
    return num_pages, EngineLimits.model_validate({"page_size": page_size, "prefix_cache": False, **keys})


LIMITS = {
    "plenty": limit_decoder(num_pages=200, page_size=8),
    "small steps": limit_decoder(num_pages=200, page_size=8, max_num_batched_tokens=6, max_requests=3),
    "few pages": limit_decoder(num_pages=34, page_size=2),
    "shared pages": limit_decoder(num_pages=50, page_size=4, prefix_cache=True, max_requests=4),
    "everything": limit_decoder(num_pages=32, page_size=2, max_num_batched_tokens=5, max_requests=5, prefix_cache=True),
}


def make_request(token_ids: Sequence[int], seed: int = 0) -> PreparedRequest:
    """A prompt of any tokens, of a model that nobody computes."""
    model = table_config(num_tokens=1 << 16, length=1 << 10, mask_token_id=0)
    return prepare_request(resolve_settings(GenerationConfig(max_new_tokens=1), model), token_ids, seed)


def settings_of(model: Transformer, **values: Any) -> DecodingSettings:
    """Settings of four new tokens, unless the values say otherwise."""
    return resolve_settings(GenerationConfig(**{"max_new_tokens": 4, **values}), model.config)


def make_jobs(model: Transformer, options: list[dict[str, Any]], count: int, seed: int = 0) -> list[Job]:
    """Prompts of 1 to 25 tokens, most of which begin alike, some with turns of a chat, and canvases with holes."""
    rng = np.random.default_rng(seed)
    beginning = rng.integers(0, 20, 25).tolist()
    settings = [resolve_settings(GenerationConfig(max_new_tokens=10, **values), model.config) for values in options]
    jobs = []
    for index in range(count):
        own = settings[index % len(settings)]
        length = int(rng.integers(1, 26))
        tokens = beginning[:length] if index % 4 else rng.integers(0, 20, length).tolist()
        if index % 5 == 4:
            canvas = [MASK if rng.random() < 0.4 and position else token for position, token in enumerate(tokens)]
            jobs.append(prepare_request(own, canvas, seed=index, options=RequestOptions(is_infill=True)))
        else:
            has_turns = own.block_causal_length is not None and index % 3 == 2
            starts = sorted({min(start, length) for start in (3, 9, 25)}) if has_turns else ()
            jobs.append(prepare_request(own, tokens, seed=index, options=RequestOptions(segment_starts=starts)))
    return jobs


def check_pages(decoder: Decoder, requests: Iterable[ActiveRequest]) -> None:
    """Free, owned and cached pages are all pages, and the owned ones are those of the requests."""
    pool = decoder.pool
    assert pool.num_free + pool.num_owned + pool.num_cached == decoder.pool.num_pages
    owned = [page for request in requests for pages in request.pages for page in pages]
    assert len(set(owned)) == pool.num_owned
    assert len(owned) == pool.num_owned or decoder.scheduler.pages.has_prefix_cache


def assert_same(ours: Generation, expected: Generation) -> None:
    assert replace(ours, logprobs=()) == replace(expected, logprobs=())
    assert ours.logprobs == pytest.approx(expected.logprobs, abs=1e-9, nan_ok=True)


def add_requests(decoder: Decoder, *jobs: Job) -> list[ActiveRequest]:
    """Let jobs wait."""
    requests = [ActiveRequest(prepared) for prepared in jobs]
    for request in requests:
        decoder.add(request)
    return requests


def drain(decoder: Decoder, *requests: ActiveRequest) -> None:
    """Decode until there is no work, and check the pages of these requests, which are all."""
    while decoder.has_work:
        decoder.step()
        check_pages(decoder, requests)


def run_all(
    decoder: Decoder, jobs: list[Job], arrivals: list[int], adapter: ModelAdapter | None = None
) -> list[Generation]:
    """Decode jobs that arrive after so many steps each; the last one with an adapter."""
    requests = [ActiveRequest(prepared) for prepared in jobs]
    requests[-1].adapter = adapter
    finished: list[ActiveRequest] = []
    for steps in range(3000):
        for request, arrival in zip(requests, arrivals, strict=True):
            if arrival == steps:
                decoder.add(request)
        had_work = decoder.has_work
        result = decoder.step()
        assert result.has_forward or result.finished or not had_work
        finished += result.finished
        check_pages(decoder, requests)
        if len(finished) == len(requests):
            break
    assert sorted(map(id, finished)) == sorted(map(id, requests)), "each one ends once"
    assert not decoder.has_work and decoder.pool.num_owned == 0
    # A step of the decoder takes a step of a request or reads a block of its text; a preempted one reads again.
    num_blocks = [len(request.tokens_L) for request in requests]
    num_steps = sum(request.num_forwards for request in requests)
    assert decoder.counts.num_steps <= num_steps + sum(num_blocks) + decoder.counts.num_preemptions * max(num_blocks)
    return [to_generation(request) for request in requests]


def check_same_bits_in_parts(model: Transformer, jobs: list[PreparedRequest]) -> None:
    """A deterministic decoder gives three requests the same bits if it reads them in parts, with few pages."""
    limits = [
        {"num_pages": 100, "max_num_batched_tokens": 500},
        {"num_pages": 8, "max_num_batched_tokens": 5, "prefix_cache": True},
    ]
    plenty, few = (
        run_all(Decoder(model, *limit_decoder(page_size=4, deterministic=True, **own)), jobs, [0, 0, 1])
        for own in limits
    )
    assert plenty == few
