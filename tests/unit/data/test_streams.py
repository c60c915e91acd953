"""Local files through the datasets library, offline: formats, splits, resuming, errors."""

from __future__ import annotations

import bz2
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from config.data import LocalFiles
from diffusionlm.data.sources import DocumentSource, Split, open_source
from diffusionlm.data.streams import find_files, format_of

Drain = Callable[..., list[Any]]
TEXTS = [f"document {index} " + "é word" * (index % 7) + "\nsecond line" for index in range(57)]


@pytest.fixture(autouse=True)
def _cache_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def opened(*paths: Path | str, split: Split = "train", **options: Any) -> DocumentSource:
    options.setdefault("validation_paths", ("unused",))  # so that no document is kept for validation
    return open_source(LocalFiles(paths=tuple(map(str, paths)), **options), split)


def json_lines(texts: list[str]) -> str:
    return "".join(json.dumps({"id": index, "text": text}) + "\n" for index, text in enumerate(texts))


def write(folder: Path, kind: str) -> Path:
    """Three files of TEXTS, in the order of their names."""
    folder.mkdir(exist_ok=True)
    for part in range(3):
        texts = TEXTS[part * 19 : (part + 1) * 19]
        if kind == "parquet":
            pa = pytest.importorskip("pyarrow")
            import pyarrow.parquet as pq

            pq.write_table(pa.table({"text": texts}), folder / f"{part}.parquet", row_group_size=4)
        elif kind == "jsonl":
            (folder / f"{part}.jsonl").write_text(json_lines(texts), encoding="utf-8")
        elif kind == "jsonl.gz":
            (folder / f"{part}.jsonl.gz").write_bytes(gzip.compress(json_lines(texts).encode()))
        elif kind == "jsonl.bz2":
            (folder / f"{part}.jsonl.bz2").write_bytes(bz2.compress(json_lines(texts).encode()))
        elif kind == "txt":
            for index, text in enumerate(texts):
                (folder / f"{part}-{index:02}.txt").write_text(text, encoding="utf-8")
        elif kind == "txt.gz":
            for index, text in enumerate(texts):
                (folder / f"{part}-{index:02}.txt.gz").write_bytes(gzip.compress(text.encode()))
    return folder


KINDS = ["jsonl", "jsonl.gz", "jsonl.bz2", "parquet", "txt", "txt.gz"]


@pytest.mark.parametrize("kind", KINDS)
def test_all_documents_in_order_whatever_the_chunks(kind: str, tmp_path: Path, drain: Drain) -> None:
    source = opened(write(tmp_path / "data", kind))
    assert drain(source) == TEXTS
    assert drain(source, (len(TEXTS),)) == TEXTS
    assert drain(source, (1,)) == TEXTS
    assert drain(source, (10, 1, 3), epoch=1) == TEXTS
    assert source.skipped == {}


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet", "txt"])
def test_resuming_from_any_position(kind: str, tmp_path: Path, drain: Drain) -> None:
    folder = write(tmp_path / "data", kind)
    source = opened(folder)
    positions, position = [], None
    for count in range(1, len(TEXTS)):
        _, position = source.read(0, position, 1)
        positions.append((count, json.loads(json.dumps(position))))
    fresh = opened(folder)
    for count, position in [positions[i] for i in (0, 3, 17, 18, 19, 36, 37, 40, 55)]:
        assert drain(fresh, (5,), position=position) == TEXTS[count:], count
        assert fresh.read(0, position, 2)[0] == TEXTS[count : count + 2]  # and back to it, out of turn
    assert drain(opened(folder), position=positions[-1][1]) == TEXTS[-1:]


def test_a_position_may_be_used_twice_and_out_of_turn(tmp_path: Path) -> None:
    source = opened(write(tmp_path / "data", "jsonl"))
    first, behind = source.read(0, None, 5)
    source.read(0, behind, 9)
    assert source.read(0, behind, 3)[0] == TEXTS[5:8]
    assert source.read(0, None, 5) == (first, behind)


def test_splits_by_hash_are_disjoint_and_cover(tmp_path: Path, drain: Drain) -> None:
    folder = write(tmp_path / "data", "jsonl")
    options: dict[str, Any] = {"validation_paths": (), "validation_fraction": 0.3}
    train = opened(folder, **options)
    validation = opened(folder, split="validation", **options)
    kept, held = drain(train, (4,)), drain(validation, (3,))
    assert not set(kept) & set(held) and sorted(kept + held) == sorted(TEXTS)
    assert 5 <= len(held) <= 30
    assert kept == [text for text in TEXTS if text in kept], "order is kept"
    assert train.identity != validation.identity


def test_validation_paths_are_read_instead(tmp_path: Path, drain: Drain) -> None:
    folder = write(tmp_path / "data", "jsonl")
    held = tmp_path / "held.jsonl"
    held.write_text(json_lines(["held out"]))
    assert drain(opened(folder, split="validation", validation_paths=(str(held),))) == ["held out"]
    assert drain(opened(folder, validation_paths=(str(held),))) == TEXTS


@pytest.mark.parametrize(
    ("sample_by", "expected"),
    [
        ("document", ["one\ntwo\n\nthree\n"]),
        ("paragraph", ["one\ntwo", "three\n"]),
        ("line", ["one", "two", "three"]),
    ],
)
def test_documents_of_a_text_file(sample_by: str, expected: list[str], tmp_path: Path, drain: Drain) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\n\nthree\n")
    found = drain(opened(path, sample_by=sample_by))
    assert [text.rstrip("\n") for text in found] == [text.rstrip("\n") for text in expected]


def test_empty_documents_are_counted_once(tmp_path: Path, drain: Drain) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json_lines(["a", "", "b"]) + '{"id": 3, "text": null}\n')
    source = opened(path)
    assert drain(source) == ["a", "b"]
    assert drain(source, epoch=1) == ["a", "b"]
    assert source.skipped == {"empty": 2}


def test_identity_follows_the_files(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", "jsonl")
    before = opened(folder).identity
    assert opened(folder).identity == before
    with (folder / "2.jsonl").open("a") as file:
        file.write(json_lines(["more"]))
    assert opened(folder).identity != before


def test_missing_field_lists_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"text_field = 'body'.*'id', 'text'"):
        opened(write(tmp_path / "data", "jsonl"), text_field="body").read(0, None, 1)


def test_field_that_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"text_field = 'id'.*int"):
        opened(write(tmp_path / "data", "jsonl"), text_field="id").read(0, None, 1)


@pytest.mark.parametrize("good", [0, 5])
@pytest.mark.parametrize("line", ['{"text": "cut', "not json at all\n", '{"text": "a"} trailing\n'])
def test_malformed_json_line(line: str, good: int, tmp_path: Path, drain: Drain) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json_lines(TEXTS[:good]) + line)
    with pytest.raises(ValueError, match=r"a\.jsonl"):
        drain(opened(path))


def test_bytes_that_are_not_utf8(tmp_path: Path, drain: Drain) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"abc \xff\xfe def")
    with pytest.raises(ValueError, match=r"a\.txt"):
        drain(opened(path))


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.txt.gz", "a.parquet"])
def test_damaged_file(name: str, tmp_path: Path, drain: Drain) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(json_lines(TEXTS).encode())[:-40])
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        drain(opened(path))


def test_empty_file_and_glob_without_match(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").touch()
    with pytest.raises(ValueError, match=r"empty file .*a\.jsonl"):
        opened(tmp_path / "a.jsonl")
    with pytest.raises(ValueError, match=r"data\.source\.paths: .*nothing\*\.jsonl.* matches no file"):
        opened(tmp_path / "nothing*.jsonl")
    with pytest.raises(ValueError, match=r"data\.source\.validation_paths: .* matches no file"):
        opened(tmp_path / "a.jsonl", split="validation", validation_paths=(str(tmp_path / "none"),))


def test_formats_must_agree(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json_lines(["a"]))
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "c.dat").write_text(json_lines(["c"]))
    with pytest.raises(ValueError, match=r"data\.source\.format"):
        opened(tmp_path / "a.jsonl", tmp_path / "b.txt")
    with pytest.raises(ValueError, match=r"c\.dat"):
        opened(tmp_path / "c.dat")
    assert opened(tmp_path / "c.dat", format="json").read(0, None, 1)[0] == ["c"]


def test_find_files_sorts_and_does_not_repeat(tmp_path: Path) -> None:
    for name in ("b/2.txt", "a/1.txt", "a/.hidden", "c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    found = find_files((str(tmp_path / "**" / "*.txt"), str(tmp_path / "a")), "key")
    assert [path.relative_to(tmp_path).as_posix() for path in found] == ["a/1.txt", "b/2.txt", "c.txt"]


def test_name_with_glob_characters(tmp_path: Path, drain: Drain) -> None:
    """A file that exists is read, whatever its name."""
    path = tmp_path / "part[1].jsonl"
    path.write_text(json_lines(["a"]))
    assert drain(opened(path)) == ["a"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.jsonl", "json"),
        ("a.json.zst", "json"),
        ("a.b.TXT.gz", "text"),
        ("a.parquet", "parquet"),
        ("a.gz", None),
        ("a", None),
        ("a.py", "text"),
    ],
)
def test_format_by_ending(name: str, expected: str | None) -> None:
    assert format_of(Path(name)) == expected
