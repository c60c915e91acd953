"""Decoding of the later turns of a chat: blocks are counted from the end of each answer, as in training. fp64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from config.generation import GenerationConfig
from config.training.objective import BlockDiffusionConfig
from diffusionlm.diffusion.noised_batch import CleanBatch
from diffusionlm.diffusion.objectives import build_layout
from diffusionlm.inference.generate import generate
from diffusionlm.inference.model_runner import ModelRunner, ScheduledRequest, find_input_slice
from diffusionlm.inference.request_builder import prepare_request
from diffusionlm.inference.requests import WHOLE_TEXT, ActiveRequest, RequestOptions, TextSegments, split_into_blocks
from diffusionlm.inference.settings import resolve_settings
from diffusionlm.models.cache import PagedCache
from diffusionlm.models.patterns import DenseBias
from diffusionlm.models.transformer import Transformer

MASK, BLOCK = 22, 4
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [4, 3, 2, 1], [11, 12, 13, 14, 15, 16, 17, 18], [5] * 6]
STARTS = [(3, 6), (), (5,), (6,)]
"""A turn may be shorter than a block, and the prompt may end with an answer."""


def settings(**values: Any) -> GenerationConfig:
    options = {"max_new_tokens": 7, "stop_token_ids": (), "attention": "block_causal", "block_length": BLOCK}
    return GenerationConfig.model_validate(options | values)


def like(model: Transformer, alignment: str) -> Transformer:
    other = Transformer(model.config.model_copy(update={"logit_alignment": alignment}))
    other.load_state_dict(model.state_dict())
    return other.double().eval()


def block_numbers(length: int, starts: tuple[int, ...]) -> list[tuple[int, int]]:
    """(segment, block in it) of each position, counted one by one."""
    numbers: list[tuple[int, int]] = []
    origin = segment = 0
    for position in range(length):
        if position in starts:
            origin, segment = position, segment + 1
        numbers.append((segment, (position - origin) // BLOCK))
    return numbers


@torch.no_grad()
def decode_plainly(model: Transformer, prompt: list[int], starts: tuple[int, ...], new: int) -> list[int]:
    """Greedy, the most confident position of the first open block at each forward, with a mask of all pairs."""
    canvas = prompt + [MASK] * new
    numbers, shift = block_numbers(len(canvas), starts), int(model.config.logit_alignment == "shifted")
    for block in sorted(set(numbers[len(prompt) :])):
        end = max(index for index, number in enumerate(numbers) if number == block) + 1
        mask = torch.tensor([[query >= key for key in numbers[:end]] for query in numbers[:end]])
        while open_positions := [i for i in range(len(prompt), end) if canvas[i] == MASK]:
            logits_LV = model(torch.tensor([canvas[:end]]), pattern=DenseBias(mask))[0]
            logits_LV[:, MASK] = float("-inf")
            probs_LV = logits_LV.softmax(dim=1)
            best = max(open_positions, key=lambda position: float(probs_LV[position - shift].max()))
            canvas[best] = int(probs_LV[best - shift].argmax())
    return canvas[len(prompt) :]


def test_blocks_of_segments_written_out(model: Transformer) -> None:
    segments = TextSegments.from_starts((3, 5), 9)
    positions = np.arange(12)
    assert segments.block_starts(positions, 4).tolist() == [0, 0, 0, 3, 3, 5, 5, 5, 5, 9, 9, 9]
    assert [segments.block_end(start, 4) for start in (0, 3, 5, 9)] == [3, 5, 9, 13]
    assert segments.numbers(7).tolist() == [1, 1, 1, 2, 2, 3, 3]
    resolved = resolve_settings(settings(), model.config)
    blocks = split_into_blocks(np.arange(6, 12), resolved, segments)
    assert [block.positions.tolist() for block in blocks] == [[6, 7, 8], [9, 10, 11]]
    blocks = split_into_blocks(np.arange(6, 12), resolved, WHOLE_TEXT)
    assert [block.positions.tolist() for block in blocks] == [[6, 7], [8, 9, 10, 11]]


@pytest.mark.parametrize("alignment", ["same_position", "shifted"])
def test_turns_decode_as_a_plain_loop_with_and_without_a_cache(model: Transformer, alignment: str) -> None:
    model = like(model, alignment)
    cached = generate(model, PROMPTS, settings(), segment_starts=STARTS)
    uncached = generate(model, PROMPTS, settings(cache="none"), segment_starts=STARTS)
    for prompt, starts, ours, other in zip(PROMPTS, STARTS, cached, uncached, strict=True):
        assert list(ours.token_ids) == decode_plainly(model, prompt, starts, 7)
        assert (ours.token_ids, ours.step_map) == (other.token_ids, other.step_map)
        assert ours.logprobs == pytest.approx(other.logprobs, abs=1e-12)
        [alone] = generate(model, [prompt], settings(), segment_starts=[starts])
        assert (alone.token_ids, alone.step_map) == (ours.token_ids, ours.step_map)
    assert generate(model, PROMPTS, settings()) == generate(model, PROMPTS, settings(), segment_starts=[()] * 4)
    assert any(ours != text for ours, text in zip(cached, generate(model, PROMPTS, settings()), strict=True))


@pytest.mark.parametrize("values", [{"temperature": 1.0}, {"cfg_scale": 1.5}, {"remasking_strategy": "p2"}])
def test_other_options_do_not_depend_on_the_cache(model: Transformer, values: dict[str, Any]) -> None:
    """Requests end at different forwards, so their places in the cache change."""
    seeds = [3, 1, 4, 1]
    prompts, starts = [*PROMPTS[:3], PROMPTS[3] * 4], [*STARTS[:3], (6, 13)]
    cached = generate(model, prompts, settings(**values), seeds, segment_starts=starts)
    uncached = generate(model, prompts, settings(cache="none", **values), seeds, segment_starts=starts)
    for ours, other in zip(cached, uncached, strict=True):
        assert (ours.token_ids, ours.step_map) == (other.token_ids, other.step_map)


@pytest.mark.parametrize("alignment", ["same_position", "shifted"])
@pytest.mark.parametrize("cache", ["none", "block"])
@torch.inference_mode()
def test_logits_of_the_second_turn_are_those_of_training(model: Transformer, alignment: str, cache: str) -> None:
    """Two turns of 9 and 13 tokens in one row; the end of each block is masked, and decoding begins there."""
    model = like(model, alignment)
    segment_BL = torch.tensor([[0] * 9 + [1] * 13])
    tokens_BL = torch.randperm(22, generator=torch.Generator().manual_seed(1))[None]
    num_visible_by_block = {9: 3, 13: 0, 17: 2, 21: 0}
    masked_BL = np.zeros((1, 22), dtype=np.bool_)
    for start, num_visible in num_visible_by_block.items():
        masked_BL[0, start + num_visible : start + BLOCK] = True
    batch = CleanBatch(tokens_BL, torch.from_numpy(masked_BL), segment_BL=segment_BL)
    layout = build_layout(BlockDiffusionConfig(block_length=BLOCK), model.config, BLOCK)
    noised = layout.build_noised_batch(batch, masked_BL, np.ones((1, 22)))
    training_logits_NV = model(noised.inputs_BS, pattern=noised.pattern, output_positions=noised.positions_N)
    logits_of = {int(token): logits for token, logits in zip(noised.targets_N, training_logits_NV, strict=True)}
    for start, num_visible in num_visible_by_block.items():
        prompt = tokens_BL[0, : start + num_visible].tolist()
        config = settings(max_new_tokens=min(start + BLOCK, 22) - len(prompt), cache=cache)
        resolved = resolve_settings(config, model.config)
        request = ActiveRequest(prepare_request(resolved, prompt, options=RequestOptions(segment_starts=(9,))))
        pages = PagedCache(model.config, 1, 40, "cpu", torch.float64) if request.uses_cache else None
        runner, request.pages = ModelRunner(model, pages), [[0]]
        request.prepare_step()
        expected = torch.stack([logits_of[int(token)] for token in tokens_BL[0, len(prompt) : start + BLOCK]])
        logits_NV = runner([ScheduledRequest(request, find_input_slice(request))])
        torch.testing.assert_close(logits_NV, expected, rtol=1e-10, atol=1e-10)


def test_whole_blocks_end_where_training_fills(model: Transformer) -> None:
    """SDAR decodes the last block to its end, counted from the last answer."""
    resolved = resolve_settings(settings(remasking_strategy="low_confidence_static", max_new_tokens=5), model.config)
    lengths = [
        len(prepare_request(resolved, [1] * 9, options=RequestOptions(segment_starts=starts)).canvas_L)
        for starts in ((), (3,), (9,), (2, 7))
    ]
    assert lengths == [16, 15, 17, 15]


def test_wrong_segments_are_refused(model: Transformer) -> None:
    for starts in ((0,), (3, 3), (5, 4), (10,), (-1,)):
        with pytest.raises(ValueError, match=r"prompt 0: segment_starts = .* must ascend from 1 at least to 9"):
            generate(model, PROMPTS[:1], settings(), segment_starts=[starts])
    with pytest.raises(ValueError, match=r"segment_starts need attention = \"block_causal\".*bidirectional"):
        generate(model, PROMPTS[:1], settings(attention="bidirectional"), segment_starts=[(3,)])
    with pytest.raises(ValueError, match="segment_starts: 1 for 2 requests"):
        generate(model, PROMPTS[:2], settings(), segment_starts=[(3,)])
