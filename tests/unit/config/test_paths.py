"""An empty path would be the working directory, and none has the character NUL: no key takes them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import TypeAdapter, ValidationError

from config.base import Section, union_members
from config.bench.inference import BenchInferConfig
from config.convert import AnalyzeConfig, ConvertConfig
from config.data import Shards
from config.eval import EvalConfig
from config.infer import InferConfig
from config.load import ConfigError, load_config
from config.make_data import MakeDataConfig
from config.tokenizer import TrainTokenizerConfig
from config.train import TrainConfig

ROOT = Path(__file__).parents[3]
SECTIONS: tuple[type[Section], ...] = (
    AnalyzeConfig, BenchInferConfig, ConvertConfig, EvalConfig, InferConfig, MakeDataConfig, Shards, TrainConfig,
    TrainTokenizerConfig,
)  # fmt: skip


def find_path_keys(section: type[Section], prefix: str) -> Iterator[tuple[str, Any]]:
    """Name and type of each key that takes one path."""
    for name, field in section.model_fields.items():
        members = union_members(field.annotation)
        for member in members:
            if isinstance(member, type) and issubclass(member, Section):
                yield from find_path_keys(member, f"{prefix}.{name}")
        if Path in members:
            yield f"{prefix}.{name}", Annotated[field.annotation, name, *field.metadata]


def test_no_path_may_be_empty() -> None:
    types = dict(pair for section in SECTIONS for pair in find_path_keys(section, section.__name__))
    assert {"TrainConfig.run.directory", "EvalConfig.model.path", "Shards.path", "ConvertConfig.source"} <= types.keys()
    for path_type in types.values():
        adapter: TypeAdapter[Any] = TypeAdapter(path_type)
        for text in ("", " "):
            with pytest.raises(ValidationError, match="is empty: name a path"):
                adapter.validate_python(text)
        with pytest.raises(ValidationError, match="contains the character NUL"):
            adapter.validate_python("runs/a\0b", strict=False)
        assert adapter.validate_python(".", strict=False) == Path()


@pytest.mark.parametrize(("value", "message"), [("", "empty"), ('"a\\u0000b"', "contains the character NUL")])
@pytest.mark.parametrize("key", ["run.directory", "data.source.validation_paths.0", "tokenizer.path"])
def test_the_message_names_the_key(key: str, value: str, message: str) -> None:
    source = 'data.source={kind="files", paths=["a.txt"], validation_paths=["b.txt"]}'
    with pytest.raises(ConfigError, match=f"{key}=?.*{message}"):
        load_config(
            TrainConfig, ROOT / "config/resources/train.toml", ["model={}", source, "tokenizer={}", f"{key}={value}"]
        )
