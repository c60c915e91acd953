"""Read and write shards of tensors in the format of `torch.distributed.checkpoint`: one file per rank, and
``.metadata``.

Its planner and file writer are called directly. Its own save and load hang if one rank fails, unpickle arbitrary
objects from ``.metadata``, and ignore unexpected keys.

Import it inside functions: it takes most of a second.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ddp.process_group import SINGLE_PROCESS, World
from diffusionlm.checkpoints.manifest import ManifestEntries, format_write_error, make_manifest_entries
from diffusionlm.checkpoints.model_files import join_problems
from diffusionlm.training.checkpointing.staging import TensorShard

METADATA_FILE = ".metadata"
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
"""Names that the pickle ``.metadata`` may contain, beside dtypes: they describe tensors and have no other effect.
Descriptions of other objects are not among them, since torch would load these by an unrestricted pickle."""
MAX_LISTED_PROBLEMS = 4


def write_shards(folder: Path, shards: Mapping[str, TensorShard], world: World) -> ManifestEntries:
    """Write this rank's shards, and on the first rank ``.metadata``. Every rank calls this.

    A shard that several ranks have is written by one of them.

    Returns:
        Manifest entries of the files of all ranks, which are on the disk. Names are relative to ``folder``'s parent.

    Raises:
        ValueError: the shards of all ranks are not whole tensors, or a rank could not write.
        OSError: the only rank could not write.
    """
    planner = _ShardSavePlanner(shards)
    writer = _RelocatableWriter(folder, single_file_per_rank=True, sync_files=True, per_thread_copy_ahead=0)
    rank = world.rank

    def create_plan() -> SavePlan:
        return writer.prepare_local_plan(planner.create_local_plan())

    # Every rank computes the global plan from the same local plans, so it is not sent.
    plans, metadata = planner.create_global_plan(world.run_on_all(create_plan))
    own_plan = planner.finish_plan(writer.prepare_global_plan(plans)[rank])

    def write() -> tuple[list[Any], ManifestEntries]:
        try:
            results = writer.write_data(own_plan, planner).wait()
        except RuntimeError as error:  # torch raises it for a full disk
            raise OSError(f"{folder}: {error}") from error
        return results, make_manifest_entries(folder.parent, sorted(folder.glob(f"__{rank}_*")))

    def describe(error: Exception) -> str:
        return format_write_error(error, folder)

    outcomes = world.run_on_all(write, describe)

    def finish() -> ManifestEntries:
        writer.finish(metadata, [results for results, _ in outcomes])
        return make_manifest_entries(folder.parent, [folder / METADATA_FILE])

    metadata_entries = world.run_on_all(finish if rank == 0 else dict, describe)
    all_entries = [*(entries for _, entries in outcomes), *metadata_entries]
    return {name: entry for entries in all_entries for name, entry in entries.items()}


@dataclass(frozen=True)
class StoredTensors:
    """The tensors of a checkpoint, which are read on request."""

    folder: Path
    metadata: Metadata
    world: World = SINGLE_PROCESS
    """The ranks that read them."""

    @staticmethod
    def open(folder: Path, world: World = SINGLE_PROCESS) -> StoredTensors:
        """Read ``.metadata``.

        Raises:
            ValueError: it is missing or damaged, or contains anything but descriptions of tensors.
        """
        path = folder / METADATA_FILE
        try:
            with path.open("rb") as file:
                metadata = _validate_metadata(_RestrictedUnpickler(file).load())
        except Exception as error:  # a damaged pickle raises any type
            raise ValueError(f"{path} cannot be read: {error or repr(error)}") from error
        return StoredTensors(folder, metadata, world)

    @cached_property
    def shapes(self) -> dict[str, torch.Size]:
        """Shape of each whole tensor by key."""
        return {key: tensor.size for key, tensor in self._tensors.items()}

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        return {key: tensor.properties.dtype for key, tensor in self._tensors.items()}

    @property
    def _tensors(self) -> dict[str, TensorStorageMetadata]:
        return self.metadata.state_dict_metadata  # type: ignore[return-value]  # checked by `open`

    def read_into(self, targets: Mapping[str, TensorShard], prefix: str = "") -> None:
        """Fill the values of shards in place, on any device. Every rank calls this; the ranks that wrote may be others.

        Args:
            targets: key -> shard of this rank. A key may be on some ranks only.
            prefix: every stored key with this prefix must be read, whole, by the ranks together.

        Raises:
            ValueError: a key is missing, not read whole, or of another shape or dtype; or a file is damaged.
        """
        shards = {key: shard for key, shard in targets.items() if not shard.is_empty}
        self.world.all_agree(lambda: self._validate_targets(targets))
        keys = sorted(key for key in self.shapes if key.startswith(prefix))
        num_read = self.world.sum(*(float(shards[key].values.numel()) if key in shards else 0.0 for key in keys))
        unexpected = [key for key, count in zip(keys, num_read, strict=True) if count < math.prod(self.shapes[key])]
        if unexpected:
            problems = [f"unexpected {key}" for key in unexpected]
            raise ValueError(f"{self.folder} does not fit: {join_problems(problems, MAX_LISTED_PROBLEMS)}")
        self.world.all_agree(lambda: self._read(shards))

    def read_whole(self, prefix: str) -> dict[str, Tensor]:
        """Read the tensors whose keys begin with ``prefix``, on the CPU. The prefix is removed from the keys."""
        keys = [key for key in self.shapes if key.startswith(prefix)]
        tensors = {key: torch.empty(self.shapes[key], dtype=self.dtypes[key]) for key in keys}
        self._read({key: TensorShard.whole(tensor) for key, tensor in tensors.items()})
        return {key.removeprefix(prefix): tensor for key, tensor in tensors.items()}

    def _validate_targets(self, targets: Mapping[str, TensorShard]) -> None:
        problems = [f"missing {key}" for key in sorted(targets.keys() - self.shapes.keys())]
        for key in sorted(targets.keys() & self.shapes.keys()):
            shard, shape, dtype = targets[key], self.shapes[key], self.dtypes[key]
            if shard.global_shape != shape:
                problems.append(f"{key} has shape {list(shape)}, here it is {list(shard.global_shape)}")
            elif shard.values.dtype != dtype:
                problems.append(f"{key} has dtype {dtype}, here it is {shard.values.dtype}")
        if problems:
            raise ValueError(f"{self.folder} does not fit: {join_problems(problems, MAX_LISTED_PROBLEMS)}")

    def _read(self, shards: Mapping[str, TensorShard]) -> None:
        planner = _ShardLoadPlanner(shards, self._tensors)
        reader = FileSystemReader(self.folder)
        reader.set_up_storage_reader(self.metadata, True)
        try:
            reader.read_data(planner.create_local_plan(), planner).wait()
        except (OSError, EOFError, RuntimeError, KeyError, AssertionError, pickle.UnpicklingError) as error:
            raise ValueError(f"{self.folder} cannot be read: {error or repr(error)}") from error


class _ShardSavePlanner(DefaultSavePlanner):
    """Plans the files of `TensorShard`s; torch's own planner needs DTensors and their device mesh."""

    def __init__(self, shards: Mapping[str, TensorShard]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.shards = shards

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_build_write_item(key, shard) for key, shard in self.shards.items()])

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.shards[index.fqn].values


class _ShardLoadPlanner(DefaultLoadPlanner):
    """Plans which parts of the files are copied into the values of `TensorShard`s."""

    def __init__(self, shards: Mapping[str, TensorShard], stored: Mapping[str, TensorStorageMetadata]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.shards = shards
        self.stored = stored

    def create_local_plan(self) -> LoadPlan:
        items = []
        for key, shard in self.shards.items():
            chunk = ChunkStorageMetadata(offsets=torch.Size(shard.offsets), sizes=shard.values.shape)
            items += create_read_items_for_chunk_list(key, self.stored[key], [chunk])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.shards[index.fqn].values


def _build_write_item(key: str, shard: TensorShard) -> WriteItem:
    offsets = torch.Size(shard.offsets)
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(offsets=offsets, sizes=shard.values.shape),
        properties=TensorProperties(dtype=shard.values.dtype),
        size=shard.global_shape,
    )
    return WriteItem(index=MetadataIndex(key, offsets), type=WriteItemType.SHARD, tensor_data=data)


class _RelocatableWriter(FileSystemWriter):
    def storage_meta(self) -> StorageMeta:
        """Leave out the path: the directory is renamed later, and Python versions pickle paths differently."""
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
    """Check that it describes tensors in files beside it."""
    if not isinstance(metadata, Metadata):
        raise ValueError("it describes no tensors")
    for key, tensor in metadata.state_dict_metadata.items():
        if not isinstance(tensor, TensorStorageMetadata) or not isinstance(tensor.properties.dtype, torch.dtype):
            raise ValueError(f"{key} is no tensor")
        if not all(isinstance(size, torch.Size) for size in (tensor.size, *(chunk.sizes for chunk in tensor.chunks))):
            raise ValueError(f"{key} has no shape")
    for location in metadata.storage_data.values():
        file_name = getattr(location, "relative_path", None)
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise ValueError("it names files outside of its directory")
    return metadata
