"""Small batches of texts with images, without image files."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from config.model import ModelConfig
from diffusionlm.diffusion.noised_batch import CleanBatch
from diffusionlm.models.init import init_weights
from diffusionlm.models.transformer import Transformer
from diffusionlm.models.vision.inputs import Grid, ImageInputs
from diffusionlm.vision.batches import build_image_inputs
from diffusionlm.vision.images import EncodedImage, PlacedImage
from tests.qwen3_vl_oracle import CONFIG, END, IMAGE, START, VISION

MASK, PAD = 294, 299
SMALL = CONFIG.model_copy(
    update={
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 1,
        "head_dim": 32,
        "num_key_value_heads": 1,
        "vision": VISION.model_copy(update={"hidden_size": 16, "intermediate_size": 16, "depth": 3}),
    }
)
LENGTH = 28


def make_model(config: ModelConfig = SMALL, seed: int = 0) -> Transformer:
    """A model whose parameters all have an effect: those that start at zero do not stay so."""
    model = Transformer(config)
    init_weights(model, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def make_image(number: int, grid: Grid = (2, 2)) -> EncodedImage:
    return EncodedImage(b"", grid, bytes([number]) * 32)


def compute_patches(image: EncodedImage) -> NDArray[np.float32]:
    """Random patches that depend on the digest."""
    rng = np.random.default_rng(image.digest[0])
    return rng.standard_normal((4 * image.num_tokens, 3 * VISION.patch_size**2), dtype=np.float32)


@dataclass(frozen=True)
class Turn:
    """A document of a row: a question, perhaps with an image, and an answer. The answer is learned."""

    question: tuple[int, ...]
    answer: tuple[int, ...]
    image: EncodedImage | None = None


def build_batch(rows: list[list[Turn]], length: int = LENGTH) -> CleanBatch:
    """Packed rows; each document is one segment."""
    shape = (len(rows), length)
    tokens_BL, targets_BL = torch.full(shape, PAD), torch.zeros(shape, dtype=torch.bool)
    numbers_BL, placed = torch.full(shape, -1), []
    for row, turns in enumerate(rows):
        start, placed_in_row = 0, []
        for number, turn in enumerate(turns):
            prompt = list(turn.question)
            if turn.image is not None:
                placed_in_row.append(PlacedImage(start + 2, turn.image))
                prompt = [prompt[0], START, *[IMAGE] * turn.image.num_tokens, END, *prompt[1:]]
            end = start + len(prompt) + len(turn.answer)
            assert end <= length
            tokens_BL[row, start:end] = torch.tensor([*prompt, *turn.answer])
            targets_BL[row, start + len(prompt) : end] = True
            numbers_BL[row, start:end] = number
            start = end
        placed.append(placed_in_row)
    images = build_image_inputs(placed, length, compute_patches)
    return CleanBatch(tokens_BL, targets_BL, numbers_BL, numbers_BL, torch.zeros_like(targets_BL), images=images)


def build_example() -> CleanBatch:
    """Rows with two images, with one behind a text, with an image of another row, and without one."""
    first, second, third = make_image(1), make_image(2, (1, 3)), make_image(3, (3, 1))
    return build_batch(
        [
            [Turn((5, 6), (20, 21, 22, 23), first), Turn((7, 8, 9), (24, 25, 26), second)],
            [Turn((10, 11), (27, 28, 29)), Turn((12, 13), (30, 31, 32, 33), third)],
            [Turn((14, 15, 16), (34, 35, 36), first), Turn((4,), (37, 38, 39, 40))],
            [Turn((17, 18, 19), (41, 42, 43)), Turn((3, 2), (44, 45))],
        ]
    )


def swap_image(images: ImageInputs, old: int, new: int) -> ImageInputs:
    """The same with the patches of another image of the same grid."""
    assert images.patches_PC is not None
    index = images.digests.index(make_image(old).digest)
    starts = np.cumsum([0, *(4 * rows * columns for rows, columns in images.grids)])
    patches_PC = images.patches_PC.clone()
    patches_PC[starts[index] : starts[index + 1]] = torch.from_numpy(
        compute_patches(make_image(new, images.grids[index]))
    )
    return replace(images, patches_PC=patches_PC)
