"""Put the config of a stage together: the common part, the config file, the settings of the stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from config.finetune.pipeline import CommonSettings, StageConfig
from files.toml_text import read_toml

TAGS = ("kind", "strategy", "rope_type")
"""Keys that select the other keys of their table."""


def merge_settings(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two trees of tables; values of ``high`` win. A table of another kind replaces the whole table."""
    merged = dict(low)
    for key, value in high.items():
        old = merged.get(key)
        is_merged = isinstance(old, Mapping) and isinstance(value, Mapping) and _is_same_kind(old, value)
        merged[key] = merge_settings(old, value) if is_merged else value  # type: ignore[arg-type]
    return merged


def _is_same_kind(low: Mapping[str, Any], high: Mapping[str, Any]) -> bool:
    return all(low.get(tag) == high[tag] for tag in TAGS if tag in high)


def read_stage_settings(stage: StageConfig, common: CommonSettings, managed_keys: Sequence[str]) -> dict[str, Any]:
    """Merge the settings of a stage, before the pipeline adds its own.

    Args:
        managed_keys: dotted keys that the pipeline sets; those of a config file are left out.

    Raises:
        ValueError: the config file cannot be read, or the stage or the common part has a managed key.
    """
    section = {"train": "train", "sft": "train", "evaluate": "evaluate", "sample": "sample"}.get(stage.kind)
    shared: dict[str, Any] = getattr(common, section) if section else {}
    for values, place in ((stage.settings, "settings"), (shared, f"common.{section}")):
        for key in managed_keys:
            if get_value(values, key) is not None:
                remedy = 'name the model in "from"' if is_model_key(key) else "remove it"
                raise ValueError(f"{place}.{key} is set by the pipeline: {remedy}")
    file_values = {} if stage.config is None else read_toml(stage.config)[1]
    for key in managed_keys:
        file_values = without_key(file_values, key)
    return merge_settings(merge_settings(shared, file_values), stage.settings)


def is_model_key(key: str) -> bool:
    """Return whether a managed key names the model that a stage reads."""
    return key in ("model.init_from", "model.path", "source")


def get_value(values: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key; None: it is not set."""
    node: Any = values
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def with_value(values: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Return a copy with another value of a dotted key.

    Raises:
        ValueError: the value of a part of the key is no table; names it.
    """
    first, _, rest = key.partition(".")
    inner = values.get(first, {})
    if rest and not isinstance(inner, Mapping):
        raise ValueError(f"{first} = {inner!r}: expected a table")
    return {**values, first: with_value(inner, rest, value) if rest else value}


def without_key(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return a copy without a dotted key."""
    if get_value(values, key) is None:
        return dict(values)
    first, _, rest = key.partition(".")
    others = {name: value for name, value in values.items() if name != first}
    return {**others, first: without_key(values[first], rest)} if rest else others
