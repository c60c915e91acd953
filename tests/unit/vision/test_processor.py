"""Sizes, pixels and order of patches against transformers, and the files of a processor."""

from __future__ import annotations

import io
import json
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

import diffusionlm
import diffusionlm.vision.processor as processor_module
from config.model import VisionConfig
from diffusionlm.vision.image_files import decode_image
from diffusionlm.vision.processor import (
    MAX_PIXELS,
    MIN_PIXELS,
    PROCESSOR_FILE,
    ImageProcessor,
    load_processor,
    save_processor,
)

ORACLE: Any = Qwen2VLImageProcessorPil
VISION = VisionConfig(
    depth=1,
    hidden_size=32,
    num_heads=2,
    intermediate_size=32,
    num_position_embeddings=16,
    mrope_section=(2, 1, 1),
)
LIMITS = [(MIN_PIXELS, MAX_PIXELS), (2_000, 20_000)]
SIZES = [
    (1, 1), (1, 2), (1, 200), (2, 400), (3, 5), (16, 16), (17, 16), (31, 33), (32, 32), (48, 48), (48, 80),
    (80, 112), (47, 49), (64, 64), (70, 110), (100, 100), (112, 112), (144, 176), (200, 1), (255, 257), (256, 256),
    (272, 240), (240, 272), (300, 200), (333, 777), (480, 640), (511, 513), (640, 480), (720, 1280), (1001, 333),
    (1080, 1920), (2000, 10), (10, 2000), (2048, 2048), (3000, 4000), (4095, 4097), (4096, 4096), (4112, 4080),
    (5000, 5000), (300, 60_000),
]  # fmt: skip
CHECKPOINT_FILE = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
}
"""What Qwen3-VL's checkpoints have."""


def draw_image(height: int, width: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def encode(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def write_options(directory: Path, options: dict[str, Any]) -> Path:
    (directory / PROCESSOR_FILE).write_text(json.dumps(options), encoding="utf-8")
    return directory


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_sizes_are_those_of_transformers(limits: tuple[int, int]) -> None:
    processor = ImageProcessor.for_model(VISION, *limits)
    assert len(SIZES) == 40
    grids = {size: processor.compute_grid(*size) for size in SIZES}
    expected = {(h, w): smart_resize(h, w, 32, *limits) for h, w in SIZES}
    assert {size: (rows * 32, columns * 32) for size, (rows, columns) in grids.items()} == expected


@pytest.mark.parametrize(
    ("size", "grid"),
    [((272, 272), (8, 8)), ((304, 304), (10, 10)), ((70, 110), (7, 11)), ((1, 1), (8, 8)), ((8192, 4096), (181, 90))],
)
def test_sides_round_half_to_even_and_limits_up_or_down(size: tuple[int, int], grid: tuple[int, int]) -> None:
    assert ImageProcessor.for_model(VISION).compute_grid(*size) == grid


@pytest.mark.parametrize("size", [(1, 201), (201, 1), (2, 401)])
def test_thin_images_are_refused(size: tuple[int, int]) -> None:
    problem = rf"^row 3: the image has {size[1]} x {size[0]} pixels: one side may be at most 200 times the other"
    with pytest.raises(ValueError, match=problem):
        ImageProcessor.for_model(VISION).read_image(draw_image(*size), "row 3")


@pytest.mark.parametrize("size", [(256, 256), (320, 512), (70, 110), (300, 301), (1, 1), (600, 3)], ids=str)
@pytest.mark.parametrize("mean", [(0.5, 0.5, 0.5), (0.48, 0.45, 0.40)], ids=["half", "clip"])
def test_patches_are_those_of_transformers(size: tuple[int, int], mean: tuple[float, float, float]) -> None:
    """transformers repeats the frame; where nothing is resampled and where something is."""
    image, std = draw_image(*size), (0.5, 0.25, 0.3)
    options = ImageProcessor.for_model(VISION, 4_096, 200_000).config
    processor = ImageProcessor(options.model_copy(update={"image_mean": mean, "image_std": std}))
    oracle = ORACLE(
        size={"shortest_edge": 4_096, "longest_edge": 200_000}, patch_size=16, image_mean=mean, image_std=std
    )
    expected = oracle(images=[image], return_tensors="np")
    encoded = processor.read_image(encode(image))
    patches = processor.compute_patches(encoded)
    assert (1, *(2 * side for side in encoded.grid)) == tuple(expected["image_grid_thw"][0])
    assert encoded.num_tokens * 4 == len(patches) and patches.dtype == np.float32
    frames = expected["pixel_values"].reshape(len(patches), 3, 2, 256)
    for frame in (0, 1):
        np.testing.assert_allclose(patches, frames[:, :, frame].reshape(len(patches), -1), atol=1e-6)


def test_patches_stand_square_by_square() -> None:
    """Pixels that say where they are: the patch of each row, and channel, row and column inside it."""
    rows, columns = np.indices((64, 96))
    pixels = np.stack([rows // 16, columns // 16, rows % 16 * 16 + columns % 16], axis=-1).astype(np.uint8)
    processor = ImageProcessor.for_model(VISION, 1_024, 10_000)
    encoded = processor.read_image(Image.fromarray(pixels))
    values = (processor.compute_patches(encoded) * 0.5 + 0.5) * 255
    assert encoded.grid == (2, 3)
    places = np.rint(values.reshape(24, 3, 256)).astype(int)
    squares = [(r, c) for r in (0, 2) for c in (0, 2, 4)]
    order = [(r + i, c + j) for r, c in squares for i in (0, 1) for j in (0, 1)]
    assert [(int(patch[0, 0]), int(patch[1, 0])) for patch in places] == order
    assert all((patch[2] == np.arange(256)).all() for patch in places)


def test_digest_is_of_file_and_options(tmp_path: Path) -> None:
    processor, other = ImageProcessor.for_model(VISION), ImageProcessor.for_model(VISION, 4_096)
    file = encode(draw_image(40, 40))
    (tmp_path / "a.png").write_bytes(file)
    read = processor.read_image(file, "here")
    assert processor.read_image(tmp_path / "a.png", "there") == processor.read_image(tmp_path / "a.png")
    assert processor.read_image(tmp_path / "a.png").digest == read.digest
    assert (
        len({read.digest, other.read_image(file).digest, processor.read_image(encode(draw_image(40, 41))).digest}) == 3
    )
    with pytest.raises(ValueError, match=r"^here: the image has changed"):
        other.compute_patches(read)


def test_a_file_that_changes_is_refused(tmp_path: Path) -> None:
    processor, path = ImageProcessor.for_model(VISION), tmp_path / "a.png"
    path.write_bytes(encode(draw_image(40, 40)))
    image = processor.read_image(path, "line 7")
    assert image.content == path
    path.write_bytes(encode(draw_image(40, 40, seed=1)))
    with pytest.raises(ValueError, match=r"^line 7: .*a\.png: the image has changed since it was checked: leave files"):
        processor.compute_patches(image)
    path.unlink()
    with pytest.raises(ValueError, match=r"^line 7: .*a\.png: the image cannot be read \(No such file"):
        processor.compute_patches(image)
    with pytest.raises(ValueError, match=r"^.*a\.png: the image cannot be read \(No such file"):
        processor.read_image(path)
    with pytest.raises(ValueError, match="it is no regular file"):
        processor.read_image(tmp_path)


def test_an_image_is_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also under another name, and by a copy of the processor; another file under the name is checked again."""
    decoded: list[bytes] = []

    def count(file: bytes) -> Any:
        decoded.append(file)
        return decode_image(file)

    monkeypatch.setattr(processor_module, "decode_image", count)
    processor, path = ImageProcessor.for_model(VISION), tmp_path / "a.png"
    path.write_bytes(encode(draw_image(400, 500)))
    first = processor.read_image(path)
    assert first == processor.read_image(path) and first.grid == processor.read_image(path.read_bytes()).grid
    assert pickle.loads(pickle.dumps(processor)).read_image(path) == first
    assert len(decoded) == 1
    path.write_bytes(encode(draw_image(500, 400)))
    assert processor.read_image(path).grid != first.grid and len(decoded) == 2
    path.write_bytes(b"no image")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"a\.png"):
            processor.read_image(path)


def test_processors_are_shared_and_copied() -> None:
    processor = ImageProcessor.for_model(VISION, 1_024, 10_000)
    images = [processor.read_image(draw_image(60 + seed, 70, seed)) for seed in range(8)]
    expected = [processor.compute_patches(image) for image in images]
    copy = pickle.loads(pickle.dumps(processor))
    assert copy == processor and hash(copy) == hash(processor)
    with ThreadPoolExecutor(4) as pool:
        for ours, theirs in zip(pool.map(copy.compute_patches, images), expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_file_of_a_checkpoint_there_and_back(tmp_path: Path) -> None:
    processor = diffusionlm.load_processor(write_options(tmp_path, CHECKPOINT_FILE))
    assert processor == ImageProcessor.for_model(VISION)
    save_processor(processor, tmp_path)
    assert json.loads((tmp_path / PROCESSOR_FILE).read_text(encoding="utf-8")) == CHECKPOINT_FILE
    processor = ImageProcessor(processor.config.model_copy(update={"image_std": (0.5, 0.25, 0.2), "min_pixels": 9_999}))
    save_processor(processor, tmp_path)
    assert load_processor(tmp_path) == processor
    oracle = ORACLE.from_pretrained(tmp_path)
    assert (tuple(oracle.image_std), oracle.size.shortest_edge) == ((0.5, 0.25, 0.2), 9_999)


def test_files_that_transformers_writes(tmp_path: Path) -> None:
    oracle = ORACLE(**{key: CHECKPOINT_FILE[key] for key in list(CHECKPOINT_FILE)[:6]})
    oracle.save_pretrained(tmp_path)
    assert load_processor(tmp_path) == ImageProcessor.for_model(VISION)
    joint = {"image_processor": json.loads((tmp_path / PROCESSOR_FILE).read_text(encoding="utf-8"))}
    (tmp_path / PROCESSOR_FILE).unlink()
    (tmp_path / "processor_config.json").write_text(json.dumps(joint), encoding="utf-8")
    assert load_processor(tmp_path) == ImageProcessor.for_model(VISION)


def test_limits_outside_of_size_win(tmp_path: Path) -> None:
    """As in transformers."""
    config = load_processor(write_options(tmp_path, CHECKPOINT_FILE | {"min_pixels": 7_000})).config
    assert (config.min_pixels, config.max_pixels) == (7_000, MAX_PIXELS)
    assert ORACLE.from_pretrained(tmp_path).size.shortest_edge == 7_000


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"image_mean": None}, r"does not say image_mean: add what .*Qwen3-VL's have image_mean and .*0\.5"),
        ({"size": None, "merge_size": None}, "does not say merge_size, min_pixels, max_pixels: "),
        ({"size": {"height": 1}}, "does not say min_pixels, max_pixels: "),
        (
            {"image_processor_type": "CLIPImageProcessor"},
            'not supported: image_processor_type = "CLIPImageProcessor", not "Qwen2VLImageProcessor" or',
        ),
        ({"do_resize": False}, "not supported: do_resize = false, not true"),
        ({"resample": 2, "do_rescale": False}, "not supported: do_rescale = false, not true; resample = 2, not 3"),
        ({"rescale_factor": 1.0}, "rescale_factor = 1.0"),
        ({"image_mean": [0.5, 0.5]}, "image_mean"),
        ({"image_std": [0.5, 0.5, 0.0]}, r"image_std = \[0.5, 0.5, 0.0\] must be positive"),
        ({"patch_size": "16"}, "patch_size: Input should be a valid integer"),
        ({"min_pixels": 9, "max_pixels": 8}, "max_pixels = 8 must be at least min_pixels = 9 and 1,024"),
        ({"min_pixels": 9, "max_pixels": 1_023}, "max_pixels = 1,023 must be at least min_pixels = 9 and 1,024"),
    ],
)
def test_options_that_are_not_supported(changes: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"preprocessor_config\.json.*{problem}"):
        load_processor(write_options(tmp_path, CHECKPOINT_FILE | changes))


def test_missing_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match=r"has no preprocessor_config\.json, which says .*: copy it from the model"):
        load_processor(tmp_path)


def test_file_of_another_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class VisionModel:
        vision = VISION.model_copy(update={"patch_size": 14})

    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}', encoding="utf-8")
    monkeypatch.setattr("diffusionlm.vision.processor.read_model_config", lambda directory: VisionModel)
    problem = r"temporal_patch_size = \(16, 2, 2\), but the model's vision tower has \(14, 2, 2\): use the file of"
    with pytest.raises(ValueError, match=problem):
        load_processor(write_options(tmp_path, CHECKPOINT_FILE))


def test_modules_load_neither_torch_nor_pillow() -> None:
    code = (
        "import sys, diffusionlm.vision.messages, diffusionlm.vision.processor; "
        "assert not {'torch', 'PIL', 'PIL.Image'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], check=True, timeout=60)


@pytest.mark.parametrize(("height", "width"), [(96, 96), (40, 50), (300, 32), (500, 700)])
def test_a_resized_image_has_the_same_patches(height: int, width: int) -> None:
    """Also where the limits would resize it again: 40 x 50 pixels become 96 x 128, more than the largest size."""
    processor = ImageProcessor.for_model(VISION, min_pixels=9_216, max_pixels=9_216)
    content = encode(draw_image(height, width))
    image, resized = processor.read_image(content), processor.read_image(content, resize=True)
    assert resized.grid == image.grid
    assert np.array_equal(processor.compute_patches(resized), processor.compute_patches(image))
    with Image.open(io.BytesIO(resized.content)) as stored:  # type: ignore[arg-type]
        assert (stored.height, stored.width) == (32 * image.grid[0], 32 * image.grid[1])
