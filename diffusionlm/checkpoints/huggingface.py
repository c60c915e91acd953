"""Models as Hugging Face directories: config.json, weights, tokenizer files, generation_config.json, README.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from config.families.model_directory import GENERATION_CONFIG_FILE, read_model_config, resolve_model_directory
from config.families.registry import get_family
from config.model import ModelConfig
from diffusionlm.checkpoints.cards import format_generation_config
from diffusionlm.checkpoints.manifest import verify_directory
from diffusionlm.checkpoints.model_card import write_model_card
from diffusionlm.checkpoints.vocabulary import check_vocabulary, read_vocabulary
from diffusionlm.checkpoints.weights import WEIGHTS, list_weight_files, load_weights, read_saved_dtype, save_weights
from diffusionlm.models.attention import AttentionBackend
from diffusionlm.models.transformer import Transformer
from tokenizer import Tokenizer, save_tokenizer
from tokenizer import load_tokenizer as load_tokenizer_files

__all__ = [
    "WEIGHTS",
    "build_config_json",
    "load_model",
    "load_model_with_config",
    "load_tokenizer",
    "load_weights",
    "read_model_config",
    "resolve_model_directory",
    "save_model",
    "save_model_directory",
    "verify_model_files",
]

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def load_model(
    path: str | Path,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    attention_backend: AttentionBackend = "auto",
) -> Transformer:
    """A model directory, a checkpoint or a run directory, ready for inference.

    Args:
        path: the directory; its family is said by ``model_type`` in its config.json.
        device: where the weights go, each on its own.
        dtype: of the parameters; ``keep``: that of the files, the widest one where they differ.
        attention_backend: how attention is computed.

    Raises:
        ValueError: no model there, an unknown dtype, a config that is not understood, a tokenizer beside it that has
            more ids than the embedding rows, or in which the mask token is an ordinary one, or weights that are
            damaged, missing, unexpected or of another shape; all of them are listed.
    """
    if dtype not in (*DTYPES, "keep"):
        raise ValueError(f"dtype = {dtype!r} must be one of {', '.join(DTYPES)}, keep")
    directory = resolve_model_directory(path)
    verify_model_files(directory)
    config, vocabulary = read_model_config(directory), read_vocabulary(directory)
    if vocabulary is not None:
        check_vocabulary(vocabulary, config, directory)
    return load_model_with_config(config, directory, device=device, dtype=dtype, attention_backend=attention_backend)


def verify_model_files(directory: Path) -> None:
    """Compare what a model is read from with the manifest, if there is one.

    Raises:
        ValueError: no weights, or a file that is missing, truncated or changed; names it.
    """
    verify_directory(
        directory,
        file_names={"config.json", GENERATION_CONFIG_FILE, *(file.name for file in list_weight_files(directory))},
    )


def load_model_with_config(
    config: ModelConfig,
    directory: Path,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    attention_backend: AttentionBackend = "auto",
) -> Transformer:
    """The weights of a directory in a model of this config, whatever tokenizer lies beside them.

    Raises:
        ValueError: weights that are damaged, missing, unexpected or of another shape; all of them are listed.
    """
    with torch.device("meta"):
        model = Transformer(config, attention_backend=attention_backend)
    wanted = DTYPES[dtype] if dtype != "keep" else read_saved_dtype(directory)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            # Not to_empty: operations on the meta device load sympy, which takes longer than a small model does.
            setattr(module, name, torch.nn.Parameter(torch.empty(parameter.shape, dtype=wanted, device=device)))
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    load_weights(model, directory, mmap=True)
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
    """Write config.json, generation_config.json and the weights, which are in shards if they are larger than
    ``max_shard_size``.

    Args:
        model: its config says the family in whose keys and names it is written.
        directory: must exist; weights that it had before are replaced.
        weights: in place of the model's own, by parameter name.
        max_shard_size: bytes, or a size such as "5GB".

    Raises:
        ValueError: no checkpoint of the family holds such a model, or a size that is none.
    """
    tensors: dict[str, Tensor] = dict(model.named_parameters()) if weights is None else weights
    values = build_config_json(model.config, next(iter(tensors.values())).dtype)
    (directory / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    (directory / GENERATION_CONFIG_FILE).write_text(format_generation_config(model.config, None), encoding="utf-8")
    family = get_family(model.config)
    save_weights({family.stored_name(name): tensor for name, tensor in tensors.items()}, directory, max_shard_size)


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
        source: a directory whose generation_config.json is taken over, if it has one; ends of text that it does not
            name are added. So is what its card says of training.

    Raises:
        ValueError: as `save_model`, or the source's generation_config.json is none.
    """
    directory.mkdir(parents=True, exist_ok=True)
    save_model(model, directory, weights, max_shard_size=max_shard_size)
    save_tokenizer(tokenizer, directory)
    (directory / GENERATION_CONFIG_FILE).write_text(format_generation_config(model.config, source), encoding="utf-8")
    written = dict(model.named_parameters()) if weights is None else weights
    write_model_card(directory, model.config, written, source=source)


def build_config_json(config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """What config.json says: the family's names, and the three that diffusion adds.

    Raises:
        ValueError: an option that the family's config.json cannot say; names it.
    """
    values = {"dtype": str(dtype).removeprefix("torch."), "use_cache": False}
    return {**get_family(config).to_config_json(config), **values}
