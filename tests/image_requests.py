"""A tiny random model that reads images, images for it, and requests with images for tests of the decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from config.generation import GenerationConfig
from diffusionlm.inference.images import expand_images
from diffusionlm.inference.request_builder import prepare_request
from diffusionlm.inference.requests import PreparedRequest, RequestOptions
from diffusionlm.inference.settings import resolve_settings
from diffusionlm.models.init import init_weights
from diffusionlm.models.patterns import AttentionPattern
from diffusionlm.models.transformer import Transformer
from diffusionlm.models.vision.inputs import ImageInputs
from diffusionlm.vision.batches import build_image_inputs
from diffusionlm.vision.images import EncodedImage, PlacedImage, compute_mrope_positions
from diffusionlm.vision.processor import ImageProcessor
from tests.qwen3_vl_oracle import CONFIG, END, IMAGE, START, VISION

MASK = CONFIG.mask_token_id or 0
PROCESSOR = ImageProcessor.for_model(VISION, min_pixels=64, max_pixels=4096)


def make_vision_model(dtype: torch.dtype = torch.float64, **changes: Any) -> Transformer:
    """A model with `CONFIG` and these changes; no parameter is at its default."""
    model = Transformer(CONFIG.model_copy(update=changes))
    init_weights(model, 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.to(dtype).eval()


@cache
def paint(rows: int, columns: int, seed: int = 0) -> EncodedImage:
    """An image of random pixels, of so many positions."""
    size = (rows * VISION.pixels_per_token, columns * VISION.pixels_per_token, 3)
    pixels = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    return PROCESSOR.read_image(Image.fromarray(pixels))


def write_prompt(*parts: int | EncodedImage) -> tuple[list[int], list[EncodedImage]]:
    """Token ids with a placeholder for each image, and the images."""
    tokens = [token for part in parts for token in ([part] if isinstance(part, int) else [START, IMAGE, END])]
    return tokens, [part for part in parts if isinstance(part, EncodedImage)]


def place(model: Transformer, *parts: int | EncodedImage) -> tuple[list[int], RequestOptions]:
    """The token ids of a request with images, and its options."""
    text = expand_images(*write_prompt(*parts), PROCESSOR, model.config)
    return [*text.token_ids], text.options


@torch.inference_mode()
def compute_logits(
    model: Transformer, token_ids: Sequence[int], images: Sequence[PlacedImage], pattern: AttentionPattern
) -> Tensor:
    """Logits [L, V] of a forward of the whole text."""
    inputs = build_image_inputs([images], len(token_ids), PROCESSOR.compute_patches)
    return model(torch.tensor([[*token_ids]]), pattern=pattern, images=inputs)[0]


@torch.inference_mode()
def compute_masked_logits(
    model: Transformer, token_ids: Sequence[int], images: Sequence[PlacedImage], pattern: AttentionPattern
) -> Tensor:
    """Logits [L, V] of a text at the position ids of another one with images, such as masks in their place."""
    inputs = ImageInputs.none(torch.arange(len(token_ids)))
    positions_3BL = torch.from_numpy(compute_mrope_positions(len(token_ids), images))[:, None]
    inputs = replace(inputs, positions_3BS=positions_3BL, features_EFD=torch.zeros(1, 0, CONFIG.hidden_size))
    return model(torch.tensor([[*token_ids]]), pattern=pattern, images=inputs)[0]


def make_image_jobs(
    model: Transformer, options: Sequence[dict[str, Any]], count: int, seed: int = 0
) -> list[PreparedRequest]:
    """Prompts of words and up to three images, some of which several prompts have; every fifth one is a canvas."""
    rng = np.random.default_rng(seed)
    settings = [resolve_settings(GenerationConfig(max_new_tokens=10, **values), model.config) for values in options]
    images = [paint(2, 3), paint(2, 3, 1), paint(1, 1), paint(4, 2)]
    jobs = []
    for index in range(count):
        parts: list[int | EncodedImage] = [1, 2, 3]
        for _ in range(index % 4):
            parts += [images[int(rng.integers(len(images)))], *rng.integers(0, 200, int(rng.integers(0, 6))).tolist()]
        is_canvas = index % 5 == 4
        if is_canvas:
            parts = [7, MASK, MASK, *parts, MASK, 8, MASK, 9]
        token_ids, placed = place(model, *parts)
        own = RequestOptions(is_infill=is_canvas, images=placed.images, processor=placed.processor)
        jobs.append(prepare_request(settings[index % len(settings)], token_ids, index, own))
    return jobs
