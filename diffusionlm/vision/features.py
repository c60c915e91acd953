"""Features of images on disk, for a vision tower that is not trained."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from diffusionlm.models.vision.inputs import ImageInputs
from diffusionlm.vision.images import EncodedImage
from files.atomic import write_bytes_atomic

CHECKSUM_BYTES = 32
_KEY = "features_EFD"


@dataclass(frozen=True)
class FeatureStore:
    """A folder with a file for each image, named after its digest: a SHA-256, then a safetensors file.

    Ranks and workers may use one folder at a time. The same image has the same features, so it does not matter whose
    file stays.
    """

    folder: Path
    """Of one tower and dtype (`open`)."""
    dtype: torch.dtype

    @classmethod
    def open(cls, directory: Path, tower_digest: str, dtype: torch.dtype) -> FeatureStore:
        """The store of a tower in a directory, which may have those of others.

        Args:
            tower_digest: of the tower's weights.
            dtype: of the features, that of the tower's matrix products.
        """
        name = hashlib.sha256(f"{tower_digest} {dtype}".encode()).hexdigest()[:16]
        return cls(directory / f"features-{name}", dtype)

    def read(self, image: EncodedImage) -> Tensor | None:
        """The features of an image, [E, F, D]. None: they are not stored. A corrupt file is removed."""
        path = self._path(image.digest)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        checksum, stored = content[:CHECKSUM_BYTES], content[CHECKSUM_BYTES:]
        if hashlib.sha256(stored).digest() != checksum:
            path.unlink(missing_ok=True)
            return None
        return safetensors.torch.load(stored)[_KEY]

    def write(self, images: ImageInputs, features_EFD: Tensor) -> None:
        """Store the features of all images that have patches."""
        sizes = [math.prod(grid) for grid in images.grids[images.num_stored :]]
        parts = torch.split(features_EFD.detach().to("cpu", self.dtype), sizes, dim=1)
        for digest, part_EFD in zip(images.digests[images.num_stored :], parts, strict=True):
            path = self._path(digest)
            if path.exists():
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            stored = safetensors.torch.save({_KEY: part_EFD.contiguous()})
            write_bytes_atomic(path, hashlib.sha256(stored).digest() + stored)

    def _path(self, digest: bytes) -> Path:
        name = digest.hex()
        return self.folder / name[:2] / name[2:]
