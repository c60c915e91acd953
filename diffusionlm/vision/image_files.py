"""Decode image files to 8-bit RGB, with a defined result or a ValueError for every file. No torch."""

from __future__ import annotations

import base64
import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage

FORMATS = ("JPEG", "PNG", "WEBP")
MAX_FILE_PIXELS = 89_478_485
"""Pixels of the largest image that is decoded: Pillow warns above. Decoded it takes 360 MB."""
THUMBNAIL_SIZE = 128
ROTATIONS = {
    2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE", 6: "ROTATE_270", 7: "TRANSVERSE",
    8: "ROTATE_90",
}  # fmt: skip
"""EXIF's orientation -> Pillow's transposition to upright."""


def decode_image(content: bytes) -> PillowImage:
    """Decode the whole of a JPEG, PNG or WebP file as `convert_image` does.

    Raises:
        ValueError: it is of another format, damaged, truncated or animated, or has more than ``MAX_FILE_PIXELS``, which
            is known before it is decoded.
    """
    from PIL import Image

    with _translate_errors():
        image = Image.open(io.BytesIO(content), formats=FORMATS)
    return convert_image(image)


def encode_image(image: PillowImage) -> bytes:
    """Encode an image as a PNG file."""
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return file.getvalue()


def to_thumbnail(content: bytes | Path) -> str:
    """Scale the image of a file down to at most `THUMBNAIL_SIZE` pixels in each direction, as a data URL for pages."""
    image = decode_image(content if isinstance(content, bytes) else content.read_bytes())
    image.thumbnail((THUMBNAIL_SIZE, THUMBNAIL_SIZE))
    return f"data:image/png;base64,{base64.b64encode(encode_image(image)).decode('ascii')}"


def convert_image(image: PillowImage) -> PillowImage:
    """Convert an image of any mode to 8-bit RGB: upright by its EXIF orientation, transparent pixels on white.

    Of 16 bits the upper 8 remain. A JPEG with several pictures (MPO of phones) gives its first.

    Raises:
        ValueError: it is no Pillow image, cannot be decoded, is animated, has too many pixels, or values without a
            defined range.
    """
    from PIL import Image

    if not isinstance(image, Image.Image):
        raise ValueError(f"the image is of type {type(image).__name__}: pass a file, its path or a Pillow image")
    with _translate_errors():
        frames = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)
    if frames > 1:
        raise ValueError(f"the image is animated, it has {frames} frames: save the frame to use as a file of its own")
    if image.mode in ("I", "F"):
        raise ValueError(f"the image has mode {image.mode}, whose values have no defined range: convert it to 8 bits")
    with _translate_errors():
        if image.width * image.height > MAX_FILE_PIXELS:
            raise Image.DecompressionBombError
        image.load()
        if image.mode.startswith("I;16"):
            levels = np.asarray(image)
            levels = np.where(levels == image.info.get("transparency", -1), 0xFFFF, levels)
            rgb = Image.fromarray((levels >> 8).astype(np.uint8)).convert("RGB")
        elif image.has_transparency_data:
            white = Image.new("RGBA", image.size, "white")
            rgb = Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
        else:
            rgb = image.convert("RGB")
    rotation = ROTATIONS.get(_read_orientation(image))
    return rgb.transpose(Image.Transpose[rotation]) if rotation else rgb


def _read_orientation(image: PillowImage) -> int:
    """Return EXIF's orientation; 1 (upright) without one, and if the EXIF data are damaged, as the pixels are not."""
    from PIL import ExifTags

    with contextlib.suppress(Exception):
        return int(image.getexif().get(ExifTags.Base.Orientation, 1))
    return 1


@contextlib.contextmanager
def _translate_errors() -> Iterator[None]:
    """Raise a ValueError for whatever Pillow raises on a damaged file, SyntaxError and struct.error included."""
    from PIL import Image, UnidentifiedImageError

    try:
        yield
    except UnidentifiedImageError:
        raise ValueError("the file is no JPEG, PNG or WebP image: convert it to one of these") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise ValueError(f"the image has more than {MAX_FILE_PIXELS:,} pixels: make it smaller") from None
    except MemoryError:
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        raise ValueError(f"the image is damaged or truncated ({problem}): replace the file, or leave it out") from error
