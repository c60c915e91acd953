"""The pipeline from [data] to rows: names, identities, tokenizers, errors."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from config.data import DataConfig, LocalFiles, MarkovChain, MixtureEntry, PythonStdlib, Shards
from config.make_data import MakeDataConfig, MakeDataOutputConfig
from config.tokenizer import TokenizerConfig
from diffusionlm.data.make_data import make_data
from diffusionlm.data.pipeline import MixtureComponent, build_row_reader, compute_data_identity, open_components
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
