"""Pages of the decoder: freed ones, shared ones, those of requests that are preempted or removed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from diffusionlm.inference import cuda_graphs
from diffusionlm.inference import decoder as decoder_module
from diffusionlm.inference import requests as requests_module
from diffusionlm.inference.decoder import Decoder
from diffusionlm.inference.generate import Generation, decode, to_generation
from diffusionlm.inference.pages import PagePool
from diffusionlm.inference.request_builder import prepare_request
from diffusionlm.inference.requests import RequestOptions
from diffusionlm.inference.settings import DecodingSettings
from diffusionlm.models.transformer import Transformer
from tests.decoding_jobs import (
    BLOCKS,
    CANVASES,
    LIMITS,
    MASK,
    add_requests,
    assert_same,
    check_pages,
    drain,
    limit_decoder,
    make_jobs,
    settings_of,
)
from tests.recorded_graph import RecordedGraph, make_pools_of

SHARED = limit_decoder(num_pages=20, page_size=4, prefix_cache=True)


def answer(model: Transformer, settings: DecodingSettings, prompt: list[int], *starts: int) -> Generation:
    return decode(model, [prepare_request(settings, prompt, options=RequestOptions(segment_starts=starts))])[0]


@pytest.mark.parametrize(
    ("name", "limits", "has_graphs"),
    [
        ("blocks", "few pages", True),
        ("blocks", "few pages", False),
        pytest.param("shifted_blocks", "everything", False, marks=pytest.mark.slow),
        pytest.param("model", "plenty", False, marks=pytest.mark.slow),
    ],
)
def test_what_pages_without_an_owner_hold_has_no_effect(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, name: str, limits: str, has_graphs: bool
) -> None:
    """Nor the page of what pads a CUDA graph, the last one."""
    model: Transformer = request.getfixturevalue(name)
    jobs = make_jobs(model, CANVASES if name == "model" else BLOCKS, 6)
    expected = [decode(model, [prepared])[0] for prepared in jobs]
    if has_graphs:
        monkeypatch.setattr(decoder_module, "select_graph_pool", lambda model: make_pools_of(RecordedGraph))
        monkeypatch.setattr(cuda_graphs, "MIN_USES", 0)
    decoder = Decoder(model, *LIMITS[limits])
    requests = add_requests(decoder, *jobs)
    cache = decoder.cache
    assert cache is not None and cache.num_pages == decoder.pool.num_pages + has_graphs
    while decoder.has_work:
        decoder.step()
        check_pages(decoder, requests)
        used = {page for active in requests for pages in active.pages for page in pages} | {*decoder.pool._cached}
        free = torch.tensor(sorted(set(range(cache.num_pages)) - used), dtype=torch.int64)
        slots = (free[:, None] * cache.page_size + torch.arange(cache.page_size)).flatten()
        for storage in (*cache.keys_KTH, *cache.values_KTH):
            storage[:, slots] = torch.nan
    for active, answer in zip(requests, expected, strict=True):
        assert_same(to_generation(active), answer)


def test_admission_leaves_a_page_to_those_that_will_need_one(blocks: Transformer) -> None:
    settings = settings_of(blocks, max_new_tokens=8)
    decoder = Decoder(blocks, *limit_decoder(num_pages=4, page_size=4))
    requests = add_requests(decoder, *(prepare_request(settings, [number] * 4) for number in (1, 2)))
    decoder.step()
    assert (len(decoder.scheduler.active), len(decoder.scheduler.waiting)) == (1, 1)
    assert decoder.pool.num_free == 2, "two more are enough for now"
    drain(decoder, *requests)
    assert decoder.counts.num_preemptions == 0


def test_guidance_shares_no_pages(blocks: Transformer) -> None:
    prompt, settings = list(range(16)), settings_of(blocks, cfg_scale=1.0)
    decoder = Decoder(blocks, *SHARED)
    for _ in range(2):
        [active] = add_requests(decoder, prepare_request(settings, prompt))
        drain(decoder, active)
        assert_same(to_generation(active), answer(blocks, settings, prompt))
    assert (decoder.counts.num_prefix_queries, decoder.pool.num_cached) == (0, 0)


def test_turns_of_a_chat_share_their_beginning(blocks: Transformer) -> None:
    """Blocks of 4 are counted anew at each turn, so pages of 4 end within blocks."""
    settings = settings_of(blocks)
    decoder = Decoder(blocks, *limit_decoder(num_pages=60, page_size=4, prefix_cache=True))
    chat = [number % 20 for number in range(0, 23 * 7, 7)]
    other = [*chat[:9], 1, *chat[10:]]
    for prompt, starts, num_cached in (
        (chat[:10], (), 0),
        (chat[:10], (6,), 4),  # the first page is in blocks that begin alike
        (chat[:18], (6,), 8),  # blocks of 6, 10, 14: what is behind 10 was never read
        (chat[:18], (6,), 16),
        (chat, (6, 15), 12),  # the block from 14 on ends at 15, so page 12 to 16 is another one
        (chat, (6, 15), 20),
        (other, (6, 15), 4),  # page 4 to 8 is equal, but the block from 6 on is not
        (chat[:10], (), 8),
        (chat, (), 8),
    ):
        options = RequestOptions(segment_starts=starts)
        [active] = add_requests(decoder, prepare_request(settings, prompt, options=options))
        drain(decoder, active)
        assert active.num_cached_tokens == num_cached, (prompt, starts)
        assert_same(to_generation(active), answer(blocks, settings, prompt, *starts))


@pytest.mark.parametrize(("name", "num_cached"), [("blocks", 16), ("shifted_blocks", 12)])
def test_the_output_before_the_block_is_computed_again(
    request: pytest.FixtureRequest, name: str, num_cached: int
) -> None:
    """A shifted model predicts the first new token at the last one of the prompt."""
    model: Transformer = request.getfixturevalue(name)
    decoder = Decoder(model, *SHARED)
    for max_new_tokens, expected in ((4, 0), (8, num_cached), (4, num_cached)):
        settings = settings_of(model, max_new_tokens=max_new_tokens, stop_token_ids=())
        [active] = add_requests(decoder, prepare_request(settings, list(range(16))))
        drain(decoder, active)
        assert active.num_cached_tokens == expected
        if not expected:
            assert decoder.pool.num_cached * 4 == num_cached, "what each step writes again is not published"
        assert_same(to_generation(active), answer(model, settings, list(range(16))))


def test_pages_are_shared_evicted_and_found_again(blocks: Transformer) -> None:
    """Two requests publish the same pages in one step; other texts take their room; a literal mask token is text."""
    settings = settings_of(blocks)
    decoder = Decoder(blocks, *limit_decoder(num_pages=12, page_size=4, prefix_cache=True))
    common = list(range(12))

    def run(*prompts: list[int]) -> list[int]:
        active = add_requests(decoder, *(prepare_request(settings, prompt) for prompt in prompts))
        drain(decoder, *active)
        for request, prompt in zip(active, prompts, strict=True):
            assert_same(to_generation(request), answer(blocks, settings, prompt))
        return [request.num_cached_tokens for request in active]

    assert run(common, common) == [0, 0]
    assert run(common, [*common[:9], 1, 2, 3], common[:11], [7, *common[1:]]) == [12, 8, 8, 0]
    assert run([*common, *[MASK] * 4]) == [12], "the canvas of the others, as text"
    assert run([7] * 4 + [8] * 5) == [0] and run(common[:4] + [8] * 5) == [4], "a page depends on all before it"
    for number in range(4):
        run([number] * 30)
    assert run(common) == [0] and run(common) == [12]


def test_steps_without_a_forward_hold_up_nobody(blocks: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests_module, "MAX_SKIPPED_STEPS", 10)
    slow = settings_of(blocks, remasking_strategy="ancestral", denoising_steps=2000, max_new_tokens=3)
    quick = settings_of(blocks, max_new_tokens=8)
    decoder = Decoder(blocks, *LIMITS["plenty"])
    requests = add_requests(decoder, *(prepare_request(own, [1, 2, 3]) for own in (quick, slow, slow, quick)))
    num_calls = 0
    while decoder.has_work and not (requests[0].is_done and requests[3].is_done):
        num_calls += 1
        decoder.step()
    assert not requests[1].is_done and requests[1].num_steps <= 10 * (num_calls + 1)
    drain(decoder, *requests)
    monkeypatch.undo()
    [expected] = decode(blocks, [prepare_request(slow, [1, 2, 3])])
    for active in requests[1:3]:
        assert_same(to_generation(active), expected)
        assert active.num_forwards == expected.num_forwards
    assert np.array_equal(requests[1].step_map_L, requests[2].step_map_L)


# ----------------------------------------------------------------------------------------------------------------------
# The pool


def counts(pool: PagePool) -> tuple[int, int, int]:
    assert pool.num_free + pool.num_owned + pool.num_cached == pool.num_pages
    return pool.num_free, pool.num_owned, pool.num_cached


def test_pages_are_adjacent_where_they_can_be() -> None:
    pool = PagePool(16)
    texts = [pool.allocate(1), pool.allocate(1)]
    for _ in range(3):
        for pages in texts:
            pages += pool.allocate(1, pages[-1])
    assert texts == [[0, 1, 2, 3], [8, 9, 10, 11]]
    pool.release(texts[0])
    assert pool.allocate(8) == list(range(8)), "the longest place"
    assert sorted(pool.allocate(4)) == [12, 13, 14, 15]
    pool.release([3])
    pool.release([9])
    assert sorted(pool.allocate(2, after=15)) == [3, 9], "not adjacent, but there"
    assert counts(pool) == (0, 16, 0)
    assert pool.allocate(0) == []
    with pytest.raises(ValueError, match="1 pages are more than the 0 that are available"):
        pool.allocate(1)


def test_the_end_of_the_oldest_text_is_evicted_first() -> None:
    pool = PagePool(4)
    old, new = pool.allocate(2), pool.allocate(2)
    for page, digest in zip([*old, *new], (b"a", b"b", b"c", b"d"), strict=True):
        pool.publish(page, digest)
    pool.release(old)
    pool.release(new)
    assert pool.allocate(1) == [old[1]]
    assert pool.share([b"a", b"b"]) == [old[0]]
    assert pool.allocate(2) == new
    assert pool.share([b"c"]) == []
    assert counts(pool) == (0, 4, 0)
