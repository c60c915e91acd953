"""Texts, configs and readers of the tests of make_data."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from config.data import LocalFiles, Shards
from config.make_data import MakeDataConfig, MakeDataOutputConfig
from config.tokenizer import TokenizerConfig
from diffusionlm.data.make_data import make_data
from diffusionlm.data.reader import Split
from diffusionlm.data.shards import ShardDocuments

WORDS = ["the", "cat", "sat", "on", "a", "mat", "naïve", "日本", "<|mask|>", "<|endoftext|>", "🙂"]


def texts(seed: int, count: int) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, size=rng.integers(1, 30))) for _ in range(count)]


TRAIN, VALIDATION = texts(0, 200), texts(1, 30)


def jsonl(path: Path, rows: list[str]) -> Path:
    path.write_text("\n".join(json.dumps({"text": row}) for row in rows) + "\n", encoding="utf-8")
    return path


def config_of(folder: Path, directory: Path, tokenizer: str | None = "tokenizer", **output: Any) -> MakeDataConfig:
    return MakeDataConfig(
        source=LocalFiles(paths=(str(folder / "train.jsonl"),), validation_paths=(str(folder / "validation.jsonl"),)),
        tokenizer=TokenizerConfig(path=str(folder / tokenizer)) if tokenizer else TokenizerConfig(vocab_size=290),
        output=MakeDataOutputConfig(directory=directory, **{"workers": 0, "shard_tokens": 500, **output}),
    )


def source_of(folder: Path) -> dict[str, Any]:
    return {"source": config_of(folder, folder).source}


def ignore(message: str) -> None:
    """A log that drops messages."""


def digest(directory: Path) -> dict[str, str]:
    """Checksum of every file."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def read(directory: Path, split: Split) -> list[list[int]]:
    documents = ShardDocuments(Shards(path=directory), split, "data.source")
    return [tokens.tolist() for tokens in documents.documents(np.arange(len(documents)))]


def error_of(config: MakeDataConfig) -> str:
    with pytest.raises(ValueError) as caught:
        make_data(config, ignore)
    return str(caught.value)


class Stopped(BaseException):
    """Stands for the end of the process."""


def stop(*_: object) -> None:
    raise Stopped
