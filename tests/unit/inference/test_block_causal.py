"""Decoding of block diffusion and autoregressive models: blocks in order, shifted outputs, no mask token.

The models are those of the other decoding tests, in fp64; 22 is the mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from config.generation import GenerationConfig
from diffusionlm.inference.generate import DecodingStep, Generation, generate, infill
from diffusionlm.models.patterns import Bidirectional, BlockCausal, Causal
from diffusionlm.models.transformer import Transformer

MASK, VOCAB = 22, 23
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11, 12], [13, 14, 15, 16]]


def settings(**values: Any) -> GenerationConfig:
    return GenerationConfig.model_validate({"max_new_tokens": 12, "stop_token_ids": (), **values})


@pytest.fixture(scope="module")
def like(model: Transformer) -> Callable[..., Transformer]:
    """The same weights under another config."""

    def make(**changes: Any) -> Transformer:
        other = Transformer(model.config.model_copy(update=changes))
        other.load_state_dict(model.state_dict())
        return other.double().eval()

    return make


@pytest.fixture(scope="module")
def autoregressive(like: Callable[..., Transformer]) -> Transformer:
    return like(block_length=1, logit_alignment="shifted", mask_token_id=None)


@torch.no_grad()
def block_by_block(model: Transformer, canvas: list[int], masked_positions: list[int], size: int) -> list[int]:
    """Greedy, the most confident position of the first open block at each forward, on the text up to that block's
    end."""
    canvas, shift = list(canvas), int(model.config.logit_alignment == "shifted")
    for block in sorted({position // size for position in masked_positions}):
        open_positions = [position for position in masked_positions if position // size == block]
        while open_positions:
            text = canvas[: (block + 1) * size]
            logits_LV = model(torch.tensor([text]), pattern=BlockCausal(size))[0]
            logits_LV[:, MASK] = float("-inf")
            probs_LV = logits_LV.softmax(dim=1)
            best = max(open_positions, key=lambda position: float(probs_LV[position - shift].max()))
            canvas[best] = int(probs_LV[best - shift].argmax())
            open_positions.remove(best)
    return canvas


@pytest.mark.parametrize("which", ["blocks", "shifted_blocks"])
@pytest.mark.parametrize("new", [12, 9])
def test_blocks_follow_each_other(which: str, new: int, request: pytest.FixtureRequest) -> None:
    """Prompts that end inside a block, at its end and before it; the last block may be cut."""
    model: Transformer = request.getfixturevalue(which)
    done = generate(model, PROMPTS, settings(max_new_tokens=new))
    for prompt, result in zip(PROMPTS, done, strict=True):
        canvas = [*prompt, *[MASK] * new]
        expected = block_by_block(model, canvas, list(range(len(prompt), len(canvas))), 4)
        assert [*prompt, *result.token_ids] == expected
        assert result.num_forwards == new and len(result.token_ids) == new
        ends = [max(result.step_map[: max(0, end - len(prompt))], default=0) for end in range(4, len(canvas), 4)]
        assert ends == [max(0, end - len(prompt)) for end in range(4, len(canvas), 4)], "left to right by block"


@pytest.mark.parametrize("which", ["blocks", "shifted_blocks"])
@pytest.mark.parametrize(
    "values", [{"temperature": 1.0}, pytest.param({"remasking_strategy": "threshold"}, marks=pytest.mark.slow)]
)
def test_a_longer_canvas_does_not_change_the_first_blocks(
    which: str, values: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    model: Transformer = request.getfixturevalue(which)
    for prompt in PROMPTS:
        long = generate(model, [prompt], settings(max_new_tokens=20, **values), [5])[0]
        for new in (4, 8, 12):
            whole = (len(prompt) + new) // 4 * 4 - len(prompt)  # the last block is another one if it is cut
            short = generate(model, [prompt], settings(max_new_tokens=new, **values), [5])[0]
            assert short.token_ids[:whole] == long.token_ids[:whole]
            assert short.step_map[:whole] == long.step_map[:whole]


def test_attention_and_block_length_are_the_models_unless_given(
    model: Transformer, blocks: Transformer, like: Callable[..., Transformer]
) -> None:
    [default] = generate(blocks, [[1, 2]], settings())
    assert_same(default, generate(model, [[1, 2]], settings(attention="block_causal", block_length=4))[0])
    [longer] = generate(blocks, [[1, 2]], settings(block_length=6))
    assert_same(longer, generate(like(block_length=6), [[1, 2]], settings())[0])
    [bidirectional] = generate(blocks, [[1, 2]], settings(attention="bidirectional"))
    assert_same(bidirectional, generate(model, [[1, 2]], settings())[0])
    assert bidirectional.token_ids != default.token_ids
    with pytest.raises(ValueError, match=r"block_causal.*needs block_length"):
        generate(model, [[1, 2]], settings(attention="block_causal"))


def test_a_request_does_not_depend_on_its_batch(blocks: Transformer, autoregressive: Transformer) -> None:
    for model in (blocks, autoregressive):
        config = settings(temperature=1.0, top_p=0.9)
        together = generate(model, PROMPTS, config, [3, 1, 4, 1])
        for done, prompt, seed in zip(together, PROMPTS, [3, 1, 4, 1], strict=True):
            assert_same(done, generate(model, [prompt], config, [seed])[0])


def assert_same(a: Generation, b: Generation) -> None:
    assert (a.token_ids, a.step_map, a.num_forwards) == (b.token_ids, b.step_map, b.num_forwards)
    assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)


@pytest.mark.parametrize("which", ["blocks", "shifted_blocks"])
def test_infill_decodes_blocks_of_the_text(which: str, request: pytest.FixtureRequest) -> None:
    model: Transformer = request.getfixturevalue(which)
    canvas = [1, MASK, 2, MASK, 3, 4, MASK, MASK, 5, 6, 7, 8, MASK, 9, MASK]
    masked_positions = [index for index, token in enumerate(canvas) if token == MASK]
    [done] = infill(model, [canvas], settings())
    assert list(done.token_ids) == block_by_block(model, canvas, masked_positions, 4)
    assert [sorted(done.step_map[start : start + 2]) for start in (0, 2, 4)] == [[1, 2], [3, 4], [5, 6]]
    # What comes after a block does not reach it.
    [other] = infill(model, [[*canvas[:8], 11, 12, 13, 14]], settings())
    assert other.token_ids[:8] == done.token_ids[:8]
    # As many forwards for each block that has masked_positions.
    [quick] = infill(model, [canvas], settings(denoising_steps=1))
    assert quick.step_map == (1, 1, 2, 2, 3, 3)
    [spread] = infill(model, [canvas], settings(steps=4))
    assert [len(set(spread.step_map[start : start + 2])) for start in (0, 2, 4)] == [2, 1, 1]
    with pytest.raises(ValueError, match=r"canvas 0: steps = 2 .* 3 \(block_length = 4, 6 tokens\)"):
        infill(model, [canvas], settings(steps=2))


def test_shifted_bidirectional_reads_the_output_before(like: Callable[..., Transformer]) -> None:
    """Dream: the whole canvas is visible, and output i - 1 predicts token i."""
    model = like(logit_alignment="shifted")
    canvas = [1, MASK, 2, MASK, 3]
    [done] = infill(model, [canvas], settings(denoising_steps=1))
    with torch.no_grad():
        logits_LV = model(torch.tensor([canvas]), pattern=Bidirectional())[0]
    logits_LV[:, MASK] = float("-inf")
    assert done.token_ids == (1, int(logits_LV[0].argmax()), 2, int(logits_LV[2].argmax()), 3)
    assert done.logprobs == pytest.approx([float(logits_LV[i].log_softmax(0).max()) for i in (0, 2)], abs=1e-5)


@pytest.mark.parametrize("mask_token_id", [None, MASK])
def test_autoregressive_decoding_is_a_plain_loop(like: Callable[..., Transformer], mask_token_id: int | None) -> None:
    model = like(block_length=1, logit_alignment="shifted", mask_token_id=mask_token_id)
    decoding_steps: list[DecodingStep] = []
    done = generate(model, PROMPTS, settings(), on_step=decoding_steps.append)
    for prompt, result in zip(PROMPTS, done, strict=True):
        text, logprobs = list(prompt), []
        for _ in range(12):
            with torch.no_grad():
                logits_V = model(torch.tensor([text]), pattern=Causal())[0, -1]
            if mask_token_id is not None:
                logits_V[mask_token_id] = float("-inf")
            text.append(int(logits_V.argmax()))
            logprobs.append(float(logits_V.log_softmax(0).max()))
        assert [*prompt, *result.token_ids] == text
        assert result.step_map == tuple(range(1, 13))
        assert result.logprobs == pytest.approx(logprobs, abs=1e-5)
    for step in decoding_steps:
        for canvas, prompt in zip(step.canvases, PROMPTS, strict=True):
            assert list(canvas.is_masked) == [False] * (len(prompt) + step.num_forwards) + [True] * (
                12 - step.num_forwards
            )


def test_a_stop_token_ends_autoregressive_text(autoregressive: Transformer) -> None:
    [whole] = generate(autoregressive, [[1, 2, 3]], settings())
    stop = whole.token_ids[4]
    first = whole.token_ids.index(stop)
    [done] = generate(autoregressive, [[1, 2, 3]], settings(stop_token_ids=(stop,)))
    assert (done.token_ids, done.finish_reason, done.num_forwards) == (whole.token_ids[:first], "stop", first + 1)


def test_a_model_without_mask_token_only_goes_left_to_right(
    autoregressive: Transformer, like: Callable[..., Transformer]
) -> None:
    """Anything else would show it the placeholders of what is to come."""
    with pytest.raises(ValueError, match="no mask token"):
        infill(autoregressive, [[1, MASK, 2]], settings())
    assert_same(
        generate(autoregressive, [[1]], settings(attention="block_causal", block_length=1))[0],
        generate(autoregressive, [[1]], settings())[0],
    )
    for values in (
        {"block_length": 4},
        {"attention": "bidirectional"},
        {"attention": "block_causal", "block_length": 12},
    ):
        with pytest.raises(ValueError, match=r"no mask token.*remove generation.attention and generation.block_length"):
            generate(autoregressive, [[1]], settings(**values))
    for changes in ({"block_length": 4}, {"block_length": None}, {"logit_alignment": "same_position"}):
        other = like(**{"block_length": 1, "logit_alignment": "shifted", **changes, "mask_token_id": None})
        with pytest.raises(ValueError, match="mask_token_id"):
            generate(other, [[1]], settings())


def test_the_first_token_of_a_text_cannot_be_predicted_by_shifted_outputs(
    autoregressive: Transformer, shifted_blocks: Transformer, like: Callable[..., Transformer]
) -> None:
    for model in (autoregressive, shifted_blocks, like(logit_alignment="shifted")):
        with pytest.raises(ValueError, match=r"prompt 1: .*first token"):
            generate(model, [[1], []], settings())
    with pytest.raises(ValueError, match=r"canvas 0: .*first token"):
        infill(shifted_blocks, [[MASK, 1]], settings())
