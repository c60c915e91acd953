"""Small checkpoints for tests: all parts of one have the step as their value."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from diffusionlm.training.checkpointing.staging import (
    VALIDATION_BOUND_KEY,
    StagedCheckpoint,
    TensorShard,
    stage_checkpoint,
)
from diffusionlm.training.checkpointing.store import CheckpointStore, LoadedCheckpoint

WriteModel = Callable[[Path, dict[str, torch.Tensor]], None]


def write_model(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    (folder / "config.toml").write_text("[run]\n", encoding="utf-8")
    save_file(weights, folder / "model.safetensors")


def whole_shards(tensors: dict[str, torch.Tensor]) -> dict[str, TensorShard]:
    return {key: TensorShard.whole(tensor) for key, tensor in tensors.items()}


def snapshot(
    step: int, write: WriteModel = write_model, size: int = 20, bound: float | None = None
) -> StagedCheckpoint:
    value = float(step)
    optimizer = whole_shards({"w.step": torch.tensor(value), "w.exp_avg": torch.full((size,), value)})
    live, weights = whole_shards({"w": torch.full((size,), value)}), {"w": torch.full((size,), value)}
    state = {"step": step} if bound is None else {"step": step, VALIDATION_BOUND_KEY: bound}
    return stage_checkpoint(step, write, state, weights, optimizer, live)


def load(store: CheckpointStore) -> tuple[LoadedCheckpoint | None, list[str]]:
    """The newest valid checkpoint, and what was said."""
    messages: list[str] = []
    return store.load_newest(messages.append), messages


def check_whole(checkpoint: LoadedCheckpoint | None, step: int) -> None:
    """All parts are there and of this step."""
    assert checkpoint is not None and checkpoint.state == {"step": step}
    assert checkpoint.path.name == f"step-{step:08d}" and checkpoint.has_live_weights
    optimizer = checkpoint.tensors.read_whole("optimizer.")
    assert optimizer.keys() == {"w.step", "w.exp_avg"}
    tensors = [*checkpoint.weights().values(), *checkpoint.live_weights().values(), *optimizer.values()]
    assert {value for tensor in tensors for value in tensor.flatten().tolist()} == {float(step)}


def list_leftovers(store: CheckpointStore) -> list[str]:
    """Temporary files and folders of saves that were not completed."""
    return [path.name for path in store.folder.iterdir() if ".tmp-" in path.name]
