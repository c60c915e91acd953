"""Places and positions of images in a text against transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from diffusionlm.vision.images import (
    EncodedImage,
    Grid,
    PlacedImage,
    compute_mrope_positions,
    expand_placeholders,
)

IMAGE = 9
MODEL: Any = Qwen3VLModel
TEXTS: dict[str, tuple[list[int], list[Grid]]] = {
    "text": ([1, 2, 3], []),
    "image in the middle": ([1, 2, IMAGE, 3, 4], [(2, 3)]),
    "image first": ([IMAGE, 3, 4], [(3, 2)]),
    "image last": ([1, IMAGE], [(1, 4)]),
    "image alone": ([IMAGE], [(5, 1)]),
    "text, image, text, two images": ([1, IMAGE, 2, 3, IMAGE, 4, IMAGE, 5], [(2, 2), (1, 7), (6, 3)]),
    "one token": ([1, IMAGE, 2], [(1, 1)]),
}


def make_images(grids: list[Grid]) -> list[EncodedImage]:
    return [EncodedImage(b"", grid, bytes([number])) for number, grid in enumerate(grids)]


@pytest.mark.parametrize("name", TEXTS)
def test_positions_are_those_of_transformers(name: str) -> None:
    tokens, grids = TEXTS[name]
    images = make_images(grids)
    expanded, placed = expand_placeholders(tokens, images, IMAGE)
    assert [image.image for image in placed] == images
    for image in placed:
        assert expanded[image.start : image.end] == [IMAGE] * image.image.num_tokens
    assert [token for token in expanded if token != IMAGE] == [token for token in tokens if token != IMAGE]

    model = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2)))
    model.get_vision_position_ids = lambda *args, **options: MODEL.get_vision_position_ids(model, *args, **options)
    input_ids = torch.tensor([expanded])
    expected, _ = MODEL.get_rope_index(
        model,
        input_ids,
        mm_token_type_ids=(input_ids == IMAGE).int(),
        image_grid_thw=torch.tensor([[1, 2 * rows, 2 * columns] for rows, columns in grids]).reshape(-1, 3),
    )
    positions = compute_mrope_positions(len(expanded), placed)
    assert positions.dtype == np.int64
    np.testing.assert_array_equal(positions, expected[:, 0].numpy())


def test_positions_of_images_that_touch() -> None:
    """transformers takes neighbors without text between them for one image; chats have <|vision_end|> there."""
    images = [PlacedImage(1, EncodedImage(b"", (1, 2), b"a")), PlacedImage(3, EncodedImage(b"", (2, 1), b"b"))]
    expected = [[0, 1, 1, 3, 3, 5], [0, 1, 1, 3, 4, 5], [0, 1, 2, 3, 3, 5]]
    assert compute_mrope_positions(6, images).tolist() == expected


def test_placeholders_without_images_are_refused() -> None:
    problem = r"^the text has 2 image placeholders \(token 9\) for 1 images: pass images as content parts"
    with pytest.raises(ValueError, match=problem):
        expand_placeholders([1, IMAGE, 2, IMAGE], make_images([(1, 1)]), IMAGE)
    with pytest.raises(ValueError, match="has 0 image placeholders"):
        expand_placeholders([1], make_images([(1, 1)]), IMAGE)


def test_move() -> None:
    placed = PlacedImage(3, EncodedImage(b"", (2, 3), b"a", "here"))
    assert (placed.start, placed.end, placed.image.num_tokens) == (3, 9, 6)
    assert placed.move(4) == PlacedImage(7, EncodedImage(b"", (2, 3), b"a", "elsewhere"))
