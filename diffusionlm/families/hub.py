"""Models of the Hugging Face Hub, named ``org/name`` or ``org/name@revision``: download and upload. No torch."""

from __future__ import annotations

import functools
import os
import re
import sys
from pathlib import Path

from files.paths import portable_path
from files.terminal_text import accepts_escapes

PROCESSOR_FILES = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
"""How programs prepare images and videos for a model."""
DESCRIPTION_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "special_tokens.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    *PROCESSOR_FILES,
    "README.md",
)
"""Everything but the weights. A pattern without a wildcard matches no file of a subfolder."""
WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json", "model-?????-of-?????.safetensors")
"""No pickles: a repository is not trusted to run code."""
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")

TOKEN_REMEDY = 'set HF_TOKEN to one with write access, or run "uv run hf auth login"'

_HUB_NAME = re.compile(r"(?P<repository>[A-Za-z0-9][\w.-]*/[\w.-]*\w)(?:@(?P<revision>\w[\w./-]*))?", re.ASCII)


def is_hub_name(name: str) -> bool:
    """Return whether a text has the form of a Hub name."""
    return _HUB_NAME.fullmatch(name) is not None


@functools.cache
def download_description(name: str) -> Path:
    """Download config, tokenizer and model card of a model, or find them in the cache. Returns the snapshot directory.

    Once per process, so that all files of a model are of one commit. The cache, HF_TOKEN, HF_ENDPOINT and
    HF_HUB_OFFLINE are those of ``huggingface_hub``.

    Args:
        name: ``org/name`` or ``org/name@revision``.

    Raises:
        ValueError: there is no such model or revision, access is denied, or the Hub cannot be reached and the cache
            does not have all files.
    """
    match = _HUB_NAME.fullmatch(name)
    assert match is not None
    return _download(name, match["repository"], match["revision"], DESCRIPTION_FILES)


@functools.cache
def download_model(name: str) -> Path:
    """Download a model with its weights, or find it in the cache. Returns the snapshot directory.

    Raises:
        ValueError: as `download_description`, or the model has no weights in safetensors files.
    """
    commit = download_description(name).name
    directory = _download(name, name.partition("@")[0], commit, WEIGHT_FILES)
    if not any((directory / file).is_file() for file in WEIGHT_FILES[:2]):
        raise ValueError(
            f"{name} on the Hugging Face Hub has no {WEIGHT_FILES[0]}, and pickles are not downloaded, because they may"
            " run code: choose a revision with safetensors, or convert the weights and name their directory"
        )
    return directory


def describe_origin(path: Path) -> str:
    """Name a model for others: a directory without the folders of this machine, a model of the Hub with its commit."""
    name = path.as_posix()
    directory = (download_description(name) if is_hub_name(name) and not path.exists() else path).resolve()
    repository = directory.parent.parent.name
    if directory.parent.name == "snapshots" and repository.startswith("models--"):
        return f"{repository.removeprefix('models--').replace('--', '/', 1)}, commit {directory.name}"
    return portable_path(path)


def _download(name: str, repository: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download  # importing it takes a second

    _set_progress_bars()
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=list(patterns)))
    except Exception as error:  # the Hub's client raises many types, some of its HTTP library
        raise ValueError(f"no model {name}: there is no such directory, and {_explain(error, name)}") from error


def check_token() -> None:
    """Raise ValueError if there is no token for the Hub, in HF_TOKEN or of a login."""
    from huggingface_hub import get_token

    if get_token() is None:
        raise ValueError(f"there is no token for the Hugging Face Hub: {TOKEN_REMEDY}")


def push_directory(directory: Path, repository: str, *, private: bool) -> str:
    """Upload a model or an adapter, without what only a run needs, to a repository, which is created if it does not
    exist. Files of weights, or of an adapter, that it has from before are replaced. Returns the URL of the commit.

    ``private``: create it as a private one, else by the default of its owner.

    Raises:
        ValueError: there are no safetensors files, the Hub cannot be reached or refuses it, or the repository is public
            in spite of ``private``.
    """
    from huggingface_hub import HfApi

    weights, api = [*(ADAPTER_FILES if (directory / ADAPTER_FILES[0]).exists() else WEIGHT_FILES)], HfApi()
    if not any(path.suffix == ".safetensors" for pattern in weights for path in directory.glob(pattern)):
        raise ValueError(f"{directory} has no weights in safetensors files: write them with --target DIR")
    _set_progress_bars()
    try:
        api.create_repo(repository, private=private or None, exist_ok=True)
        if private and not api.model_info(repository).private:
            raise ValueError("the repository is public: make it private in its settings, or push without --private")
        patterns = [*DESCRIPTION_FILES, *weights]
        return api.upload_folder(
            repo_id=repository, folder_path=directory, allow_patterns=patterns, delete_patterns=weights
        ).commit_url
    except Exception as error:  # as in `_download`
        status, text = getattr(getattr(error, "response", None), "status_code", None), " ".join(str(error).split())
        if status in (401, 403, 404):
            text = f"is it a repository of your account, or of an organization of yours? {TOKEN_REMEDY} ({text})"
        retry = f"diffusionlm-convert --source {directory} --push {repository}" + (" --private" if private else "")
        text = f"{directory} was not pushed to {repository} on the Hugging Face Hub: {text}; to try it again: {retry}"
        raise ValueError(text) from error


def _set_progress_bars() -> None:
    """Show progress in a terminal only. LOCAL_RANK is set by torchrun: one bar per machine is enough."""
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if os.environ.get("LOCAL_RANK", "0") != "0" or not accepts_escapes(sys.stderr):
        disable_progress_bars()


def _explain(error: Exception, name: str) -> str:
    """Explain on one line why a download failed, with the remedy."""
    from huggingface_hub import constants, errors

    repository, _, revision = name.partition("@")
    match error:
        case errors.GatedRepoError():
            return "access on the Hugging Face Hub is restricted: accept the conditions on its page, and set HF_TOKEN"
        case errors.RepositoryNotFoundError():
            return "the Hugging Face Hub has no such model, or it is private: correct the name, or set HF_TOKEN"
        case errors.RevisionNotFoundError():
            return f"the model on the Hugging Face Hub has no revision {revision!r}"
    cause = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _first_line(error.__cause__ or error)
    command = f"uv run hf download {repository}" + (f" --revision {revision}" if revision else "")
    return (
        f"it cannot be downloaded from the Hugging Face Hub ({cause}), nor is all of it in the cache: run "
        f'"{command}" where there is a network, or name a local directory'
    )


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
