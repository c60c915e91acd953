"""Models as Hugging Face directories: config.json, weights, tokenizer files, generation_config.json, README.md."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from config.model import ModelConfig
from diffusionlm.checkpoints import llada
from diffusionlm.checkpoints.cards import generation_defaults, model_card
from diffusionlm.checkpoints.families import natural_family, to_json, to_values
from diffusionlm.checkpoints.manifest import verify
from diffusionlm.checkpoints.weights import WEIGHTS, load_weights, save_weights, saved_dtype, weight_files
from diffusionlm.models.attention import Backend
from diffusionlm.models.transformer import Transformer
from tokenizer import Tokenizer, save_tokenizer
from tokenizer import load_tokenizer as load_tokenizer_files

__all__ = [
    "WEIGHTS",
    "config_json",
    "load_model",
    "load_tokenizer",
    "load_weights",
    "read_config",
    "resolve_model_directory",
    "save_model",
    "save_model_directory",
]

GENERATION = "generation_config.json"
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


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


def load_model(
    path: str | Path,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    attention_backend: Backend = "auto",
) -> Transformer:
    """A model directory, a checkpoint or a run directory, ready for inference.

    Args:
        path: the directory; its family is said by ``model_type`` in its config.json.
        device: where the weights go, each on its own.
        dtype: of the parameters; ``keep``: that of the files.
        attention_backend: how attention is computed.

    Raises:
        ValueError: no model there, an unknown dtype, a config that is not understood, or weights that are damaged,
            missing, unexpected or of another shape; all of them are listed.
    """
    if dtype not in (*DTYPES, "keep"):
        raise ValueError(f"dtype = {dtype!r} must be one of {', '.join(DTYPES)}, keep")
    directory = resolve_model_directory(path)
    verify(directory, only={"config.json", *(file.name for file in weight_files(directory))})
    config = read_config(directory)
    with torch.device("meta"):
        model = Transformer(config, attention_backend=attention_backend)
    model.to(DTYPES[dtype] if dtype != "keep" else saved_dtype(directory)).to_empty(device=device)
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    load_weights(model, directory)
    return model.eval()


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a model directory, a checkpoint or a run directory."""
    directory = Path(path)
    is_tokenizer = any((directory / name).is_file() for name in ("vocab.json", "tokenizer.json"))
    return load_tokenizer_files(directory if is_tokenizer else resolve_model_directory(path))


def save_model(
    model: Transformer,
    directory: Path,
    weights: dict[str, Tensor] | None = None,
    *,
    max_shard_size: int | str = "5GB",
) -> None:
    """Write config.json and the weights, in one file or, if they are larger than ``max_shard_size``, in shards.

    Args:
        model: its config says the family in whose keys and names it is written.
        directory: must exist; weights that it had before are replaced.
        weights: in place of the model's own, by parameter name.
        max_shard_size: bytes, or a size such as "5GB".

    Raises:
        ValueError: no checkpoint of the family holds such a model, or a size that is none.
    """
    tensors: dict[str, Tensor] = dict(model.named_parameters()) if weights is None else weights
    values = config_json(model.config, next(iter(tensors.values())).dtype)
    (directory / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    if model.config.model_type == "llada":
        tensors = {llada.file_name(name): tensor for name, tensor in tensors.items()}
    save_weights(tensors, directory, max_shard_size)


def save_model_directory(
    model: Transformer,
    tokenizer: Tokenizer,
    directory: Path,
    weights: dict[str, Tensor] | None = None,
    *,
    max_shard_size: int | str = "5GB",
    source: Path | None = None,
) -> None:
    """A complete model directory: config, weights, tokenizer, generation_config.json and a model card.

    Args:
        model: its config says the family in whose keys and names it is written.
        tokenizer: of the model.
        directory: made if it is not there.
        weights: in place of the model's own, by parameter name.
        max_shard_size: bytes, or a size such as "5GB".
        source: a directory whose generation_config.json is taken over as it is, if it has one.

    Raises:
        ValueError: as `save_model`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    save_model(model, directory, weights, max_shard_size=max_shard_size)
    save_tokenizer(tokenizer, directory)
    if source is not None and (source / GENERATION).is_file():
        shutil.copyfile(source / GENERATION, directory / GENERATION)
    else:
        defaults = json.dumps(generation_defaults(model.config), indent=2) + "\n"
        (directory / GENERATION).write_text(defaults, encoding="utf-8")
    (directory / "README.md").write_text(model_card(model), encoding="utf-8")


def config_json(config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """What config.json says: the family's names, and the three that diffusion adds.

    Raises:
        ValueError: an option that the family's config.json cannot say; names it.
    """
    values = {"dtype": str(dtype).removeprefix("torch."), "use_cache": False}
    return {**to_json(config), **values}


def read_config(directory: Path) -> ModelConfig:
    """The model config of a directory of any family, in the spelling of transformers 4 or 5.

    Raises:
        ValueError: not JSON, or a model that would be computed otherwise than here; names the file and the keys.
    """
    path = directory / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: not a JSON object")
    known, problems = to_values(values, directory.resolve())
    if known:
        try:
            config = ModelConfig.model_validate(known)
        except ValidationError as error:
            problems += [f"{'.'.join(map(str, e['loc'])) or 'config'}: {e['msg']}" for e in error.errors()]
    if problems:
        raise ValueError(f"{path}: not the config of a model that can be loaded here: {'; '.join(problems)}")
    # What the options say need not be said again, and is the same for a model that was made here.
    return config.model_copy(update={"model_type": None}) if config.model_type == natural_family(config) else config
