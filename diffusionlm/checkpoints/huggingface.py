"""Models as Hugging Face directories: config.json, model.safetensors, tokenizer files."""

from __future__ import annotations

import json
from collections.abc import Iterator
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
    tensors: dict[str, Tensor] = dict(model.named_parameters()) if weights is None else weights
    values = config_json(model.config, next(iter(tensors.values())).dtype)
    (directory / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    contiguous = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    save_file(contiguous, directory / WEIGHTS, metadata={"format": "pt"})


def save_model_directory(model: Transformer, tokenizer: Tokenizer, directory: Path) -> None:
    """A complete model directory: config, weights, tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    save_model(model, directory)
    save_tokenizer(tokenizer, directory)


FAMILIES = {"qwen3": True, "llama": False}
"""``model_type`` -> whether queries and keys are normed: what transformers leaves out of its config.json."""

SLIDING = "sliding_attention"


def config_json(config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """What config.json says: transformers' names, and the three that diffusion adds.

    Raises:
        ValueError: sliding layers without ``qk_norm``: transformers would compute them as full ones.
    """
    family = next(name for name, qk_norm in FAMILIES.items() if qk_norm == config.qk_norm)
    values = config.model_dump(exclude_none=True)
    if SLIDING not in (config.layer_types or ()):
        values = {key: value for key, value in values.items() if key not in ("sliding_window", "layer_types")}
    elif family != "qwen3":
        raise ValueError(
            f'layer_types has "{SLIDING}", which transformers\' {family} does not know: set qk_norm = true'
        )
    else:
        values["use_sliding_window"] = True
    return {
        "architectures": [f"{family.capitalize()}ForCausalLM"],
        "model_type": family,
        "hidden_act": "silu",
        "dtype": str(dtype).removeprefix("torch."),
        "use_cache": False,
        **values,
    }


def read_config(directory: Path) -> ModelConfig:
    """The model config of a directory, in the spelling of transformers 4 or 5.

    Raises:
        ValueError: not JSON, or a model that would be computed otherwise than here; names the file and the keys.
    """
    path = directory / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: not a JSON object")
    problems = [f"{key} = {value!r} is not supported" for key, value in _unsupported(values)]
    known = {key: value for key, value in values.items() if key in ModelConfig.model_fields}
    known.setdefault("qk_norm", FAMILIES.get(values.get("model_type", ""), True))
    theta = (values.get("rope_parameters") or {}).get("rope_theta")
    if theta is not None:
        known["rope_theta"] = theta
    if isinstance(known.get("eos_token_id"), list):
        known["eos_token_id"] = next(iter(known["eos_token_id"]), None)
    if SLIDING not in (values.get("layer_types") or ()):
        known = {key: value for key, value in known.items() if key not in ("sliding_window", "layer_types")}
    known = {key: value for key, value in known.items() if value is not None}
    if not known.keys() & {"mask_token_id", "logit_alignment", "block_length"}:
        # Nothing of diffusion: an autoregressive model, which is blocks of one token with shifted outputs.
        known |= {"logit_alignment": "shifted", "block_length": 1}
    try:
        config = ModelConfig.model_validate(known)
    except ValidationError as error:
        problems += [f"{'.'.join(map(str, e['loc'])) or 'config'}: {e['msg']}" for e in error.errors()]
    if problems:
        raise ValueError(f"{path}: not the config of a model that can be loaded here: {'; '.join(problems)}")
    return config


def _unsupported(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Keys that change what a model computes, and that this one does not know."""
    for key in ("rope_scaling", "rope_parameters"):
        rope = values.get(key) or {}
        if rope.get("rope_type", rope.get("type", "default")) != "default":
            yield key, rope
    if values.get("model_type") not in FAMILIES:
        yield "model_type", values.get("model_type")
    # Without use_sliding_window transformers drops the window; without layer_types it has a rule of its own.
    is_sliding = SLIDING in (values.get("layer_types") or ())
    if is_sliding != bool(values.get("use_sliding_window")):
        yield "use_sliding_window", values.get("use_sliding_window")
    if is_sliding and values.get("model_type") != "qwen3":
        yield "layer_types", values["layer_types"]
    for key, harmless in (
        ("hidden_act", "silu"),
        ("mlp_bias", False),
        ("final_logit_softcapping", None),
        ("attn_logit_softcapping", None),
    ):
        if values.get(key, harmless) != harmless:
            yield key, values[key]


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
