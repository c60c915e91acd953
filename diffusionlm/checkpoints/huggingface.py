"""Models as Hugging Face directories: config.json, model.safetensors, tokenizer files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from config.model import ModelConfig
from diffusionlm.checkpoints.manifest import verify
from diffusionlm.models.attention import Backend
from diffusionlm.models.transformer import Transformer
from tokenizer import Tokenizer, save_tokenizer
from tokenizer import load_tokenizer as load_tokenizer_files

WEIGHTS = "model.safetensors"
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

    Raises:
        ValueError: no model there, an unknown dtype, a config that is not understood, or weights that are damaged,
            missing, unexpected or of another shape; all of them are listed.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype = {dtype!r} must be one of {', '.join(DTYPES)}")
    directory = resolve_model_directory(path)
    verify(directory, only=("config.json", WEIGHTS))
    with torch.device("meta"):
        model = Transformer(read_config(directory), attention_backend=attention_backend)
    model.to_empty(device=device)
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    load_weights(model, directory / WEIGHTS)
    return model.to(DTYPES[dtype]).eval()


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a model directory, a checkpoint or a run directory."""
    directory = Path(path)
    is_tokenizer = any((directory / name).is_file() for name in ("vocab.json", "tokenizer.json"))
    return load_tokenizer_files(directory if is_tokenizer else resolve_model_directory(path))


def save_model(model: Transformer, directory: Path, weights: dict[str, Tensor] | None = None) -> None:
    """Write config.json and model.safetensors; ``weights`` in place of the model's own, by parameter name."""
    (directory / "config.json").write_text(json.dumps(config_json(model.config), indent=2) + "\n", encoding="utf-8")
    tensors = dict(model.named_parameters()) if weights is None else weights
    contiguous = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    save_file(contiguous, directory / WEIGHTS, metadata={"format": "pt"})


def save_model_directory(model: Transformer, tokenizer: Tokenizer, directory: Path) -> None:
    """A complete model directory: config, weights, tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    save_model(model, directory)
    save_tokenizer(tokenizer, directory)


def config_json(config: ModelConfig) -> dict[str, Any]:
    """What config.json says: transformers' names, and the three that diffusion adds."""
    return {
        "architectures": ["Qwen3ForCausalLM" if config.qk_norm else "LlamaForCausalLM"],
        "model_type": "qwen3" if config.qk_norm else "llama",
        "hidden_act": "silu",
        "dtype": "float32",
        "use_cache": False,
        **config.model_dump(exclude_none=True),
    }


def read_config(directory: Path) -> ModelConfig:
    """The model config of a directory.

    Raises:
        ValueError: not JSON, or not a config of this family; names the file and the keys.
    """
    path = directory / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as JSON: {error}") from error
    known = {key: value for key, value in values.items() if key in ModelConfig.model_fields}
    try:
        return ModelConfig.model_validate(known)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'config'}: {e['msg']}" for e in error.errors())
        raise ValueError(f"{path}: not the config of a diffusionlm model: {problems}") from error


@torch.no_grad()
def load_weights(model: Transformer, path: Path) -> None:
    """Copy every tensor of a safetensors file into the parameter of its name.

    Raises:
        ValueError: the file is missing or damaged, or a tensor is missing, unexpected or misshapen; lists all.
    """
    parameters = dict(model.named_parameters())
    try:
        with safe_open(path, framework="pt") as file:
            found = set(file.keys())
            problems = [f"missing {name}" for name in sorted(parameters.keys() - found)]
            problems += [f"unexpected {name}" for name in sorted(found - parameters.keys())]
            for name in sorted(parameters.keys() & found):
                shape, expected = list(file.get_slice(name).get_shape()), list(parameters[name].shape)
                if shape != expected:
                    problems.append(f"{name} has shape {shape}, the model {expected}")
                elif not problems:
                    parameters[name].copy_(file.get_tensor(name))
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: cannot be read as safetensors: {error}") from error
    if problems:
        raise ValueError(f"{path} does not fit the model: {'; '.join(problems)}")
