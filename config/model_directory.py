"""The model config of a Hugging Face directory: its config.json and generation_config.json. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from config.families import infer_model_type, read_options
from config.model import ModelConfig

GENERATION_CONFIG_FILE = "generation_config.json"


def resolve_model_directory(path: str | Path) -> Path:
    """The directory with config.json: the path itself, or the newest checkpoint of a run directory.

    Raises:
        ValueError: neither; names the path and what was looked for.
    """
    path = Path(path)
    if not path.is_dir():
        raise ValueError(f"no model at {path}: there is no such directory")
    for candidate in (path, path / "checkpoints" / "latest"):
        if (candidate / "config.json").is_file():
            return candidate
    raise ValueError(f"no model at {path}: it has neither a config.json nor a checkpoints/latest with one")


def read_model_config(directory: Path) -> ModelConfig:
    """The model config of a directory of any family, in the spelling of transformers 4 or 5.

    Raises:
        ValueError: not JSON, or a model that would be computed otherwise than here; names the file and the keys.
    """
    path = directory / "config.json"
    values, generation = _read_json_object(path), read_generation_config(directory)
    if generation is not None and generation.get("_from_model_config"):
        generation = None  # transformers made it of config.json: it says nothing of its own
    known, problems = read_options(values, directory.resolve(), generation)
    if known:
        try:
            config = ModelConfig.model_validate(known)
        except ValidationError as error:
            problems += [f"{'.'.join(map(str, e['loc'])) or 'config'}: {e['msg']}" for e in error.errors()]
    if problems:
        raise ValueError(f"{path}: not the config of a model that can be loaded here: {'; '.join(problems)}")
    # What the options say need not be said again, and is the same for a model that was made here.
    return config.model_copy(update={"model_type": None}) if config.model_type == infer_model_type(config) else config


def read_generation_config(directory: Path) -> dict[str, Any] | None:
    """What a directory's generation_config.json says. None: it has none.

    Raises:
        ValueError: it is no JSON object; names the file.
    """
    path = directory / GENERATION_CONFIG_FILE
    return _read_json_object(path) if path.is_file() else None


def _read_json_object(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: not a JSON object")
    return values
