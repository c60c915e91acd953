"""Build the images of a forward from those of its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffusionlm.models.vision.inputs import ImageInputs
from diffusionlm.vision.images import EncodedImage, PlacedImage, compute_mrope_positions


def build_image_inputs(
    rows: Sequence[Sequence[PlacedImage]],
    length: int,
    compute_patches: Callable[[EncodedImage], NDArray[np.float32]],
    read_features: Callable[[EncodedImage], Tensor | None] | None = None,
) -> ImageInputs | None:
    """Build the images of B rows of ``length`` tokens; None: there are none. Equal images are computed once.

    Args:
        compute_patches: `ImageProcessor.compute_patches`.
        read_features: `FeatureStore.read`; of images that are stored no patches are computed. None: there are none.
    """
    images = {placed.image.digest: placed.image for row in rows for placed in row}
    if not images:
        return None
    features = {digest: read_features and read_features(image) for digest, image in images.items()}
    images = {digest: images[digest] for digest in sorted(images, key=lambda digest: features[digest] is None)}
    stored = [features_EFD for features_EFD in features.values() if features_EFD is not None]
    patches = [compute_patches(image) for digest, image in images.items() if features[digest] is None]
    ends = np.cumsum([image.num_tokens for image in images.values()]).tolist()
    first_rows = dict(zip(images, [0, *ends[:-1]], strict=True))
    indices, feature_rows = [], []
    for number, row in enumerate(rows):
        for placed in row:
            offsets = np.arange(placed.image.num_tokens)
            indices.append(number * length + placed.start + offsets)
            feature_rows.append(first_rows[placed.image.digest] + offsets)
    positions = np.stack([compute_mrope_positions(length, row) for row in rows], axis=1)
    return ImageInputs(
        positions_3BS=torch.from_numpy(positions),
        indices_M=torch.from_numpy(np.concatenate(indices)),
        feature_rows_M=torch.from_numpy(np.concatenate(feature_rows)),
        grids=tuple(image.grid for image in images.values()),
        digests=tuple(images),
        patches_PC=torch.from_numpy(np.concatenate(patches)) if patches else None,
        features_EFD=torch.cat(stored, dim=1) if stored else None,
    )
