"""Checkpoints: a killed process, a full disk or a flipped bit leaves what was there before."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from diffusionlm.checkpoints.huggingface import load_model, save_model
from diffusionlm.checkpoints.manifest import MANIFEST, replace_text, verify, write_directory
from diffusionlm.models.transformer import Transformer
from diffusionlm.training.checkpoint import CheckpointStore, Saved, restore_weights

MakeModel = Callable[..., Transformer]
FILES = ["model.safetensors", "state.json", "optimizer.safetensors", "live_weights.safetensors"]


def write_model(folder: Path) -> None:
    save_file({"w": torch.arange(100.0)}, folder / "model.safetensors")


def save(store: CheckpointStore, step: int, write: Callable[[Path], None] = write_model) -> Path:
    optimizer = {"w.step": torch.tensor(float(step)), "w.exp_avg": torch.full((50,), float(step))}
    return store.save(step, write, {"step": step}, optimizer, {"w": torch.full((9,), float(step))})


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "run" / "checkpoints", keep_last=2)


def load(store: CheckpointStore) -> tuple[Saved | None, list[str]]:
    said: list[str] = []
    return store.load_newest(said.append), said


def assert_is(saved: Saved | None, step: int) -> None:
    assert saved is not None and saved.state == {"step": step}
    assert saved.path.name == f"step-{step:08d}"
    assert torch.equal(saved.optimizer["w.exp_avg"], torch.full((50,), float(step)))
    assert saved.live_weights is not None and torch.equal(saved.live_weights["w"], torch.full((9,), float(step)))


def leftovers(store: CheckpointStore) -> list[str]:
    return [path.name for path in store.folder.iterdir() if ".tmp-" in path.name]


def test_saves_loads_keeps_last_and_points_to_latest(store: CheckpointStore) -> None:
    assert load(store) == (None, [])
    for step in (5, 10, 100):
        path = save(store, step)
        verify(path)
        assert (store.folder / "latest").resolve() == path.resolve()
    assert store.steps() == [10, 100]
    assert sorted(path.name for path in store.folder.iterdir()) == ["latest", "step-00000010", "step-00000100"]
    saved, said = load(store)
    assert_is(saved, 100)
    assert not said and not leftovers(store)


def test_latest_is_relative_so_that_a_run_may_move(store: CheckpointStore, tmp_path: Path) -> None:
    save(store, 3)
    store.folder.parent.rename(tmp_path / "moved")
    assert (tmp_path / "moved" / "checkpoints" / "latest" / "state.json").is_file()


def test_without_average_there_are_no_live_weights(store: CheckpointStore) -> None:
    store.save(1, write_model, {"step": 1}, {}, None)
    saved, _ = load(store)
    assert saved is not None and saved.live_weights is None and saved.optimizer == {}


def test_exception_while_writing_leaves_the_old_one(store: CheckpointStore) -> None:
    save(store, 1)

    def interrupted(folder: Path) -> None:
        write_model(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save(store, 2, interrupted)
    assert not leftovers(store)
    assert_is(load(store)[0], 1)


@pytest.mark.parametrize("moment", ["write", "before rename", "after rename", "in latest"])
def test_kill_at_any_moment_leaves_a_whole_one(store: CheckpointStore, moment: str) -> None:
    save(store, 1)
    child = os.fork()
    if child == 0:  # the child ends without any cleaning up
        try:
            if moment == "write":
                save(store, 2, lambda folder: (write_model(folder), os._exit(9))[0])
            original_rename, original_replace = os.rename, os.replace

            def rename(source: Any, target: Any) -> None:
                if moment == "before rename":
                    os._exit(9)
                original_rename(source, target)
                if moment == "after rename":
                    os._exit(9)

            def replace(source: Any, target: Any) -> None:
                if moment == "in latest":
                    os._exit(9)
                original_replace(source, target)

            os.rename, os.replace = rename, replace  # type: ignore[assignment]
            save(store, 2)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert (store.folder / "latest" / "state.json").is_file()
    saved, _ = load(store)
    assert_is(saved, 2 if moment in ("after rename", "in latest") else 1)
    save(store, 3)
    assert_is(load(store)[0], 3)
    assert not leftovers(store), "what the killed process left aside is removed by the next save"


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif how == "flipped":
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    elif how == "emptied":
        path.write_bytes(b"")
    else:
        path.unlink()


@pytest.mark.parametrize("how", ["truncated", "flipped", "emptied", "removed"])
@pytest.mark.parametrize("name", [*FILES, MANIFEST])
def test_damaged_one_is_set_aside_with_a_message(store: CheckpointStore, name: str, how: str) -> None:
    save(store, 1)
    damage(save(store, 2) / name, how)
    saved, said = load(store)
    assert_is(saved, 1)
    assert any("step-00000002" in line and (name in line or name == MANIFEST) for line in said)
    assert any("damaged-step-00000002" in line for line in said)
    assert (store.folder / "latest").resolve().name == "step-00000001"
    assert (store.folder / "damaged-step-00000002").is_dir(), "kept for a look at it"
    assert store.steps() == [1]
    save(store, 2)  # the run goes on and comes by here again
    assert_is(load(store)[0], 2)


def test_any_flipped_byte_of_the_manifest_is_noticed(store: CheckpointStore) -> None:
    path = save(store, 1) / MANIFEST
    content = path.read_bytes()
    for index in range(len(content)):
        path.write_bytes(content[:index] + bytes([content[index] ^ 1]) + content[index + 1 :])
        try:
            verify(path.parent)
        except ValueError:
            continue
        assert content[index : index + 1].isspace(), f"flipping byte {index} of the manifest went unnoticed"
    path.write_bytes(content)
    verify(path.parent)


def test_all_damaged_is_an_error(store: CheckpointStore) -> None:
    for step in (1, 2):
        damage(save(store, step) / "optimizer.safetensors", "flipped")
    with pytest.raises(ValueError, match=str(store.folder)):
        load(store)
    assert store.steps() == [1, 2], "nothing is thrown away"


def test_full_disk_while_writing_the_model(store: CheckpointStore) -> None:
    save(store, 1)

    def full(folder: Path) -> None:
        write_model(folder)
        raise OSError(28, "No space left on device")

    with pytest.raises(ValueError, match=r"step-00000002 was not written: .*No space left.*MiB"):
        save(store, 2, full)
    assert not leftovers(store) and store.steps() == [1]
    assert_is(load(store)[0], 1)


def test_full_disk_while_pointing_latest(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    save(store, 1)

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ValueError, match=r"latest|step-00000002"):
        save(store, 2)
    monkeypatch.undo()
    assert not leftovers(store)


LIMITED = """
import resource, signal, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from diffusionlm.training.checkpoint import CheckpointStore

store = CheckpointStore(Path(sys.argv[1]), keep_last=2)
write = lambda folder: save_file({"w": torch.zeros(int(sys.argv[2]))}, folder / "model.safetensors")
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    store.save(2, write, {"step": 2}, {"w.exp_avg": torch.zeros(int(sys.argv[3]))}, None)
except ValueError as error:
    print("REFUSED", error)
"""


@pytest.mark.parametrize(("model", "optimizer"), [(1_000_000, 1), (1, 1_000_000)])
def test_file_size_limit_of_the_system(store: CheckpointStore, model: int, optimizer: int) -> None:
    """The writes of safetensors themselves fail, as on a full disk."""
    save(store, 1)
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(store.folder), str(model), str(optimizer)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("REFUSED") and "step-00000002" in done.stdout
    assert not leftovers(store)
    assert_is(load(store)[0], 1)


def test_a_programming_error_is_not_called_a_full_disk(store: CheckpointStore) -> None:
    """A TypeError in a writer is a bug; users must not be sent to look at their disk."""

    def wrong(folder: Path) -> None:
        raise TypeError("a bug")

    with pytest.raises(TypeError, match="a bug"):
        save(store, 1, wrong)
    assert not leftovers(store)


def test_write_directory_does_not_replace(tmp_path: Path) -> None:
    target = tmp_path / "made"
    write_directory(target, lambda folder: (folder / "a").write_text("1") and None)
    with pytest.raises(ValueError, match="made"):
        write_directory(target, lambda folder: (folder / "a").write_text("2") and None)
    assert (target / "a").read_text() == "1"
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_replace_text_is_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "summary.json"
    replace_text(path, "one")
    replace_text(path, "two")
    assert path.read_text() == "two"

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        replace_text(path, "three")
    assert path.read_text() == "two"
    assert [each.name for each in tmp_path.iterdir()] == ["summary.json"]


def test_weights_are_restored_by_name(tiny_model: MakeModel) -> None:
    source, target = tiny_model(seed=1), tiny_model(seed=2)
    weights = {name: parameter.detach().clone() for name, parameter in source.named_parameters()}
    restore_weights(dict(target.named_parameters()), weights)
    assert all(torch.equal(parameter, weights[name]) for name, parameter in target.named_parameters())
    weights.pop("model.norm.weight")
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        restore_weights(dict(target.named_parameters()), weights)


@pytest.mark.parametrize("change", ["missing", "unexpected", "misshapen", "damaged", "absent"])
def test_model_directory_that_does_not_fit(change: str, tiny_model: MakeModel, tmp_path: Path) -> None:
    model = tiny_model()
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    expected = "model.norm.weight"
    if change == "missing":
        del weights[expected]
    elif change == "misshapen":
        weights[expected] = torch.zeros(3)
    elif change == "unexpected":
        weights["model.extra.weight"] = torch.zeros(3)
        expected = "model.extra.weight"
    save_model(model, tmp_path, weights)
    if change == "damaged":
        damage(tmp_path / "model.safetensors", "truncated")
        expected = "model.safetensors"
    elif change == "absent":
        (tmp_path / "model.safetensors").unlink()
        expected = "model.safetensors"
    with pytest.raises(ValueError, match=expected.replace(".", r"\.")):
        load_model(tmp_path)


def test_run_directory_is_a_model_directory(tiny_model: MakeModel, tmp_path: Path) -> None:
    model = tiny_model()
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=1)
    store.save(4, lambda folder: save_model(model, folder), {}, {}, None)
    for path in (tmp_path, store.folder / "latest", store.path(4)):
        assert torch.equal(load_model(path).model.norm.weight, model.model.norm.weight)
    with pytest.raises(ValueError, match="no model at"):
        load_model(store.folder)
    with pytest.raises(ValueError, match="no such directory"):
        load_model(tmp_path / "nothing")
    with pytest.raises(ValueError, match="dtype = 'int8'"):
        load_model(tmp_path, dtype="int8")
