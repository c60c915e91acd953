"""Blocks of several tokens after token-causal text: committed text is read causally, and the block as in training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from config.generation import GenerationConfig
from diffusionlm.inference.decoder import Decoder
from diffusionlm.inference.generate import decode, generate, infill
from diffusionlm.inference.request_builder import prepare_request
from diffusionlm.inference.requests import RequestOptions
from diffusionlm.inference.settings import resolve_settings
from diffusionlm.models.patterns import DenseBias
from diffusionlm.models.transformer import Transformer
from tests.decoding_jobs import BLOCKS, LIMITS, assert_same, limit_decoder, make_jobs, run_all

MASK, BLOCK = 22, 4
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [4, 3, 2, 1], [11, 12, 13, 14, 15, 16, 17, 18], [5] * 6]
STARTS = [(3, 6), (), (5,), (6,)]
MODELS: dict[str, dict[str, Any]] = {
    "block": {},
    "token": {"noisy_attention": "token"},
    "token, shifted": {"noisy_attention": "token", "logit_alignment": "shifted"},
}
Like = Callable[..., Transformer]


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, like: Like) -> Transformer:
    return like(block_length=BLOCK, clean_alignment="shifted", **MODELS[request.param])


@torch.no_grad()
def decode_plainly(model: Transformer, canvas: list[int], starts: tuple[int, ...] = ()) -> list[int]:
    """Greedy, the most confident position of the first open block at each forward, with a mask of all pairs."""
    canvas, shift = [*canvas], int(model.config.logit_alignment == "shifted")
    origins = [max(start for start in (0, *starts) if start <= position) for position in range(len(canvas))]
    blocks = [(origin, (position - origin) // BLOCK) for position, origin in enumerate(origins)]
    for block in sorted(set(blocks)):
        first = blocks.index(block)
        end = first + blocks.count(block)
        is_causal = model.config.noisy_attention == "token"
        rows = [[key <= query or (query >= first and not is_causal) for key in range(end)] for query in range(end)]
        while open_positions := [position for position in range(end) if canvas[position] == MASK]:
            logits_LV = model(torch.tensor([canvas[:end]]), pattern=DenseBias(torch.tensor(rows)))[0]
            logits_LV[:, MASK] = float("-inf")
            probs_LV = logits_LV.softmax(dim=1)
            best = max(open_positions, key=lambda position: float(probs_LV[position - shift].max()))
            canvas[best] = int(probs_LV[best - shift].argmax())
    return canvas


@pytest.mark.parametrize("cache", ["block", "none"])
def test_texts_are_those_of_a_plain_loop(model: Transformer, cache: str) -> None:
    config = GenerationConfig(max_new_tokens=7, stop_token_ids=(), cache=cache)
    for prompt, starts in zip(PROMPTS, STARTS, strict=True):
        [answer] = generate(model, [prompt], config, segment_starts=[starts])
        assert [*prompt, *answer.token_ids] == decode_plainly(model, [*prompt, *[MASK] * 7], starts)
    canvas = [1, MASK, 2, MASK, 3, 4, MASK, MASK, 5, 6, 7, 8, MASK, 9, MASK]
    [filled] = infill(model, [canvas], GenerationConfig(cache=cache))
    assert list(filled.token_ids) == decode_plainly(model, canvas)


@pytest.mark.parametrize("name", LIMITS)
def test_requests_of_all_kinds_decode_as_alone(model: Transformer, name: str) -> None:
    jobs = make_jobs(model, BLOCKS, 16)
    expected = [decode(model, [job])[0] for job in jobs]
    for ours, answer in zip(run_all(Decoder(model, *LIMITS[name]), jobs, [*range(16)]), expected, strict=True):
        assert_same(ours, answer)


def test_deterministic_decoders_give_the_same_bits_in_parts(model: Transformer) -> None:
    settings = resolve_settings(GenerationConfig(max_new_tokens=7, stop_token_ids=()), model.config)
    jobs = [
        prepare_request(settings, prompt, seed, RequestOptions(segment_starts=starts))
        for seed, (prompt, starts) in enumerate(zip(PROMPTS, STARTS, strict=True))
    ]
    decoders = [
        Decoder(model, *limit_decoder(num_pages=pages, page_size=4, deterministic=True, max_num_batched_tokens=budget))
        for pages, budget in ((100, 500), (8, 5))
    ]
    plenty, few = (run_all(decoder, jobs, [0, 0, 1, 2]) for decoder in decoders)
    assert plenty == few
