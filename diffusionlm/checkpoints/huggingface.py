"""Models as Hugging Face directories: config.json, weights, tokenizer files, generation_config.json, README.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from config.infer import InferModelConfig
from config.model import ModelConfig
from config.training.runtime import AttentionBackend
from diffusionlm.checkpoints.adapter_files import load_adapter
from diffusionlm.checkpoints.model_card import write_model_card
from diffusionlm.checkpoints.model_files import find_weights_directory, read_processor_files, verify_model_files
from diffusionlm.checkpoints.weights import (
    MAX_SHARD_SIZE,
    open_weights,
    read_saved_dtype,
    save_weights,
    to_stored_tensors,
)
from diffusionlm.families.family import list_eos_token_ids
from diffusionlm.families.model_directory import (
    GENERATION_CONFIG_FILE,
    read_generation_config,
    read_model_config,
    resolve_model_directory,
)
from diffusionlm.families.registry import get_family
from diffusionlm.models.transformer import Transformer
from profiling.torch_setup import select_device, select_dtype
from tokenizer import Tokenizer, save_tokenizer

DTYPES = {name: getattr(torch, name) for name in ("float32", "float64", "bfloat16", "float16")}


def load_model(
    path: str | Path,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    attention_backend: AttentionBackend = "auto",
    adapter: str | Path | None = None,
    cuda_graphs: Literal["auto", "off"] = "auto",
) -> Transformer:
    """Load a model directory, a checkpoint, the newest checkpoint of a run directory, or a model of the Hugging Face
    Hub, for inference.

    Args:
        path: the directory, ``org/name`` or ``org/name@revision``; ``model_type`` in its config.json names the family.
            A checkpoint of a run with ``[lora]`` is its base with the adapter.
        device: of the parameters. Tensors are copied there one by one.
        dtype: of the parameters. ``keep``: that of the files; of several, the narrowest that holds all of them.
        attention_backend: how attention is computed.
        adapter: directory of a PEFT adapter (LoRA), which is put on the model.
        cuda_graphs: ``auto``: decoding on a GPU records forwards and repeats them (`inference.cuda_graphs`).

    Raises:
        ValueError: there is no model, the dtype is unknown, config.json is not supported, or the weights are
            damaged, missing, unexpected or of another shape; lists all problems.
    """
    if dtype not in (*DTYPES, "keep"):
        raise ValueError(f"dtype = {dtype!r} must be one of {', '.join(DTYPES)}, keep")
    directory = resolve_model_directory(path)
    verify_model_files(directory)
    config = read_model_config(directory)
    weights_directory = find_weights_directory(directory)
    own_adapter = directory if weights_directory != directory else None
    if own_adapter is not None and adapter is not None:
        raise ValueError(
            f"{path} has an adapter, and {adapter} is another one: name only one, or merge the first with "
            "diffusionlm-convert"
        )
    model = load_model_with_config(
        config, weights_directory, device=device, dtype=dtype, attention_backend=attention_backend
    )
    adapter = own_adapter or adapter
    if adapter is not None:
        load_adapter(model, Path(adapter))
    model.uses_cuda_graphs = cuda_graphs == "auto"
    return model


def load_configured_model(config: InferModelConfig) -> Transformer:
    """Load the model of a command's ``[model]`` section to its device, and set the number of CPU threads.

    Raises:
        ValueError: there is no path, no CUDA device where one is required, or what `load_model` raises.
    """
    if config.path is None:
        raise ValueError("model.path is missing: name a model directory, a checkpoint or a run directory")
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = select_device(config.device, "model.device")
    return load_model(
        config.path,
        device=device,
        dtype=select_dtype(config.dtype, device),
        attention_backend=config.attention_backend,
        adapter=config.adapter,
        cuda_graphs=config.cuda_graphs,
    )


def load_model_with_config(
    config: ModelConfig,
    directory: Path,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    attention_backend: AttentionBackend = "auto",
    mmap: bool = True,
) -> Transformer:
    """Load a directory's weights into a model of this config, without reading its config.json or its tokenizer.

    The config is compared with the headers of the files before memory is allocated.

    Args:
        mmap: parameters may use the mapped files as their storage (`StoredWeights.copy_to`).

    Raises:
        ValueError: weights are damaged, missing, unexpected or of another shape; lists all of them.
    """
    parameter_dtype = DTYPES[dtype] if dtype != "keep" else read_saved_dtype(directory)
    with open_weights(directory) as weights:
        weights.check_size(config)
        with torch.device("meta"):
            model = Transformer(config, attention_backend=attention_backend)
        weights.check(model)
        _allocate_parameters(model, parameter_dtype, device)
        weights.copy_to(model, mmap=mmap)
    return model.eval()


def _allocate_parameters(model: Transformer, dtype: torch.dtype, device: str) -> None:
    """Replace the parameters of a model on the meta device by uninitialized ones."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            # Not to_empty: operations on the meta device import sympy, which takes longer than loading a small model.
            values = torch.empty(parameter.shape, dtype=dtype, device=device)
            setattr(module, name, torch.nn.Parameter(values))
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight


def save_model(
    model: Transformer,
    directory: Path,
    weights: dict[str, Tensor] | None = None,
    *,
    max_shard_size: int = MAX_SHARD_SIZE,
    source: Path | None = None,
) -> None:
    """Write config.json, generation_config.json and the weights, with the keys and tensor names of the model's family.

    Args:
        model: names its family in ``model.config``.
        directory: must exist; its old weights are replaced.
        weights: written instead of the model's own, by parameter name.
        max_shard_size: bytes of a weight file at most.
        source: the directory that the model was converted from. Its generation_config.json is copied, with the
            model's stop tokens added.

    Raises:
        ValueError: the family has no such model, or the source's generation_config.json is not a JSON object.
    """
    tensors: dict[str, Tensor] = dict(model.named_parameters()) if weights is None else weights
    save_model_config(model.config, next(iter(tensors.values())).dtype, directory, source=source)
    save_weights(to_stored_tensors(model.config, tensors), directory, max_shard_size)


def save_model_config(config: ModelConfig, dtype: torch.dtype, directory: Path, *, source: Path | None = None) -> None:
    """Write config.json and generation_config.json; the arguments and errors are those of `save_model`."""
    values = build_config_json(config, dtype)
    (directory / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    (directory / GENERATION_CONFIG_FILE).write_text(format_generation_config(config, source), encoding="utf-8")


def save_model_directory(
    model: Transformer,
    tokenizer: Tokenizer,
    directory: Path,
    weights: dict[str, Tensor] | None = None,
    *,
    max_shard_size: int = MAX_SHARD_SIZE,
    source: Path | None = None,
) -> None:
    """Write a complete model directory: config, weights, tokenizer, generation_config.json and model card.

    Args:
        tokenizer: of the model.
        directory: created if it does not exist.
        source: see `save_model`; the training section of its model card and the settings of its image processor are
            copied as well.

    The other arguments and the errors are those of `save_model`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    save_model(model, directory, weights, max_shard_size=max_shard_size, source=source)
    save_tokenizer(tokenizer, directory)
    for name, content in read_processor_files(source, model.config).items() if source is not None else ():
        (directory / name).write_bytes(content)
    tensors = dict(model.named_parameters()) if weights is None else weights
    write_model_card(directory, model.config, tensors, source=source)


def build_config_json(config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Build the object of config.json: the family's keys and the keys that diffusion adds.

    Raises:
        ValueError: the family has no model with these options; names the keys.
    """
    values = {"dtype": str(dtype).removeprefix("torch."), "use_cache": False}
    return {**get_family(config).to_config_json(config), **values}


def format_generation_config(config: ModelConfig, source: Path | None) -> str:
    """Format generation_config.json: that of the source if it has one, with all stop tokens of the model.

    If the source's file names them all, its text is unchanged. Its sampling options are for other programs.

    Raises:
        ValueError: the source's file is not a JSON object; names it.
    """
    source_values = None if source is None else read_generation_config(source)
    if source is None or source_values is None:
        ids = list(config.stop_token_ids) or config.eos_token_id
        values = {"eos_token_id": ids, "pad_token_id": config.pad_token_id}
        return json.dumps({key: value for key, value in values.items() if value is not None}, indent=2) + "\n"
    stop_ids = list(config.stop_token_ids) or list_eos_token_ids({"eos_token_id": config.eos_token_id})
    # In the order of reading: config.json, which holds the first stop token, then generation_config.json.
    ids_read = dict.fromkeys([*stop_ids[:1], *list_eos_token_ids(source_values)])
    if [id_ for id_ in ids_read if id_ in stop_ids] == stop_ids:
        return (source / GENERATION_CONFIG_FILE).read_text(encoding="utf-8")
    values = {key: value for key, value in source_values.items() if key != "_from_model_config"}
    return json.dumps(values | {"eos_token_id": list(dict.fromkeys([*stop_ids, *ids_read]))}, indent=2) + "\n"
