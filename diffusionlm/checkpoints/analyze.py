"""Compare two model directories: configs, tensor names, shapes and values."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from diffusionlm.checkpoints.huggingface import load_model
from diffusionlm.checkpoints.model_files import (
    ADAPTER_WEIGHTS,
    find_weights_directory,
    is_adapter_checkpoint,
    list_safetensors_files,
)
from diffusionlm.checkpoints.weights import COMPARE_CHUNK_ELEMENTS, ExpertStack, to_stored_tensors
from diffusionlm.families.model_directory import resolve_model_directory
from diffusionlm.families.registry import parameter_name
from diffusionlm.models.lora import merge_adapter
from files.json_files import read_json_object

_Values = Path | Mapping[str, Tensor]
"""Where the values of tensors are: in the files of a directory, or in memory by name."""


@dataclass(frozen=True)
class TensorInfo:
    """Name, shape and dtype of a stored tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: str

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class TensorPair:
    """The tensor of each directory for one parameter."""

    a: TensorInfo
    b: TensorInfo
    max_difference: float | None = None
    """Largest absolute difference. None: shapes differ, or values were not compared."""
    relative_difference: float | None = None
    """Root mean square of the difference, divided by that of a's values."""


@dataclass(frozen=True)
class Analysis:
    """Result of a comparison."""

    config_differences: tuple[tuple[str, Any, Any], ...]
    """(key, a's value, b's value) of config.json; keys of its objects are dotted. None: the key is missing."""
    pairs: tuple[TensorPair, ...]
    only_a: tuple[TensorInfo, ...]
    only_b: tuple[TensorInfo, ...]
    merged: tuple[str, ...] = ()
    """Which of "a" and "b" are adapters: compared with their base, rounded to the dtype of the other model."""

    @property
    def is_equal(self) -> bool:
        """Every tensor has a pair with the same values. Configs may differ."""
        return not self.only_a and not self.only_b and all(pair.max_difference == 0.0 for pair in self.pairs)

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "is_equal": self.is_equal})


def analyze(a: Path, b: Path, *, values: bool = True) -> Analysis:
    """Compare two model directories.

    Tensors of the same parameter are a pair, by whatever family's name. An adapter is merged into its base first, in
    memory.

    Args:
        a: a model directory, a checkpoint, a run directory or an adapter.
        b: the other one.
        values: compare values; otherwise only names, shapes and dtypes.

    Raises:
        ValueError: there is no model, or a file cannot be read; names it.
    """
    (values_a, config_a, tensors_a), (values_b, config_b, tensors_b) = _read_merged(a), _read_merged(b)
    infos_a, infos_b = (
        {parameter_name(name): info for name, info in tensors.items()} for tensors in (tensors_a, tensors_b)
    )
    pairs = [TensorPair(info, infos_b[name]) for name, info in infos_a.items() if name in infos_b]
    if values:
        pairs = [_compare_values(values_a, values_b, pair) for pair in pairs]
    only_a = tuple(info for name, info in infos_a.items() if name not in infos_b)
    only_b = tuple(info for name, info in infos_b.items() if name not in infos_a)
    config_a, config_b = _flatten(config_a), _flatten(config_b)
    keys = dict.fromkeys([*config_a, *config_b])
    differences = tuple(
        (key, config_a.get(key), config_b.get(key)) for key in keys if config_a.get(key) != config_b.get(key)
    )
    merged = tuple(side for side, source in (("a", values_a), ("b", values_b)) if not isinstance(source, Path))
    return Analysis(differences, tuple(pairs), only_a, only_b, merged)


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _read_merged(path: Path) -> tuple[_Values, dict[str, Any], dict[str, TensorInfo]]:
    """Read a model as `read_model` does, or an adapter merged into its base in float32."""
    directory = path if is_adapter_checkpoint(path) else resolve_model_directory(path)
    if not is_adapter_checkpoint(directory):
        return read_model(directory)
    base = find_weights_directory(directory)
    model = load_model(base, adapter=directory)
    merge_adapter(model)
    tensors = to_stored_tensors(model.config, {name: value.detach() for name, value in model.named_parameters()})
    values = {name: value.join() if isinstance(value, ExpertStack) else value for name, value in tensors.items()}
    infos = {name: TensorInfo(name, tuple(value.shape), "F32", ADAPTER_WEIGHTS) for name, value in values.items()}
    config_directory = directory if (directory / "config.json").is_file() else base
    return values, read_json_object(config_directory / "config.json"), infos


def read_model(path: Path) -> tuple[Path, dict[str, Any], dict[str, TensorInfo]]:
    """Read the directory of a model of any kind, its config.json and the headers of its tensors.

    Raises:
        ValueError: there is no model, or a file cannot be read; names it.
    """
    directory = resolve_model_directory(path)
    return directory, read_json_object(directory / "config.json"), list_tensors(directory)


def list_tensors(directory: Path) -> dict[str, TensorInfo]:
    """List the tensors of a directory's safetensors files by name, without reading values.

    Raises:
        ValueError: there are no such files, a file is damaged, or two files hold a tensor of the same name.
    """
    tensors: dict[str, TensorInfo] = {}
    for path in list_safetensors_files(directory):
        try:
            with safe_open(path, framework="pt") as file:
                slices = {name: file.get_slice(name) for name in list(file.keys())}
                infos = [TensorInfo(n, tuple(s.get_shape()), str(s.get_dtype()), path.name) for n, s in slices.items()]
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path}: cannot be read as safetensors: {error}") from error
        for info in infos:
            if info.name in tensors:
                raise ValueError(f"{directory}: {info.name} is in {tensors[info.name].file} and in {info.file}")
            tensors[info.name] = info
    return tensors


def _compare_values(a: _Values, b: _Values, pair: TensorPair) -> TensorPair:
    if pair.a.shape != pair.b.shape:
        return pair
    values_a, values_b = _read_tensor(a, pair.a).flatten(), _read_tensor(b, pair.b).flatten()
    if not isinstance(a, Path):
        values_a = values_a.to(values_b.dtype)
    elif not isinstance(b, Path):
        values_b = values_b.to(values_a.dtype)
    max_difference, sum_squared_difference, sum_squares = 0.0, 0.0, 0.0
    for start in range(0, values_a.numel(), COMPARE_CHUNK_ELEMENTS):
        chunk = values_a[start : start + COMPARE_CHUNK_ELEMENTS].double()
        difference = chunk - values_b[start : start + COMPARE_CHUNK_ELEMENTS].double()
        max_difference = max(max_difference, float(difference.abs().max()))
        sum_squared_difference += float(difference.square().sum())
        sum_squares += float(chunk.square().sum())
    no_values = math.inf if sum_squared_difference else 0.0
    ratio = sum_squared_difference / sum_squares if sum_squares else no_values
    return replace(pair, max_difference=max_difference, relative_difference=ratio**0.5)


def _read_tensor(values: _Values, info: TensorInfo) -> Tensor:
    if not isinstance(values, Path):
        return values[info.name]
    with safe_open(values / info.file, framework="pt") as file:
        tensor: Tensor = file.get_tensor(info.name)
    return tensor
