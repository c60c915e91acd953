"""Images of requests: their places in a text, their features, and what a forward needs of them.

Features are computed for one image at a time, so they do not depend on what is decoded beside it, when a forward first
reads a part of the image: never if its keys and values are in the prefix cache. Attention goes by the index of a
position, rotary embeddings by its M-RoPE position ids.

Shapes: L positions of a text, Q inputs of a forward, M of them image positions, F positions of an image, E features of
a position, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from config.model import ModelConfig
from diffusionlm.inference.healing import HealedText
from diffusionlm.inference.requests import RequestOptions
from diffusionlm.models.tensors import copy_to_device
from diffusionlm.models.transformer import Transformer
from diffusionlm.models.varlen import SequenceSlice
from diffusionlm.models.vision.inputs import ImageInputs
from diffusionlm.vision.images import EncodedImage, expand_placeholders
from diffusionlm.vision.processor import ImageProcessor, RawImage

ImageSource: TypeAlias = "RawImage | EncodedImage | str"
"""An image file, its path, a Pillow image, or what a processor has read of one."""


@dataclass(frozen=True)
class TextImages:
    """Images of a text in a forward."""

    positions_3L: NDArray[np.int64]
    """Position ids of the text in time, rows and columns."""
    features: tuple[tuple[int, Tensor], ...] = ()
    """First position of each image that the forward reads, and its features, [E, F, D]."""

    def select(self, start: int, end: int) -> list[tuple[int, Tensor]]:
        """The parts of the images between two positions, each with its first position."""
        limits = [(max(start, first), min(end, first + part.shape[1])) for first, part in self.features]
        return [
            (part_start, features_EFD[:, part_start - first : part_end - first])
            for (part_start, part_end), (first, features_EFD) in zip(limits, self.features, strict=True)
            if part_start < part_end
        ]

    def has_text_alone(self, start: int, end: int) -> bool:
        """Whether all position ids between two positions follow each other in time, rows and columns, as in a text."""
        offsets_3Q = self.positions_3L[:, start:end] - np.arange(start, end)
        return not self.select(start, end) and bool((offsets_3Q == offsets_3Q[0, 0]).all())

    def restrict(self, start: int, end: int) -> TextImages:
        """What a forward needs that reads these positions, for another process: features are on the CPU."""
        positions_3L = np.zeros_like(self.positions_3L[:, :end])
        positions_3L[:, start:] = self.positions_3L[:, start:end]
        return TextImages(positions_3L, tuple((first, part.cpu()) for first, part in self.select(start, end)))


def join_images(
    model: Transformer, sequences: Sequence[SequenceSlice], images: Sequence[TextImages | None]
) -> ImageInputs | None:
    """The images of the inputs of a forward; None: no text has any.

    Args:
        images: those of the text of each sequence.
    """
    if all(own is None for own in images):
        return None
    device, vision, first_input, num_rows = model.lm_head.weight.device, model.config.vision, 0, 0
    assert vision is not None, "checked before"
    features = [torch.empty(1 + len(vision.deepstack_visual_indexes), 0, model.config.hidden_size, device=device)]
    positions, indices, rows = [], [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for sequence, own in zip(sequences, images, strict=True):
        indices_Q = sequence.input_positions
        positions.append(np.tile(indices_Q, (3, 1)) if own is None else own.positions_3L[:, indices_Q])
        for first, features_EFD in own.features if own is not None else ():
            inputs_M = np.flatnonzero((indices_Q >= first) & (indices_Q < first + features_EFD.shape[1]))
            if len(inputs_M):
                indices.append(first_input + inputs_M)
                rows.append(num_rows + indices_Q[inputs_M] - first)
                features.append(features_EFD.to(device))
                num_rows += features_EFD.shape[1]
        first_input += len(indices_Q)
    packed = torch.from_numpy(np.concatenate([*np.concatenate(positions, axis=1), *indices, *rows]))
    positions_T, places_2M = copy_to_device(packed, device).tensor_split([3 * first_input])
    indices_M, rows_M = places_2M.view(2, -1)
    return ImageInputs(
        positions_3BS=positions_T.view(3, 1, first_input),
        indices_M=indices_M,
        feature_rows_M=rows_M,
        grids=(),
        features_EFD=torch.cat(features[1:], dim=1) if len(features) > 2 else features[-1],
    )


class FeatureReader:
    """Computes the features of images, once for all requests that have them at a time."""

    def __init__(self, model: Transformer) -> None:
        self._model = model
        self._features: WeakValueDictionary[bytes, Tensor] = WeakValueDictionary()
        """Digest of an image -> features that a request holds."""

    @torch.no_grad()
    def __call__(self, image: EncodedImage, processor: ImageProcessor) -> Tensor:
        """Features of an image, [E, F, D].

        Raises:
            ValueError: its file cannot be read anymore.
        """
        features_EFD = self._features.get(image.digest)
        if features_EFD is None:
            patches_PC = torch.from_numpy(processor.compute_patches(image))
            patches_PC = copy_to_device(patches_PC, self._model.lm_head.weight.device)
            features_EFD = self._features[image.digest] = self._model.compute_features(patches_PC, (image.grid,))
        return features_EFD


def expand_images(
    text: HealedText | Sequence[int],
    images: Sequence[ImageSource],
    processor: ImageProcessor | None,
    model: ModelConfig,
) -> HealedText:
    """Read the images of a text that has one placeholder token for each, and repeat it as often as the image takes
    positions. The positions in the options of the text move with the tokens.

    Args:
        images: in the order of the placeholders.
        processor: that of the model.

    Returns:
        The text, whose `token_ids` and `options` are those of a request.

    Raises:
        ValueError: the text has not one placeholder for each image, the model reads no images, or an image cannot be
            read.
    """
    text = text if isinstance(text, HealedText) else HealedText(tuple(text))
    image_token_id, processor = check_vision(model, processor)
    if isinstance(images, str | bytes):
        raise ValueError("the images of a text are a list, and this is a single one: put it into a list")
    encoded = [_read_image(image, processor, f"image {number}") for number, image in enumerate(images)]
    token_ids, placed = expand_placeholders(text.token_ids, encoded, image_token_id)
    unhealed_ids, _ = expand_placeholders(
        text.unhealed_token_ids, encoded if text.unhealed_token_ids else (), image_token_id
    )
    placeholders = np.flatnonzero(np.array(text.token_ids, dtype=np.int64) == image_token_id)
    offsets = np.cumsum([0, *(image.num_tokens - 1 for image in encoded)])

    def move(position: int) -> int:
        return position + int(offsets[np.searchsorted(placeholders, position)])

    options = replace(
        text.options,
        images=placed,
        processor=processor,
        segment_starts=tuple(map(move, text.options.segment_starts)),
        allowed_token_ids={move(position): ids for position, ids in text.options.allowed_token_ids.items()},
        choices={move(position): choices for position, choices in text.options.choices.items()},
    )
    return HealedText(tuple(token_ids), options, tuple(unhealed_ids))


def _read_image(image: ImageSource, processor: ImageProcessor, label: str) -> EncodedImage:
    if isinstance(image, EncodedImage):
        return image
    return processor.read_image(Path(image) if isinstance(image, str) else image, label, resize=True)


def check_images(model: ModelConfig, token_ids: Sequence[int] | NDArray[np.int64], options: RequestOptions) -> None:
    """Check that the image placeholders of a text are those of its images.

    Raises:
        ValueError: they are not, or the model reads no images.
    """
    images = options.images
    if images:
        check_vision(model, options.processor)
    if model.image_token_id is None:
        return
    is_free_L = np.array(token_ids, dtype=np.int64) == model.image_token_id
    num_placeholders = int(is_free_L.sum())
    for placed in images:
        own_F = is_free_L[max(placed.start, 0) : max(placed.end, 0)]
        if len(own_F) < placed.image.num_tokens or not own_F.all():
            raise ValueError(
                f"the image at position {placed.start} takes {placed.image.num_tokens} positions, of which "
                f"{int(own_F.sum())} hold a placeholder of its own (token {model.image_token_id}): use expand_images"
            )
        own_F[:] = False
    if is_free_L.any():
        raise ValueError(
            f"the text has {num_placeholders} image placeholders (token {model.image_token_id}), and its {len(images)} "
            f"images take {num_placeholders - int(is_free_L.sum())}: pass an image for each one, or remove the token"
        )


def check_vision(model: ModelConfig, processor: ImageProcessor | None) -> tuple[int, ImageProcessor]:
    """Check that a model reads images as a processor divides them. Returns the id of the placeholder, and it."""
    if model.vision is None or model.image_token_id is None:
        raise ValueError(
            "the model has no vision tower, so it cannot read images: leave them out, or load a Qwen3-VL model"
        )
    if processor is None:
        raise ValueError("images need the processor that has read them: pass diffusionlm.load_processor(directory)")
    size, model_size = processor.config.pixels_per_token, model.vision.pixels_per_token
    if size != model_size:
        raise ValueError(
            f"the image processor has positions of {size} x {size} pixels, and the model of {model_size} x "
            f"{model_size}: load the processor of the model"
        )
    return model.image_token_id, processor
