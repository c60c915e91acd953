"""Conversations with images from files of every form, and loaders of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from config.data import DataConfig
from config.model import ModelConfig
from config.training.objective import BlockDiffusionConfig
from diffusionlm.data.chat.encoder import BAD_IMAGE
from diffusionlm.data.loader import LoadedStep, LoaderSpec, WorkerLoader
from diffusionlm.data.pipeline import build_row_reader, count_skipped, open_components
from diffusionlm.data.sources import read_reference_answers
from diffusionlm.diffusion.noised_batch import NoisedBatch
from tests.tiny_run import MODEL
from tests.unit.data.chat_cases import VISION, chat, image_processor, image_tokenizer, picture

PICTURES = [picture(1 + index % 2, 1 + index % 3, index) for index in range(24)]
PROCESSOR = image_processor()
QUESTION = [{"type": "image"}, {"type": "text", "text": "what"}]


def write_pictures(folder: Path) -> list[str]:
    """Write the pictures to a folder below; returns their paths in it."""
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    paths = [f"pictures/{index}.png" for index in range(len(PICTURES))]
    for path, content in zip(paths, PICTURES, strict=True):
        (folder / path).write_bytes(content)
    return paths


def write_json(folder: Path) -> Path:
    path = folder / "chats.jsonl"
    rows = [chat(QUESTION, f"a{index}") | {"image": name} for index, name in enumerate(write_pictures(folder))]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def write_parquet(folder: Path, make_column: Callable[[list[bytes]], tuple[str, pa.Array]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    name, column = make_column(PICTURES)
    messages = [chat(QUESTION, f"a{index}")["messages"] for index in range(len(PICTURES))]
    for question, answer in messages:
        answer["content"] = [{"type": "text", "text": answer["content"]}]
        question["content"] = [{"text": None, **part} for part in question["content"]]
    pq.write_table(pa.table({"messages": pa.array(messages), name: column}), folder / "chats.parquet")
    return folder / "chats.parquet"


COLUMNS: dict[str, Callable[[list[bytes]], tuple[str, pa.Array]]] = {
    "binary": lambda pictures: ("image", pa.array(pictures, pa.binary())),
    "struct": lambda pictures: ("image", pa.array([{"bytes": content, "path": None} for content in pictures])),
    "list": lambda pictures: ("images", pa.array([[{"bytes": content, "path": "x.png"}] for content in pictures])),
}


def config_of(*paths: Path, source: dict[str, Any] | None = None, **data: Any) -> DataConfig:
    chats = {"kind": "files", "paths": list(map(str, paths)), "chat": {"eos_padding": "none"}}
    return DataConfig.model_validate({"source": chats | (source or {}), "document_shuffle_window": 0} | data)


Contents = list[tuple[str, list[tuple[int, tuple[int, int], bytes]]]]
"""Text of each row, and place, size and file of each of its images."""


def read_contents(config: DataConfig, split: Any = "train") -> Contents:
    tokenizer, components = image_tokenizer(), open_components(config, split, processor=PROCESSOR)
    reader = build_row_reader(components, config, tokenizer, 64, 0, repeat=False)
    rows, _ = reader.read(0, None, 1000)
    return [
        (
            tokenizer.decode(row.tokens_L.tolist()),
            [(placed.start, placed.image.grid, read_file(placed.image.content)) for placed in row.images],
        )
        for row in rows
    ]


def read_file(content: bytes | Path) -> bytes:
    return content if isinstance(content, bytes) else content.read_bytes()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Contents:
    path = write_json(tmp_path_factory.mktemp("expected"))
    return read_contents(config_of(path, source={"validation_paths": [str(path)]}, rows="padded", row_shuffle_window=0))


def test_rows_of_pictures_beside_a_file(expected: Contents) -> None:
    assert len(expected) == len(PICTURES)
    for index, (text, images) in enumerate(expected):
        size = (1 + index % 2) * (1 + index % 3)
        placeholders = f"<|vision_start|>{'<|image_pad|>' * size}<|vision_end|>"
        assert text.startswith(
            f"<|im_start|>user\n{placeholders}what<|im_end|>\n<|im_start|>assistant\na{index}<|im_end|>"
        )
        assert images == [(7, (1 + index % 2, 1 + index % 3), PICTURES[index])]


@pytest.mark.parametrize("column", COLUMNS)
def test_parquet_has_the_same_rows(column: str, expected: Contents, tmp_path: Path) -> None:
    path = write_parquet(tmp_path, COLUMNS[column])
    config = config_of(path, source={"validation_paths": [str(path)]}, rows="padded", row_shuffle_window=0)
    assert read_contents(config) == expected


def test_a_folder_of_pictures_and_their_conversations(expected: Contents, tmp_path: Path) -> None:
    write_json(tmp_path)
    config = config_of(tmp_path, source={"validation_paths": [str(tmp_path)]}, rows="padded", row_shuffle_window=0)
    assert read_contents(config) == expected


@pytest.mark.parametrize("name", ["metadata", "parquet"])
def test_a_dataset_of_the_library(name: str, expected: Contents, tmp_path: Path, monkeypatch: Any) -> None:
    """A directory of pictures with metadata, or of Parquet: pictures stay files."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "data"
    if name == "metadata":
        paths = write_pictures(folder)
        rows = [
            {"file_name": path, "prompt": "<image>what", "completion": f"a{index}"} for index, path in enumerate(paths)
        ]
        (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    else:
        import datasets

        folder.mkdir()
        rows = [{"prompt": "what", "completion": f"a{index}"} for index in range(len(PICTURES))]
        table: Any = {key: [row[key] for row in rows] for key in rows[0]} | {"image": [{"bytes": c} for c in PICTURES]}
        features = datasets.Features(
            {"prompt": datasets.Value("string"), "completion": datasets.Value("string"), "image": datasets.Image()}
        )
        datasets.Dataset.from_dict(table, features).to_parquet(str(folder / "train.parquet"))
    source = {"kind": "hub", "dataset": str(folder), "validation_split": "train", "chat": {"eos_padding": "none"}}
    values = {"source": source, "document_shuffle_window": 0, "rows": "padded", "row_shuffle_window": 0}
    assert sorted(read_contents(DataConfig.model_validate(values))) == sorted(expected)


def test_validation_is_the_same_wherever_the_folder_lies(tmp_path: Path) -> None:
    options: Any = {"source": {"validation_fraction": 0.3}, "rows": "padded", "row_shuffle_window": 0}
    splits = [
        [read_contents(config_of(write_json(tmp_path / name), **options), split) for split in ("train", "validation")]
        for name in ("here", "there")
    ]
    assert splits[0] == splits[1]
    train, validation = splits[0]
    assert len(train) + len(validation) == len(PICTURES) and 2 <= len(validation) < len(train)


def test_bad_pictures_are_skipped_and_counted_or_named(tmp_path: Path) -> None:
    path = write_json(tmp_path)
    (tmp_path / "pictures/3.png").write_bytes(PICTURES[3][:40])
    (tmp_path / "pictures/5.png").unlink()
    options: dict[str, Any] = {"validation_paths": [str(path)]}
    config = config_of(path, source=options | {"on_bad_row": "skip"}, row_shuffle_window=0)
    components = open_components(config, "train", processor=PROCESSOR)
    rows, _ = build_row_reader(components, config, image_tokenizer(), 64, 0, repeat=False).read(0, None, 100)
    assert sum(len(row.images) for row in rows) == len(PICTURES) - 2
    assert count_skipped(components) == {BAD_IMAGE: 2}
    assert "chats.jsonl, line 4: " in components[0].skip_logs[1].examples[BAD_IMAGE]
    with pytest.raises(ValueError, match=r"data\.source\.chat: \S*chats\.jsonl, line 4: .*3\.png.*on_bad_row"):
        read_contents(config_of(path, source=options))


def test_reference_answers_of_one_question_about_several_pictures(tmp_path: Path) -> None:
    path = write_json(tmp_path)
    source: Any = config_of(path, source={"validation_paths": [str(path)]}).source
    conversations = read_reference_answers(source, "validation", "source", 100)
    assert len(conversations) == len(PICTURES), "they are no copies of each other"


# ----------------------------------------------------------------------------------------------------------------------
# Loaders


def build_spec(path: Path, workers: int = 0) -> LoaderSpec:
    tokenizer = image_tokenizer()
    data = config_of(path, row_shuffle_window=7, workers=workers, source={"validation_paths": [str(path)]})
    ids = {"image_token_id": 261, "vision_start_token_id": 260, "vision_end_token_id": 262, "mask_token_id": 257}
    model = ModelConfig.model_validate({**MODEL, **ids, "vocab_size": tokenizer.vocab_size, "vision": VISION})
    return LoaderSpec(data, tokenizer, 120, BlockDiffusionConfig(block_length=4), model, 4, 2, 0, processor=PROCESSOR)


def tensors_of(batch: NoisedBatch) -> list[torch.Tensor]:
    images = batch.images
    assert images is not None and images.patches_PC is not None
    return [
        batch.inputs_BS, batch.positions_N, batch.weights_N, images.positions_3BS, images.indices_M,
        images.feature_rows_M, images.patches_PC,
    ]  # fmt: skip


def assert_equal_steps(actual: LoadedStep, expected: LoadedStep) -> None:
    for ours, theirs in zip(actual.noised_batches, expected.noised_batches, strict=True):
        assert ours.images is not None and theirs.images is not None and ours.images.digests == theirs.images.digests
        assert all(map(torch.equal, tensors_of(ours), tensors_of(theirs)))


def test_a_resumed_loader_has_the_same_images(tmp_path: Path) -> None:
    spec = build_spec(write_json(tmp_path))
    loader = spec.open()
    steps = [loader.next_step(step) for step in range(9)]
    assert loader.epoch >= 1, "several epochs"
    for start in (1, 4, 7):
        resumed = spec.open()
        resumed.load_state_dict(json.loads(json.dumps(steps[start - 1].state)))
        for step in range(start, 9):
            assert_equal_steps(resumed.next_step(step), steps[step])
    for loaded in steps:
        for batch in loaded.noised_batches:
            is_image_BS = np.isin(batch.inputs_BS, [261])
            images = batch.images
            assert images is not None and np.array_equal(np.flatnonzero(is_image_BS), images.indices_M)
            assert not is_image_BS.flatten()[batch.positions_N].any(), "noise never hits an image"


@pytest.mark.slow
def test_a_worker_builds_the_same_images(tmp_path: Path) -> None:
    path = write_json(tmp_path)
    here, there = build_spec(path).open(), WorkerLoader(build_spec(path, workers=1))
    try:
        for step in range(3):
            assert_equal_steps(there.next_step(step), here.next_step(step))
        (tmp_path / "pictures/0.png").unlink()
        with pytest.raises(ValueError, match=r"chats\.jsonl, line 1: .*the image cannot be read"):
            [there.next_step(step) for step in range(3, 20)]
    finally:
        there.close()
