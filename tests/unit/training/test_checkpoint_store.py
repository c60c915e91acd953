"""Checkpoints: a killed process, a full disk or a flipped bit leaves what was there before."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from config.train import TrainConfig
from config.training.training import CheckpointConfig
from diffusionlm.checkpoints.huggingface import load_model, save_model
from diffusionlm.checkpoints.manifest import MANIFEST, verify_directory, write_directory_atomically
from diffusionlm.training.checkpointing.run_directory import open_run_directory
from diffusionlm.training.checkpointing.staging import stage_checkpoint
from diffusionlm.training.checkpointing.store import CheckpointStore
from diffusionlm.training.checkpointing.tensor_files import StoredTensors
from files.usage_error import UsageError
from tests.conftest import MakeModel
from tests.unit.training.checkpoints import (
    WriteModel,
    check_whole,
    list_leftovers,
    load,
    snapshot,
    whole_shards,
    write_model,
)

DATA = "training_state/__0_0.distcp"
FILES = ["model.safetensors", "state.json", DATA, "training_state/.metadata"]


def save(store: CheckpointStore, step: int, write: WriteModel = write_model) -> Path:
    return store.save(snapshot(step, write))


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "run" / "checkpoints", keep_last=2)


def test_saves_loads_keeps_last_and_points_to_latest(store: CheckpointStore) -> None:
    assert load(store) == (None, [])
    for step in (5, 10, 100):
        path = save(store, step)
        verify_directory(path)
        assert (store.folder / "latest").resolve() == path.resolve()
    assert store.steps() == [10, 100]
    assert sorted(path.name for path in store.folder.iterdir()) == ["latest", "step-00000010", "step-00000100"]
    saved, messages = load(store)
    check_whole(saved, 100)
    assert not messages and not list_leftovers(store)


def test_latest_is_relative_so_that_a_run_may_move(store: CheckpointStore, tmp_path: Path) -> None:
    save(store, 3)
    store.folder.parent.rename(tmp_path / "moved")
    assert (tmp_path / "moved" / "checkpoints" / "latest" / "state.json").is_file()


def test_without_average_the_live_weights_are_the_models(store: CheckpointStore) -> None:
    store.save(stage_checkpoint(1, write_model, {"step": 1}, {"w": torch.arange(3.0)}, {}))
    saved, _ = load(store)
    assert saved is not None and not saved.has_live_weights and saved.tensors.read_whole("optimizer.") == {}
    assert torch.equal(saved.live_weights()["w"], torch.arange(3.0))


def test_exception_during_a_write_keeps_the_previous_checkpoint(store: CheckpointStore) -> None:
    save(store, 1)

    def interrupted(folder: Path, weights: dict[str, torch.Tensor]) -> None:
        write_model(folder, weights)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save(store, 2, interrupted)
    assert not list_leftovers(store)
    check_whole(load(store)[0], 1)


def test_a_snapshot_is_of_its_moment(store: CheckpointStore) -> None:
    """Also where the tensors are views, and where one is used twice."""
    state, weights = {"step": 1}, torch.arange(12.0).view(3, 4)
    staged = stage_checkpoint(
        1, write_model, state, {"w": weights.T}, whole_shards({"w.a": weights}), whole_shards({"w": weights[1]})
    )
    weights.zero_()
    state["step"] = 9
    store.save(staged)
    saved, _ = load(store)
    assert saved is not None and saved.state == {"step": 1}
    expected = torch.arange(12.0).view(3, 4)
    assert torch.equal(saved.weights()["w"], expected.T)
    assert torch.equal(saved.tensors.read_whole("optimizer.")["w.a"], expected)
    assert torch.equal(saved.live_weights()["w"], expected[1])


def test_the_format_is_torchs(store: CheckpointStore, tmp_path: Path) -> None:
    """Its own functions read what is written here, and what they write is read here."""
    from torch.distributed.checkpoint.state_dict_loader import load as torch_load
    from torch.distributed.checkpoint.state_dict_saver import save as torch_save

    tensors = {"optimizer.w.a": torch.randn(5, 3), "optimizer.w.step": torch.tensor(3.0)}
    tensors["weights.w"] = torch.randn(7).bfloat16()
    optimizer = {name.removeprefix("optimizer."): tensors[name] for name in ("optimizer.w.a", "optimizer.w.step")}
    live = whole_shards({"w": tensors["weights.w"]})
    staged = stage_checkpoint(1, write_model, {}, {"w": torch.zeros(1)}, whole_shards(optimizer), live)
    path = store.save(staged)
    read = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    with pytest.warns(UserWarning, match="single process"):
        torch_load(read, checkpoint_id=path / "training_state")
    with pytest.warns(UserWarning, match="single process"):
        torch_save(tensors, checkpoint_id=tmp_path / "theirs")
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    theirs = tmp_path / "theirs" / ".metadata"
    with pytest.raises(ValueError, match=r"pathlib\S*\.PosixPath"):
        StoredTensors.open(theirs.parent)  # it has the path that it was written to
    taken_metadata = pickle.loads(theirs.read_bytes())
    taken_metadata.storage_meta = None
    theirs.write_bytes(pickle.dumps(taken_metadata))
    opened = StoredTensors.open(theirs.parent)
    assert opened.shapes == {name: tensor.shape for name, tensor in tensors.items()}
    assert all(torch.equal(value, tensors[name]) for name, value in opened.read_whole("").items())


def test_tensors_are_read_in_place_and_must_fit(store: CheckpointStore) -> None:
    save(store, 3)
    saved, _ = load(store)
    assert saved is not None

    def targets() -> dict[str, torch.Tensor]:
        return {"optimizer.w.step": torch.tensor(0.0), "optimizer.w.exp_avg": torch.zeros(20)}

    fits = targets()
    saved.tensors.read_into(whole_shards(fits), "optimizer.")
    assert fits["optimizer.w.step"] == 3 and torch.equal(fits["optimizer.w.exp_avg"], torch.full((20,), 3.0))
    cases = {
        "unexpected weights.w": (targets(), ""),
        "unexpected optimizer.w.step": ({"optimizer.w.exp_avg": torch.zeros(20)}, "optimizer."),
        "missing optimizer.v.step": (targets() | {"optimizer.v.step": torch.tensor(0.0)}, "optimizer."),
        r"optimizer.w.step has shape \[\], here it is \[2\]": ({"optimizer.w.step": torch.zeros(2)}, "optimizer."),
        "weights.w has dtype torch.float32, here it is torch.float64": (
            {"weights.w": torch.zeros(20, dtype=torch.float64)},
            "weights.",
        ),
    }
    for text, (wrong, prefix) in cases.items():
        with pytest.raises(ValueError, match=f"step-00000003/training_state does not fit.*{text}"):
            saved.tensors.read_into(whole_shards(wrong), prefix)


@pytest.mark.parametrize("keep_last", [1, 2])
def test_best_and_every_third_checkpoint_are_retained(tmp_path: Path, keep_last: int) -> None:
    store = CheckpointStore(tmp_path, keep_last, keep_every_steps=30)
    bounds = {10: float("nan"), 20: 2.5, 30: None, 40: 2.5, 50: float("inf"), 60: 2.7, 70: 2.6}
    for step, bound in bounds.items():
        store.save(snapshot(step, bound=bound))
    last = [70] if keep_last == 1 else [60, 70]
    assert store.steps() == sorted({30, 40, 60, *last})
    assert os.readlink(tmp_path / "best") == "step-00000040"
    assert os.readlink(tmp_path / "latest") == "step-00000070"
    store.save(snapshot(80, bound=1.0))
    assert store.steps() == sorted({30, 60, *([70] if keep_last == 2 else []), 80})
    assert os.readlink(tmp_path / "best") == "step-00000080"
    damage(store.path(80) / "state.json", "flipped")
    assert load(store)[0] is not None
    assert os.readlink(tmp_path / "best") == ("step-00000070" if keep_last == 2 else "step-00000060")


def test_link_target_is_not_removed(store: CheckpointStore) -> None:
    """A run that went back to an older state: ``latest`` is not the newest of them."""
    for step in (5, 6):
        save(store, step)
    save(store, 1)
    assert os.readlink(store.folder / "latest") == "step-00000001"
    assert store.steps() == [1, 5, 6]


def test_an_expired_checkpoint_that_was_moved_and_linked_loses_its_link(store: CheckpointStore, tmp_path: Path) -> None:
    """Its files, which may be on another disk, stay."""
    save(store, 1)
    archive = store.path(1).rename(tmp_path / "archive")
    store.path(1).symlink_to(archive)
    for step in range(2, 6):
        save(store, step)
    assert 1 not in store.steps() and 5 in store.steps() and not list_leftovers(store)
    assert (archive / MANIFEST).is_file()


def damage(path: Path, damage_kind: str) -> None:
    content = path.read_bytes()
    if damage_kind == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif damage_kind == "flipped":
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    elif damage_kind == "emptied":
        path.write_bytes(b"")
    else:
        path.unlink()


@pytest.mark.parametrize("damage_kind", ["truncated", "flipped", "emptied", "removed"])
@pytest.mark.parametrize("name", [*FILES, MANIFEST])
def test_damaged_checkpoint_is_renamed_and_reported(store: CheckpointStore, name: str, damage_kind: str) -> None:
    save(store, 1)
    damage(save(store, 2) / name, damage_kind)
    saved, messages = load(store)
    check_whole(saved, 1)
    assert any("step-00000002" in line and (name in line or name == MANIFEST) for line in messages)
    assert any("damaged-step-00000002" in line for line in messages)
    assert (store.folder / "latest").resolve().name == "step-00000001"
    assert (store.folder / "damaged-step-00000002").is_dir(), "kept for a look at it"
    assert store.steps() == [1]
    save(store, 2)  # the run goes on and comes by here again
    check_whole(load(store)[0], 2)


def write_file(text: str) -> Callable[[Path], None]:
    """Return a writer of a directory with one file."""

    def write(folder: Path) -> None:
        (folder / "a").write_text(text)

    return write


def test_any_flipped_byte_of_the_manifest_is_noticed(tmp_path: Path) -> None:
    write_directory_atomically(tmp_path / "made", write_file("1"))
    path = tmp_path / "made" / MANIFEST
    content = path.read_bytes()
    for index in range(len(content)):
        path.write_bytes(content[:index] + bytes([content[index] ^ 1]) + content[index + 1 :])
        try:
            verify_directory(path.parent)
        except ValueError:
            continue
        assert content[index : index + 1].isspace(), f"flipping byte {index} of the manifest went unnoticed"
    path.write_bytes(content)
    verify_directory(path.parent)


def test_all_damaged_is_an_error(store: CheckpointStore) -> None:
    for step in (1, 2):
        damage(save(store, step) / DATA, "flipped")
    with pytest.raises(ValueError, match=str(store.folder)):
        load(store)
    assert store.steps() == [1, 2], "nothing is thrown away"


def test_run_directory_is_a_model_directory(tiny_model: MakeModel, tmp_path: Path) -> None:
    model = tiny_model()
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=1)
    weights = dict(model.named_parameters())
    store.save(stage_checkpoint(4, lambda folder, copies: save_model(model, folder, copies), {}, weights, {}))
    for path in (tmp_path, store.folder / "latest", store.path(4)):
        assert torch.equal(load_model(path).model.norm.weight, model.model.norm.weight)
    with pytest.raises(ValueError, match="no model at"):
        load_model(store.folder)
    with pytest.raises(ValueError, match="no such directory"):
        load_model(tmp_path / "nothing")
    with pytest.raises(ValueError, match="dtype = 'int8'"):
        load_model(tmp_path, dtype="int8")


@pytest.fixture
def used(config: TrainConfig) -> Path:
    """A run directory with a checkpoint."""
    with open_run_directory(config) as directory:
        directory.store.path(1).mkdir(parents=True)
    return config.run.directory


def refuses(config: TrainConfig, message: str) -> None:
    with pytest.raises(UsageError, match=message), open_run_directory(config):
        pass


def test_a_used_directory_is_a_usage_error(config: TrainConfig, used: Path) -> None:
    before = (used / "config.toml").read_bytes()
    changed = config.model_copy(update={"run": config.run.model_copy(update={"seed": config.run.seed + 1})})
    refuses(changed, r"another config:\n  run\.seed")
    refuses(config.model_copy(update={"checkpoint": CheckpointConfig(resume="never")}), r'checkpoint\.resume = "never"')
    assert (used / "config.toml").read_bytes() == before
    (used / "config.toml").unlink()
    refuses(config, r"not empty and not a run \(it holds checkpoints\)")
