"""Two model directories side by side: configs, tensors, what maps to what, and how much they differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from config.families.model_directory import resolve_model_directory

COMPARE_CHUNK_ELEMENTS = 1 << 24
"""Values that are compared at once."""

MatchKind = Literal["name", "values"]


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a directory."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: str
    """Name of the file that holds it."""


@dataclass(frozen=True)
class TensorPair:
    """Two tensors that belong together."""

    a: TensorInfo
    b: TensorInfo
    match: MatchKind
    """``name``: they are called alike. ``values``: they hold the same."""
    max_difference: float | None
    """Largest absolute difference; None: shapes differ, or values were not compared."""
    relative_difference: float | None
    """Root mean square of the difference over that of a's values."""


@dataclass(frozen=True)
class Analysis:
    """What two directories have in common, and what not."""

    config_differences: tuple[tuple[str, Any, Any], ...]
    """(key, a's value, b's value); None where a key is missing."""
    pairs: tuple[TensorPair, ...]
    only_a: tuple[TensorInfo, ...]
    only_b: tuple[TensorInfo, ...]

    @property
    def is_equal(self) -> bool:
        """The same tensors under the same names with the same values; configs may differ."""
        return not self.only_a and not self.only_b and all(pair.max_difference == 0.0 for pair in self.pairs)

    def to_json(self) -> str:
        """One object on a line."""
        return json.dumps({**asdict(self), "is_equal": self.is_equal})


def list_tensors(directory: Path) -> dict[str, TensorInfo]:
    """The tensors of all safetensors files of a directory, by name; values are not read.

    Raises:
        ValueError: there are none, a file is damaged, or two files hold a tensor of the same name.
    """
    files = sorted(directory.glob("*.safetensors"))
    files = [path for path in files if path.name.startswith("model")] or files
    if not files:
        raise ValueError(f"{directory} has no *.safetensors files to compare; convert it first")
    found: dict[str, TensorInfo] = {}
    for path in files:
        for info in _read_headers(path):
            if info.name in found:
                raise ValueError(f"{directory}: {info.name} is in {found[info.name].file} and in {info.file}")
            found[info.name] = info
    return found


def _read_headers(path: Path) -> Iterator[TensorInfo]:
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no dictionary)
                part = file.get_slice(name)
                yield TensorInfo(name, tuple(part.get_shape()), str(part.get_dtype()), path.name)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: cannot be read as safetensors: {error}") from error


def analyze(a: Path, b: Path, *, values: bool = True) -> Analysis:
    """Compare two model directories.

    Tensors belong together if they are called alike; of the others, if shape and values are the same.

    Raises:
        ValueError: no model there, or files that cannot be read.
    """
    a, b = resolve_model_directory(a), resolve_model_directory(b)
    ours, theirs = list_tensors(a), list_tensors(b)
    pairs = [
        _compare_tensors(a, b, ours[name], theirs[name], "name", compare=values) for name in ours if name in theirs
    ]
    rest_a = [info for name, info in ours.items() if name not in theirs]
    rest_b = [info for name, info in theirs.items() if name not in ours]
    if values and rest_a and rest_b:
        digests: dict[str, list[TensorInfo]] = {}
        shapes = {info.shape for info in rest_a}
        for info in rest_b:
            if info.shape in shapes:
                digests.setdefault(_hash_tensor(b, info), []).append(info)
        for info in list(rest_a):
            same = digests.get(_hash_tensor(a, info), []) if digests else []
            if same:
                other = same.pop(0)
                pairs.append(_compare_tensors(a, b, info, other, "values", compare=True))
                rest_a.remove(info)
                rest_b.remove(other)
    return Analysis(_compare_configs(a, b), tuple(pairs), tuple(rest_a), tuple(rest_b))


def _compare_tensors(
    a: Path, b: Path, one: TensorInfo, other: TensorInfo, match: MatchKind, *, compare: bool
) -> TensorPair:
    if not compare or one.shape != other.shape:
        return TensorPair(one, other, match, None, None)
    left, right = _read_tensor(a, one).flatten(), _read_tensor(b, other).flatten()
    largest, squares, total = 0.0, 0.0, 0.0
    for start in range(0, left.numel(), COMPARE_CHUNK_ELEMENTS):
        wide = left[start : start + COMPARE_CHUNK_ELEMENTS].double()
        difference = wide - right[start : start + COMPARE_CHUNK_ELEMENTS].double()
        largest = max(largest, float(difference.abs().max()))
        squares += float(difference.square().sum())
        total += float(wide.square().sum())
    relative = (squares / total) ** 0.5 if total else (0.0 if not squares else float("inf"))
    return TensorPair(one, other, match, largest, relative)


def _read_tensor(directory: Path, info: TensorInfo) -> Tensor:
    with safe_open(directory / info.file, framework="pt") as file:
        tensor: Tensor = file.get_tensor(info.name)
    return tensor


def _hash_tensor(directory: Path, info: TensorInfo) -> str:
    """Of shape and values as float32: the same in every dtype that holds them exactly."""
    digest = hashlib.sha256(repr(info.shape).encode())
    flat = _read_tensor(directory, info).flatten()
    for start in range(0, flat.numel(), COMPARE_CHUNK_ELEMENTS):
        digest.update(flat[start : start + COMPARE_CHUNK_ELEMENTS].to(torch.float32).numpy().tobytes())
    return digest.hexdigest()


def _compare_configs(a: Path, b: Path) -> tuple[tuple[str, Any, Any], ...]:
    ours, theirs = (_read_config_json(directory) for directory in (a, b))
    keys = dict.fromkeys([*ours, *theirs])
    return tuple((key, ours.get(key), theirs.get(key)) for key in keys if ours.get(key) != theirs.get(key))


def _read_config_json(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: not a JSON object")
    return values


def format_directory(directory: Path, max_rows: int) -> str:
    """The tensors of one directory, as a table."""
    tensors = list(list_tensors(resolve_model_directory(directory)).values())
    count = sum(_count_elements(info) for info in tensors)
    rows = [[info.name, _format_shape(info), info.dtype, info.file] for info in tensors]
    return f"{directory}: {len(tensors)} tensors, {count:,} values\n\n{_format_table(rows, max_rows)}"


def format_analysis(analysis: Analysis, max_rows: int) -> str:
    """Tables for people."""
    lines: list[str] = []
    if analysis.config_differences:
        rows = [[key, json.dumps(one), json.dumps(other)] for key, one, other in analysis.config_differences]
        lines += ["config.json differs in", "", _format_table(rows, max_rows), ""]
    same = [pair for pair in analysis.pairs if pair.match == "name" and pair.max_difference == 0.0]
    lines.append(f"{len(same)} tensors are the same in both")
    others = [pair for pair in analysis.pairs if pair not in same]
    if others:
        rows = [_format_pair(pair) for pair in others]
        lines += ["", "these belong together (largest difference, relative root mean square):", ""]
        lines.append(_format_table(rows, max_rows))
    for name, rest in (("a", analysis.only_a), ("b", analysis.only_b)):
        if rest:
            rows = [[info.name, _format_shape(info), info.dtype] for info in rest]
            lines += ["", f"only in {name}:", "", _format_table(rows, max_rows)]
    return "\n".join(lines)


def _format_pair(pair: TensorPair) -> list[str]:
    names = pair.a.name if pair.a.name == pair.b.name else f"{pair.a.name} = {pair.b.name}"
    shape = (
        _format_shape(pair.a) if pair.a.shape == pair.b.shape else f"{_format_shape(pair.a)} / {_format_shape(pair.b)}"
    )
    dtype = pair.a.dtype if pair.a.dtype == pair.b.dtype else f"{pair.a.dtype} / {pair.b.dtype}"
    if pair.max_difference is None or pair.relative_difference is None:
        return [names, shape, dtype, "-", "-"]
    return [names, shape, dtype, f"{pair.max_difference:.3g}", f"{pair.relative_difference:.3g}"]


def _format_shape(info: TensorInfo) -> str:
    return "x".join(map(str, info.shape)) or "scalar"


def _count_elements(info: TensorInfo) -> int:
    count = 1
    for size in info.shape:
        count *= size
    return count


def _format_table(rows: Sequence[Sequence[str]], max_rows: int) -> str:
    shown = rows[:max_rows] if max_rows else rows
    widths = [max(len(row[column]) for row in shown) for column in range(len(shown[0]))]
    lines = [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in shown
    ]
    if len(shown) < len(rows):
        lines.append(f"  ... and {len(rows) - len(shown)} more; set max_rows to 0 to see all")
    return "\n".join(lines)
