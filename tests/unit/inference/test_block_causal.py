"""Decoding of block diffusion and autoregressive models, in fp64: blocks in order and counted anew in each turn of a
chat, as in training; shifted outputs; no mask token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from config.generation import GenerationConfig
from config.training.objective import BlockDiffusionConfig
from diffusionlm.diffusion.noised_batch import CleanBatch
from diffusionlm.diffusion.objectives import build_layout
from diffusionlm.inference.generate import generate, infill
from diffusionlm.inference.model_runner import ModelRunner, schedule_step
from diffusionlm.inference.request_builder import prepare_request
from diffusionlm.inference.requests import ActiveRequest, RequestOptions
from diffusionlm.inference.settings import resolve_settings
from diffusionlm.models.cache import PagedCache
from diffusionlm.models.patterns import Causal, DenseBias
from diffusionlm.models.transformer import Transformer

MASK, BLOCK = 22, 4
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [4, 3, 2, 1], [11, 12, 13, 14, 15, 16, 17, 18], [5] * 6]
STARTS = [(3, 6), (), (5,), (6,)]
"""A turn may be shorter than a block, and the prompt may end with an answer."""
MODELS = ["blocks", "shifted_blocks"]
Like = Callable[..., Transformer]


def settings(**values: Any) -> GenerationConfig:
    return GenerationConfig.model_validate({"max_new_tokens": 7, "stop_token_ids": (), **values})


@pytest.fixture(scope="module")
def autoregressive(like: Like) -> Transformer:
    return like(block_length=1, logit_alignment="shifted", mask_token_id=None)


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
def decode_plainly(model: Transformer, canvas: list[int], starts: tuple[int, ...] = ()) -> list[int]:
    """Greedy, the most confident position of the first open block at each forward, with a mask of all pairs."""
    canvas, shift = [*canvas], int(model.config.logit_alignment == "shifted")
    numbers = block_numbers(len(canvas), starts)
    for block in sorted(set(numbers)):
        end = max(index for index, number in enumerate(numbers) if number == block) + 1
        mask = torch.tensor([[query >= key for key in numbers[:end]] for query in numbers[:end]])
        while open_positions := [position for position in range(end) if canvas[position] == MASK]:
            logits_LV = model(torch.tensor([canvas[:end]]), pattern=DenseBias(mask))[0]
            logits_LV[:, MASK] = float("-inf")
            probs_LV = logits_LV.softmax(dim=1)
            best = max(open_positions, key=lambda position: float(probs_LV[position - shift].max()))
            canvas[best] = int(probs_LV[best - shift].argmax())
    return canvas


@pytest.mark.parametrize("name", MODELS)
def test_turns_decode_as_a_plain_loop_with_and_without_a_cache(name: str, request: pytest.FixtureRequest) -> None:
    model: Transformer = request.getfixturevalue(name)
    cached = generate(model, PROMPTS, settings(), segment_starts=STARTS)
    uncached = generate(model, PROMPTS, settings(cache="none"), segment_starts=STARTS)
    for prompt, starts, ours, other in zip(PROMPTS, STARTS, cached, uncached, strict=True):
        assert [*prompt, *ours.token_ids] == decode_plainly(model, [*prompt, *[MASK] * 7], starts)
        assert (ours.token_ids, ours.step_map) == (other.token_ids, other.step_map)
        assert ours.logprobs == pytest.approx(other.logprobs, abs=1e-12)
    assert any(ours != text for ours, text in zip(cached, generate(model, PROMPTS, settings()), strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_infill_decodes_blocks_of_the_text(name: str, request: pytest.FixtureRequest) -> None:
    model: Transformer = request.getfixturevalue(name)
    canvas = [1, MASK, 2, MASK, 3, 4, MASK, MASK, 5, 6, 7, 8, MASK, 9, MASK]
    [done] = infill(model, [canvas], settings())
    assert list(done.token_ids) == decode_plainly(model, canvas)
    assert [sorted(done.step_map[start : start + 2]) for start in (0, 2, 4)] == [[1, 2], [3, 4], [5, 6]]
    # As many forwards for each block that has masked positions.
    [quick] = infill(model, [canvas], settings(denoising_steps=1))
    assert quick.step_map == (1, 1, 2, 2, 3, 3)
    [spread] = infill(model, [canvas], settings(steps=4))
    assert [len(set(spread.step_map[start : start + 2])) for start in (0, 2, 4)] == [2, 1, 1]
    with pytest.raises(ValueError, match=r"canvas 0: steps = 2 .* 3 \(block_length = 4, 6 tokens\)"):
        infill(model, [canvas], settings(steps=2))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("cache", ["none", "block"])
@torch.inference_mode()
def test_logits_of_the_second_turn_are_those_of_training(name: str, cache: str, request: pytest.FixtureRequest) -> None:
    """Two turns of 9 and 13 tokens in one row; the end of each block is masked, and decoding begins there."""
    model: Transformer = request.getfixturevalue(name)
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
        active = ActiveRequest(prepare_request(resolved, prompt, options=RequestOptions(segment_starts=(9,))))
        pages = PagedCache(model.config, 1, 40, "cpu", torch.float64) if active.uses_cache else None
        runner, active.pages = ModelRunner(model, pages), [[0]]
        active.prepare_step()
        expected = torch.stack([logits_of[int(token)] for token in tokens_BL[0, len(prompt) : start + BLOCK]])
        logits_NV = runner([schedule_step(active)])
        torch.testing.assert_close(logits_NV, expected, rtol=1e-10, atol=1e-10)


def test_whole_blocks_end_where_training_fills(blocks: Transformer) -> None:
    """SDAR decodes the last block to its end, counted from the last answer."""
    resolved = resolve_settings(settings(remasking_strategy="low_confidence_static", max_new_tokens=5), blocks.config)
    lengths = [
        len(prepare_request(resolved, [1] * 9, options=RequestOptions(segment_starts=starts)).canvas_L)
        for starts in ((), (3,), (9,), (2, 7))
    ]
    assert lengths == [16, 15, 17, 15]


def test_wrong_segments_are_refused(blocks: Transformer) -> None:
    for starts in ((0,), (3, 3), (10,)):
        with pytest.raises(ValueError, match=r"prompt 0: segment_starts = .* must ascend from 1 at least to 9"):
            generate(blocks, PROMPTS[:1], settings(), segment_starts=[starts])
    with pytest.raises(ValueError, match=r"segment_starts need attention = \"block_causal\".*bidirectional"):
        generate(blocks, PROMPTS[:1], settings(attention="bidirectional"), segment_starts=[(3,)])


@pytest.mark.parametrize("mask_token_id", [None, MASK])
def test_autoregressive_decoding_is_a_plain_loop(like: Like, mask_token_id: int | None) -> None:
    model = like(block_length=1, logit_alignment="shifted", mask_token_id=mask_token_id)
    for prompt, result in zip(PROMPTS, generate(model, PROMPTS, settings()), strict=True):
        text, logprobs = list(prompt), []
        for _ in range(7):
            with torch.no_grad():
                logits_V = model(torch.tensor([text]), pattern=Causal())[0, -1]
            if mask_token_id is not None:
                logits_V[mask_token_id] = float("-inf")
            text.append(int(logits_V.argmax()))
            logprobs.append(float(logits_V.log_softmax(0).max()))
        assert [*prompt, *result.token_ids] == text
        assert result.step_map == tuple(range(1, 8))
        assert result.logprobs == pytest.approx(logprobs, abs=1e-5)


def test_a_model_without_mask_token_only_goes_left_to_right(autoregressive: Transformer, like: Like) -> None:
    """Anything else would show it the placeholders of what is to come."""
    with pytest.raises(ValueError, match="no mask token"):
        infill(autoregressive, [[1, MASK, 2]], settings())
    for values in ({"block_length": 4}, {"attention": "bidirectional"}):
        with pytest.raises(ValueError, match=r"no mask token.*remove generation.attention and generation.block_length"):
            generate(autoregressive, [[1]], settings(**values))
    for changes in ({"block_length": 4}, {"logit_alignment": "same_position"}):
        other = like(**{"block_length": 1, "logit_alignment": "shifted", **changes, "mask_token_id": None})
        with pytest.raises(ValueError, match="mask_token_id"):
            generate(other, [[1]], settings())


def test_the_first_token_of_a_text_cannot_be_predicted_by_shifted_outputs(
    autoregressive: Transformer, shifted_blocks: Transformer, like: Like
) -> None:
    for model in (autoregressive, shifted_blocks, like(logit_alignment="shifted")):
        with pytest.raises(ValueError, match=r"prompt 1: .*first token"):
            generate(model, [[1], []], settings())
    with pytest.raises(ValueError, match=r"canvas 0: .*first token"):
        infill(shifted_blocks, [[MASK, 1]], settings())
