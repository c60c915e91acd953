"""Published evaluation protocols, which ``config/resources/evaluation/presets.toml`` lists with their sources."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from config.dump import format_value
from config.generation import STRATEGY_KEYS
from files.toml_text import parse_toml

PATH = Path(__file__).parents[1] / "resources" / "evaluation" / "presets.toml"
UNPUBLISHED_KEYS = ("data", "shots_data", "name", "limit", "item_ids", "id_field", "seed", "repeats", "batch_size",
                    "run_code", "timeout_seconds", "preset")  # fmt: skip
"""Keys of a task that no protocol sets: where items are, how many, and how they are computed."""

EXCLUSIVE_KEYS = (("steps", "denoising_steps"), ("max_new_tokens", "total_length"))


@dataclass(frozen=True)
class Preset:
    """A protocol with which a score was published."""

    family: str
    """model_type of the models that it is for."""
    source: str
    """File of the publication's repository, or its table."""
    values: Mapping[str, Any]
    """Keys of a task with its `kind`; without a kind those of its generation or likelihood alone, for tasks of
    lm-evaluation-harness."""
    score: float | None = None
    """Accuracy in percent that the source reports. None: none, or for another task."""
    model: str = ""
    """Model of the score, on the Hugging Face Hub."""

    @property
    def kind(self) -> str | None:
        """Kind of the own task; None: the protocol is for a task of lm-evaluation-harness."""
        kind: str | None = self.values.get("kind")
        return kind


@cache
def load_presets() -> dict[str, Preset]:
    """Name -> protocol: publication and model / task."""
    return {name: Preset(**values) for name, values in parse_toml(PATH.read_text(encoding="utf-8")).items()}


def get_preset(name: str) -> Preset:
    """Look a protocol up.

    Raises:
        ValueError: there is none of this name; lists those of the same publication, or all.
    """
    presets = load_presets()
    if name not in presets:
        publication = name.partition("/")[0]
        similar = [other for other in presets if other.partition("/")[0] == publication] or list(presets)
        raise ValueError(f'preset = "{name}" is no published protocol: choose one of {", ".join(similar)}')
    return presets[name]


def describe_kind(name: str) -> str:
    """Say which tasks a protocol is for."""
    kind = get_preset(name).kind
    if kind is None:
        return "it is for a task of lm-evaluation-harness (diffusionlm-lm-eval --model_args preset=NAME)"
    return f'it is for kind = "{kind}"'


def apply_preset(name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a protocol with changes, which win.

    Of keys that exclude each other, the protocol's gives way; with another strategy, its options do.

    Raises:
        ValueError: there is no such protocol.
    """
    return _merge(get_preset(name).values, changes)


def _merge(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    removed = {other for pair in EXCLUSIVE_KEYS for key, other in (pair, pair[::-1]) if changes.get(key) is not None}
    if changes.get("remasking_strategy", values.get("remasking_strategy")) != values.get("remasking_strategy"):
        removed |= {"confidence_from", *STRATEGY_KEYS} - {"remasking_strategy"}
    merged = {
        key: _merge(value, {}) if isinstance(value, Mapping) else value
        for key, value in values.items()
        if key not in removed
    }
    for key, value in changes.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def list_deviations(name: str, values: Mapping[str, Any]) -> list[str]:
    """Return what differs from a published protocol, as ``key = value (published: value)``.

    Args:
        values: those of the task, complete or as far as they are set.
    """
    return list(_compare(get_preset(name).values, values, ""))


def _compare(published: Mapping[str, Any], values: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, expected in published.items():
        value = values.get(key)
        if isinstance(expected, Mapping):
            yield from _compare(expected, value if isinstance(value, Mapping) else {}, f"{prefix}{key}.")
        elif _plain(value) != _plain(expected):
            yield f"{prefix}{key} = {_format(value)} (published: {_format(expected)})"
    for key, value in values.items():
        if key not in published and (prefix or key not in UNPUBLISHED_KEYS) and key != "shots_data":
            yield f"{prefix}{key} = {_format(value)} (published: the default)"


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _format(value: Any) -> str:
    return "the default" if value is None else format_value(value)
