"""Records up to `max_record_bytes`, and larger ones."""

from __future__ import annotations

import gzip
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.unit.data.sources.record_documents import open_documents

Drain = Callable[..., list[Any]]


LINE: dict[str, str] = {"sample_by": "line"}
LARGE = b"x" * 500

LARGE_ROWS: dict[str, tuple[str, bytes, dict[str, Any], list[str]]] = {
    "first line": ("a.json.gz", b'{"text": "%s"}\n' % LARGE, {}, []),
    "array": ("a.json.gz", b'[{"text": "%s"}]' % LARGE, {}, []),
    "document": ("a.txt.gz", LARGE, {"sample_by": "document"}, []),
}


@pytest.mark.parametrize(("name", "content", "options", "before"), LARGE_ROWS.values(), ids=LARGE_ROWS)
def test_records_are_read_up_to_a_size(
    name: str, content: bytes, options: dict[str, Any], before: list[str], tmp_path: Path, drain: Drain
) -> None:
    path = tmp_path / name
    path.write_bytes(compress(name, content))
    options = options | {"max_record_bytes": 100}
    with pytest.raises(ValueError, match=r"a\..*record too large: .*max_record_bytes = 100; raise it"):
        drain(open_documents(path, "raise", **options))
    source = open_documents(path, "skip", **options)
    assert drain(source) == before and source.skip_log.counts == {"record too large": 1}
    assert len(drain(open_documents(path, "raise", **options | {"max_record_bytes": 10_000}))) == len(before) + 1


ROW = b'{"text": "%s"}\n'

CHAT_ROW = b'{"prompt": "%s", "completion": "%s"}\n'

AMONG_SMALL: dict[str, tuple[str, tuple[bytes, bytes, bytes], dict[str, Any], str]] = {
    "lines of JSON in an archive": ("a.json.gz", (ROW % b"a", ROW % LARGE, ROW % b"b"), {}, "line 3"),
    "conversations": (
        "a.jsonl",
        (CHAT_ROW % (b"x", b"a"), CHAT_ROW % (LARGE, b"y"), CHAT_ROW % (b"x", b"b")),
        {"chat": {}},
        "line 3",
    ),
    "lines": ("a.txt", (b"a\n", LARGE + b"\n", b"b\n"), LINE, "line 3"),
    "paragraphs": ("a.txt", (b"a\n\n", b"c\n" * 100 + b"\n", b"b\n\n"), {"sample_by": "paragraph"}, "line 105"),
    "line of a paragraph": (
        "a.txt",
        (b"a\n\n", b"c\n%s\nd\n\n" % LARGE, b"b\n\n"),
        {"sample_by": "paragraph"},
        "line 8",
    ),
}


@pytest.mark.parametrize(("name", "records", "options", "place"), AMONG_SMALL.values(), ids=AMONG_SMALL)
def test_a_record_that_is_too_large_is_left_out_alone(
    name: str,
    records: tuple[bytes, bytes, bytes],
    options: dict[str, Any],
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    drain: Drain,
) -> None:
    first, large, last = records
    monkeypatch.setattr(
        "diffusionlm.data.sources.file_formats.BUFFER_BYTES", 7
    )  # the rest of the line is read in pieces
    path = tmp_path / name
    (path_of_small := tmp_path / f"small-{name}").write_bytes(compress(name, first * 2 + last * 2))
    path.write_bytes(compress(name, first * 2 + large + last * 2))
    options = options | {"max_record_bytes": 100}
    expected = drain(open_documents(path_of_small, "raise", **options))
    assert len(expected) == 4
    source = open_documents(path, "skip", **options)
    assert drain(source, (1,)) == expected and source.skip_log.counts == {"record too large": 1}
    for num_read in (1, 2, 3):  # continues exactly, before and after the large one
        _, position = open_documents(path, "skip", **options).read(0, None, num_read)
        assert open_documents(path, "skip", **options).read(0, position, 9)[0] == expected[num_read:]
    with pytest.raises(ValueError, match=rf"{name}, {place}: record too large: .*on_bad_row = \"skip\""):
        drain(open_documents(path, "raise", **options))


def compress(name: str, content: bytes) -> bytes:
    return gzip.compress(content) if name.endswith(".gz") else content


LINES: dict[str, Callable[[], bytes]] = {
    "a.txt": lambda: b"x" * (64 << 20),
    "a.txt.gz": lambda: b"\n".join(
        row.tobytes().hex().encode() for row in np.random.default_rng(0).random((12_000, 60))
    ),
}


@pytest.mark.parametrize("name", LINES)
def test_files_are_read_in_bounded_memory(name: str, tmp_path: Path) -> None:
    """A line that is too large, and many lines of an archive."""
    path = tmp_path / name
    path.write_bytes(compress(name, b"a\n" + LINES[name]() + b"\nb\n"))
    source = open_documents(path, "skip", sample_by="line", max_record_bytes=2_000)
    position, count = None, 0
    tracemalloc.start()
    try:
        while count == 0 or position is not None:
            documents, position = source.read(0, position, 100)
            count += len(documents)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count == (2 if name == "a.txt" else 12_002) and peak < 6 << 20


def test_a_file_that_is_one_record_may_be_as_large_as_on_the_disk(tmp_path: Path, drain: Drain) -> None:
    (tmp_path / "a.txt").write_bytes(LARGE)
    (tmp_path / "a.json").write_bytes(b'[{"text": "%s"}]' % LARGE)
    for name in ("a.txt", "a.json"):
        assert drain(open_documents(tmp_path / name, "raise", max_record_bytes=100)) == [LARGE.decode()]


@pytest.mark.parametrize("is_dictionary", [False, True])
def test_large_values_of_parquet(is_dictionary: bool, tmp_path: Path, drain: Drain) -> None:
    path, texts = tmp_path / "a.parquet", ["x" * 500] * 100
    pq.write_table(pa.table({"text": texts}), path, use_dictionary=is_dictionary)
    with pytest.raises(ValueError, match=r"a\.parquet.*record too large.*max_record_bytes = 300"):
        drain(open_documents(path, "raise", max_record_bytes=300))
    assert drain(open_documents(path, "raise")) == texts


def test_one_large_value_among_small_ones_of_parquet(tmp_path: Path, drain: Drain) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a"] * 100 + ["x" * 500, "b"]}), path, use_dictionary=False)
    source = open_documents(path, "skip", max_record_bytes=300)
    assert drain(source) == ["a"] * 100 + ["b"] and source.skip_log.counts == {"record too large": 1}
    with pytest.raises(ValueError, match=r"a\.parquet, row 101: record too large"):
        drain(open_documents(path, "raise", max_record_bytes=300))
