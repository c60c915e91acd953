"""The data section: the sources of made-up text, and how documents begin and end."""

from __future__ import annotations

from pathlib import Path

import pytest

from config.base import Section
from config.data import (
    DataConfig,
    HubDataset,
    MarkovChain,
    ShidokuGrids,
    SyntheticText,
)
from config.dump import to_toml
from config.load import load_config


class Config(Section):
    data: DataConfig


def load(*overrides: str) -> DataConfig:
    return load_config(Config, None, overrides).data


@pytest.mark.parametrize(
    ("kind", "section"),
    [
        ("markov", MarkovChain(symbols="abcdefgh", length=32, stay=0.8)),
        ("shidoku", ShidokuGrids()),
    ],
)
def test_sources_by_their_kind(kind: str, section: SyntheticText, tmp_path: Path) -> None:
    data = load(f"data.source={kind}")
    assert data.source == section
    assert (section.seed, section.documents_per_epoch, section.validation_documents) == (0, 100_000, 4_096)
    assert load(f"data.source={kind}", "data.source.seed=7").source == section.model_copy(update={"seed": 7})
    path = tmp_path / "a.toml"
    path.write_text(to_toml(Config(data=data)), encoding="utf-8")
    assert load_config(Config, path).data == data


HUB = ("data.source.kind=hub", "data.source.dataset=a/b")


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        ((), ("train", None)),
        (("data.source.train_split=train:1000",), ("train", 1000)),
        (("data.source.train_split=train+test:5",), ("train+test", 5)),
        (("data.source.train_split=test", "data.source.validation_split=train"), ("test", None)),
    ],
)
def test_first_documents_of_a_hub_split(overrides: tuple[str, ...], part: tuple[str, int | None]) -> None:
    source = load(*HUB, *overrides).source
    assert isinstance(source, HubDataset) and source.train_split_and_limit == part
