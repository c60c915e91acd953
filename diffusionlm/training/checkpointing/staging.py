"""Copy everything a checkpoint stores to CPU memory, so that training continues while ranks write it."""

from __future__ import annotations

import contextlib
import json
import logging
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddp.mesh import Shard
from ddp.parallelism import Parallelism
from ddp.process_group import World

LOGGER = logging.getLogger(__name__)

ALIGNMENT = 64
"""Copies begin at multiples of this many bytes: a cache line."""


class SnapshotMemory:
    """Copies tensors into one buffer on the CPU.

    A buffer for tensors of a GPU is pinned, so that copies are fast, and is kept for the next snapshot: pinning takes
    seconds. It has the bytes of one snapshot; torch's own pinned memory is rounded up to powers of two. Without a GPU
    each snapshot has a buffer of its own, which is freed with it.
    """

    def __init__(self, *, pins: bool = True) -> None:
        """``pins``: whether to pin memory for tensors of a GPU."""
        self._pins = pins
        self._pinned = torch.empty(0, dtype=torch.uint8)
        self._unpin: weakref.finalize[..., Any] | None = None

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy tensors, and wait until the copies are done. Those of a GPU overwrite the ones of the call before, so
        what they were made for must have ended. A tensor on ``meta`` gets its memory, which the caller fills."""
        sizes = [values.numel() * values.element_size() for values in tensors.values()]
        *offsets, num_bytes = accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0)
        has_gpu = any(values.is_cuda for values in tensors.values())
        buffer = self._allocate(num_bytes, is_pinned=has_gpu and self._pins)
        copies = {}
        for (name, values), offset, size in zip(tensors.items(), offsets, sizes, strict=True):
            copies[name] = buffer[offset : offset + size].view(values.dtype).view(values.shape)
            if not values.is_meta:
                copies[name].copy_(values.detach(), non_blocking=True)
        if has_gpu:
            torch.cuda.current_stream().synchronize()
        return copies

    def close(self) -> None:
        """Unpin the memory and let go of it; copies in it stay valid."""
        if self._unpin is not None:
            self._unpin()  # at most once; it happens by itself before the memory is freed
        self._pinned, self._unpin = torch.empty(0, dtype=torch.uint8), None

    def _allocate(self, num_bytes: int, *, is_pinned: bool) -> Tensor:
        """A new buffer, or the pinned one, which is made anew if it is too small."""
        if not is_pinned:
            return torch.empty(num_bytes, dtype=torch.uint8)
        if self._pinned.numel() < num_bytes:
            self.close()
            buffer = torch.empty(num_bytes, dtype=torch.uint8)
            cuda: Any = torch.cuda
            if code := int(cuda.cudart().cudaHostRegister(buffer.data_ptr(), num_bytes, 0)):
                LOGGER.warning(
                    "checkpoints are copied to memory that is not pinned, which is slower: CUDA cannot pin %.1f GB "
                    "(error %d)", num_bytes / 1e9, code
                )  # fmt: skip
                self._pins = False
                _clear_cuda_error()
                return buffer
            self._pinned, self._unpin = buffer, weakref.finalize(self, _unpin, buffer)
        return self._pinned


def _clear_cuda_error() -> None:
    """Let torch report the last error of CUDA, which the next kernel would raise."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def _unpin(buffer: Tensor) -> None:
    cuda: Any = torch.cuda
    if code := int(cuda.cudart().cudaHostUnregister(buffer.data_ptr())):
        # Not raised: after an error that stays, each call returns it again, and the first one is what a user needs.
        LOGGER.warning("CUDA cannot unpin the memory of checkpoints (error %d)", code)


VALIDATION_BOUND_KEY = "validation_bound"
"""Key of the bound in nats per token, if the step was validated; null: it was not."""
TASK_METRICS_KEY = "task_metrics"
"""Key of the accuracies by task and rule, if the step was evaluated on tasks."""


@dataclass(frozen=True)
class TensorShard:
    """The part of a tensor that one rank stores: a contiguous range of each dimension, or all of it."""

    values: Tensor
    offsets: tuple[int, ...]
    """Position of the first element of ``values`` in the whole tensor."""
    global_shape: torch.Size

    @staticmethod
    def whole(values: Tensor) -> TensorShard:
        """A tensor that this rank has completely."""
        return TensorShard(values, (0,) * values.dim(), values.shape)

    @staticmethod
    def of(values: Tensor, shard: Shard) -> TensorShard:
        """A part of a tensor; rows of ``values`` behind it are padding."""
        return TensorShard(values[: shard.shape[0]] if shard.shape else values, shard.offsets, shard.whole_shape)

    @property
    def is_empty(self) -> bool:
        """True if this rank has no part of a tensor that has elements."""
        return self.values.numel() == 0 and self.global_shape.numel() > 0


def to_shards(state: Mapping[str, Tensor], parallel: Parallelism) -> dict[str, TensorShard]:
    """Optimizer state of a rank by ``parameter.key`` as shards. Scalars and state of whole parameters are whole."""
    shards = {}
    for key, values in state.items():
        shard = parallel.shard_of(key.rpartition(".")[0])
        is_whole = not values.dim() or shard.is_whole
        shards[key] = TensorShard.whole(values) if is_whole else TensorShard.of(values, shard)
    return shards


def divide_over_ranks(shards: Mapping[str, TensorShard], world: World) -> dict[str, TensorShard]:
    """Of shards that all ranks have, those that this rank writes, about the same bytes on each: the others would copy
    theirs to the CPU for nothing. All ranks divide alike."""
    num_bytes = {key: shard.values.numel() * shard.values.element_size() for key, shard in shards.items()}
    loads, own = [0] * world.size, {}
    for key in sorted(shards, key=lambda key: (-num_bytes[key], key)):
        rank = loads.index(min(loads))
        loads[rank] += num_bytes[key]
        if rank == world.rank:
            own[key] = shards[key]
    return own


@dataclass(frozen=True)
class StagedCheckpoint:
    """A checkpoint in CPU memory, before it is written. Training does not change it."""

    step: int
    state: str
    """Text of state.json."""
    weights: dict[str, Tensor]
    """Whole weights of the model directory; only the first rank uses them."""
    shards: dict[str, TensorShard]
    """This rank's shards of ``optimizer.<parameter>.<key>`` and ``weights.<parameter>``."""
    write_model: Callable[[Path, dict[str, Tensor]], None]

    def write(self, folder: Path) -> None:
        """Write the model directory and state.json; the first rank does."""
        self.write_model(folder, self.weights)
        (folder / "state.json").write_text(self.state, encoding="utf-8")


def stage_checkpoint(
    step: int,
    write_model: Callable[[Path, dict[str, Tensor]], None],
    state: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    optimizer: Mapping[str, TensorShard],
    live_weights: Mapping[str, TensorShard] | None = None,
    memory: SnapshotMemory | None = None,
) -> StagedCheckpoint:
    """Copy tensors to CPU memory, and wait until the copies are done.

    Args:
        write_model: writes a model directory with the copies of ``weights``. It is called later from another thread, so
            it must not use anything that training changes.
        weights: whole weights of the model directory. Only the first rank needs them. The copies of those on ``meta``
            are filled by the caller.
        optimizer: ``parameter.key`` -> shard.
        live_weights: parameter -> shard of the weights being trained, if ``weights`` are their average.
        memory: what the tensors are copied to (`AsyncCheckpointer.reserve_memory`). None: to new memory,
            which is not pinned.

    Raises:
        TypeError: the state is not JSON.
    """
    shards = {f"optimizer.{key}": shard for key, shard in optimizer.items()}
    shards |= {f"weights.{name}": shard for name, shard in (live_weights or {}).items()}
    shards = {key: shard for key, shard in shards.items() if not shard.is_empty}
    sources = {f"model.{name}": values for name, values in weights.items()}
    copies = (memory or SnapshotMemory(pins=False)).copy(sources | {key: shard.values for key, shard in shards.items()})
    shard_copies = {key: replace(shard, values=copies[key]) for key, shard in shards.items()}
    weight_copies = {name: copies[f"model.{name}"] for name in weights}
    return StagedCheckpoint(step, json.dumps(state, indent=1) + "\n", weight_copies, shard_copies, write_model)
