"""The data section: the documents of a Hub split."""

from __future__ import annotations

import pytest

from config.base import Section
from config.data import (
    DataConfig,
    HubDataset,
)
from config.load import load_config


class Config(Section):
    data: DataConfig


def load(*overrides: str) -> DataConfig:
    return load_config(Config, None, overrides).data


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
