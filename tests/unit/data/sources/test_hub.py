"""Datasets through the datasets library, offline: directories, a cache, resuming, errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from config.data import HubDataset
from diffusionlm.data.reader import DocumentSource, Split
from diffusionlm.data.sources import open_source

Drain = Callable[..., list[Any]]

TEXTS = [f"document {index} é" for index in range(57)]
COMMIT = "0123456789" * 4


@pytest.fixture(autouse=True)
def _offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()


def open_documents(dataset: Path | str, split: Split = "train", **options: Any) -> DocumentSource:
    options.setdefault("validation_split", "test")  # so that no document is validation out
    return open_source(HubDataset(dataset=str(dataset), **options), split, "data.source")


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    """Two files for training, one to test."""
    folder = tmp_path / "stories"
    folder.mkdir()
    for part, texts in enumerate((TEXTS[:30], TEXTS[30:])):
        table = pa.table({"id": range(len(texts)), "text": texts})
        pq.write_table(table, folder / f"train-{part}.parquet", row_group_size=8)
    pq.write_table(pa.table({"id": [0, 1], "text": ["held", "out"]}), folder / "test-0.parquet")
    return folder


def json_directory(folder: Path, rows: list[dict[str, Any]]) -> Path:
    folder.mkdir()
    (folder / "train-0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def cached(tmp_path: Path) -> str:
    """A cached dataset of the Hub, as the library stores it."""
    folder = tmp_path / "cache/someone___tiny/default/0.0.0" / COMMIT
    folder.mkdir(parents=True)
    table = pa.table({"text": TEXTS})
    with pa.OSFile(str(folder / "tiny-train.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, max_chunksize=10)
    info = datasets.DatasetInfo(
        features=datasets.Features({"text": datasets.Value("string")}),
        builder_name="parquet",
        dataset_name="tiny",
        config_name="default",
        version="0.0.0",
        splits=[{"name": "train", "num_examples": len(TEXTS), "dataset_name": "tiny"}],
    )
    info.write_to_directory(str(folder))
    return "someone/tiny"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["parquet", "json", "cached"])
def test_resuming_at_every_position(kind: str, request: pytest.FixtureRequest, tmp_path: Path, drain: Drain) -> None:
    if kind == "json":
        dataset: Path | str = json_directory(tmp_path / "lines", [{"text": text} for text in TEXTS])
    else:
        dataset = request.getfixturevalue(kind)
    source = open_documents(dataset)
    position: Any = None
    for cut in range(1, len(TEXTS) + 1):
        _, position = open_documents(dataset).read(0, position, 1)
        position = json.loads(json.dumps(position))
        assert drain(source, (9,), position=position) == TEXTS[cut:], cut
        assert source.read(0, position, 2)[0] == TEXTS[cut : cut + 2], "the same position again"
    assert drain(source, epoch=1) == drain(source, epoch=2) == TEXTS


@pytest.mark.parametrize("limit", [{"train_split": "train:20"}, {"max_documents": 20}])
def test_max_documents(limit: dict[str, Any], parquet: Path, drain: Drain) -> None:
    options: dict[str, Any] = {"validation_split": None, "validation_fraction": 0.3}
    everything, validation = (
        drain(open_documents(parquet, **options)),
        drain(open_documents(parquet, "validation", **options)),
    )
    assert sorted(everything + validation) == sorted(TEXTS) and validation
    source = open_documents(parquet, **options, **limit)
    assert drain(source, (7,)) == drain(source, (20,)) == everything[:20]
    position = source.read(0, None, 15)[1]
    assert drain(open_documents(parquet, **options, **limit), (1,), position=position) == everything[15:20]
    assert drain(open_documents(parquet, "validation", **options, **limit)) == validation
    identities = [open_documents(parquet, **options | more).identity for more in ({}, limit, {"on_bad_row": "skip"})]
    assert len({*identities, source.identity}) == 3
    assert source.provenance.endswith("split train, the first 20 documents")


def test_bad_records(tmp_path: Path, drain: Drain) -> None:
    values = ["a", "", None, 12, "b\ufffd"]
    folder = json_directory(tmp_path / "mixed", [{"text": value} for value in values])
    with pytest.raises(ValueError, match=rf"data\.source\.text_field = 'text': {folder}, row 3: null .*\"skip\""):
        drain(open_documents(folder))
    source = open_documents(folder, on_bad_row="skip")
    for _ in range(2):
        assert drain(source, (1,)) == ["a", "b\ufffd"]
    assert source.skip_log.counts == {
        "empty": 1,
        "null instead of text": 1,
        "number instead of text": 1,
    }
    source = open_documents(folder, on_bad_row="replace")
    assert drain(source, (2,)) == ["a", "12", "b\ufffd"]
    assert source.skip_log.counts["mended: number instead of text"] == 1


def test_other_columns_are_not_decoded(tmp_path: Path, drain: Drain) -> None:
    """Such as invalid pictures."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    table = pa.table({"text": ["a"], "image": [{"bytes": b"no picture", "path": "a.png"}]})
    features = {"text": {"dtype": "string", "_type": "Value"}, "image": {"_type": "Image"}}
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(table, folder / "train.parquet")
    assert drain(open_documents(folder)) == ["a"]


def test_missing_splits_configs_and_datasets(parquet: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.source\.train_split = 'nope'.*'train', 'test'"):
        open_documents(parquet, train_split="nope")
    with pytest.raises(ValueError, match=r"data\.source\.text_field = 'body' is no column .*'id', 'text'"):
        open_documents(parquet, text_field="body")
    with pytest.raises(ValueError, match=r"data\.source\.dataset = 'someone/other' cannot be opened: .*Offline"):
        open_documents("someone/other")
    with pytest.raises(ValueError, match=r"data\.source\.dataset = '\./nowhere': there is no such directory"):
        open_documents("./nowhere")
    (tmp_path / "nothing").mkdir()
    (tmp_path / "nothing/train.jsonl").touch()
    with pytest.raises(ValueError, match=r"data\.source\..*is one of its files missing or empty\?"):
        open_documents(tmp_path / "nothing").read(0, None, 1)


def test_damage_ends_the_stream_with_an_error(tmp_path: Path, drain: Drain) -> None:
    rows = [{"text": text} for text in TEXTS]
    folder = json_directory(tmp_path / "lines", rows)
    (folder / "train-1.jsonl").write_text('{"text": "a"}\n{"text": broken}\n')
    with pytest.raises(ValueError, match=r"data\.source\.dataset = .*cannot be read after row 57.*kind = "):
        drain(open_documents(folder, on_bad_row="skip"))


def test_offline_with_a_cache(cached: str, drain: Drain) -> None:
    source = open_documents(cached)
    assert drain(source, (5,)) == TEXTS
    assert source.provenance.startswith(f"someone/tiny, config default, revision {COMMIT}, from the local cache")
    assert COMMIT in source.identity
    pinned = open_documents(cached, revision=COMMIT)
    assert pinned.identity == source.identity and drain(pinned) == TEXTS
    with pytest.raises(ValueError, match=rf"data\.source\.revision = 'v2': .*the local cache has the commit {COMMIT}"):
        open_documents(cached, revision="v2")
