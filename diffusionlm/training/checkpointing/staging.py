"""What a checkpoint will hold, copied at one moment, so that training may go on while it is written."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Offsets = tuple[int, ...]
VALIDATION_BOUND_KEY = "validation_bound"


@dataclass(frozen=True)
class TensorShard:
    """What one rank has of a tensor."""

    values: Tensor
    """On the CPU."""
    offsets: Offsets
    """Where it begins in the whole tensor."""
    global_shape: torch.Size


@dataclass(frozen=True)
class StagedCheckpoint:
    """A checkpoint before it is written; nothing of it changes any more."""

    step: int
    state: str
    """Of state.json."""
    weights: dict[str, Tensor]
    """Of the model directory, whole; of no meaning on other ranks than the first."""
    shards: dict[str, TensorShard]
    """What this rank has of ``optimizer.<parameter>.<key>`` and ``weights.<parameter>``."""
    write_model: Callable[[Path, dict[str, Tensor]], None]

    def write(self, folder: Path) -> None:
        """The model directory and state.json, as the first rank does."""
        self.write_model(folder, self.weights)
        (folder / "state.json").write_text(self.state, encoding="utf-8")


def stage_checkpoint(
    step: int,
    write_model: Callable[[Path, dict[str, Tensor]], None],
    state: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    optimizer: Mapping[str, Any],
    live_weights: Mapping[str, Any] | None = None,
    bound: float | None = None,
) -> StagedCheckpoint:
    """Copy everything to memory of the CPU, pinned where it comes from a GPU, and wait until it is there.

    Args:
        step: of the run.
        write_model: writes a model directory of the weights that it is given, the copies of ``weights``. It may be
            called from another thread, later: it must use nothing that training changes.
        state: goes to state.json.
        weights: of the model directory, whole. Ranks other than the first may leave them out.
        optimizer: ``parameter.key`` -> tensor, whole or a DTensor of which this rank has a part.
        live_weights: those being trained, where ``weights`` are their average; in the same way.
        bound: of the validation of this step, in nats per token, if there was one: what the best one is chosen by.

    Raises:
        TypeError: the state is not made of what JSON knows.
    """
    named = {f"optimizer.{name}": value for name, value in optimizer.items()}
    named |= {f"weights.{name}": value for name, value in (live_weights or {}).items()}
    shards = {name: part for name, value in named.items() if (part := _copy_shard(value)) is not None}
    copies = {name: _copy(value) for name, value in weights.items()}
    with_bound = dict(state) if bound is None else {**state, VALIDATION_BOUND_KEY: bound}
    if any(value.is_cuda for value in (*named.values(), *weights.values())):
        torch.cuda.current_stream().synchronize()  # the copies were only begun
    return StagedCheckpoint(step, json.dumps(with_bound, indent=1) + "\n", copies, shards, write_model)


def _copy_shard(value: Any) -> TensorShard | None:
    """A copy; None where this rank has nothing of it."""
    if not hasattr(value, "to_local"):
        return TensorShard(_copy(value), (0,) * value.dim(), value.shape)
    values = value.to_local()
    if values.numel() == 0:
        return None
    (chunk,) = value.__create_chunk_list__()
    return TensorShard(_copy(values), tuple(chunk.offsets), value.shape)


def _copy(value: Tensor) -> Tensor:
    value = value.detach()
    copy = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
    return copy.copy_(value, non_blocking=True)
