"""An engine with images: the answers of `generate`, also of a model that is divided over processes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from config.generation import GenerationConfig
from diffusionlm.inference.generate import generate
from diffusionlm.inference.images import expand_images
from diffusionlm.serving.engine import Engine
from diffusionlm.vision.images import EncodedImage
from tests.image_requests import PROCESSOR, make_vision_model, paint, write_prompt

CONFIG = GenerationConfig(max_new_tokens=9, stop_token_ids=())
PROMPTS: list[list[int | EncodedImage]] = [
    [1, 2, paint(4, 4), 3],
    [1, 2, paint(4, 4), 3, 4, 5, 6, 7, paint(1, 3)],
    [1, 2, paint(4, 4, 1), 3],
    [5, 6],
]


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("budget", [7, 200])
def test_answers_are_those_of_generate(num_ranks: int, budget: int) -> None:
    """Texts with images share pages, and are read in parts."""
    model = make_vision_model(block_length=4, num_key_value_heads=2)
    texts, images = zip(*(write_prompt(*parts) for parts in PROMPTS), strict=True)
    expected = generate(model, texts, CONFIG, images=images, processor=PROCESSOR)
    limits: dict[str, Any] = {"cache_memory": 1 << 20, "page_size": 4, "max_num_batched_tokens": budget}
    with Engine(model, tensor_parallel=num_ranks, **limits) as engine, ThreadPoolExecutor(len(PROMPTS)) as threads:

        def answer(number: int) -> tuple[tuple[int, ...], tuple[float, ...], int]:
            text = expand_images(texts[number], images[number], PROCESSOR, model.config)
            request = engine.submit(text.token_ids, CONFIG, number, text.options)
            result = request.result(60)
            return result.token_ids, result.logprobs, request.state.num_cached_tokens

        first, again = ([*threads.map(answer, range(len(PROMPTS)))] for _ in range(2))
    for ours in (first, again):
        assert [tokens for tokens, _, _ in ours] == [item.token_ids for item in expected]
        for (_, logprobs, _), item in zip(ours, expected, strict=True):
            assert logprobs == pytest.approx(item.logprobs, abs=1e-9)
    assert [num_cached for _, _, num_cached in again] == [20, 28, 20, 0]


def test_an_image_that_is_gone_ends_its_request_alone(tmp_path: Path) -> None:
    model = make_vision_model(block_length=4)
    file = tmp_path / "image.png"
    file.write_bytes(paint(2, 3).content)  # type: ignore[arg-type]
    text = expand_images(*write_prompt(*PROMPTS[0]), PROCESSOR, model.config)
    gone = expand_images(write_prompt(1, paint(2, 3))[0], [PROCESSOR.read_image(file)], PROCESSOR, model.config)
    file.unlink()
    with Engine(model, cache_memory=1 << 18) as engine:
        requests = [engine.submit(own.token_ids, CONFIG, 0, own.options) for own in (gone, text)]
        with pytest.raises(ValueError, match=r"image\.png: the image cannot be read"):
            requests[0].result(60)
        assert len(requests[1].result(60).token_ids) == 9 and engine.is_alive
