"""Tensors of a run in torch's format for distributed checkpoints, where each rank writes and reads what it has.

The format is `torch.distributed.checkpoint`'s: a file of each rank, and ``.metadata`` that says where the parts of each
tensor lie. What goes around it is ours: its own calls take a failure on one rank for a crash, load ``.metadata`` by a
pickle that may run anything, and pass over keys that nobody asked for.

Importing this takes most of a second: import it where it is needed.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from ddp.process_group import SINGLE_PROCESS, World
from diffusionlm.checkpoints.manifest import ManifestEntries, format_write_error, make_manifest_entries
from diffusionlm.training.checkpointing.save_coordinator import SaveCoordinator
from diffusionlm.training.checkpointing.staging import TensorShard

METADATA = ".metadata"
_ALLOWED_GLOBALS = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}
"""What ``.metadata`` may name, beside dtypes: with these a pickle can describe tensors and do nothing. What describes
other things than tensors is not among them, since torch would load those by an unguarded pickle."""
MAX_LISTED_PROBLEMS = 4
"""Problems that an error lists."""


def write_shards(folder: Path, shards: Mapping[str, TensorShard], world: SaveCoordinator) -> ManifestEntries:
    """Write this rank's parts; the first rank writes ``.metadata``. Every rank calls this.

    A part that several ranks have is written by one of them.

    Returns:
        What the manifest of the directory around ``folder`` says of all files of all ranks, which are on the disk.

    Raises:
        ValueError: the parts of the ranks do not make whole tensors, or one could not write.
        OSError: this rank could not write, and is alone.
    """
    planner = _ShardPlanner(shards)
    writer = _RelocatableWriter(folder, single_file_per_rank=True, sync_files=True, per_thread_copy_ahead=0)
    rank = world.world.rank

    def plan() -> SavePlan:
        return writer.prepare_local_plan(planner.create_local_plan())

    # Each rank makes the plan of all from the same parts, so nobody has to send it.
    plans, metadata = planner.create_global_plan(world.gather_results(plan))
    mine = planner.finish_plan(writer.prepare_global_plan(plans)[rank])

    def write() -> tuple[list[Any], ManifestEntries]:
        try:
            results = writer.write_data(mine, planner).wait()
        except RuntimeError as error:  # torch's own for a disk that is full
            raise OSError(f"{folder}: {error}") from error
        return results, make_manifest_entries(folder.parent, sorted(folder.glob(f"__{rank}_*")))

    def describe(error: Exception) -> str:
        return format_write_error(error, folder)

    written = world.gather_results(write, describe)

    def finish() -> ManifestEntries:
        writer.finish(metadata, [results for results, _ in written])
        return make_manifest_entries(folder.parent, [folder / METADATA])

    of_all = [*(entries for _, entries in written), *world.gather_results(finish if rank == 0 else dict, describe)]
    return {name: entry for entries in of_all for name, entry in entries.items()}


@dataclass(frozen=True)
class StoredTensors:
    """Tensors that a checkpoint holds, not yet read."""

    folder: Path
    metadata: Metadata

    @staticmethod
    def open(folder: Path) -> StoredTensors:
        """See what there is.

        Raises:
            ValueError: it is missing, damaged, or would do other things than describe tensors.
        """
        path = folder / METADATA
        try:
            with path.open("rb") as file:
                metadata = _validate_metadata(_RestrictedUnpickler(file).load())
        except Exception as error:  # a damaged pickle raises whatever it likes
            raise ValueError(f"{path} cannot be read: {error or repr(error)}") from error
        return StoredTensors(folder, metadata)

    @cached_property
    def shapes(self) -> dict[str, torch.Size]:
        """Of whole tensors, by key."""
        return {key: tensor.size for key, tensor in self._tensors.items()}

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        """By key."""
        return {key: tensor.properties.dtype for key, tensor in self._tensors.items()}

    @property
    def _tensors(self) -> dict[str, TensorStorageMetadata]:
        return self.metadata.state_dict_metadata  # type: ignore[return-value]  # `open` saw to it

    def read_into(self, targets: Mapping[str, Any], prefix: str = "", world: World = SINGLE_PROCESS) -> None:
        """Fill tensors in place, on any device, each rank its own, whatever ranks wrote them. Every rank calls this.

        Args:
            targets: key -> tensor, whole or a DTensor of which this rank has a part. Some may be on other ranks alone.
            prefix: all keys that begin so must be taken, by one rank or several together.
            ranks: those of the run.

        Raises:
            ValueError: a key is missing, not taken, or of another shape or dtype; names it. Or a file is damaged.
        """
        wanted = {key: value for key, value in targets.items() if _local_tensor(value).numel() or not value.numel()}
        world.all_agree(lambda: self._validate_targets(targets))
        keys = sorted(key for key in self.shapes if key.startswith(prefix))
        taken = world.sum(*(float(_local_tensor(wanted[key]).numel()) if key in wanted else 0.0 for key in keys))
        left = [key for key, count in zip(keys, taken, strict=True) if count < math.prod(self.shapes[key])]
        if left:
            raise ValueError(f"{self.folder} does not fit: {_truncate_problems(f'unexpected {key}' for key in left)}")
        world.all_agree(lambda: self._read(wanted))

    def read_whole(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose keys begin so, in memory of the CPU, by what follows the prefix.

        Raises:
            ValueError: a file is damaged.
        """
        keys = [key for key in self.shapes if key.startswith(prefix)]
        read = {key: torch.empty(self.shapes[key], dtype=self.dtypes[key]) for key in keys}
        self._read(read)
        return {key.removeprefix(prefix): value for key, value in read.items()}

    def _validate_targets(self, targets: Mapping[str, Any]) -> None:
        problems = [f"missing {key}" for key in sorted(targets.keys() - self.shapes.keys())]
        for key in sorted(targets.keys() & self.shapes.keys()):
            value, shape, dtype = targets[key], self.shapes[key], self.dtypes[key]
            if value.shape != shape:
                problems.append(f"{key} has shape {list(shape)}, here it is {list(value.shape)}")
            elif value.dtype != dtype:
                problems.append(f"{key} has dtype {dtype}, here it is {value.dtype}")
        if problems:
            raise ValueError(f"{self.folder} does not fit: {_truncate_problems(problems)}")

    def _read(self, targets: Mapping[str, Any]) -> None:
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(targets), self.metadata, True)
        reader = FileSystemReader(self.folder)
        reader.set_up_storage_reader(self.metadata, True)
        try:
            reader.read_data(planner.create_local_plan(), planner).wait()
        except (OSError, EOFError, RuntimeError, KeyError, AssertionError, pickle.UnpicklingError) as error:
            raise ValueError(f"{self.folder} cannot be read: {error or repr(error)}") from error


class _ShardPlanner(DefaultSavePlanner):
    """Plans what is written of parts, without the mesh of ranks that they come from."""

    def __init__(self, shards: Mapping[str, TensorShard]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.shards = shards

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_build_write_item(key, part) for key, part in self.shards.items()])

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.shards[index.fqn].values


def _build_write_item(key: str, part: TensorShard) -> WriteItem:
    offsets = torch.Size(part.offsets)
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(offsets=offsets, sizes=part.values.shape),
        properties=TensorProperties(dtype=part.values.dtype),
        size=part.global_shape,
    )
    return WriteItem(index=MetadataIndex(key, offsets), type=WriteItemType.SHARD, tensor_data=data)


class _RelocatableWriter(FileSystemWriter):
    def storage_meta(self) -> StorageMeta:
        """Without the path: the directory will be renamed, and each Python pickles paths in its own way."""
        return StorageMeta()


class _RestrictedUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in _ALLOWED_GLOBALS:
            raise ValueError(
                f"it names {module}.{name}, which no description of tensors needs and which was not called; do not "
                "use this checkpoint"
            )
        return super().find_class(module, name)


def _validate_metadata(metadata: object) -> Metadata:
    """That it describes tensors in files beside it.

    Raises:
        ValueError, AttributeError, TypeError: it does not.
    """
    if not isinstance(metadata, Metadata):
        raise ValueError("it describes no tensors")
    for key, tensor in metadata.state_dict_metadata.items():
        if not isinstance(tensor, TensorStorageMetadata) or not isinstance(tensor.properties.dtype, torch.dtype):
            raise ValueError(f"{key} is no tensor")
        if not all(isinstance(size, torch.Size) for size in (tensor.size, *(chunk.sizes for chunk in tensor.chunks))):
            raise ValueError(f"{key} has no shape")
    for place in metadata.storage_data.values():
        if not isinstance(place, _StorageInfo) or Path(place.relative_path).name != place.relative_path:
            raise ValueError("it places tensors outside of its directory")
    return metadata


def _local_tensor(value: Any) -> Tensor:
    """What this rank has of a tensor."""
    return value.to_local() if hasattr(value, "to_local") else value  # type: ignore[no-any-return]


def _truncate_problems(problems: Iterable[str]) -> str:
    listed = list(problems)
    more = [f"and {len(listed) - MAX_LISTED_PROBLEMS:,} more"] if len(listed) > MAX_LISTED_PROBLEMS else []
    return "; ".join(listed[:MAX_LISTED_PROBLEMS] + more)
