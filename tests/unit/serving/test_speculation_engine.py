"""An engine with speculation: texts are those of next-token decoding, among others, with adapters and images, and of a
model that is divided over processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from config.generation import GenerationConfig
from diffusionlm.checkpoints.adapter_files import read_adapter
from diffusionlm.inference.generate import generate
from diffusionlm.inference.images import expand_images
from diffusionlm.inference.requests import RequestOptions
from diffusionlm.serving.engine import Engine
from diffusionlm.vision.images import EncodedImage
from tests.conftest import MakeModel
from tests.image_requests import PROCESSOR, make_vision_model, paint, write_prompt
from tests.unit.serving.test_adapters import write_adapter

PLAIN = GenerationConfig(max_new_tokens=14, stop_token_ids=(), block_length=1, temperature=0.8)
CONFIGS = [PLAIN] + [
    GenerationConfig(max_new_tokens=14, stop_token_ids=(), temperature=0.8, speculation=kind, draft_length=length)
    for kind, length in (("two_forwards", 3), ("one_forward", 2), ("one_forward", 5))
]
REJECTING = [config.model_copy(update={"acceptance": "rejection"}) for config in CONFIGS[1:]]
"""Their texts are those of the same requests alone."""


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_texts_of_adapters_are_those_of_next_tokens(tiny_model: MakeModel, tmp_path: Path, num_ranks: int) -> None:
    keys: dict[str, Any] = {"vocab_size": 19, "mask_token_id": 18, "block_length": 4, "clean_alignment": "shifted"}
    model, adapted = (tiny_model(torch.float64, **keys).eval() for _ in range(2))
    write_adapter(adapted, tmp_path / "a", 1, {"rank": 2})
    write_adapter(tiny_model(torch.float64, **keys), tmp_path / "drafts", 2, {"rank": 3, "positions": "masks"})
    adapters = {name: read_adapter(model, tmp_path / name) for name in ("a", "drafts")}
    own_models = {None: model, "a": adapted, "drafts": model}
    cases = [(own, config, seed) for seed in range(4) for own in own_models for config in CONFIGS]
    # Texts of rejection depend on the drafts.
    cases += [(own, config, seed) for seed in range(4) for own in (None, "a") for config in REJECTING]
    limits: dict[str, Any] = {"cache_memory": 1 << 16, "page_size": 4, "max_num_batched_tokens": 9}
    prompt = [*range(11)]
    with Engine(model, adapters=adapters, tensor_parallel=num_ranks, **limits) as engine:
        requests = [engine.submit(prompt, config, seed, RequestOptions(adapter=own)) for own, config, seed in cases]
        answers = [request.result(60) for request in requests]
    by_adapter = zip(answers[: len(CONFIGS)], answers[2 * len(CONFIGS) : 3 * len(CONFIGS)], strict=True)
    assert any(plain.step_map != drafted.step_map for plain, drafted in by_adapter), "drafts differ"
    for (own, config, seed), ours in zip(cases, answers, strict=True):
        [expected] = generate(own_models[own], [prompt], config if config in REJECTING else PLAIN, [seed])
        assert ours.token_ids == expected.token_ids
        assert ours.logprobs == pytest.approx(expected.logprobs, abs=1e-9)


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_texts_after_images_are_those_of_next_tokens(num_ranks: int) -> None:
    model = make_vision_model(block_length=4, clean_alignment="shifted", num_key_value_heads=2)
    parts: list[list[int | EncodedImage]] = [[1, 2, paint(4, 4), 3], [5, 6, 7, paint(2, 5), 8, paint(2, 5, 1)]]
    texts, images = zip(*(write_prompt(*own) for own in parts), strict=True)
    limits: dict[str, Any] = {"cache_memory": 1 << 20, "page_size": 4, "max_num_batched_tokens": 7}
    with Engine(model, tensor_parallel=num_ranks, **limits) as engine:
        for number, expected in enumerate(generate(model, texts, PLAIN, images=images, processor=PROCESSOR)):
            text = expand_images(texts[number], images[number], PROCESSOR, model.config)
            requests = [engine.submit(text.token_ids, config, number, text.options) for config in CONFIGS]
            for request in requests:
                assert request.result(60).token_ids == expected.token_ids
                assert request.result(60).logprobs == pytest.approx(expected.logprobs, abs=1e-9)
