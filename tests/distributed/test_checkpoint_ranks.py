"""Checkpoints that several ranks write and read together: resharded exactly, and failing alike."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ddp.mesh import Shard
from ddp.process_group import SINGLE_PROCESS, World
from diffusionlm.checkpoints.manifest import make_manifest_entries
from diffusionlm.training.checkpointing import tensor_files
from diffusionlm.training.checkpointing.staging import StagedCheckpoint, TensorShard, stage_checkpoint
from diffusionlm.training.checkpointing.store import AsyncCheckpointer, CheckpointStore, LoadedCheckpoint
from tests.distributed.forked import end_ranks, run_ranks

SHAPES = {"long": (7, 3), "short": (1, 4), "bias": (5,)}
"""Of parameters that are cut by rows; of the short one, ranks but the first have nothing."""


def whole(name: str, step: int) -> torch.Tensor:
    shape = SHAPES[name]
    return step * 100.0 + torch.arange(float(torch.Size(shape).numel())).view(shape)


def rows(value: torch.Tensor, world: World) -> TensorShard:
    """This rank's rows."""
    parts = value.chunk(world.size)
    first_row = sum(len(part) for part in parts[: world.rank])
    own = parts[world.rank] if world.rank < len(parts) else value[:0]
    return TensorShard.of(own.clone(), Shard.rows(value.shape, first_row, first_row + len(own)))


def optimizer_of(world: World, step: int) -> dict[str, TensorShard]:
    """Cut ones; one that the last rank has whole; and a count, on every rank that has some of its parameter."""
    state = {f"{name}.exp_avg": rows(whole(name, step), world) for name in SHAPES}
    state["long.step"] = TensorShard.whole(torch.tensor(float(step)))
    if world.rank == world.size - 1:
        state["matrix.momentum"] = TensorShard.whole(torch.full((2, 2), float(step)))
    return state


def write_model(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    save_file(weights, folder / "model.safetensors")


def snapshot(world: World, step: int, write: Callable[..., None] = write_model) -> StagedCheckpoint:
    weights = {"w": torch.full((3,), float(step))} if world.is_first else {}
    live = {"long": rows(whole("long", step) + 0.5, world)}
    return stage_checkpoint(step, write, {"step": step}, weights, optimizer_of(world, step), live)


def save(store: CheckpointStore, world: World, step: int) -> Path:
    return store.save(snapshot(world, step), world.with_own_group())


def load(store: CheckpointStore, world: World = SINGLE_PROCESS) -> tuple[LoadedCheckpoint, list[str]]:
    messages: list[str] = []
    saved = store.load_newest(messages.append, world)
    assert saved is not None
    return saved, messages


def assert_whole(store: CheckpointStore, step: int) -> None:
    """By a process alone."""
    saved, messages = load(store)
    assert messages == [] and saved.state == {"step": step}
    optimizer = saved.tensors.read_whole("optimizer.")
    assert optimizer.keys() == {*(f"{name}.exp_avg" for name in SHAPES), "long.step", "matrix.momentum"}
    assert all(torch.equal(optimizer[f"{name}.exp_avg"], whole(name, step)) for name in SHAPES)
    assert optimizer["long.step"] == step and torch.equal(optimizer["matrix.momentum"], torch.full((2, 2), float(step)))
    assert torch.equal(saved.live_weights()["long"], whole("long", step) + 0.5)
    assert torch.equal(saved.weights()["w"], torch.full((3,), float(step)))
    assert not [path.name for path in store.folder.iterdir() if ".tmp-" in path.name]


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """With a checkpoint that one process wrote."""
    new_store = CheckpointStore(tmp_path / "checkpoints", 2)
    save(new_store, SINGLE_PROCESS, 1)
    return new_store


@pytest.mark.parametrize(("writers", "readers"), [(1, 2), (2, 3), (3, 2)])
def test_any_number_of_ranks_reads_what_any_number_wrote(
    store: CheckpointStore, tmp_path: Path, writers: int, readers: int
) -> None:
    if writers == 1:
        save(store, SINGLE_PROCESS, 2)
    else:
        run_ranks(lambda world: save(store, world, 2), tmp_path, writers)
    files = sorted(path.name for path in (store.path(2) / "training_state").iterdir())
    assert files == [".metadata", *(f"__{rank}_0.distcp" for rank in range(writers))]
    assert_whole(store, 2)

    def read(world: World) -> None:
        saved, _ = load(store, world)
        expected = {f"optimizer.{key}": value for key, value in optimizer_of(world, 2).items()}
        expected["weights.long"] = rows(whole("long", 2) + 0.5, world)
        targets = {key: replace(shard, values=torch.zeros_like(shard.values)) for key, shard in expected.items()}
        saved.tensors.read_into(targets)
        for key, shard in expected.items():
            assert torch.equal(targets[key].values, shard.values), key

    run_ranks(read, tmp_path, readers)


def test_keys_that_do_not_fit_are_named_on_all_ranks(store: CheckpointStore, tmp_path: Path) -> None:
    def read(world: World) -> list[str]:
        saved, _ = load(store, world)
        fits = {f"optimizer.{key}": value for key, value in optimizer_of(world, 1).items()}
        cases: list[dict[str, Any]] = [
            {key: value for key, value in fits.items() if key != "optimizer.matrix.momentum"},
            {key: value for key, value in fits.items() if key != "optimizer.bias.exp_avg" or world.is_first},
            fits | ({"optimizer.new.step": TensorShard.whole(torch.tensor(0.0))} if world.rank == 1 else {}),
            fits | {"optimizer.bias.exp_avg": rows(torch.zeros(6), world)},
        ]
        errors = []
        for wrong in cases:
            with pytest.raises(ValueError) as caught:
                saved.tensors.read_into(wrong, "optimizer.")
            errors.append(str(caught.value))
        return errors

    one, other = run_ranks(read, tmp_path)
    assert one == other
    assert "unexpected optimizer.matrix.momentum" in one[0]
    assert "unexpected optimizer.bias.exp_avg" in one[1], "some of its rows are taken, not all"
    assert one[2].startswith("rank 1: ") and "missing optimizer.new.step" in one[2]
    assert "optimizer.bias.exp_avg has shape [5], here it is [6]" in one[3]


@pytest.mark.parametrize(
    ("rank", "name"), [(0, "state.json"), (1, "__1_0.distcp"), (0, "__0_0.distcp"), (0, ".metadata.tmp")]
)
def test_a_full_disk_of_one_rank_fails_on_both(store: CheckpointStore, tmp_path: Path, rank: int, name: str) -> None:
    def fail(world: World) -> str:
        original = io.open

        def full(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if world.rank == rank and "w" in mode and Path(str(path)).name == name:
                raise OSError(28, "No space left on device")
            return original(path, mode, *args, **kwargs)

        saves = AsyncCheckpointer(store, world.with_own_group())
        io.open = full  # type: ignore[assignment]
        saves.start(snapshot(world, 2))
        with pytest.raises(ValueError, match="step-00000002 was not written") as caught:
            saves.wait()
        io.open = original
        saves.start(snapshot(world, 3))
        saves.wait()
        saves.close()
        return str(caught.value)

    one, other = run_ranks(fail, tmp_path)
    assert one == other
    assert f"rank {rank}: [Errno 28] No space left on device" in one and "MiB are free there; make room" in one
    assert store.steps() == [1, 3]
    assert_whole(store, 3)


def test_ranks_without_a_shared_disk_are_rejected(store: CheckpointStore, tmp_path: Path) -> None:
    def act(world: World) -> str:
        if world.rank == 1:

            def elsewhere(folder: Path, files: Any) -> Any:
                writer = make_manifest_entries(folder, files)
                for file in files:
                    file.unlink()
                return writer

            tensor_files.make_manifest_entries = elsewhere  # type: ignore[attr-defined]
        with pytest.raises(ValueError) as caught:
            save(store, world, 2)
        return str(caught.value)

    one, other = run_ranks(act, tmp_path)
    assert one == other
    assert "rank 0: the first rank does not see training_state/__1_0.distcp: all ranks must share" in one
    assert store.steps() == [1]


@pytest.mark.parametrize("dies", [0, 1])
def test_a_rank_that_dies_during_a_save_ends_it_on_the_other(store: CheckpointStore, tmp_path: Path, dies: int) -> None:
    def act(world: World) -> str:
        original = io.open

        def opened(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if world.rank == dies and Path(str(path)).name == f"__{dies}_0.distcp":
                os.kill(os.getpid(), signal.SIGKILL)
            return original(path, mode, *args, **kwargs)

        io.open = opened  # type: ignore[assignment]
        saves = AsyncCheckpointer(store, world.with_own_group())
        saves.start(snapshot(world, 2))
        with pytest.raises(ValueError) as caught:
            saves.wait()
        os._exit(0 if "step-00000002 was not written: a rank died" in str(caught.value) else 5)

    codes = [ending.exit_code for ending in end_ranks(act, tmp_path, timeout=15)]
    assert codes == ([-signal.SIGKILL, 0] if dies == 0 else [0, -signal.SIGKILL])
    assert store.steps() == [1]
    run_ranks(lambda world: save(store, world, 3), tmp_path)
    assert_whole(store, 3)


def test_training_talks_while_a_thread_saves(store: CheckpointStore, tmp_path: Path) -> None:
    """Values of the training are not mixed up with those of the save, whatever comes first."""

    def act(world: World) -> list[float]:
        saves = AsyncCheckpointer(store, world.with_own_group())
        totals = []
        for step in (2, 3, 4):
            saves.start(snapshot(world, step))
            totals += [world.sum(float(world.rank + number))[0] for number in range(20)]
        saves.wait()
        failures = saves.pop_failures()
        saves.close()
        assert failures == []
        return totals

    expected = [1.0 + 2 * number for number in range(20)] * 3
    assert run_ranks(act, tmp_path) == [expected, expected]
    assert store.steps() == [3, 4]
    assert_whole(store, 4)


def test_the_first_rank_decides_what_is_loaded(store: CheckpointStore, tmp_path: Path) -> None:
    """A damaged one is set aside once, and the other rank does not look at it."""
    data = save(store, SINGLE_PROCESS, 2) / "training_state" / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)

    def act(world: World) -> tuple[str, list[str]]:
        saved, messages = load(store, world)
        return saved.path.name, messages

    (one, messages), (other, silent) = run_ranks(act, tmp_path)
    assert one == other == "step-00000001" and silent == []
    assert "__0_0.distcp is damaged" in messages[0] and "damaged-step-00000002" in messages[1]
    data.parent.parent.parent.joinpath("step-00000001", "state.json").unlink(missing_ok=True)

    def none(world: World) -> str:
        with pytest.raises(ValueError) as caught:
            store.load_newest(lambda text: None, world)
        return str(caught.value)

    errors = run_ranks(none, tmp_path)
    assert errors[0] == errors[1] and "no checkpoint in" in errors[0]
