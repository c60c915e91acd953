"""Sources of few documents: both splits have text in every file layout, and reading resumes at each position."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from config.data import LocalFiles
from diffusionlm.data.reader import DocumentSource, Split
from diffusionlm.data.sources import open_source

Drain = Callable[..., list[Any]]

TEXT = "".join(f"line {index:05}\n" for index in range(20_000))
"""220,000 bytes."""


def open_documents(path: Path, split: Split = "train", **options: Any) -> DocumentSource:
    return open_source(LocalFiles(paths=(str(path),), **options), split, "data.source")


def write_twenty(folder: Path) -> None:
    for index in range(20):
        (folder / f"{index:02}.txt").write_text(TEXT[index * 11_000 : (index + 1) * 11_000])


def write_row(folder: Path) -> None:
    (folder / "a.jsonl").write_text(json.dumps({"text": TEXT}))


def write_array(folder: Path) -> None:
    (folder / "a.json").write_text(json.dumps([{"text": TEXT[:110_000]}, {"text": TEXT[110_000:]}]))


LAYOUTS: list[Callable[[Path], None]] = [write_twenty, write_row, write_array]


@pytest.fixture(params=LAYOUTS, ids=[layout.__name__ for layout in LAYOUTS])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    directory = tmp_path / "data"
    directory.mkdir()
    request.param(directory)
    return directory


def test_both_splits_have_their_share(folder: Path, drain: Drain) -> None:
    train, validation = open_documents(folder), open_documents(folder, "validation")
    train_parts, validation_parts = drain(train), drain(validation)
    lines = [line for part in (*train_parts, *validation_parts) for line in part.splitlines(keepends=True)]
    assert sorted(lines) == TEXT.splitlines(keepends=True), "all lines, each in one split"
    assert 0.9 * 11_000 < len("".join(validation_parts)) <= 11_000
    assert train.identity != validation.identity
    assert train.provenance == validation.provenance and "are validation text" in train.provenance
    assert train.skip_log.counts == validation.skip_log.counts == {}


@pytest.mark.parametrize("split", ["train", "validation"])
def test_resuming_at_every_position(split: Split, folder: Path, drain: Drain, check_resuming: Drain) -> None:
    parts = check_resuming(lambda: open_documents(folder, split))
    assert len(parts) >= (3 if split == "train" else 1)
    source = open_documents(folder, split)
    assert drain(source, (1,)) == drain(source, epoch=1) == parts


def test_bad_rows_are_left_out(tmp_path: Path, drain: Drain, check_resuming: Drain) -> None:
    path = tmp_path / "a.jsonl"
    rows = [json.dumps({"text": TEXT}), "broken", '{"text": ""}', json.dumps({"text": "b" * 100_000})]
    path.write_text("\n".join(rows))
    with pytest.raises(ValueError, match="line 2: malformed JSON"):
        drain(open_documents(path))
    source = open_documents(path, on_bad_row="skip")
    validation = open_documents(path, "validation", on_bad_row="skip")
    for _ in range(2):
        assert len("".join([*drain(source, (1,)), *drain(validation)])) == 320_000
        assert source.skip_log.counts == validation.skip_log.counts == {"malformed JSON": 1, "empty": 1}
    check_resuming(lambda: open_documents(path, on_bad_row="skip"))


def test_max_documents_counts_whole_texts(tmp_path: Path, drain: Drain) -> None:
    write_array(tmp_path)
    everything = drain(open_documents(tmp_path))
    limited = open_documents(tmp_path, max_documents=1)
    first = drain(limited, (1,))
    assert first == drain(limited) == everything[: len(first)]
    assert 100_000 < len("".join(first)) < 110_000
    position = open_documents(tmp_path, max_documents=1).read(0, None, 1)[1]
    assert drain(limited, position=position) == first[1:]
