"""Faults while a checkpoint is written or read: after each there is the old one or the new one, never neither."""

from __future__ import annotations

import gc
import io
import os
import pickle
import resource
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import save_file

from ddp.process_group import World
from diffusionlm.checkpoints.manifest import MANIFEST, list_files, make_manifest_entries, verify_directory
from diffusionlm.training.checkpointing.staging import (
    ALIGNMENT,
    SnapshotMemory,
    TensorShard,
    divide_over_ranks,
    stage_checkpoint,
)
from diffusionlm.training.checkpointing.store import AsyncCheckpointer, CheckpointStore
from diffusionlm.training.checkpointing.tensor_files import StoredTensors
from tests.fake_cuda import fake_cuda
from tests.unit.training.checkpoints import (
    check_whole,
    list_leftovers,
    load,
    snapshot,
    whole_shards,
    write_model,
)

EVENTS = ("open", "fsync", "rename", "replace", "symlink", "unlink", "mkdir", "rmdir")
"""Calls of `os` by which a save changes what is on the disk, or makes it last."""


NUM_EVENTS = 50
"""That a save has at least."""


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """With one checkpoint, and the rule to keep one: the save that is disturbed removes it."""
    store_of_one = CheckpointStore(tmp_path / "checkpoints", keep_last=1)
    store_of_one.save(snapshot(1))
    return store_of_one


def newest(store: CheckpointStore) -> int:
    """The step of what is loaded, all of whose parts must be of that step."""
    saved, messages = load(store)
    assert saved is not None and messages == []
    check_whole(saved, saved.state["step"])
    return int(saved.state["step"])


def in_child(act: Callable[[], Any]) -> int:
    """The exit code of a copy of this process that does it: 0, 1 after an exception, or minus the signal."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            act()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("it lives")


def counting(on_event: Callable[[int, str], None], patch: Callable[[Any, str, Any], None] = setattr) -> None:
    """From now on every event of this process is counted, from 0, and told before it happens."""
    counted, is_told = [0], [False]

    def wrap(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if not is_told[0]:
                is_told[0] = True
                on_event(counted[0], name)
                counted[0] += 1
                is_told[0] = False
            return original(*args, **kwargs)

        return wrapped

    for name in EVENTS:
        patch(os, name, wrap(name, getattr(os, name)))
    patch(io, "open", wrap("open a file", io.open))


def test_disk_state_at_every_event_of_a_save(store: CheckpointStore, tmp_path: Path) -> None:
    """The save ends with removing the old checkpoint; what a killed process leaves is what is there at that moment."""
    names: list[str] = []

    def keep(number: int, name: str) -> None:
        names.append(name)
        shutil.copytree(store.folder, tmp_path / str(number), symlinks=True)

    with pytest.MonkeyPatch.context() as patch:
        counting(keep, patch.setattr)
        store.save(snapshot(2))
    assert {*EVENTS, "open a file"} == set(names)
    stores = [CheckpointStore(tmp_path / str(number), 1) for number in range(len(names))]
    for store_of_event in stores:
        for step in store_of_event.steps()[:-1]:  # the newest is read below
            verify_directory(store_of_event.path(step), must_have_manifest=True)
    newest_steps = [newest(store_of_event) for store_of_event in stores]
    assert set(newest_steps) == {1, 2} and newest_steps == sorted(newest_steps), "the new one appears in one moment"
    assert names[newest_steps.index(2) - 1] == "rename" and len(names) >= NUM_EVENTS, len(names)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95])
def test_kill_within_a_save(store: CheckpointStore, share: float) -> None:
    """In the order of events; some of them in a thread beside the rest of the process."""
    until = int(share * NUM_EVENTS)

    def save() -> None:
        staged = snapshot(2)
        counting(lambda now, name: die() if now == until else None)
        saves = AsyncCheckpointer(store, background=bool(until % 2))
        saves.start(staged)
        saves.wait()

    assert in_child(save) == -signal.SIGKILL
    assert (store.folder / "latest" / "state.json").is_file()
    assert newest(store) in (1, 2)
    store.save(snapshot(3))
    assert newest(store) == 3 and store.steps() == [3]
    assert not list_leftovers(store), "what the killed process left aside is removed by the next save"


@pytest.mark.parametrize(("model", "optimizer"), [(50_000, 1), (1, 50_000)])
def test_a_file_that_may_not_grow_is_a_full_disk(
    store: CheckpointStore, tmp_path: Path, model: int, optimizer: int
) -> None:
    """The writes of safetensors and of torch themselves fail; neither says so by an OSError."""

    def save() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        shards = whole_shards({"w.exp_avg": torch.zeros(optimizer)})
        staged = stage_checkpoint(2, write_model, {"step": 2}, {"w": torch.zeros(model)}, shards)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            store.save(staged)
        except ValueError as error:
            (tmp_path / "said").write_text(str(error))

    assert in_child(save) == 0
    message = (tmp_path / "said").read_text()
    assert "step-00000002 was not written: " in message and "MiB are free there; make room)" in message
    assert not list_leftovers(store) and newest(store) == 1


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata.tmp", "state.json", "config.toml", MANIFEST])
def test_a_full_disk_at_each_file(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    original = io.open

    def full(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if "w" in mode and Path(str(path)).name == name:
            raise OSError(28, "No space left on device")
        return original(path, mode, *args, **kwargs)

    monkeypatch.setattr(io, "open", full)
    with pytest.raises(ValueError, match=r"step-00000002 was not written: .*No space left on device.*MiB are free"):
        store.save(snapshot(2))
    monkeypatch.undo()
    assert not list_leftovers(store) and newest(store) == 1


@pytest.mark.parametrize("event", ["fsync", "rename", "mkdir"])
def test_a_folder_that_does_not_change(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, event: str) -> None:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, event, refuse)
    with pytest.raises(ValueError, match=r"step-00000002 was not written: .*Read-only file system"):
        store.save(snapshot(2))
    monkeypatch.undo()
    assert not list_leftovers(store) and newest(store) == 1


def test_links_that_cannot_be_changed(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> NoReturn:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ValueError, match=r"step-00000002 was written, but the folder around it could not be changed"):
        store.save(snapshot(2))
    monkeypatch.undo()
    assert not list_leftovers(store) and store.steps() == [1, 2] and newest(store) == 2


class Harm:
    """A pickle of this makes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def sign(path: Path) -> None:
    """Write the manifest anew, as one would who means harm."""
    import json

    (path / MANIFEST).unlink()
    (path / MANIFEST).write_text(json.dumps({"files": make_manifest_entries(path, list_files(path))}))
    verify_directory(path, must_have_manifest=True)


@pytest.mark.parametrize("attack_location", ["whole", "inside", "bytes", "outside"])
def test_a_malicious_pickle_is_not_executed(store: CheckpointStore, tmp_path: Path, attack_location: str) -> None:
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    store = CheckpointStore(store.folder, 2)
    path, touched = store.save(snapshot(2)), tmp_path / "touched"
    file = path / "training_state" / ".metadata"
    metadata: Any = pickle.loads(file.read_bytes())
    if attack_location == "whole":
        metadata = Harm(touched)
    elif attack_location == "inside":
        metadata.planner_data = Harm(touched)
    elif attack_location == "bytes":  # torch would load what is said to be no tensor without any guard
        metadata.state_dict_metadata["optimizer.w.step"] = BytesStorageMetadata()
    else:
        next(iter(metadata.storage_data.values())).relative_path = "../../elsewhere"
    file.write_bytes(pickle.dumps(metadata))
    sign(path)
    messages: list[str] = []
    saved = store.load_newest(messages.append)
    assert saved is not None and saved.state == {"step": 1}
    assert not touched.exists()
    expected = {
        "whole": "names pathlib",
        "inside": "names pathlib",
        "bytes": "BytesStorageMetadata",
        "outside": "outside of its directory",
    }[attack_location]
    assert "step-00000002/training_state/.metadata cannot be read" in messages[0] and expected in messages[0]
    if attack_location != "outside":
        assert "not called; do not use this checkpoint" in messages[0]


def test_tensors_are_not_loaded_by_an_open_pickle(store: CheckpointStore, tmp_path: Path) -> None:
    """Torch's own guard, in the file of the tensors."""
    touched = tmp_path / "touched"
    folder = store.path(1) / "training_state"
    buffer = io.BytesIO()
    torch.save(Harm(touched), buffer)
    (folder / "__0_0.distcp").write_bytes(buffer.getvalue())
    opened = StoredTensors.open(folder)
    for location in opened.metadata.storage_data.values():
        location.offset, location.length = 0, len(buffer.getvalue())
    with pytest.raises(ValueError, match="training_state cannot be read"):
        opened.read_whole("")
    assert not touched.exists()


def test_background_failures_are_reported_once(store: CheckpointStore) -> None:
    def full(folder: Path, weights: dict[str, torch.Tensor]) -> None:
        raise OSError(28, "No space left on device")

    saves = AsyncCheckpointer(store)
    saves.start(snapshot(2, full))
    saves.start(snapshot(3))  # waits for the one before, and does not hide what became of it
    (failure,) = saves.pop_failures()
    assert "step-00000002 was not written: [Errno 28] No space left on device" in failure
    saves.wait()
    assert saves.pop_failures() == [] and newest(store) == 3
    saves.start(snapshot(4, full))
    with pytest.raises(ValueError, match="step-00000004 was not written"):
        saves.wait()
    assert saves.pop_failures() == []
    saves.start(snapshot(5, full))
    saves.close()
    assert "step-00000005" in saves.pop_failures()[0]
    assert newest(store) == 3


def test_training_continues_during_a_save(store: CheckpointStore) -> None:
    may_end, weights = threading.Event(), {"w": torch.ones(3)}

    def slow(folder: Path, copies: dict[str, torch.Tensor]) -> None:
        assert may_end.wait(30)
        write_model(folder, copies)

    saves = AsyncCheckpointer(store)
    saves.start(stage_checkpoint(2, slow, {"step": 2}, weights, whole_shards({"w.a": weights["w"]})))
    assert saves.pop_failures() == [] and newest(store) == 1  # in the middle of it
    weights["w"] += 1
    may_end.set()
    saves.wait()
    saved = store.load_newest(print)
    assert saved is not None and torch.equal(saved.weights()["w"], torch.ones(3))
    assert torch.equal(saved.tensors.read_whole("optimizer.")["w.a"], torch.ones(3))


@pytest.mark.parametrize("background", [False, True])
def test_a_mistake_of_the_program_is_no_event(store: CheckpointStore, background: bool) -> None:
    def wrong(folder: Path, weights: dict[str, torch.Tensor]) -> None:
        raise TypeError("a bug")

    saves = AsyncCheckpointer(store, background=background)
    saves.start(snapshot(2, wrong))
    with pytest.raises(TypeError, match="a bug"):
        saves.start(snapshot(3))
    saves.close()
    assert not list_leftovers(store)


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
