"""Models by their Hub name, with a client that answers what a test says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub import errors
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, enable_progress_bars

from diffusionlm.families import hub
from diffusionlm.families.hub import describe_origin, is_hub_name
from diffusionlm.families.model_directory import resolve_model_directory

COMMITS = {"main": "a" * 40, "v1": "b" * 40}


@pytest.fixture
def uncached() -> None:
    for function in (hub.download_description, hub.download_model):
        function.cache_clear()


@pytest.mark.usefixtures("uncached")
def test_a_model_is_of_one_commit_and_has_no_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "models--org--tiny" / "snapshots" / COMMITS["v1"]
    snapshot.mkdir(parents=True)
    calls: list[tuple[str, str | None, list[str]]] = []

    def download(repository: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        calls.append((repository, revision, allow_patterns))
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ValueError, match=r"org/tiny@v1 .* has no model.safetensors, and pickles are not downloaded"):
        hub.download_model("org/tiny@v1")
    (snapshot / "model.safetensors").touch()
    assert hub.download_model("org/tiny@v1") == snapshot == hub.download_description("org/tiny@v1")
    description, weights = list(hub.DESCRIPTION_FILES), list(hub.WEIGHT_FILES)
    of_commit = ("org/tiny", COMMITS["v1"], weights)
    assert calls == [("org/tiny", "v1", description), of_commit, of_commit], "what is complete is not asked for again"
    assert not [name for name in (*description, *weights) if name.endswith((".bin", ".py", "*"))]


NOT_FOUND: Any = httpx.Response(404, request=httpx.Request("GET", "https://hub"))


@pytest.mark.usefixtures("uncached")
@pytest.mark.parametrize(
    ("error", "is_offline", "parts"),
    [
        (errors.RepositoryNotFoundError("x", response=NOT_FOUND), False, ["there is no such directory", "HF_TOKEN"]),
        (errors.GatedRepoError("x", response=NOT_FOUND), False, ["accept the conditions"]),
        (errors.RevisionNotFoundError("x", response=NOT_FOUND), False, ["no revision 'v1'"]),
        (errors.LocalEntryNotFoundError("x"), True, ["HF_HUB_OFFLINE", '"uv run hf download org/new --revision v1"']),
        (ConnectionError("nobody\nanswers"), False, ["(ConnectionError: nobody)", "uv run hf download org/new"]),
    ],
)
def test_errors_are_one_line_with_a_remedy(
    error: Exception, is_offline: bool, parts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", is_offline)
    with pytest.raises(ValueError, match=r"^no model org/new@v1: ") as caught:
        resolve_model_directory("org/new@v1")
    assert all(part in str(caught.value) for part in parts) and "\n" not in str(caught.value)


def test_paths_that_are_no_hub_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub is not asked about existing paths, nor about one that is probably misspelled."""
    monkeypatch.chdir(tmp_path)
    asked: list[str] = []

    def download(name: str) -> Path:
        asked.append(name)
        return tmp_path / "snapshot"

    for function in (hub.download_description, hub.download_model):
        monkeypatch.setattr(f"diffusionlm.families.model_directory.{function.__name__}", download)
    for folder in ("snapshot", "Qwen/local", "Qwen/local@main"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.json").write_text("{}")
    assert resolve_model_directory("Qwen/local") == Path("Qwen/local")
    assert resolve_model_directory("Qwen/local@main") == Path("Qwen/local@main")
    for name in (tmp_path / "none", "none", "a/b/c", "../none", "org/..", "org/a b"):
        with pytest.raises(ValueError, match=r"no model at .*: there is no such directory$"):
            resolve_model_directory(name)
    with pytest.raises(
        ValueError, match=r"no model at Qwen/none: .*; write Qwen/none@main for a model of the Hugging Face Hub"
    ):
        resolve_model_directory("Qwen/none")
    with pytest.raises(ValueError, match=r"no model at Qwen/loacl: .*; did you mean Qwen/local\?"):
        resolve_model_directory("Qwen/loacl")
    assert asked == []
    assert resolve_model_directory("Qwen/none@main") == tmp_path / "snapshot"
    assert resolve_model_directory("org/none") == tmp_path / "snapshot"
    assert asked == ["Qwen/none@main", "org/none"]
    assert is_hub_name("a/b@refs/pr/1") and not is_hub_name("a/b@")


@pytest.mark.parametrize(("rank", "is_terminal"), [("0", True), ("1", True), ("0", False)])
def test_one_rank_of_a_machine_shows_progress_in_a_terminal(
    rank: str, is_terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setattr(hub, "accepts_escapes", lambda stream: is_terminal)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path))
    enable_progress_bars()
    try:
        assert hub.download_description.__wrapped__("org/tiny") == tmp_path
        assert are_progress_bars_disabled() == (rank == "1" or not is_terminal)
    finally:
        enable_progress_bars()


def test_origin_names_no_folder_of_this_machine(tmp_path: Path) -> None:
    assert describe_origin(tmp_path / "qwen3-mask") == "qwen3-mask"
    snapshot = tmp_path / "hub/models--Qwen--Qwen3-0.6B/snapshots" / COMMITS["v1"]
    assert describe_origin(snapshot) == f"Qwen/Qwen3-0.6B, commit {COMMITS['v1']}"
