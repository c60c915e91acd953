"""Where snapshots are kept until they are written."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import save_file

from ddp.process_group import World
from diffusionlm.training.checkpointing.staging import (
    ALIGNMENT,
    SnapshotMemory,
    TensorShard,
    divide_over_ranks,
    stage_checkpoint,
)
from diffusionlm.training.checkpointing.store import AsyncCheckpointer, CheckpointStore
from tests.fake_cuda import fake_cuda


def test_copies_have_the_bytes_of_their_tensors() -> None:
    rng = torch.Generator().manual_seed(0)
    tensors = {
        "matrix": torch.randn(5, 7, generator=rng),
        "transposed": torch.randn(6, 3, generator=rng).T,
        "bytes": torch.arange(9, dtype=torch.uint8),
        "narrow": torch.randn(3, generator=rng).bfloat16(),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 4),
    }
    memory = SnapshotMemory()
    copies, other = memory.copy(tensors), memory.copy(tensors)
    for name, tensor in tensors.items():
        assert copies[name].dtype == tensor.dtype and torch.equal(copies[name], tensor)
        assert copies[name].is_contiguous() and copies[name].data_ptr() % ALIGNMENT == copies["matrix"].data_ptr() % 64
    other["matrix"].zero_()
    assert torch.equal(copies["matrix"], tensors["matrix"]), "without a GPU each snapshot has its own memory"


def test_memory_of_a_gpu_is_pinned_once() -> None:
    """As many bytes as the tensors have, not a power of two; for a larger snapshot again; freed at the end."""
    with fake_cuda() as record:
        registered: list[list[int]] = []
        memory = SnapshotMemory()
        for size in (1000, 1000, 900, 3000, 1000):
            tensors = {"a": torch.empty(size, device="cuda"), "b": torch.empty(10, dtype=torch.bfloat16, device="cuda")}
            copies = memory.copy(tensors)
            assert [copy.shape for copy in copies.values()] == [tensor.shape for tensor in tensors.values()]
            registered.append(list(record.registered.values()))
        assert registered == [[4032 + 64]] * 3 + [[12032 + 64]] * 2
        assert record.waits == {"diffusionlm/training/checkpointing/staging.py:copy": 5}, "once a snapshot"
        memory.close()
        assert record.registered == {}
        memory.copy({"a": torch.empty(8, device="cuda")})
        del memory
        gc.collect()
        assert record.registered == {}, "before the memory is freed"
        SnapshotMemory(pins=False).copy({"a": torch.empty(8, device="cuda")})
        assert record.registered == {}


def test_memory_that_cannot_be_pinned_is_used_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    with fake_cuda() as record, patch.object(record, "cudaHostRegister", lambda *_: 2):
        memory = SnapshotMemory()
        for _ in range(2):
            copies = memory.copy({"a": torch.empty(8, device="cuda")})
            assert copies["a"].shape == (8,) and record.registered == {}
        memory.close()
    assert [record.message for record in caplog.records] == [
        "checkpoints are copied to memory that is not pinned, which is slower: CUDA cannot pin 0.0 GB (error 2)"
    ]


def test_memory_is_not_overwritten_while_it_is_written(tmp_path: Path) -> None:
    """Even if it is kept, as for a GPU: three saves, each slower than the time to the next."""
    may_write, saved = threading.Event(), {}

    def write(folder: Path, weights: dict[str, torch.Tensor]) -> None:
        assert may_write.wait(30)
        saved[int(weights["w"][0])] = weights["w"].clone()
        save_file(weights, folder / "model.safetensors")

    saves = AsyncCheckpointer(CheckpointStore(tmp_path, keep_last=3))
    buffer = torch.empty(1 << 16, dtype=torch.uint8)
    kept_memory: Any = saves.reserve_memory()
    kept_memory._allocate = lambda num_bytes, is_pinned: buffer[:num_bytes]
    for step in (1, 2, 3):
        timer = threading.Timer(0.05, may_write.set)
        timer.start()
        memory = saves.reserve_memory()
        assert len(saved) == step - 1, "it waits for the save before"
        may_write.clear()
        weights = {"w": torch.full((1000,), float(step))}
        saves.start(stage_checkpoint(step, write, {"step": step}, weights, {}, memory=memory))
    may_write.set()
    saves.wait()
    timer.join()
    assert all(torch.equal(weights, torch.full((1000,), float(step))) for step, weights in saved.items())
    assert CheckpointStore(tmp_path, keep_last=3).steps() == [1, 2, 3]


def test_ranks_copy_what_they_write() -> None:
    shards = {
        f"w{index}.exp_avg": TensorShard.whole(torch.zeros(size)) for index, size in enumerate((5, 40, 8, 30, 7, 1))
    }
    parts = [divide_over_ranks(shards, World(rank, 3)) for rank in range(3)]
    assert sorted(name for part in parts for name in part) == sorted(shards)
    sizes = [sum(shard.values.numel() for shard in part.values()) for part in parts]
    assert sizes == [40, 30, 21]
    assert divide_over_ranks(shards, World()) == shards
