"""Local files: documents are read back from any position, in every format and compression; the standard library."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import importlib
import inspect
import json
import lzma
import os
import sysconfig
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from config.base import Section
from config.data import LocalFiles, PythonStdlib, TextSource
from diffusionlm.data.reader import DocumentSource, Split
from diffusionlm.data.sources import file_formats, open_source
from diffusionlm.data.sources.local_files import StdlibSource, detect_format, find_files

Drain = Callable[..., list[Any]]

TEXTS = [f"document {index} " + "é word" * (index % 7) + "\nsecond line" for index in range(57)]

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}
FORMATS = ["jsonl", "array", "document", "paragraph", "line", "parquet"]
KINDS = [(form, ending) for form in FORMATS for ending in COMPRESS if form != "parquet" or not ending]


def open_documents(*paths: Path | str, split: Split = "train", **options: Any) -> DocumentSource:
    options.setdefault("validation_paths", ("unused",))  # so that no document is validation out
    return open_source(LocalFiles(paths=tuple(map(str, paths)), **options), split, "data.source")


def json_lines(texts: list[str]) -> str:
    return "".join(json.dumps({"id": index, "text": text}) + "\n" for index, text in enumerate(texts))


def random_texts(count: int, seed: int, form: str) -> list[str]:
    """Characters of all planes and all kinds of line breaks, as far as the format can hold them."""
    rng = np.random.default_rng(seed)
    breaks = ["\n", "\r\n", "\r", "\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\ufeff", "\\", '"', "\x7f"]
    if form in ("jsonl", "array", "parquet"):
        breaks += ["\0", "\n\n"]
    if form in ("paragraph", "line"):
        breaks = ["\u2028", "\x85", "\ufeff", '"'] + (["\n"] if form == "paragraph" else [])
    texts = []
    for _ in range(count):
        highest = rng.choice([0x7F, 0x7FF, 0xFFFF, 0x10FFFF])
        codes = rng.integers(0x20, highest + 1, int(rng.integers(1, 40)))
        pieces = [chr(code) for code in codes if not 0xD800 <= code < 0xE000]
        for _ in range(int(rng.integers(0, 4))):
            pieces.insert(int(rng.integers(0, len(pieces) + 1)), str(rng.choice(breaks)))
        text = "".join(pieces)
        if form in ("paragraph", "line"):  # so that their ends are not stripped
            text = "\n".join(f"a{line}z" for line in text.split("\n"))
        if form == "document":
            text = text.replace("\r\n", "\n").lstrip("\ufeff")
        texts.append(text or "x")
    return texts


def content_of(texts: list[str], form: str, rng: np.random.Generator) -> bytes:
    if form == "jsonl":
        lines = [json.dumps({"text": text}, ensure_ascii=bool(rng.integers(2))) for text in texts]
        return "\n".join(lines).encode() + b"\n" * int(rng.integers(2))
    if form == "array":
        rows = [{"id": 1, "text": text, "more": [{}]} for text in texts]
        return json.dumps(rows, ensure_ascii=bool(rng.integers(2)), indent=1 if rng.integers(2) else None).encode()
    if form == "paragraph":
        return b"\n" * 2 + "".join(text + "\n" * int(rng.integers(2, 5)) for text in texts).encode()
    if form == "line":
        return "".join(text + str(rng.choice(["\n", "\r\n", "\n\n"])) for text in texts).encode()
    assert form == "document" and len(texts) == 1
    return texts[0].encode()


def write(folder: Path, texts: list[str], form: str, ending: str, seed: int = 0) -> Path:
    """The texts in several files, in the order of their names; archives have two members."""
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(seed)
    parts = [[text] for text in texts] if form == "document" else [texts[:19], texts[19:20], texts[20:]]
    name = {"jsonl": "jsonl", "array": "json", "parquet": "parquet"}.get(form, "txt")
    for number, part in enumerate(parts):
        path = folder / f"{number:03}.{name}{ending}"
        if form == "parquet":
            kinds = [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())]
            column = pa.array(part, pa.string()).cast(kinds[number % 3])
            pq.write_table(pa.table({"id": range(len(part)), "text": column}), path, row_group_size=7)
        else:
            content = content_of(part, form, rng)
            half = len(content) // 2
            pieces = [content] if ending == "" else [content[:half], content[half:]]
            path.write_bytes(b"".join(COMPRESS[ending](piece) for piece in pieces))
    return folder


def options_of(form: str) -> dict[str, Any]:
    return {"sample_by": form} if form in ("document", "paragraph", "line") else {}


@pytest.fixture
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks end in the middle of lines, of characters and of row groups."""
    monkeypatch.setattr("files.compressed.BUFFER_BYTES", 61)
    monkeypatch.setattr("files.compressed.COMPRESSED_BLOCK", 37)
    monkeypatch.setattr(file_formats, "MAX_PARQUET_BATCH_ROWS", 3)


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize(("form", "ending"), KINDS)
def test_every_document_from_every_position(
    form: str, ending: str, tmp_path: Path, drain: Drain, check_resuming: Drain
) -> None:
    for seed in range(2):
        texts = random_texts(45, seed, form)
        folder = write(tmp_path / str(seed), texts, form, ending, seed)
        assert check_resuming(partial(open_documents, folder, **options_of(form)), step=1 + 6 * seed) == texts
        source = open_documents(folder, **options_of(form))
        assert drain(source, (1,), epoch=1) == drain(source, (10, 1, 3), epoch=2) == texts
        assert source.skip_log.counts == {}


def test_json_and_parquet_together(tmp_path: Path, drain: Drain) -> None:
    (tmp_path / "a.jsonl.zst").write_bytes(COMPRESS[".zst"](json_lines(["a", "b"]).encode()))
    (tmp_path / "b.json").write_text('{\n "text": "c",\n "id": 1}\n')
    (tmp_path / "c.json").write_text('{"text": "d"}\n{"text": "e"}\n')
    pq.write_table(pa.table({"text": ["f"]}), tmp_path / "d.parquet")
    source = open_documents(tmp_path)
    assert drain(source, (1,)) == list("abcdef")
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert source.provenance == f"4 files, {size:,} bytes, json and parquet, of {tmp_path.name}"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("[]", []),
        (f'[{{"id": {"9" * 5000}, "text": "a"}}, {{"text": "b"}}]', ["a", "b"]),
        ("\ufeff\n[\n{}]", None),
        ("", None),
        ('\n\n[{"text":"a"}\n,\n{"text":"b"} ]  \n', ["a", "b"]),
        ('\ufeff{"text": "a"}\n\n{"text": "b"}', ["a", "b"]),
        ('{"a": {\n"b": 1},\n"text": "x"}', ["x"]),
    ],
)
def test_forms_of_a_json_file(content: str, expected: list[str] | None, tmp_path: Path, drain: Drain) -> None:
    path = tmp_path / "a.json"
    path.write_text(content, encoding="utf-8")
    if expected is None:
        with pytest.raises(ValueError, match=r"no field 'text'|empty file"):
            drain(open_documents(path))
    else:
        assert drain(open_documents(path)) == expected


@pytest.mark.parametrize(
    ("sample_by", "expected"),
    [
        ("document", ["one\ntwo\n\n \nthree\rfour\n"]),
        ("paragraph", ["one\ntwo", "three\rfour"]),
        ("line", ["one", "two", "three\rfour"]),
    ],
)
@pytest.mark.parametrize("line_break", [b"\n", b"\r\n"])
def test_documents_of_a_text_file(
    sample_by: str, expected: list[str], line_break: bytes, tmp_path: Path, drain: Drain
) -> None:
    """Line breaks of Windows become plain ones, a lone carriage return stays, and a byte order mark goes."""
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbf" + b"one\ntwo\n\n \nthree\rfour\n".replace(b"\n", line_break))
    assert drain(open_documents(path, sample_by=sample_by), (1,)) == expected


def test_a_named_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl.gz")
    with pytest.raises(ValueError, match=rf"data\.source\.paths: {tmp_path / 'a.jsonl.gz'} .*no regular file"):
        open_documents(tmp_path)


# Splits


@pytest.mark.parametrize("fraction", [0.05, 0.3])
def test_splits_by_the_hash_of_the_text(fraction: float, tmp_path: Path, drain: Drain) -> None:
    texts = [f"{text} {number}" for number in range(2) for text in TEXTS]
    folder = write(tmp_path / "data", texts, "jsonl", "")
    options: dict[str, Any] = {"validation_paths": (), "validation_fraction": fraction}
    shares = {text: int(hashlib.sha256(text.encode()).hexdigest()[:16], 16) / 2**64 for text in texts}
    train, validation = open_documents(folder, **options), open_documents(folder, split="validation", **options)
    assert drain(validation, (3,)) == [text for text in texts if shares[text] < fraction]
    assert drain(train, (4,)) == [text for text in texts if shares[text] >= fraction]
    assert train.identity != validation.identity


@pytest.mark.parametrize("limit", [1, 10, 1000])
def test_max_documents(limit: int, tmp_path: Path, drain: Drain) -> None:
    folder = write(tmp_path / "data", TEXTS, "jsonl", ".gz")
    options: dict[str, Any] = {"validation_paths": (), "validation_fraction": 0.3}
    everything = drain(open_documents(folder, **options))
    limited = open_documents(folder, max_documents=limit, **options)
    assert drain(limited, (4, 6)) == drain(limited, (1,), epoch=1) == everything[:limit]
    position = open_documents(folder, max_documents=limit, **options).read(0, None, 4)[1]
    if limit > 4:
        assert drain(limited, (4, 6), position=position) == everything[4:limit]
    whole = open_documents(folder, split="validation", **options)
    validation = open_documents(folder, split="validation", max_documents=limit, **options)
    assert drain(validation) == drain(whole) and validation.identity == whole.identity


# Identity


def test_identity_follows_the_files_and_not_their_place(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", TEXTS, "jsonl", "")
    before = open_documents(folder).identity
    assert open_documents(folder).identity == before
    moved = folder.rename(tmp_path / "elsewhere")
    assert open_documents(moved).identity == before
    for option in ({"text_field": "id"}, {"on_bad_row": "skip"}, {"max_documents": 3}, {"validation_paths": ()}):
        assert open_documents(moved, **option).identity != before
    with (moved / "002.jsonl").open("a") as file:
        file.write(json_lines(["more"]))
    assert open_documents(moved).identity != before


def test_a_file_that_changes_while_it_is_read(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", TEXTS, "jsonl", "")
    last = folder / "002.jsonl"
    source, other, touched, edited = (open_documents(folder) for _ in range(4))
    _, position = source.read(0, None, 3)
    os.utime(last, ns=(1, 1))
    assert len(touched.read(0, None, 100)[0]) == 57, "only the modification time differs"
    content = last.read_bytes()
    last.write_bytes(content.replace(b"document", b"Document"))
    with pytest.raises(ValueError, match=r"002\.jsonl has changed"):
        edited.read(0, None, 100)
    last.write_bytes(content)
    last.write_text(last.read_text() + json_lines(["more"]))
    with pytest.raises(ValueError, match=r"data\.source\.paths: .*002\.jsonl has changed .*start a new run"):
        source.read(0, position, 100)
    last.unlink()
    with pytest.raises(ValueError, match=r"002\.jsonl can no longer be read \(No such file"):
        other.read(0, None, 100)


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_a_position_after_the_end_of_a_file(ending: str, tmp_path: Path) -> None:
    """The file was replaced by a shorter one."""
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(COMPRESS[ending](json_lines(TEXTS).encode()))
    _, position = open_documents(path).read(0, None, 30)
    path.write_bytes(COMPRESS[ending](json_lines(TEXTS[:9]).encode()))
    with pytest.raises(ValueError, match=r"a\.jsonl.* has no byte [\d,]+, where reading continues"):
        open_documents(path).read(0, position, 1)


# Finding files


def test_find_files_sorts_and_does_not_repeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b/2.txt", "a/1.txt", "a/.hidden", ".git/x.txt", "c.txt", "part[1].txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    monkeypatch.chdir(tmp_path)
    paths = find_files((str(tmp_path / "**" / "*.txt"), str(tmp_path / "a"), "c.txt", "./c.txt"), "key")
    assert [path.relative_to(tmp_path).as_posix() for path in paths] == ["a/1.txt", "b/2.txt", "c.txt", "part[1].txt"]
    assert find_files((".",), "key") == paths
    assert find_files(("part[1].txt",), "key") == paths[-1:], "a file that exists, whatever its name"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_files(("~/a",), "key") == paths[:1]


def test_globs_and_directories_without_files(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"data\.source\.paths: .*nothing\*\.jsonl.* matches no file"):
        open_documents(tmp_path / "nothing*.jsonl")
    with pytest.raises(ValueError, match=r"data\.source\.paths: .*empty' is a directory without files"):
        open_documents(tmp_path / "empty")
    with pytest.raises(ValueError, match=r"data\.source\.validation_paths: .* matches no file"):
        open_documents(tmp_path / "a.jsonl", split="validation", validation_paths=(str(tmp_path / "none"),))


def test_unknown_and_mixed_formats(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json_lines(["a"]))
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "c.dat").write_text(json_lines(["c"]))
    (tmp_path / "d.parquet.gz").write_bytes(b"d")
    with pytest.raises(ValueError, match=r"b\.txt is plain text and .*a\.jsonl is json; .*\[\[data\.mixture\]\]"):
        open_documents(tmp_path / "a.jsonl", tmp_path / "b.txt")
    with pytest.raises(ValueError, match=r"c\.dat .* format; .*data\.source\.format"):
        open_documents(tmp_path / "c.dat")
    with pytest.raises(ValueError, match=r"d\.parquet\.gz .*unpack it"):
        open_documents(tmp_path / "d.parquet.gz")
    names = ("a.jsonl", "a.json.zst", "a.b.TXT.gz", "a.parquet", "a.gz", "a", "a.py")
    assert [detect_format(Path(name)) for name in names] == ["json", "json", "text", "parquet", None, None, "text"]
    assert open_documents(tmp_path / "c.dat", format="json").read(0, None, 1)[0] == ["c"]
    assert open_documents(tmp_path / "a.jsonl", tmp_path / "b.txt", format="text").read(0, None, 3)[0][1] == "b"


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_a_row_of_40_megabytes(ending: str, tmp_path: Path, drain: Drain) -> None:
    text = "é" * 20_000_000
    path = tmp_path / f"a.jsonl{ending}"
    content = json_lines(["a", text, "b"]).replace("\\u00e9", "é").encode()
    path.write_bytes(gzip.compress(content, 1) if ending else content)
    assert drain(open_documents(path), (1,)) == ["a", text, "b"]


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """60 files to be read, and others that are not."""
    root = tmp_path / "python3"
    for index in range(60):
        path = root / ("json" if index % 3 else ".") / f"module{index:02}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"x = {index}  # é\r\n", encoding="utf-8", newline="")
    for folder in ("site-packages/numpy", "test", "json/tests", "encodings", "idlelib/idle_test", "pydoc_data"):
        (root / folder).mkdir(parents=True)
        (root / folder / "excluded.py").write_text("excluded = 1")
    (root / "test.py").write_text("a module named like an excluded folder = 1")
    (root / "empty.py").write_text("")
    (root / "notes.txt").write_text("excluded")
    monkeypatch.setattr(sysconfig, "get_paths", lambda *a, **k: {"stdlib": str(root)})
    return root


@pytest.mark.parametrize("section", get_args(TextSource))
def test_every_section_names_what_opens_it(section: type[Section]) -> None:
    module, _, name = section.opener.partition(":")  # type: ignore[attr-defined]
    opener = getattr(importlib.import_module(f"diffusionlm.data.sources.{module}"), name)
    assert list(inspect.signature(opener).parameters)[:3] == ["config", "split", "key"]
    assert section.model_fields["kind"].default


def open_splits(share: int = 5) -> tuple[DocumentSource, DocumentSource]:
    config = PythonStdlib(validation_share=share)
    return open_source(config, "train", "data.source"), open_source(config, "validation", "data.source")


def names(source: DocumentSource, root: Path) -> list[str]:
    assert isinstance(source, StdlibSource)
    return [path.relative_to(root).as_posix() for path in source.paths]


def test_splits_are_disjoint_and_cover_everything(library: Path) -> None:
    train, validation = open_splits()
    expected = {f"{'json/' if index % 3 else ''}module{index:02}.py" for index in range(60)} | {"test.py"}
    assert not set(names(train, library)) & set(names(validation, library))
    assert set(names(train, library)) | set(names(validation, library)) == expected
    assert 3 <= len(names(validation, library)) <= 24
    assert names(train, library) == sorted(names(train, library), key=Path)
    assert train.skip_log.counts == validation.skip_log.counts == {}


def test_identity_changes_with_text_and_split(library: Path) -> None:
    train, validation = open_splits()
    assert train.identity != validation.identity
    (library / names(train, library)[0]).write_text("changed = 1")
    assert open_splits()[0].identity != train.identity
    assert open_splits()[1].identity == validation.identity


def test_files_that_are_not_utf8_are_counted(library: Path, drain: Callable[..., list[Any]]) -> None:
    broken = library / names(open_splits()[0], library)[3]
    broken.write_bytes(b"# \xff\xfe latin")
    train, validation = open_splits()
    assert train.skip_log.counts == {"not UTF-8": 1} and validation.skip_log.counts == {}
    assert broken not in train.paths  # type: ignore[attr-defined]
    assert all("latin" not in text for text in drain(train))


@pytest.mark.usefixtures("library")
def test_resuming_of_the_standard_library(check_resuming: Callable[..., list[Any]]) -> None:
    train, _ = open_splits()
    whole = [path.read_text(encoding="utf-8") for path in train.paths]  # type: ignore[attr-defined]
    assert check_resuming(lambda: open_splits()[0]) == whole == train.read(0, None, len(whole))[0]
