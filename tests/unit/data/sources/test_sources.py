"""The standard library as text: its splits, what is left out, and reading on."""

from __future__ import annotations

import importlib
import inspect
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from config.base import Section
from config.data import PythonStdlib, TextSource
from diffusionlm.data.reader import DocumentSource
from diffusionlm.data.sources import open_source
from diffusionlm.data.sources.local_files import StdlibSource


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
def test_resuming(check_resuming: Callable[..., list[Any]]) -> None:
    train, _ = open_splits()
    whole = [path.read_text(encoding="utf-8") for path in train.paths]  # type: ignore[attr-defined]
    assert check_resuming(lambda: open_splits()[0]) == whole == train.read(0, None, len(whole))[0]
