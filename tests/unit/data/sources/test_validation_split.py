"""Held-out validation text: the choice between hash and ends, where texts are divided, reading on from any place."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from config.data import LocalFiles
from diffusionlm.data.chat.conversation import Conversation
from diffusionlm.data.reader import DocumentSource, Split
from diffusionlm.data.sources import open_source, validation_split
from diffusionlm.data.sources.validation_split import (
    PART_CHARACTERS,
    EndSplit,
    HashSplit,
    choose_split,
    cut_into_parts,
    find_boundary,
)

KEY = "data.source.paths"


def divide(texts: list[str], fraction: float) -> tuple[list[list[str]], list[list[str]]]:
    """The parts of each text for training, and those for validation."""
    train, validation = choose_split(texts, fraction, False, KEY), choose_split(texts, fraction, True, KEY)
    assert isinstance(train, EndSplit) and isinstance(validation, EndSplit)
    assert train.end_lengths == validation.end_lengths and train.description == validation.description
    return [train.select(text) for text in texts], [validation.select(text) for text in texts]


def ends(texts: list[str], fraction: float) -> list[int]:
    """Length of the validation text of each text."""
    return [len("".join(parts)) for parts in divide(texts, fraction)[1]]


@pytest.mark.parametrize(
    ("text", "target", "slack", "expected"),
    [
        ("ab\n\ncd\n\nef", 3, 6, 4),
        ("ab\n\ncd\n\nef", 5, 3, 8),
        ("ab\n\ncd\n\nef", 5, 2, 7),
        ("ab cd\nef", 1, 7, 6),
        ("ab cd\nef", 1, 1, 1),
        ("ab cd\nef", 0, 8, 0),
        ("ab cd", 5, 0, 5),
    ],
    ids=["paragraph", "next", "line in reach", "line", "nothing", "whole text", "end"],
)
def test_boundaries_are_paragraphs_lines_words(text: str, target: int, slack: int, expected: int) -> None:
    assert find_boundary(text, target, slack) == expected


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([100_000, 200_000], [5_000, 10_000]),
        ([50_000] * 8, [0, 5_000] * 4),  # 2,500 are too few for an end of their own
        ([10, 1_000], [0, 50]),
        ([100] * 20, [0, 0, 0, 0, 25] * 4),
        ([1, 1], [1, 0]),
    ],
    ids=["large", "middle", "small first", "many small", "characters"],
)
def test_shares_of_short_texts_are_added(sizes: list[int], expected: list[int]) -> None:
    texts = [chr(ord("a") + index) * size for index, size in enumerate(sizes)]
    assert ends(texts, 0.05) == expected


@pytest.mark.parametrize("fraction", [0.001, 0.05, 0.5, 0.95])
def test_nothing_is_lost_and_nothing_is_in_both(fraction: float) -> None:
    texts = ["one two\n\nthree four\n" * 9_000, "x" * 70_000, "last"]
    train, validation = divide(texts, fraction)
    assert ["".join(parts) for parts in train] == [
        text[: len(text) - len("".join(end))] for text, end in zip(texts, validation, strict=True)
    ]
    assert all("".join([*start, *end]) == text for text, start, end in zip(texts, train, validation, strict=True))
    share = sum(len(part) for parts in validation for part in parts) / len("".join(texts))
    assert 0.7 * fraction < share <= fraction


def test_copies_are_divided_alike() -> None:
    copy = "copy " * 4_000
    texts = [copy, "another text " * 3_000, copy, copy]
    lengths = ends(texts, 0.1)
    assert lengths[0] == lengths[2] == lengths[3] == 2_000 and lengths[1] == 3_900
    assert ends([copy] * 150, 0.1) == [2_000] * 150, "as many copies as documents that a hash needs"


def test_large_texts_are_cut_into_parts() -> None:
    text = "a line of text\n" * 20_000
    parts = cut_into_parts(text)
    assert "".join(parts) == text and [len(part) for part in parts] == [65_550, 65_550, 65_550, 65_550, 37_800]
    assert cut_into_parts("") == []
    assert cut_into_parts("x" * PART_CHARACTERS * 2) == ["x" * PART_CHARACTERS] * 2
    assert len(cut_into_parts("x" * (PART_CHARACTERS + 100))) == 1, "no short last part"


@pytest.mark.parametrize(("fraction", "num_documents"), [(0.05, 100), (0.5, 10), (0.95, 100), (0.005, 1_000)])
def test_enough_documents_are_selected_by_hash(fraction: float, num_documents: int) -> None:
    texts = [f"document {index}" for index in range(num_documents)]
    assert isinstance(choose_split(texts[:-1], fraction, False, KEY), EndSplit)
    assert choose_split(texts, fraction, False, KEY) == HashSplit(fraction, False)


def test_no_more_documents_are_read_than_necessary(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0

    def endless() -> Iterator[str]:
        nonlocal count
        while True:
            count += 1
            yield f"document {count}"

    assert choose_split(endless(), 0.05, True, KEY) == HashSplit(0.05, True)
    assert count == 100
    monkeypatch.setattr(validation_split, "MAX_READ_DOCUMENTS", 500)
    assert choose_split(endless(), 1e-9, True, KEY) == HashSplit(1e-9, True)
    assert count == 600


def test_the_order_of_keys_does_not_move_a_conversation_between_the_splits() -> None:
    chats = [Conversation(({"role": "user", "content": "q"},), ({"name": str(index), "b": 1},)) for index in range(200)]
    reordered = [replace(chat, tools=({"b": 1, "name": chat.tools[0]["name"]},)) for chat in chats if chat.tools]
    split = choose_split(chats, 0.2, True, KEY)
    assert split == HashSplit(0.2, True)
    selected = [bool(split.select(chat)) for chat in chats]
    assert selected == [bool(split.select(chat)) for chat in reordered] and any(selected)
    sorted_text = [
        json.dumps({"messages": chat.messages, "tools": chat.tools}, sort_keys=True, separators=(",", ":"))
        for chat in chats
    ]
    assert selected == [bool(split.select(text)) for text in sorted_text], "the split of former checkpoints"
    few = choose_split(chats[:10], 0.2, True, KEY)
    assert [bool(few.select(chat)) for chat in chats[:10]] == [bool(few.select(chat)) for chat in reordered[:10]]


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
