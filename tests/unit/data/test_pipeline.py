"""The pipeline from [data] to rows: names, identities, tokenizers; mixtures by weight, resumable at every position."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from config.data import DataConfig, LocalFiles, MarkovChain, MixtureEntry, PythonStdlib, Shards
from config.make_data import MakeDataConfig, MakeDataOutputConfig
from config.tokenizer import TokenizerConfig
from diffusionlm.data.make_data import make_data
from diffusionlm.data.packing import Row
from diffusionlm.data.pipeline import (
    MixedRowReader,
    MixtureComponent,
    build_row_reader,
    compute_data_identity,
    open_components,
)
from tokenizer import Tokenizer, load_tokenizer, train_bpe

TEXTS = [f"{index}: " + "the cat sat on the mat " * (1 + index % 5) for index in range(200)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> LocalFiles:
    path = tmp_path_factory.mktemp("files") / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS), encoding="utf-8")
    return LocalFiles(paths=(str(path),), validation_fraction=0.2)


@pytest.fixture(scope="module")
def shards(files: LocalFiles, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("shards") / "made"
    config = MakeDataConfig(
        source=files,
        tokenizer=TokenizerConfig(vocab_size=270),
        output=MakeDataOutputConfig(directory=directory, workers=0),
    )
    make_data(config, lambda _: None)
    return directory


def documents(config: DataConfig, tokenizer: Tokenizer, **options: Any) -> Counter[str]:
    """Texts of the rows' documents, each row one document."""
    rows, position = build_row_reader(open_components(config, "train"), config, tokenizer, 128, 0, **options).read(
        0, None, 10_000
    )
    assert position is None
    return Counter(tokenizer.decode(row.tokens_L[row.loss_mask_L].tolist(), skip_special=True) for row in rows)


def test_shards_hold_the_documents_of_their_source(files: LocalFiles, shards: Path) -> None:
    tokenizer = load_tokenizer(shards / "tokenizer")
    text = DataConfig(source=files, rows="padded")
    shards_config = DataConfig(source=Shards(path=shards), rows="padded")
    assert documents(text, tokenizer) == documents(shards_config, tokenizer)
    assert 120 < len(documents(shards_config, tokenizer)) < 200


def test_shards_of_another_tokenizer_are_rejected(shards: Path, tokenizer: Tokenizer) -> None:
    other = train_bpe(["something else"], vocab_size=265)
    config = DataConfig(source=Shards(path=shards))
    with pytest.raises(ValueError, match=r"made with another tokenizer.*set tokenizer\.path"):
        build_row_reader(open_components(config, "train"), config, other, 16, 0)


def test_identity_is_of_the_documents_and_their_weights(files: LocalFiles) -> None:
    def identity(*weights: float, seed: int = 0) -> str:
        sources: tuple[LocalFiles | MarkovChain, ...] = (files, MarkovChain(seed=seed))
        components = tuple(
            MixtureEntry(source=source, weight=weight) for source, weight in zip(sources, weights, strict=True)
        )
        return compute_data_identity(open_components(DataConfig(mixture=components), "train"))

    assert identity(1.0, 2.0) == identity(1.0, 2.0)
    assert len({identity(1.0, 2.0), identity(2.0, 1.0), identity(1.0, 2.0, seed=1)}) == 3
    single = open_components(DataConfig(source=files), "train")
    assert compute_data_identity(single) == single[0].source.identity


def test_components_of_one_name_are_rejected(files: LocalFiles) -> None:
    components = (MixtureEntry(source=files, name="a"), MixtureEntry(source=MarkovChain(), name="a"))
    with pytest.raises(ValueError, match=r"data\.mixture: two entries are named 'a'"):
        open_components(DataConfig(mixture=components), "train")


def test_components_have_different_orders(list_reader: Any, tokenizer: Tokenizer) -> None:
    """With the same RNG key, equal components would have the same order."""
    texts = [f"{index:03}" for index in range(64)]
    components = [MixtureComponent(name, 1.0, list_reader(texts)) for name in ("a", "b")]
    config = DataConfig(source=PythonStdlib(), rows="padded", row_shuffle_window=0)
    rows, _ = build_row_reader(components, config, tokenizer, 8, 0).read(0, None, 128)
    decoded_rows = [tokenizer.decode(row.tokens_L.tolist(), skip_special=True) for row in rows]
    assert sorted(decoded_rows[::2]) == sorted(decoded_rows[1::2]) == texts and decoded_rows[::2] != decoded_rows[1::2]


Drain = Callable[..., list[Any]]


class LabeledRows:
    """Rows labeled (component, epoch, index); ``sizes`` are their numbers of tokens."""

    def __init__(self, part: int, sizes: list[int]) -> None:
        self.part, self.sizes = part, sizes

    def read(self, epoch: int, position: Any, limit: int) -> tuple[list[Row], Any]:
        start = position or 0
        rows = [self._row(epoch, place) for place in range(start, min(start + limit, len(self.sizes)))]
        return rows, start + limit if len(rows) == limit else None

    def _row(self, epoch: int, place: int) -> Row:
        document_ids_L = np.where(np.arange(16) < self.sizes[place], 0, -1).astype(np.int32)
        return Row(np.array([self.part, epoch, place], dtype=np.int32), document_ids_L, document_ids_L >= 0)


def labels(rows: list[Row]) -> list[tuple[int, int, int]]:
    return [tuple(row.tokens_L.tolist()) for row in rows]


def mix(sizes: list[list[int]], weights: list[float], repeat: bool = True) -> MixedRowReader:
    readers: list[Any] = [LabeledRows(component, counts) for component, counts in enumerate(sizes)]
    return MixedRowReader(readers, weights, [f"component {index}" for index in range(len(readers))], repeat)


def random_sizes() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(1, 17, count).tolist() for count in (300, 40, 111)]


@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [5.0, 1.0, 3.0], [0.1, 0.7, 0.2]])
def test_tokens_follow_the_weights_at_every_position(weights: list[float]) -> None:
    rows, _ = mix(random_sizes(), weights).read(0, None, 400)
    tokens = np.zeros((len(rows), 3))
    for place, row in enumerate(rows):
        tokens[place, row.tokens_L[0]] = (row.document_ids_L >= 0).sum()
    so_far = tokens.cumsum(axis=0)
    expected = so_far.sum(axis=1, keepdims=True) * np.array(weights) / sum(weights)
    assert np.abs(so_far - expected).max() <= 16 * 2


def test_an_epoch_has_every_row_of_every_component(drain: Drain) -> None:
    sizes = random_sizes()
    entries = labels(drain(mix(sizes, [1.0, 1.0, 1.0]), (7,)))
    for component, counts in enumerate(sizes):
        first_pass = [index for owner, epoch, index in entries if owner == component and epoch == 0]
        assert first_pass == list(range(len(counts)))
    passes = {part: {epoch for owner, epoch, _ in entries if owner == part} for part in range(3)}
    assert passes[0] == {0} and len(passes[1]) > 3, "short components start again, with another pass"
    later = {epoch for _, epoch, _ in labels(drain(mix(sizes, [1.0, 1.0, 1.0]), epoch=1))}
    assert not later & {epoch for _, epoch, _ in entries}, "epochs share no pass"


def test_without_repeat_each_row_comes_once(drain: Drain) -> None:
    sizes = [*random_sizes(), []]
    entries = labels(drain(mix(sizes, [1.0, 2.0, 3.0, 1.0], repeat=False), (5, 1)))
    assert sorted(entries) == [
        (component, 0, index) for component, counts in enumerate(sizes) for index in range(len(counts))
    ]


@pytest.mark.parametrize("repeat", [False, True])
def test_resuming_at_every_position(repeat: bool, check_resuming: Drain) -> None:
    sizes = [[3, 5, 8, 1, 1, 9], [16, 2], [4, 4, 4, 4]]

    def make() -> MixedRowReader:
        return mix(sizes, [2.0, 1.0, 1.5], repeat)

    for epoch in (0, 2):
        check_resuming(make, lambda a, b: labels(a) == labels(b), epoch)


def test_a_component_without_rows_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"data\.mixture: component 1 has no documents"):
        mix([[1, 2], []], [1.0, 1.0]).read(0, None, 3)
