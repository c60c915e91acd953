"""Read images as Qwen3-VL does: sides resized to whole squares, pixels normalized, patches in merge order. No torch.

Shapes: P patches of an image, C values of a patch.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError, model_validator

from config.base import PositiveInt, Section
from config.model import Size, VisionConfig
from diffusionlm.families.model_directory import read_model_config, resolve_model_directory
from diffusionlm.families.registry import FAMILIES
from diffusionlm.vision.image_files import convert_image, decode_image, encode_image
from diffusionlm.vision.images import EncodedImage, Grid
from files.atomic import write_text_atomic
from files.compressed import check_regular_file
from files.json_files import read_json_object
from files.usage_error import prefix_errors

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage

RawImage: TypeAlias = "bytes | Path | PillowImage"
"""An image file, its path, or a decoded image."""

PROCESSOR_FILE = "preprocessor_config.json"
JOINT_PROCESSOR_FILE = "processor_config.json"
"""What transformers 5 writes, with the same keys under ``image_processor``."""
SUPPORTED_OPTIONS: dict[str, tuple[Any, ...]] = {
    "image_processor_type": ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil"),
    "do_resize": (True,),
    "do_rescale": (True,),
    "do_normalize": (True,),
    "do_convert_rgb": (True,),
    "resample": (3,),
    "rescale_factor": (1 / 255,),
}
"""Values of transformers' other options, which may be missing. 3 is bicubic."""
MAX_ASPECT_RATIO = 200
MAX_CHECKED_IMAGES = 1 << 20
"""Images whose grids a processor remembers."""
MIN_PIXELS, MAX_PIXELS = 65_536, 16_777_216
"""Limits of Qwen3-VL's checkpoints."""

Channels = tuple[float, float, float]


class ProcessorConfig(Section):
    """How images are resized and normalized; transformers' keys."""

    patch_size: Size
    """Pixels of the side of a patch."""
    merge_size: Size
    """Patches of the side of a square that becomes one position of the text."""
    temporal_patch_size: Size
    """Frames of a patch; a still image is repeated."""
    min_pixels: PositiveInt
    """Smaller images are enlarged to so many pixels."""
    max_pixels: PositiveInt
    """Larger images are shrunk to so many pixels."""
    image_mean: Annotated[Channels, Field(strict=False)]
    """Subtracted from red, green and blue in [0, 1]."""
    image_std: Annotated[Channels, Field(strict=False)]
    """Divisors after that."""

    @model_validator(mode="after")
    def _check_values(self) -> Self:
        if self.max_pixels < max(self.min_pixels, self.pixels_per_token**2):
            raise ValueError(
                f"max_pixels = {self.max_pixels:,} must be at least min_pixels = {self.min_pixels:,} and "
                f"{self.pixels_per_token**2:,}, the pixels of one position of the text"
            )
        if min(self.image_std) <= 0.0:
            raise ValueError(f"image_std = {list(self.image_std)} must be positive")
        return self

    @property
    def pixels_per_token(self) -> int:
        """Pixels of the side of the square that becomes one position of the text."""
        return self.patch_size * self.merge_size


@dataclass(frozen=True)
class ImageProcessor:
    """Checks images and computes their patches. Threads may share it, processes may copy it."""

    config: ProcessorConfig
    _grids: dict[bytes, Grid] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Grids of images that were checked, by digest: they are not decoded for it again, as in the next epoch."""

    @classmethod
    def for_model(cls, vision: VisionConfig, min_pixels: int = MIN_PIXELS, max_pixels: int = MAX_PIXELS) -> Self:
        """The processor of a model that is trained from random weights: Qwen3-VL's, with its normalization to [-1, 1].

        Raises:
            ValueError: the limits contradict each other.
        """
        config = ProcessorConfig(
            patch_size=vision.patch_size,
            merge_size=vision.spatial_merge_size,
            temporal_patch_size=vision.temporal_patch_size,
            min_pixels=min_pixels,
            max_pixels=max_pixels,
            image_mean=(0.5, 0.5, 0.5),
            image_std=(0.5, 0.5, 0.5),
        )
        return cls(config)

    def read_image(self, content: RawImage, location: str = "", *, resize: bool = False) -> EncodedImage:
        """Check an image by decoding it the first time. A decoded image is kept as a PNG file, a path as a path.

        Args:
            location: place of the record or request; begins errors, here and in `compute_patches`.
            resize: keep the resized image, as a PNG file, so that its patches are computed fast, whatever its file.

        Raises:
            ValueError: the file cannot be read or decoded (`decode_image`), or one side is too long for the other.
        """
        if isinstance(content, Path):
            location = f"{location}: {content}" if location else str(content)
        with prefix_errors(location):
            if resize:
                return self._read_resized(content, location)
            if isinstance(content, bytes | Path):
                file = _read_file(content)
            else:
                content = file = encode_image(convert_image(content))
            digest = self._compute_digest(file)
            grid = self._grids.get(digest)
            if grid is None:
                rgb = decode_image(file)
                grid = self.compute_grid(rgb.height, rgb.width)
                if len(self._grids) < MAX_CHECKED_IMAGES:
                    self._grids[digest] = grid
        return EncodedImage(content, grid, digest, location)

    def compute_patches(self, image: EncodedImage) -> NDArray[np.float32]:
        """Resize an image by bicubic interpolation, normalize it and divide it into patches.

        Returns:
            [P, C] of one frame: values in channel, row, column; patches square by square, row by row in each.

        Raises:
            ValueError: the file cannot be read any more, or is another than `read_image` has read.
        """
        with prefix_errors(image.location):
            file = _read_file(image.content)
            if self._compute_digest(file) != image.digest:
                raise ValueError("the image has changed since it was checked: leave files as they are during a run")
            rgb = decode_image(file)
        config, (rows, columns) = self.config, image.grid
        pixels = np.asarray(self._resize_to(rgb, image.grid))
        side, merge = config.patch_size, config.merge_size
        pixels = pixels.reshape(rows, merge, side, columns, merge, side, 3).transpose(0, 3, 1, 4, 6, 2, 5)
        mean, std = (np.array(values, np.float32)[:, None, None] for values in (config.image_mean, config.image_std))
        values: NDArray[np.float32] = (pixels.astype(np.float32) / np.float32(255) - mean) / std
        return values.reshape(rows * columns * merge**2, -1)

    def compute_grid(self, height: int, width: int) -> Grid:
        """Compute the size, in positions of the text, to which an image is resized (Qwen's "smart resize").

        Sides are rounded to whole positions, half to even. Above ``max_pixels`` or below ``min_pixels`` both sides are
        scaled by the same factor and rounded down or up.

        Raises:
            ValueError: one side is more than ``MAX_ASPECT_RATIO`` times the other.
        """
        if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
            raise ValueError(
                f"the image has {width} x {height} pixels: one side may be at most {MAX_ASPECT_RATIO} times the other; "
                "crop or divide it"
            )
        unit = self.config.pixels_per_token
        rows, columns = round(height / unit), round(width / unit)
        pixels = rows * columns * unit**2
        if pixels > self.config.max_pixels:
            scale = math.sqrt(height * width / self.config.max_pixels)
            return max(1, math.floor(height / scale / unit)), max(1, math.floor(width / scale / unit))
        if pixels < self.config.min_pixels:
            scale = math.sqrt(self.config.min_pixels / (height * width))
            return math.ceil(height * scale / unit), math.ceil(width * scale / unit)
        return rows, columns

    def _read_resized(self, content: RawImage, location: str) -> EncodedImage:
        rgb = decode_image(_read_file(content)) if isinstance(content, bytes | Path) else convert_image(content)
        grid = self.compute_grid(rgb.height, rgb.width)
        file = encode_image(self._resize_to(rgb, grid))  # of this size, so that it is not resized again
        return EncodedImage(file, grid, self._compute_digest(file), location)

    def _resize_to(self, rgb: PillowImage, grid: Grid) -> PillowImage:
        from PIL.Image import Resampling

        rows, columns = grid
        return rgb.resize(
            (columns * self.config.pixels_per_token, rows * self.config.pixels_per_token), Resampling.BICUBIC
        )

    def _compute_digest(self, file: bytes) -> bytes:
        options = self.config.model_dump_json().encode()
        return hashlib.sha256(options + b"\n" + file).digest()


def load_processor(path: str | Path) -> ImageProcessor:
    """Load the image processor of a model directory, a checkpoint, a run directory or a model of the Hub.

    Raises:
        ValueError: there is none, it has options that are not supported, or it does not fit the model in its directory.
    """
    directory = Path(path)
    if not any((directory / name).is_file() for name in (PROCESSOR_FILE, JOINT_PROCESSOR_FILE)):
        directory = resolve_model_directory(path, needs_weights=False)
    file, values = _read_values(directory)
    config = _parse_config(file, values)
    config_file = directory / "config.json"
    if config_file.is_file() and str(read_json_object(config_file).get("model_type")) in FAMILIES:
        vision = read_model_config(directory).vision
        if vision is not None:
            _check_model(file, config, vision)
    return ImageProcessor(config)


def save_processor(processor: ImageProcessor, directory: Path) -> None:
    """Write preprocessor_config.json as Qwen3-VL's checkpoints have it.

    Raises:
        OSError: it cannot be written.
    """
    options = processor.config.model_dump(mode="json")
    size = {"longest_edge": options.pop("max_pixels"), "shortest_edge": options.pop("min_pixels")}
    types = {"processor_class": "Qwen3VLProcessor", "image_processor_type": "Qwen2VLImageProcessorFast"}
    write_text_atomic(directory / PROCESSOR_FILE, json.dumps({"size": size} | options | types, indent=2) + "\n")


def _read_values(directory: Path) -> tuple[Path, dict[str, Any]]:
    """Return the file with the options of a directory's processor, and the options."""
    file, joint_file = directory / PROCESSOR_FILE, directory / JOINT_PROCESSOR_FILE
    if file.is_file():
        return file, read_json_object(file)
    values = read_json_object(joint_file).get("image_processor") if joint_file.is_file() else None
    if not isinstance(values, dict):
        raise ValueError(
            f"{directory} has no {PROCESSOR_FILE}, which says how images are resized and normalized: copy it from the "
            "model that this one was made of; of a model without images there is none"
        )
    return joint_file, values


def _parse_config(file: Path, values: dict[str, Any]) -> ProcessorConfig:
    """Read transformers' options. None has a default: its class would normalize as CLIP, which Qwen3-VL does not."""
    unsupported = [
        f"{key} = {json.dumps(values[key])}, not {' or '.join(map(json.dumps, supported))}"
        for key, supported in SUPPORTED_OPTIONS.items()
        if values.get(key) is not None and values[key] not in supported
    ]
    if unsupported:
        raise ValueError(f"{file}: options that are not supported: {'; '.join(unsupported)}")
    size = values["size"] if isinstance(values.get("size"), dict) else {}
    options = {"min_pixels": size.get("shortest_edge"), "max_pixels": size.get("longest_edge")}
    options |= {key: values[key] for key in ProcessorConfig.model_fields if values.get(key) is not None}
    missing = [key for key in ProcessorConfig.model_fields if options.get(key) is None]
    if missing:
        raise ValueError(
            f"{file} does not say {', '.join(missing)}: add what the model was trained with. Qwen3-VL's have "
            f"image_mean and image_std = [0.5, 0.5, 0.5], patch_size = 16, merge_size = temporal_patch_size = 2, and "
            f'size = {{"shortest_edge": {MIN_PIXELS}, "longest_edge": {MAX_PIXELS}}} (min_pixels, max_pixels)'
        )
    try:
        return ProcessorConfig.model_validate(options)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, e['loc'])) or 'options'}: {e['msg']}" for e in error.errors()]
        raise ValueError(f"{file}: {'; '.join(problems)}") from None


def _check_model(file: Path, config: ProcessorConfig, vision: VisionConfig) -> None:
    """Reject a processor whose patches are not those of the model."""
    sizes = (config.patch_size, config.merge_size, config.temporal_patch_size)
    model_sizes = (vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size)
    if sizes != model_sizes:
        raise ValueError(
            f"{file}: patch_size, merge_size, temporal_patch_size = {sizes}, but the model's vision tower has "
            f"{model_sizes}: use the file of the model"
        )


def _read_file(content: bytes | Path) -> bytes:
    if isinstance(content, bytes):
        return content
    try:
        check_regular_file(content)
        return content.read_bytes()
    except OSError as error:
        raise ValueError(f"the image cannot be read ({error.strerror})") from error
