"""Requests that join, wait, are preempted and leave: each answer is that of the request alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch

from config.generation import GenerationConfig
from diffusionlm.inference.decoder import Decoder
from diffusionlm.inference.generate import Generation, decode, to_generation
from diffusionlm.inference.request_builder import prepare_request
from diffusionlm.inference.requests import ActiveRequest, RequestOptions
from diffusionlm.inference.scheduler import DecoderLimits
from diffusionlm.inference.settings import resolve_settings
from diffusionlm.models.transformer import Transformer
from tests.decoding_jobs import BLOCKS, CANVASES, LIMITS, MASK, Job, check_pages, make_jobs, run_all


def same(ours: Generation, expected: Generation) -> None:
    assert replace(ours, logprobs=()) == replace(expected, logprobs=())
    assert ours.logprobs == pytest.approx(expected.logprobs, abs=1e-9, nan_ok=True)


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
    rng = np.random.default_rng(1)
    order = rng.permutation(len(jobs)).tolist()
    arrivals = rng.integers(0, 30, len(jobs)).tolist()
    decoder = Decoder(model, LIMITS[limits])
    results = run_all(decoder, [jobs[index] for index in order], arrivals)
    for index, result in zip(order, results, strict=True):
        same(result, answers[index])
    counts = decoder.counts
    assert counts.num_request_steps == sum(answer.num_forwards for answer in answers)
    if name == "blocks":
        assert (counts.num_preemptions > 0) == (limits in ("few pages", "everything"))
        if limits == "shared pages":
            assert counts.num_prefix_hits > 0


def test_a_prompt_is_read_in_parts_beside_others(expected: Callable[..., Any]) -> None:
    """Neither waits for the other."""
    model, _, _ = expected("blocks")
    settings = resolve_settings(GenerationConfig(max_new_tokens=12, block_length=4), model.config)
    jobs = [prepare_request(settings, [1]), prepare_request(settings, list(range(20)))]
    decoder = Decoder(model, DecoderLimits(num_pages=20, page_size=4, max_num_batched_tokens=12))
    first, second = (ActiveRequest(prepared) for prepared in jobs)
    decoder.add(first)
    decoder.step()
    decoder.add(second)
    progress = []
    while not second.num_forwards:
        rows = decoder.counts.num_batched_tokens
        assert first in decoder.step().decoded
        progress.append((second.cached_length, decoder.counts.num_batched_tokens - rows))
    assert [length for length, _ in progress] == [8, 16, 20]
    assert [rows for _, rows in progress][:-1] == [12, 12]
    while decoder.has_work:
        decoder.step()
    for request, answer in zip((first, second), alone(model, jobs), strict=True):
        same(to_generation(request), answer)


def test_removed_requests_leave_nothing_behind(expected: Callable[..., Any]) -> None:
    model, jobs, answers = expected("blocks")
    rng = np.random.default_rng(2)
    for limits in ("everything", "plenty"):
        decoder = Decoder(model, LIMITS[limits])
        requests = [ActiveRequest(prepared) for prepared in jobs]
        for request in requests:
            decoder.add(request)
        removed: set[int] = set()
        while decoder.has_work:
            decoder.step()
            if rng.random() < 0.4 and len(removed) < 8:
                victim = int(rng.integers(len(requests)))
                decoder.remove(requests[victim])  # waiting, being read, being decoded, or done
                removed.add(victim)
            check_pages(decoder, requests)
        assert decoder.pool.num_owned == 0
        for index, request in enumerate(requests):
            if index not in removed:
                same(to_generation(request), answers[index])


def test_the_youngest_gives_way_until_someone_is_served(expected: Callable[..., Any]) -> None:
    """Two long readings, a budget for one, and pages for the older one alone."""
    model, _, _ = expected("blocks")
    settings = resolve_settings(GenerationConfig(max_new_tokens=4, denoising_steps=1), model.config)
    canvas = [MASK if position in (1, 32) else position % 20 for position in range(36)]
    jobs = [
        prepare_request(settings, [1] * 36),
        prepare_request(settings, canvas, options=RequestOptions(is_infill=True)),
    ]
    decoder = Decoder(model, DecoderLimits(num_pages=12, page_size=4, max_num_batched_tokens=8))
    for result, answer in zip(run_all(decoder, jobs, [0, 0]), alone(model, jobs), strict=True):
        same(result, answer)


def test_newcomers_do_not_overtake_prompts_that_are_read(expected: Callable[..., Any]) -> None:
    model, _, _ = expected("blocks")
    settings = resolve_settings(GenerationConfig(max_new_tokens=4, denoising_steps=1), model.config)
    decoder = Decoder(model, DecoderLimits(num_pages=400, page_size=4, max_num_batched_tokens=12))
    first = ActiveRequest(prepare_request(settings, [1] * 32))
    decoder.add(first)
    for _ in range(8):
        decoder.add(ActiveRequest(prepare_request(settings, [2] * 32)))
        decoder.step()
    assert first.is_done


def test_the_end_is_reported_in_its_round(expected: Callable[..., Any]) -> None:
    model, _, _ = expected("blocks")
    settings = resolve_settings(GenerationConfig(max_new_tokens=3, denoising_steps=1), model.config)
    decoder = Decoder(model, LIMITS["plenty"])
    request = ActiveRequest(prepare_request(settings, [1]))
    decoder.add(request)
    result = decoder.step()
    assert result.decoded == result.finished == (request,) and not decoder.has_work


def test_preempted_requests_do_not_count_as_cached(expected: Callable[..., Any]) -> None:
    model, _, _ = expected("blocks")
    settings = resolve_settings(GenerationConfig(max_new_tokens=28), model.config)
    decoder = Decoder(model, DecoderLimits(num_pages=13, page_size=4, has_prefix_cache=True))
    requests = [ActiveRequest(prepare_request(settings, [number] * 9)) for number in (1, 2)]
    for request in requests:
        decoder.add(request)
    while decoder.has_work:
        decoder.step()
    assert decoder.counts.num_preemptions > 0
    assert [request.num_cached_tokens for request in requests] == [0, 0] and decoder.counts.num_prefix_hits == 0


def test_the_same_prompt_again_is_not_read_again(expected: Callable[..., Any]) -> None:
    model, _, _ = expected("blocks")
    settings = resolve_settings(GenerationConfig(max_new_tokens=4), model.config)
    [answer] = alone(model, [prepare_request(settings, list(range(20)))])
    decoder = Decoder(model, DecoderLimits(num_pages=20, page_size=4, has_prefix_cache=True))
    rows = []
    for prompt in (list(range(20)), list(range(20)), [9, *range(1, 20)], [*range(19), 5]):
        before = decoder.counts.num_batched_tokens
        [result] = run_all(decoder, [prepare_request(settings, prompt)], [0])
        rows.append(decoder.counts.num_batched_tokens - before)
        if prompt == list(range(20)):
            same(result, answer)
    first = rows[0]
    assert rows == [first, first - 20, first, first - 16]


def test_what_can_never_fit_is_refused(expected: Callable[..., Any]) -> None:
    model, _, _ = expected("blocks")
    settings = resolve_settings(GenerationConfig(max_new_tokens=12), model.config)
    request = ActiveRequest(prepare_request(settings, list(range(20))))
    with pytest.raises(ValueError, match=r"32 tokens need 8 pages of 4 positions, and the cache has 7: shorten"):
        Decoder(model, DecoderLimits(num_pages=7, page_size=4)).add(request)

    for key in ("page_size", "max_requests", "max_num_batched_tokens"):
        with pytest.raises(ValueError, match=f"{key} = 0 must be at least 1"):
            Decoder(model, replace(LIMITS["plenty"], **{key: cast(Any, 0)}))


def test_an_error_ends_its_own_request(expected: Callable[..., Any]) -> None:
    """A single token has logits that are not finite; who may not use it is decoded."""
    model, _, _ = expected("blocks")
    broken = Transformer(model.config)
    broken.load_state_dict(model.state_dict())
    broken.double().eval()
    with torch.no_grad():
        broken.model.embed_tokens.weight[3] = torch.nan
    settings = resolve_settings(GenerationConfig(max_new_tokens=4, suppress_token_ids=(3,)), model.config)
    prepared = [prepare_request(settings, prompt) for prompt in ([1, 2], [3, 4])]
    good, bad = (ActiveRequest(request) for request in prepared)
    decoder = Decoder(broken, LIMITS["plenty"])
    for request in (good, bad):
        decoder.add(request)
    while decoder.has_work:
        decoder.step()
    assert good.error is None and "not finite" in str(bad.error)
    same(to_generation(good), alone(model, [prepared[0]])[0])
