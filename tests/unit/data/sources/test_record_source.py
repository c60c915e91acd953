"""Bad and large records under each `on_bad_row`: documents, skip counts, errors, bounded memory."""

from __future__ import annotations

import bz2
import gzip
import lzma
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from config.data import LocalFiles
from diffusionlm.data.reader import DocumentSource
from diffusionlm.data.sources import open_source

Drain = Callable[..., list[Any]]


def open_documents(path: Path, on_bad_row: str, **options: Any) -> DocumentSource:
    config = LocalFiles.model_validate(
        {"paths": (str(path),), "validation_paths": ("unused",), "on_bad_row": on_bad_row, **options}
    )
    return open_source(config, "train", "data.source")


GOOD = b'{"text": "a"}\n%s\n{"text": "b"}\n'
FFFD = "\ufffd"


@dataclass(frozen=True)
class Case:
    """A bad record between the documents "a" and "b"."""

    row: bytes
    reason: str
    repaired_text: str | None = None
    message: str | None = None
    """Pattern of a part of the message."""
    location: str = "line 2"
    name: str = "a.jsonl"
    content: bytes = GOOD
    options: dict[str, str] = field(default_factory=dict)
    key: str = "data.source.paths"

    def write(self, folder: Path) -> Path:
        path = folder / self.name
        path.write_bytes(self.content % self.row)
        return path


NOT_TEXT = "data.source.text_field = 'text'"
ARRAY = b'[{"text": "a"},\n%s,\n{"text": "b"}]'
LINES = b"a\n%s\nb\n"
LINE: dict[str, str] = {"sample_by": "line"}

CASES = {
    "broken": Case(b"not json", "malformed JSON", message=r"Expecting value at character 0 of 'not json'"),
    "cut": Case(b'{"text": "cut', "malformed JSON", message="Unterminated string"),
    "deep": Case(b"[" * 100_000, "malformed JSON", message="nested too deeply"),
    "utf8": Case(b'{"text": "x\xff\xfey"}', "not UTF-8", f"x{FFFD}{FFFD}y", message=r"xff\\xfey.*byte 11"),
    "utf8 in another field": Case(b'{"id": "\xc3", "text": "x"}', "not UTF-8", "x"),
    "utf8 and number": Case(b'{"id": "\xc3", "text": 5}', "not UTF-8", "5"),
    "lone surrogate": Case(b'{"text": "x\\ud800y\\udc00"}', "lone surrogate", f"x{FFFD}y{FFFD}", message=r"ud800"),
    "null": Case(b'{"text": null}', "null instead of text", key=NOT_TEXT),
    "nan": Case(b'{"text": NaN}', "number instead of text", key=NOT_TEXT, message="nan"),
    "digits as written": Case(b'{"text": -1.50e3}', "number instead of text", "-1.50e3", key=NOT_TEXT),
    "many digits": Case(b'{"text": %s}' % (b"7" * 5000), "number instead of text", "7" * 5000, key=NOT_TEXT),
    "list": Case(b'{"text": ["x"]}', "list instead of text", key=NOT_TEXT, message=r"\['x'\]"),
    "no field": Case(b'{"id": 1, "Text": "x"}', "no field 'text'", key=NOT_TEXT, message="its fields are 'id', 'Text'"),
    "list of its own": Case(b'["text"]', "not an object"),
    "array, utf8": Case(b'{"text": "x\xff"}', "not UTF-8", f"x{FFFD}", name="a.json", content=ARRAY),
    "array, number": Case(b"5", "not an object", name="a.json", content=ARRAY),
    "line, utf8": Case(b"x\xff", "not UTF-8", f"x{FFFD}", "byte 1.*iconv", name="a.txt", content=LINES, options=LINE),
    "line, binary": Case(b"x\0y", "binary data", name="a.txt", content=LINES, options=LINE, message="plain text"),
}


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def test_raise_names_key_file_line_and_remedy(case: Case, tmp_path: Path, drain: Drain) -> None:
    path = case.write(tmp_path)
    source = open_documents(path, "raise", **case.options)
    _, position = source.read(0, None, 1)
    with pytest.raises(ValueError, match=case.message) as caught:
        source.read(0, position, 5)
    message = str(caught.value)
    assert message.startswith(f"{case.key}: {path}, {case.location}: {case.reason}: ")
    assert 'set data.source.on_bad_row = "skip"' in message
    assert ('"replace"' in message) == (case.repaired_text is not None)
    assert len(message) < 450 + len(str(path)), "long records are shortened"
    with pytest.raises(ValueError, match=case.message):
        source.read(0, position, 1)  # the next call fails again
    assert source.skip_log.counts == {}


@pytest.mark.parametrize("policy", ["skip", "replace"])
def test_a_bad_record_is_left_out_or_repaired_and_counted_once(
    case: Case, policy: str, tmp_path: Path, drain: Drain
) -> None:
    source = open_documents(case.write(tmp_path), policy, **case.options)
    repaired = [case.repaired_text] if case.repaired_text is not None and policy == "replace" else []
    for epoch in (0, 0, 1):
        assert drain(source, (1,), epoch=epoch) == ["a", *repaired, "b"]
        assert source.skip_log.counts == {f"mended: {case.reason}" if repaired else case.reason: 1}


@pytest.mark.parametrize("policy", ["raise", "skip", "replace"])
def test_valid_unusual_records(policy: str, tmp_path: Path, drain: Drain) -> None:
    """Blank lines, Windows line breaks, byte order marks, late fields, NaN in other fields, duplicate keys."""
    rows = [
        b'\xef\xbb\xbf{"text": "a"}',
        b"",
        b"  \t",
        b'{"text": "b"}\r',
        b'{"text": "c", "score": NaN, "big": 1' + b"0" * 5000 + b"}",
        b'{"text": "x", "text": "d"}',
        b' {"text": "e", "new": {"nested": [1, "\\ud800"]}} ',
        b'{"text": "\\ud83d\\ude00"}',
        b'{"text": "\\u0000"}',
        b'\xef\xbb\xbf{"text": "h"}',
    ]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(rows))
    source = open_documents(path, policy)
    assert drain(source, (1,)) == ["a", "b", "c", "d", "e", "\U0001f600", "\0", "h"]
    assert source.skip_log.counts == {}


@pytest.mark.parametrize("policy", ["raise", "skip", "replace"])
def test_empty_text_is_skipped_and_counted(policy: str, tmp_path: Path, drain: Drain) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": ""}\n{"text": "a"}\n{"text": ""}\n')
    source = open_documents(path, policy)
    assert drain(source, (1,)) == drain(source) == ["a"]
    assert source.skip_log.counts == {"empty": 2}


@pytest.mark.parametrize("end", [b'{"text": "c"}', b"", b'] {"text": "c"}'])
def test_broken_array(end: bytes, tmp_path: Path, drain: Drain) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b'[{"text": "a"},\n\n{"text": "b"}' + end)
    with pytest.raises(ValueError, match=r"a\.json, line 3: malformed JSON: .*the rest of the array is lost"):
        drain(open_documents(path, "raise"))
    for policy in ("skip", "replace"):
        source = open_documents(path, policy)
        assert drain(source, (1,)) == ["a", "b"]
        assert source.skip_log.counts == {"malformed JSON": 1}


# Whole files


def test_a_bad_record_among_those_of_the_split_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.txt").write_bytes(b"text \0")
    with pytest.raises(ValueError, match=rf"{tmp_path / 'b.txt'}: binary data: .*data\.source\.on_bad_row = \"skip\""):
        open_documents(tmp_path, "raise", validation_paths=())
    open_documents(tmp_path, "skip", validation_paths=())


def test_empty_files(tmp_path: Path, drain: Drain) -> None:
    (tmp_path / "a.jsonl").touch()
    (tmp_path / "b.jsonl").write_text('{"text": "b"}\n')
    with pytest.raises(ValueError, match=r"empty file .*a\.jsonl; remove it"):
        open_documents(tmp_path, "raise")
    source = open_documents(tmp_path, "skip")
    assert drain(source) == drain(source) == ["b"] and source.skip_log.counts == {"empty file": 1}
    with pytest.raises(ValueError, match=r"empty file .*a\.jsonl; remove it, name other files$"):
        open_documents(tmp_path / "a.jsonl", "skip")
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.py").touch()
    (tmp_path / "text/b.py").write_text("b")
    source = open_documents(tmp_path / "text", "raise")
    assert drain(source) == ["b"] and source.skip_log.counts == {"empty": 1}


ARCHIVES: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.compress,
}


@pytest.mark.parametrize("ending", ARCHIVES)
def test_truncated_archive(ending: str, tmp_path: Path, drain: Drain, monkeypatch: pytest.MonkeyPatch) -> None:
    """All whole records before the end are read; the number of lost ones is unknown."""
    monkeypatch.setattr("files.compressed.BUFFER_BYTES", 100)
    texts = [f"{number}" for number in range(200)]
    rows = [f'{{"text": "{text}"}}\n'.encode() for text in texts]
    first, second = ARCHIVES[ending](b"".join(rows[:150])), ARCHIVES[ending](b"".join(rows[150:]))
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(first + second[: len(second) // 2])
    (tmp_path / "b.jsonl").write_text('{"text": "b"}\n')
    with pytest.raises(ValueError, match=rf"{path}, line 1\d\d: truncated archive: .*copy it again; .*\"skip\""):
        drain(open_documents(tmp_path, "raise"))
    for policy in ("skip", "replace"):
        source = open_documents(tmp_path, policy)
        whole = drain(source)
        assert whole[-1] == "b" and whole[:-1] == texts[: len(whole) - 1] and len(whole) > 150
        assert source.skip_log.counts == {"truncated archive": 1}
        position: Any = None
        for cut in range(1, len(whole) + 1):
            _, position = source.read(0, position, 1)
            if cut >= 145:
                assert drain(open_documents(tmp_path, policy), position=position) == whole[cut:]


@pytest.mark.parametrize("ending", ARCHIVES)
def test_damaged_archive(ending: str, tmp_path: Path, drain: Drain) -> None:
    path = tmp_path / f"a.jsonl{ending}"
    row = b'{"text": "a"}\n'
    for content in (row, b"\x07garbage" + row):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"{path}: damaged archive: .*copy it again"):
            drain(open_documents(path, "raise"))
    path.write_bytes(ARCHIVES[ending](row) + b"garbage behind it")
    source = open_documents(path, "skip")
    assert drain(source) == ["a"] and source.skip_log.counts == {"damaged archive": 1}


def test_archive_padded_with_zeros(tmp_path: Path, drain: Drain) -> None:
    path = tmp_path / "a.jsonl.gz"
    member = gzip.compress(b'{"text": "a"}\n')
    path.write_bytes(member + bytes(100_000) + member + bytes(512))
    assert drain(open_documents(path, "raise")) == ["a", "a"]


# Parquet


def test_parquet_cells(tmp_path: Path, drain: Drain) -> None:
    binary = pa.array([b"a", b"x\xff", None, b"", b"b"], pa.binary())
    path = tmp_path / "a.parquet"
    table = pa.table({"text": pa.Array.from_buffers(pa.string(), len(binary), binary.buffers())})
    pq.write_table(table, path)
    with pytest.raises(ValueError, match=rf"data\.source\.paths: {path}, row 2: not UTF-8: b'x"):
        drain(open_documents(path, "raise"))
    source = open_documents(path, "skip")
    assert drain(source, (1,)) == ["a", "b"]
    assert source.skip_log.counts == {"not UTF-8": 1, "null instead of text": 1, "empty": 1}
    source = open_documents(path, "replace")
    assert drain(source, (1,)) == ["a", f"x{FFFD}", "b"]
    assert source.skip_log.counts == {"mended: not UTF-8": 1, "null instead of text": 1, "empty": 1}
    pq.write_table(pa.table({"text": binary}), path)
    assert drain(open_documents(path, "replace")) == ["a", f"x{FFFD}", "b"]


@pytest.mark.parametrize("policy", ["raise", "skip", "replace"])
def test_parquet_columns(policy: str, tmp_path: Path, drain: Drain) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": [1, 2], "text": ["a", "b"], "tags": [["x"], []]}), path)
    with pytest.raises(ValueError, match=r"text_field = 'body' is no column of .*'id', 'text', 'tags'"):
        drain(open_documents(path, policy, text_field="body"))
    numbers, lists = open_documents(path, policy, text_field="id"), open_documents(path, policy, text_field="tags")
    if policy == "raise":
        with pytest.raises(ValueError, match=r"text_field = 'id': .*row 1: number instead of text: 1;.*\"replace\""):
            drain(numbers)
    else:
        assert drain(numbers) == ([] if policy == "skip" else ["1", "2"])
        assert drain(lists) == [] and lists.skip_log.counts == {"list instead of text": 2}


def test_corrupt_parquet(tmp_path: Path, drain: Drain) -> None:
    path = tmp_path / "a.parquet"
    texts = [f"{number} {number**7}" for number in range(400)]
    pq.write_table(pa.table({"text": texts}), path, row_group_size=100, compression="zstd")
    content = bytearray(path.read_bytes())
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=rf"{path}: damaged Parquet: .*copy it again"):
        drain(open_documents(path, "raise"))
    source = open_documents(path, "skip")
    assert drain(source) == [] and source.skip_log.counts == {"damaged Parquet": 1}
    start = pq.ParquetFile(pa.BufferReader(bytes(content))).metadata.row_group(2).column(0)
    first = start.dictionary_page_offset or start.data_page_offset
    content[first : first + 200] = bytes(200)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{path}, row 200: damaged Parquet"):
        drain(open_documents(path, "raise"))
    source = open_documents(path, "skip")
    assert drain(source, (7,)) == texts[:200] and source.skip_log.counts == {"damaged Parquet": 1}


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


LARGE_LINES: dict[str, Callable[[], bytes]] = {
    "a.txt": lambda: b"x" * (64 << 20),
    "a.txt.gz": lambda: b"\n".join(
        row.tobytes().hex().encode() for row in np.random.default_rng(0).random((12_000, 60))
    ),
}


@pytest.mark.parametrize("name", LARGE_LINES)
def test_files_are_read_in_bounded_memory(name: str, tmp_path: Path) -> None:
    """A line that is too large, and many lines of an archive."""
    path = tmp_path / name
    path.write_bytes(compress(name, b"a\n" + LARGE_LINES[name]() + b"\nb\n"))
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
