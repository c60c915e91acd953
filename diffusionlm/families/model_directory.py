"""Reading config.json and generation_config.json of a model directory. No torch."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from config.model import ModelConfig
from diffusionlm.families.hub import download_description, download_model, is_hub_name
from diffusionlm.families.registry import FAMILIES, infer_model_type
from files.json_files import read_json_object

GENERATION_CONFIG_FILE = "generation_config.json"


def resolve_model_directory(path: str | Path, *, needs_weights: bool = True) -> Path:
    """Find the directory with config.json: the path itself, the newest checkpoint of a run directory, or a model of the
    Hugging Face Hub, which is downloaded to its cache.

    A name ``org/name`` is looked up on the Hub if there is no such path and no directory ``org``, which would make it
    a misspelled path. ``org/name@revision`` needs no such guess.

    Args:
        path: the path or the Hub name.
        needs_weights: False: of a model on the Hub, everything but the weights is enough.

    Raises:
        ValueError: there is no config.json, or no such model on the Hub; names the path.
    """
    path = Path(path)
    name = path.as_posix()
    if is_hub_name(name) and not path.exists() and ("@" in name or not path.parent.is_dir()):
        path = download_model(name) if needs_weights else download_description(name)
    if not path.is_dir():
        raise ValueError(f"no model at {path}: there is no such directory{_suggest_model(path)}")
    for candidate in (path, path / "checkpoints" / "latest"):
        if (candidate / "config.json").is_file():
            return candidate
    if (path / "adapter_config.json").is_file():
        raise ValueError(f"no model at {path}: it is an adapter; name its base, and this directory as its adapter")
    raise ValueError(f"no model at {path}: it has no config.json, and no checkpoints/latest/config.json")


def _suggest_model(path: Path) -> str:
    """Return a similar name, or the name on the Hub, for a directory that is missing."""
    siblings = [child.name for child in path.parent.iterdir() if child.is_dir()] if path.parent.is_dir() else []
    similar = get_close_matches(path.name, siblings, 1)
    name = path.as_posix()
    if similar:
        return f"; did you mean {path.parent / similar[0]}?"
    return f"; write {name}@main for a model of the Hugging Face Hub" if is_hub_name(name) and "@" not in name else ""


def read_model_config(directory: Path) -> ModelConfig:
    """Read the config of a model of any family, in the spelling of transformers 4 or 5.

    Raises:
        ValueError: not JSON, or a model that cannot be computed here; names the file and the keys.
    """
    path = directory / "config.json"
    values, generation = read_json_object(path), read_generation_config(directory)
    if generation is not None and generation.get("_from_model_config"):
        generation = None  # transformers copied it from config.json
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(
            f"{path}: model_type = {model_type!r} is not supported; supported are {', '.join(FAMILIES)}. If the model "
            "has the layers of one of these, write its name as model_type"
        )
    options, problems = FAMILIES[model_type].read_options(values, directory.resolve(), generation)
    try:
        config = ModelConfig.model_validate(options)
    except ValidationError as error:
        problems += [f"{'.'.join(map(str, e['loc'])) or 'config'}: {e['msg']}" for e in error.errors()]
    if problems:
        raise ValueError(f"{path}: the model cannot be loaded: {'; '.join(problems)}")
    # Without an inferable model_type, a model that was read equals one that was built from the same options.
    return config.model_copy(update={"model_type": None}) if model_type == infer_model_type(config) else config


def read_generation_config(directory: Path) -> dict[str, Any] | None:
    """Read a directory's generation_config.json. None: there is none.

    Raises:
        ValueError: it is no JSON object; names the file.
    """
    path = directory / GENERATION_CONFIG_FILE
    return read_json_object(path) if path.is_file() else None
