"""Read and write the weights of a directory: safetensors or pickles, in one file or in shards with an index.

Files are mapped into memory and copied tensor by tensor, so that reading needs no more memory than the model. With
``mmap`` nothing is copied, and the parameters are the mapped file.
"""

from __future__ import annotations

import functools
import json
import pickle
import re
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from config.model import ModelConfig
from diffusionlm.checkpoints.model_files import INDEX, WEIGHTS, join_problems, list_weight_files, read_weight_index
from diffusionlm.families.registry import get_family, parameter_name

HEAD_WEIGHT, EMBEDDING_WEIGHT = "lm_head.weight", "model.embed_tokens.weight"
MAX_SHARD_SIZE = 5_000_000_000
"""Bytes of a weight file, unless a single tensor has more."""
COMPARE_CHUNK_ELEMENTS = 1 << 24
"""Values of a tensor that are compared at the same time."""
_IGNORED_BUFFERS = re.compile(r".*\.rotary_emb\.inv_freq")
"""Buffers in old files, which follow from the config."""
_STACKED_EXPERTS = re.compile(
    r"(?P<stem>.*\.mlp\.experts)\.(?P<kind>gate_up_proj|gate_proj|up_proj|down_proj)(?:\.weight)?"
)
_EXPERT_WEIGHT = re.compile(r"(?P<stem>.*\.mlp\.experts)\.(?P<expert>\d+)\.(?P<kind>\w+_proj)\.weight")
_SHARD_FILE = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a weight file, or a slice of one, for one parameter."""

    file: Path
    stored_name: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    """Returns the values, in the mapped file."""


@dataclass(frozen=True)
class StoredWeights:
    """The tensors of open weight files."""

    path: Path
    """Directory, or one weight file."""
    entries: dict[str, StoredTensor]
    """By parameter name."""
    problems: tuple[str, ...]
    """Faults of the files, whatever the model."""

    def check_size(self, config: ModelConfig) -> None:
        """Check that the files have at least one tensor for each layer and expert of a config, before a model of that
        many is built.

        Raises:
            ValueError: they have not.
        """
        num_tensors = len(self.entries)
        num_sparse = sum(config.is_sparse(layer) for layer in range(min(config.num_hidden_layers, num_tensors)))
        numbers = {"num_hidden_layers": config.num_hidden_layers, "num_experts": config.num_experts * num_sparse}
        for key, number in numbers.items():
            if number > num_tensors:
                raise ValueError(
                    f"{self.path} does not fit the model of its config.json: {key} = {getattr(config, key)}, but the "
                    f"weights are only {num_tensors} tensors: correct the key"
                )

    def check(self, model: nn.Module) -> None:
        """Check that the tensors are those of a model, which may be on the meta device. Only those of a tied head are
        read.

        Raises:
            ValueError: tensors are missing, unexpected, of another shape or not floating-point; lists them.
        """
        parameters = dict(model.named_parameters())
        entries = self._entries_of(parameters)
        problems = [*self.problems, *_find_mismatches(parameters, entries)]
        head = None if HEAD_WEIGHT in parameters else self.entries.get(HEAD_WEIGHT)
        if not problems and head is not None and not _are_equal(head.read(), entries[EMBEDDING_WEIGHT].read()):
            problems.append(
                f"{HEAD_WEIGHT} differs from {EMBEDDING_WEIGHT}, but config.json has tie_word_embeddings = true "
                "(or no such key): set it to false"
            )
        if problems:
            source = " of its config.json" if self.path.is_dir() else ""
            raise ValueError(f"{self.path} does not fit the model{source}: {join_problems(problems)}")

    @torch.no_grad()
    def copy_to(self, model: nn.Module, *, mmap: bool = False) -> None:
        """Copy the tensors into the parameters of a model that `check` accepts, converted to their dtype.

        Args:
            model: has the parameters.
            mmap: a parameter on the CPU with the file's dtype uses the mapped file as its storage: pages are read when
                they are first used, and shared with other processes. The mapping is private, so changes of a parameter
                do not reach the file. While it is in use, the file may be replaced, but not overwritten.

        Raises:
            ValueError: a file is damaged.
        """
        parameters = dict(model.named_parameters())
        entries = self._entries_of(parameters)
        for name, parameter in parameters.items():
            values = _read_tensor(entries[name])
            can_share = values.dtype == parameter.dtype and parameter.device.type == "cpu" and values.is_contiguous()
            if mmap and can_share:
                parameter.data = values
            else:
                parameter.copy_(values)

    def _entries_of(self, parameters: Collection[str]) -> dict[str, StoredTensor]:
        """The tensors for these parameters: without a head that is tied, which may stand for the embedding."""
        entries = dict(self.entries)
        if HEAD_WEIGHT not in parameters and HEAD_WEIGHT in entries:
            entries.setdefault(EMBEDDING_WEIGHT, entries.pop(HEAD_WEIGHT))
        return entries


@contextmanager
def open_weights(path: Path) -> Iterator[StoredWeights]:
    """Open the weight files of a directory, or one weight file, and read their headers.

    Raises:
        ValueError: a file is missing or damaged; names it.
    """
    with ExitStack() as stack:
        entries, problems = _open_stored_tensors(list_weight_files(path) if path.is_dir() else [path], stack)
        yield StoredWeights(path, entries, tuple(problems))


def read_weights(directory: Path) -> dict[str, Tensor]:
    """Read all weights of a directory, by parameter name. They are memory-mapped where the format allows it.

    Raises:
        ValueError: a file is missing or damaged, or two files have the same tensor; lists them.
    """
    with open_weights(directory) as weights:
        if weights.problems:
            raise ValueError(f"{directory}: {join_problems(weights.problems)}")
        return {name: _read_tensor(entry) for name, entry in weights.entries.items()}


def read_saved_dtype(path: Path) -> torch.dtype:
    """Return the dtype of a directory's floating-point weights; of several, the narrowest that holds all of them.

    Raises:
        ValueError: there are no such weights, or they are damaged.
    """
    with open_weights(path) as weights:
        dtypes = {_read_tensor(entry).dtype for entry in weights.entries.values()} & set(_FLOAT_DTYPES)
        if not dtypes:
            raise ValueError(f"{path}: the weight files have no tensors of {', '.join(map(str, _FLOAT_DTYPES))}")
        return functools.reduce(torch.promote_types, dtypes)


def _open_stored_tensors(files: list[Path], stack: ExitStack) -> tuple[dict[str, StoredTensor], list[str]]:
    """Return the tensors of the files by parameter name, and what is wrong with them."""
    tensors: list[StoredTensor] = []
    for file in files:
        if not file.name.endswith(".json"):
            tensors += _open_pickle(file) if file.suffix == ".bin" else _open_safetensors(file, stack)
    file_of = {tensor.stored_name: tensor.file.name for tensor in tensors}
    tables = (t.shape for t in tensors if parameter_name(t.stored_name) in (EMBEDDING_WEIGHT, HEAD_WEIGHT))
    hidden_size = next((shape[-1] for shape in tables if shape), None)
    entries: dict[str, StoredTensor] = {}
    problems = []
    for tensor in tensors:
        for name, entry in _split_stacked_experts(tensor, hidden_size):
            if name in entries:
                problems.append(f"{name} is in {entries[name].file.name} and in {entry.file.name}")
            entries[name] = entry
    if files[0].name.endswith(".json"):
        index = read_weight_index(files[0])
        problems += [f"{name} is not in {file}" for name, file in index.items() if file_of.get(name) != file]
        problems += [f"{name} is in {file_of[name]}, but not in the index" for name in file_of.keys() - index.keys()]
    return entries, problems


def _open_safetensors(path: Path, stack: ExitStack) -> Iterator[StoredTensor]:
    try:
        file = stack.enter_context(safe_open(path, framework="pt"))
        for name in file.keys():  # noqa: SIM118 (not a dictionary)
            shape = tuple(file.get_slice(name).get_shape())
            yield StoredTensor(path, name, shape, lambda name=name: file.get_tensor(name))  # type: ignore[misc]
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: cannot be read as safetensors: {error}; download or write it again") from error


def _open_pickle(path: Path) -> Iterator[StoredTensor]:
    """Open a pickle without running code in it (``weights_only``) and without reading tensors (``mmap``)."""
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                    raise ValueError("its entries are compressed, which torch.save never does: save it again")
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError, ValueError, zipfile.BadZipFile) as error:
        lines = str(error).strip().splitlines()
        raise ValueError(f"{path}: cannot be read as weights: {lines[0] if lines else error!r}") from error
    if not isinstance(tensors, dict) or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise ValueError(f"{path}: is not a dictionary of tensors: save a state_dict")
    for name, tensor in tensors.items():
        if tensor.nbytes > tensor.untyped_storage().nbytes():
            raise ValueError(f"{path}: {name} has shape {list(tensor.shape)}, but fewer values: save whole tensors")
        yield StoredTensor(path, str(name), tuple(tensor.shape), lambda tensor=tensor: tensor)  # type: ignore[misc]


def _split_stacked_experts(entry: StoredTensor, hidden_size: int | None) -> Iterator[tuple[str, StoredTensor]]:
    """Yield (parameter name, tensor): one, or one per expert of a stacked tensor.

    That is [experts, out, in], or [experts, in, out] if only this fits ``hidden_size`` (Qwen3-VL-MoE).
    """
    name = parameter_name(entry.stored_name)
    match = _STACKED_EXPERTS.fullmatch(name)
    # A shape without values could name any number of experts.
    if match is None or len(entry.shape) != 3 or 0 in entry.shape:
        if _IGNORED_BUFFERS.fullmatch(name) is None:
            yield name, entry
        return
    num_experts, *shape = entry.shape
    sizes = shape if match["kind"] == "down_proj" else shape[::-1]  # that of the model comes first
    is_transposed = sizes[0] != hidden_size and sizes[1] == hidden_size
    num_rows, num_columns = shape[::-1] if is_transposed else shape
    kinds = ("gate_proj", "up_proj") if match["kind"] == "gate_up_proj" else (match["kind"],)
    size = num_rows // len(kinds)
    for expert in range(num_experts):
        for index, kind in enumerate(kinds):
            rows = slice(index * size, (index + 1) * size)
            read = functools.partial(_read_slice, entry, expert, rows, is_transposed=is_transposed)
            parameter = f"{match['stem']}.{expert}.{kind}.weight"
            yield parameter, StoredTensor(entry.file, entry.stored_name, (size, num_columns), read)


def _read_slice(entry: StoredTensor, expert: int, rows: slice, *, is_transposed: bool) -> Tensor:
    matrix = entry.read()[expert]
    return (matrix.T if is_transposed else matrix)[rows]


def _find_mismatches(parameters: dict[str, nn.Parameter], entries: dict[str, StoredTensor]) -> list[str]:
    """List tensors that are missing, unexpected, of another shape or not floating-point."""
    problems = []
    for name in sorted(parameters.keys() - entries.keys()):
        hint = " (set tie_word_embeddings = true in config.json if the head is the embedding)"
        problems.append(f"missing {name}{hint if name == HEAD_WEIGHT else ''}")
    unexpected = (entries[name] for name in sorted(entries.keys() - parameters.keys()))
    problems += dict.fromkeys(f"unexpected {entry.stored_name} in {entry.file.name}" for entry in unexpected)
    for name in sorted(parameters.keys() & entries.keys()):
        entry, expected = entries[name], tuple(parameters[name].shape)
        if entry.shape != expected:
            problems.append(f"{entry.stored_name} has shape {list(entry.shape)}, the model has {list(expected)}")
        elif (dtype := _read_tensor(entry).dtype) not in _FLOAT_DTYPES:
            problems.append(
                f"{entry.stored_name} has dtype {dtype}, which is not supported (quantized weights are not)"
            )
    return problems


def _read_tensor(entry: StoredTensor) -> Tensor:
    try:
        return entry.read()
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{entry.file}: {entry.stored_name} cannot be read: {error}") from error


def _are_equal(a: Tensor, b: Tensor) -> bool:
    """Compare in chunks, because the tables are large."""
    if a.shape != b.shape:
        return False
    rows = max(1, COMPARE_CHUNK_ELEMENTS // max(1, a[0].numel()))
    return all(
        torch.equal(x.float(), y.float()) for x, y in zip(torch.split(a, rows), torch.split(b, rows), strict=True)
    )


@dataclass(frozen=True)
class ExpertStack:
    """A projection of the experts of a layer, which are joined when they are written."""

    projections: dict[tuple[int, str], Tensor]
    """Of each expert ``down_proj``, or ``gate_proj`` and ``up_proj``, [out, in]."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.projections.values())

    def numel(self) -> int:
        return sum(tensor.numel() for tensor in self.projections.values())

    def join(self) -> Tensor:
        """[experts, in, out] as in Qwen3-VL-MoE's files; [experts, out, in] if both sizes are the same, because
        transformers transposes only what does not fit."""
        num_experts = len({expert for expert, _ in self.projections})
        stacked = torch.stack([self.projections[key] for key in sorted(self.projections)])
        stacked = stacked.view(num_experts, -1, stacked.shape[2])
        return stacked if stacked.shape[1] == stacked.shape[2] else stacked.mT


def to_stored_tensors(config: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor | ExpertStack]:
    """Map names of parameters to the tensors in the weight files of the model's family."""
    family = get_family(config)
    stored: dict[str, Tensor | ExpertStack] = {}
    stacks: dict[str, ExpertStack] = {}
    for parameter, tensor in tensors.items():
        name = family.stored_name(parameter)
        match = _EXPERT_WEIGHT.fullmatch(name) if family.stacks_experts else None
        if match is None:
            stored[name] = tensor
            continue
        name = f"{match['stem']}.{'down_proj' if match['kind'] == 'down_proj' else 'gate_up_proj'}"
        stored[name] = stack = stacks.setdefault(name, ExpertStack({}))
        stack.projections[int(match["expert"]), match["kind"]] = tensor
    return stored


def save_weights(
    tensors: Mapping[str, Tensor | ExpertStack], directory: Path, max_shard_size: int = MAX_SHARD_SIZE
) -> list[Path]:
    """Write tensors to model.safetensors or, if they are larger than ``max_shard_size``, to shards and an index.

    A shard has at least one tensor, of any size. Old weights of the directory are removed, because a single file would
    be read instead of these.

    Returns:
        The files.

    Raises:
        OSError, SafetensorError: the files cannot be written.
    """
    shards, shard_bytes = [dict[str, Tensor | ExpertStack]()], 0
    for name, tensor in tensors.items():
        if shards[-1] and shard_bytes + tensor.nbytes > max_shard_size:
            shards.append({})
            shard_bytes = 0
        shards[-1][name] = tensor
        shard_bytes += tensor.nbytes
    for path in directory.glob("model*.safetensors*"):
        if path.name in (WEIGHTS, INDEX) or _SHARD_FILE.fullmatch(path.name):
            path.unlink()
    count = len(shards)
    names = [WEIGHTS] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    for file, shard in zip(names, shards, strict=True):
        whole = {name: tensor.join() if isinstance(tensor, ExpertStack) else tensor for name, tensor in shard.items()}
        contiguous = {name: tensor.detach().contiguous().cpu() for name, tensor in whole.items()}
        save_file(contiguous, directory / file, metadata={"format": "pt"})
    if count == 1:
        return [directory / WEIGHTS]
    metadata: dict[str, Any] = {
        "total_parameters": sum(tensor.numel() for tensor in tensors.values()),
        "total_size": sum(tensor.nbytes for tensor in tensors.values()),
    }
    weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
    index = json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2) + "\n"
    (directory / INDEX).write_text(index, encoding="utf-8")
    return [directory / INDEX, *(directory / name for name in names)]
