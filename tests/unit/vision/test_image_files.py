"""Every kind of image file has a defined result: RGB pixels, or an error that says what to do."""

from __future__ import annotations

import io
import random
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image

from diffusionlm.vision.image_files import FORMATS, convert_image, decode_image
from diffusionlm.vision.processor import ImageProcessor
from tests.unit.vision.test_processor import VISION, draw_image

Pixel = tuple[int, int, int]
WHITE = (255, 255, 255)


def encode(image: Image.Image, file_format: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return file.getvalue()


def encode_pixels(array: Any, dtype: type = np.uint8, **options: Any) -> bytes:
    return encode(Image.fromarray(np.array(array, dtype)), **options)


def write_png(
    size: tuple[int, int], bit_depth: int, color_type: int, rows: bytes, *chunks: tuple[bytes, bytes]
) -> bytes:
    """A PNG file by hand: what Pillow does not write."""
    header = struct.pack(">IIBBBBB", *size, bit_depth, color_type, 0, 0, 0)
    all_chunks = [(b"IHDR", header), *chunks, (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    parts = [struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in all_chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def list_pixels(image: Image.Image) -> list[Pixel]:
    assert image.mode == "RGB"
    return [tuple(pixel) for pixel in np.asarray(image).reshape(-1, 3).tolist()]


def make_palette_image() -> Image.Image:
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.putpixel((1, 0), 1)
    return image


PIXELS: dict[str, tuple[bytes, list[Pixel]]] = {
    "color": (encode_pixels([[[9, 8, 7]]]), [(9, 8, 7)]),
    "grayscale": (encode_pixels([[0, 77, 255]]), [(0, 0, 0), (77, 77, 77), WHITE]),
    "black and white": (encode(Image.fromarray(np.array([[False, True]]))), [(0, 0, 0), WHITE]),
    "alpha": (encode_pixels([[[255, 0, 0, 128], [1, 2, 3, 255], [9, 9, 9, 0]]]), [(255, 127, 127), (1, 2, 3), WHITE]),
    "alpha of WebP": (encode_pixels([[[9, 9, 9, 0]]], file_format="WEBP", lossless=True), [WHITE]),
    "grayscale with alpha": (encode(Image.new("LA", (1, 1), (0, 0))), [WHITE]),
    "palette": (encode(make_palette_image()), [(255, 0, 0), (0, 0, 255)]),
    "palette with a transparent color": (encode(make_palette_image(), transparency=0), [WHITE, (0, 0, 255)]),
    "palette with alphas": (encode(make_palette_image(), transparency=b"\x80\xff"), [(255, 127, 127), (0, 0, 255)]),
    "transparent color": (encode_pixels([[[9, 8, 7], [9, 8, 6]]], transparency=(9, 8, 7)), [WHITE, (9, 8, 6)]),
    "grayscale of 16 bits": (
        encode_pixels([[0, 257, 0x80FF, 0xFFFF]], np.uint16),
        [(0, 0, 0), (1, 1, 1), (128, 128, 128), WHITE],
    ),
    "grayscale of 16 bits with a transparent level": (
        encode_pixels([[257, 258]], np.uint16, transparency=257),
        [WHITE, (1, 1, 1)],
    ),
    "color of 16 bits": (
        write_png((1, 1), 16, 2, b"\0" + struct.pack(">3H", 0x1234, 0xFFFF, 0x80FF)),
        [(0x12, 0xFF, 0x80)],
    ),
    "CMYK": (encode(Image.new("CMYK", (1, 1), (255, 0, 0, 0)), "JPEG", quality=100), [(0, 255, 255)]),
}


@pytest.mark.parametrize("name", PIXELS)
def test_pixels(name: str) -> None:
    content, expected = PIXELS[name]
    assert list_pixels(decode_image(content)) == expected
    image = ImageProcessor.for_model(VISION).read_image(Image.open(io.BytesIO(content)))
    assert isinstance(image.content, bytes) and list_pixels(decode_image(image.content)) == expected


@pytest.mark.parametrize("mode", ["YCbCr", "LAB", "HSV", "RGBa", "RGBX", "PA"])
def test_modes_of_decoded_images(mode: str) -> None:
    assert convert_image(Image.new(mode, (2, 3))).mode == "RGB"


@pytest.mark.parametrize("mode", ["I", "F"])
def test_values_without_a_range_are_refused(mode: str) -> None:
    with pytest.raises(ValueError, match=f"mode {mode}, whose values have no defined range: convert it to 8 bits"):
        convert_image(Image.new(mode, (2, 3)))


@pytest.mark.parametrize("file_format", FORMATS)
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied(file_format: str, orientation: int) -> None:
    """Against the definition: where row 0 and column 0 of the stored image are when it is shown (EXIF 2.3, 4.6.4)."""
    stored = np.zeros((32, 64, 3), np.uint8)
    stored[:16, :16] = (255, 0, 0)  # row 0, column 0
    stored[:16, 48:] = (0, 0, 255)  # row 0, last column
    first, last = {
        1: ("top left", "top right"),
        2: ("top right", "top left"),
        3: ("bottom right", "bottom left"),
        4: ("bottom left", "bottom right"),
        5: ("top left", "bottom left"),
        6: ("top right", "bottom right"),
        7: ("bottom right", "top right"),
        8: ("bottom left", "top left"),
    }[orientation]
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    shown = np.asarray(decode_image(encode(Image.fromarray(stored), file_format, exif=exif, quality=95)))
    assert shown.shape == ((64, 32, 3) if orientation > 4 else (32, 64, 3))
    corners = {"top left": (4, 4), "top right": (4, -5), "bottom left": (-5, 4), "bottom right": (-5, -5)}
    for corner, place in corners.items():
        color = {first: (255, 0, 0), last: (0, 0, 255)}.get(corner, (0, 0, 0))
        np.testing.assert_allclose(shown[place], color, atol=16)


@pytest.mark.parametrize(
    "exif",
    [b"Exif\0\0no TIFF header", b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x09\0\0\0\0\0\0"],
    ids=["damaged", "orientation 9"],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_useless_orientation_is_ignored(exif: bytes) -> None:
    image = draw_image(8, 16)
    assert decode_image(encode(image, "JPEG", exif=exif)).tobytes() == decode_image(encode(image, "JPEG")).tobytes()


@pytest.mark.parametrize("file_format", ["WEBP", "PNG"])
def test_animations_are_refused(file_format: str) -> None:
    frames = [draw_image(8, 8, seed) for seed in range(3)]
    content = encode(frames[0], file_format, save_all=True, append_images=frames[1:])
    with pytest.raises(ValueError, match="animated, it has 3 frames: save the frame to use as a file of its own"):
        decode_image(content)
    with pytest.raises(ValueError, match="it has 3 frames"):
        convert_image(Image.open(io.BytesIO(encode(frames[0], "GIF", save_all=True, append_images=frames[1:]))))


def test_first_picture_of_a_phone_is_read() -> None:
    frames = [draw_image(8, 8, seed) for seed in range(2)]
    content = encode(frames[0], "MPO", save_all=True, append_images=frames[1:])
    assert decode_image(content).tobytes() == decode_image(encode(frames[0], "JPEG")).tobytes()


@pytest.mark.parametrize("file_format", FORMATS)
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_truncated_files_are_refused(file_format: str, share: float) -> None:
    content = encode(draw_image(60, 80), file_format)
    with pytest.raises(
        ValueError, match=r"^the image is damaged or truncated \(.*\): replace the file, or leave it out"
    ):
        decode_image(content[: int(len(content) * share)])


def test_damaged_files_are_refused() -> None:
    for content in (
        write_png((4, 4), 8, 0, b"\0\1\2"),
        write_png((1, 1), 8, 0, b"\0\0", (b"zTXt", b"a\0\0" + zlib.compress(b"x" * 20_000_000))),
    ):
        with pytest.raises(ValueError, match="damaged or truncated"):
            decode_image(content)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("file_format", FORMATS)
def test_random_damage_raises_nothing_else(file_format: str) -> None:
    rng = random.Random(0)
    content = encode(draw_image(24, 24), file_format, exif=b"Exif\0\0MM\0*\0\0\0\x08\0\0\0\0\0\0")
    num_refused = 0
    for _ in range(200):
        damaged = bytearray(content)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(rng.choice([60, len(damaged)]))] = rng.randrange(256)
        try:
            decode_image(bytes(damaged))
        except ValueError:
            num_refused += 1
    assert num_refused > 50


@pytest.mark.parametrize(
    "content",
    [b"", b"no image", encode(draw_image(8, 8), "GIF"), encode(draw_image(8, 8), "BMP"), b"<svg></svg>"],
    ids=["empty", "text", "GIF", "BMP", "SVG"],
)
def test_other_formats_are_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"^the file is no JPEG, PNG or WebP image: convert it to one of these$"):
        decode_image(content)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("size", [(9_473, 9_447), (60_000, 60_000)], ids=str)
def test_bombs_are_refused_before_they_are_decoded(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", fail)
    with pytest.raises(ValueError, match=r"^the image has more than 89,478,485 pixels: make it smaller$"):
        decode_image(write_png(size, 8, 2, b"\0" * 1_000))


@pytest.mark.filterwarnings("error")
def test_bombs_are_refused_where_warnings_are_errors() -> None:
    with pytest.raises(ValueError, match="more than 89,478,485 pixels"):
        decode_image(write_png((9_473, 9_447), 8, 2, b"\0" * 1_000))


def test_lack_of_memory_is_no_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", fail)
    with pytest.raises(MemoryError):
        decode_image(PIXELS["color"][0])
