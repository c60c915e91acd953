"""Adapters as PEFT's directories: adapter_config.json and adapter_model.safetensors (PEFT 0.21)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from config.finetune.lora import LoraConfig, is_module
from diffusionlm.checkpoints.adapter_config import read_adapter_config, resolve_adapter_directory
from diffusionlm.checkpoints.base_fingerprint import BaseFingerprint
from diffusionlm.checkpoints.model_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, join_problems
from diffusionlm.checkpoints.weights import EMBEDDING_WEIGHT
from diffusionlm.families.hub import is_hub_name
from diffusionlm.families.registry import get_family, parameter_name
from diffusionlm.models.lora import (
    LoRALinear,
    TrainedRowsEmbedding,
    TrainedRowsLinear,
    adapter_modules,
    add_adapter,
    trained_base_parameters,
)
from diffusionlm.models.row_adapters import ModelAdapter, share_weights
from diffusionlm.models.transformer import Transformer
from files.usage_error import prefix_errors

_PREFIX = "base_model.model."


GetFingerprint = Callable[[], BaseFingerprint]


def load_adapter(model: Transformer, directory: Path, get_fingerprint: GetFingerprint | None = None) -> LoraConfig:
    """Put the adapter of a directory on a model, in place. After an error the model is as it was.

    Args:
        get_fingerprint: computes that of the model, which reads all weights: several adapters may share one result.

    Raises:
        ValueError: the adapter is missing, damaged, not supported, or of another base; lists what is wrong.
    """
    directory = resolve_adapter_directory(directory)
    config = read_adapter_config(directory)
    names = stored_module_names(model)
    tensors = _read_tensors_for(model, directory, get_fingerprint)
    with torch.device("meta"):
        probe = Transformer(model.config)
    with prefix_errors(str(directory / ADAPTER_CONFIG)):
        add_adapter(probe, config, names=names)
    _check_tensors(probe, config, tensors, directory)
    add_adapter(model, config, names=names)
    _copy_tensors(model, config, tensors)
    return config


def read_adapter(
    model: Transformer, directory: Path | str, get_fingerprint: GetFingerprint | None = None
) -> ModelAdapter:
    """Read the adapter of a directory for an `Engine`, which decodes with the model and several adapters at a time.

    The model stays as it is; the adapter shares its weights. Arguments are those of `load_adapter`.

    Raises:
        ValueError: like `load_adapter`; or the adapter has parameters of the base, which requests share.
    """
    adapted = share_weights(model)
    config = load_adapter(adapted, Path(directory), get_fingerprint)
    if trained_base_parameters(adapted, config, stored_module_names(adapted)):
        raise ValueError(
            f"{directory} trains parameters of its base (modules_to_save, bias), which other requests share: merge it "
            f"with diffusionlm-convert --source BASE --adapter {directory} --target MERGED"
        )
    return ModelAdapter.from_model(adapted)


def load_adapter_values(model: Transformer, config: LoraConfig, directory: Path) -> None:
    """Replace the values of a model's adapter by those of a directory.

    Raises:
        ValueError: that adapter is missing, damaged, not supported, or has other modules, ranks or scales.
    """
    directory = resolve_adapter_directory(directory)
    stored = read_adapter_config(directory)
    tensors = _read_tensors_for(model, directory)
    _check_tensors(model, config, tensors, directory)
    names = stored_module_names(model)
    adapted = [names[name] for name, module in adapter_modules(model) if isinstance(module, LoRALinear)]
    with prefix_errors(str(directory / ADAPTER_CONFIG)):
        differing = [name for name in adapted if stored.scale_of(name) != config.scale_of(name)]
    if differing:
        raise ValueError(
            f"{directory / ADAPTER_CONFIG}: the scale of {differing[0]} is {stored.scale_of(differing[0]):g}, that of "
            f"[lora] is {config.scale_of(differing[0]):g}: set lora.rank, lora.alpha and lora.rslora as there"
        )
    _copy_tensors(model, config, tensors)


def _read_tensors_for(
    model: Transformer, directory: Path, get_fingerprint: GetFingerprint | None = None
) -> dict[str, Tensor]:
    """Read an adapter for a model whose weights are those of the base, without the copies of them that PEFT writes."""
    tensors, fingerprint = _read_tensors(directory / ADAPTER_WEIGHTS)
    if fingerprint is not None:
        _check_base(directory, fingerprint, (get_fingerprint or partial(BaseFingerprint.from_model, model))())
    parameters = dict(model.named_parameters(remove_duplicate=False))

    def is_copy(name: str, value: Tensor) -> bool:
        if name.endswith((".original_module.bias", ".modules_to_save.bias")):  # of bias = "all"; stored as .bias too
            return True
        own = parameters.get(parameter_name(name.removeprefix(_PREFIX).replace(".base_layer.", ".")))
        return own is not None and name.endswith(".base_layer.weight") and torch.equal(value.to(own), own)

    return {name: value for name, value in tensors.items() if not is_copy(name, value)}


def _check_tensors(model: Transformer, config: LoraConfig, tensors: Mapping[str, Tensor], directory: Path) -> None:
    listed = list(_list_adapter_tensors(model, config))
    problems = _find_mismatches({stored: value.shape for stored, _, value in listed}, tensors)
    tied = [stored for stored, name, _ in listed if name == EMBEDDING_WEIGHT]
    if len(tied) == 2 and not (tensors.keys() >= set(tied) and torch.equal(*(tensors[stored] for stored in tied))):
        problems = [
            "it trains embedding and head apart, which this model ties: train it with ensure_weight_tying = true, or "
            "make the base with diffusion.untie_head = true"
        ]
    if problems:
        raise ValueError(f"{directory / ADAPTER_WEIGHTS} does not fit the model: {join_problems(problems)}")


@torch.no_grad()
def _copy_tensors(model: Transformer, config: LoraConfig, tensors: Mapping[str, Tensor]) -> None:
    for name, _, parameter in _list_adapter_tensors(model, config):
        parameter.copy_(tensors[name])


def _find_mismatches(shapes: Mapping[str, torch.Size], tensors: Mapping[str, Tensor]) -> list[str]:
    problems = [f"{name} is missing" for name in shapes.keys() - tensors.keys()]
    problems += [f"{name} is unexpected" for name in tensors.keys() - shapes.keys()]
    problems += [
        f"{name} is {list(tensors[name].shape)}, the model needs {list(shape)}"
        for name, shape in shapes.items()
        if name in tensors and tensors[name].shape != shape
    ]
    return sorted(problems)


def read_own_adapter(
    model: Transformer, config: LoraConfig, directory: Path, fingerprint: BaseFingerprint
) -> dict[str, Tensor]:
    """Read the adapter of a checkpoint of the run that trains this model: its parameters, whole, by name.

    The products that PiSSA and OLoRA subtract are set in the model.

    Args:
        config: of the adapter.
        fingerprint: of the model's base.

    Raises:
        ValueError: the adapter is damaged, was trained on another base, or has other modules or ranks.
    """
    tensors, stored_fingerprint = _read_tensors(directory / ADAPTER_WEIGHTS)
    if stored_fingerprint is None:
        raise ValueError(
            f"{directory / ADAPTER_WEIGHTS} names no base: it is not of a checkpoint; download or write it again"
        )
    _check_base(directory, stored_fingerprint, fingerprint)
    listed = list(_list_adapter_tensors(model, config))
    placeholders = {name: torch.empty(parameter.shape, device="meta") for _, name, parameter in listed}
    shapes = {stored: value.shape for stored, value in _exported_tensors(model, config, placeholders)}
    problems = _find_mismatches(shapes, tensors)
    if problems:
        raise ValueError(
            f"{directory / ADAPTER_WEIGHTS} does not fit [lora]: {join_problems(problems)}: set its keys as before, or "
            "name another run.directory and set lora.init_from"
        )
    values = {name: tensors[stored] for stored, name, _ in listed}
    for name, module in adapter_modules(model):
        if isinstance(module, LoRALinear) and module.first_A is not None and module.first_B is not None:
            A, B = f"{name}.lora_A", f"{name}.lora_B"
            rank = len(module.first_A)
            module.first_A.copy_(values[A][rank:])
            module.first_B.copy_(-values[B][:, rank:])
            values |= {A: values[A][:rank], B: values[B][:, :rank]}
    return values


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write a safetensors file with sorted metadata; the library writes them in random order. Equal adapters are equal
    files."""
    content = save(tensors, metadata)
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-len(text) // 8) * 8)  # tensors begin at a multiple of 8
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def save_adapter(
    model: Transformer,
    config: LoraConfig,
    directory: Path,
    *,
    base: str | None = None,
    weights: Mapping[str, Tensor] | None = None,
    fingerprint: BaseFingerprint | None = None,
) -> None:
    """Write the adapter of a model as PEFT does.

    An adapter that began as a part of the weight (PiSSA, OLoRA) is written as a difference, with twice the rank.

    Args:
        config: of the adapter.
        directory: must exist.
        base: name or path of the base, for readers.
        weights: written instead of the model's own, whole, by parameter name.
        fingerprint: of the base. None: of the model's, which is that of the base if no parameter of it is trained.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in _exported_tensors(model, config, weights)}
    assert fingerprint or not trained_base_parameters(model, config, stored_module_names(model)), "whose base is gone"
    metadata = {"format": "pt"} | (fingerprint or BaseFingerprint.from_model(model)).to_metadata()
    save_tensors(tensors, directory / ADAPTER_WEIGHTS, metadata)
    values = _build_adapter_config(model, config, base)
    (directory / ADAPTER_CONFIG).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def stored_module_names(model: Transformer) -> dict[str, str]:
    """Name of each module with a weight -> its name in the checkpoints of the model's family."""
    family = get_family(model.config)
    return {
        name: family.stored_name(f"{name}.weight").removesuffix(".weight")
        for name, module in model.named_modules()
        if hasattr(module, "weight")
    }


def _list_adapter_tensors(model: Transformer, config: LoraConfig) -> Iterator[tuple[str, str, nn.Parameter]]:
    """Name in a PEFT file, name in the model and parameter of each tensor of the adapter. A tied table is there twice,
    as in PEFT."""
    family = get_family(model.config)
    for name, module in adapter_modules(model):
        stem = _PREFIX + family.stored_name(f"{name}.weight").removesuffix(".weight")
        if isinstance(module, LoRALinear):
            yield f"{stem}.lora_A.weight", f"{name}.lora_A", module.lora_A
            yield f"{stem}.lora_B.weight", f"{name}.lora_B", module.lora_B
            if module.lora_magnitude is not None:
                yield f"{stem}.lora_magnitude_vector", f"{name}.lora_magnitude", module.lora_magnitude
        elif isinstance(module, TrainedRowsEmbedding) or not model.config.tie_word_embeddings:
            yield f"{stem}.token_adapter.trainable_tokens_delta", f"{name}.trained_rows", module.trained_rows
    own_names = {parameter: name for name, parameter in model.named_parameters()}
    for name, stored_name in trained_base_parameters(model, config, stored_module_names(model)).items():
        parameter = model.get_parameter(name)
        yield _PREFIX + stored_name, own_names[parameter], parameter


def _exported_tensors(
    model: Transformer, config: LoraConfig, weights: Mapping[str, Tensor] | None
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a PEFT file: of a LoRA module its whole factors, with the subtracted product."""
    modules = dict(adapter_modules(model))
    written: set[str] = set()
    for stored_name, name, parameter in _list_adapter_tensors(model, config):
        value = parameter if weights is None else weights[name]
        if name in written:  # safetensors refuses two tensors in one memory
            value = value.clone()
        written.add(name)
        module = modules.get(name.rpartition(".")[0])
        if isinstance(module, LoRALinear) and module.first_A is not None and module.first_B is not None:
            if name.endswith(".lora_A"):
                value = torch.cat([value, module.first_A.to(value.device)])
            elif name.endswith(".lora_B"):
                value = torch.cat([value, -module.first_B.to(value.device)], dim=1)
        yield stored_name, value


def _build_adapter_config(model: Transformer, config: LoraConfig, base: str | None) -> dict[str, Any]:
    names = stored_module_names(model)
    modules = dict(adapter_modules(model))
    adapted = {names[name] for name, module in modules.items() if isinstance(module, LoRALinear)}
    endings = sorted({name.rpartition(".")[2] for name in adapted})
    has_exact_endings = adapted == {name for name in names.values() if any(is_module(name, end) for end in endings)}
    # A difference of two products has twice the rank at the same scale.
    growth = 2 if config.init in ("pissa", "olora") else 1
    alpha_growth = growth**0.5 if config.rslora else growth
    rows = [name for name, module in modules.items() if isinstance(module, TrainedRowsEmbedding | TrainedRowsLinear)]
    if model.config.tie_word_embeddings:
        rows = rows[:1]
    family = get_family(model.config)
    trained = trained_base_parameters(model, config, names)
    has_trained_tie = model.config.tie_word_embeddings and EMBEDDING_WEIGHT in trained
    revision = None
    if base is not None and "@" in base and is_hub_name(base):
        base, _, revision = base.partition("@")
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "inference_mode": True,
        "r": config.rank * growth,
        "lora_alpha": _whole(config.alpha * alpha_growth),
        "lora_dropout": config.dropout,
        "target_modules": endings if has_exact_endings else sorted(adapted),
        "exclude_modules": None,
        "rank_pattern": {key: value * growth for key, value in config.rank_patterns.items()},
        "alpha_pattern": {key: _whole(value * alpha_growth) for key, value in config.alpha_patterns.items()},
        "use_rslora": config.rslora,
        "use_dora": config.dora,
        "init_lora_weights": True,
        "bias": config.bias,
        "fan_in_fan_out": False,
        "modules_to_save": list(config.modules_to_save) or None,
        **({"ensure_weight_tying": True} if has_trained_tie else {}),
        **({"positions": "masks"} if config.positions == "masks" else {}),  # PEFT ignores it
        "trainable_token_indices": {
            family.stored_name(f"{name}.weight").removesuffix(".weight").rpartition(".")[2]: list(
                config.token_ids(model.config.mask_token_id)
            )
            for name in rows
        }
        or None,
    }


def _whole(value: float) -> int | float:
    """An integer where the value is one: PEFT and vLLM expect it."""
    return int(value) if value == int(value) else value


def _check_base(directory: Path, stored: BaseFingerprint, fingerprint: BaseFingerprint) -> None:
    """Raise a ValueError with names of tensors if an adapter was trained on a base with another fingerprint."""
    difference = stored.find_difference(fingerprint)
    if difference is not None:
        raise ValueError(
            f"{directory} was trained on another base than this model: {difference}. Use the base that its "
            f"{ADAPTER_CONFIG} names, with the weights it had then, or train another adapter"
        )


def _read_tensors(path: Path) -> tuple[Mapping[str, Tensor], BaseFingerprint | None]:
    """The tensors of an adapter, and the fingerprint of its base; PEFT writes none."""
    try:
        with safe_open(path, framework="pt") as file:
            fingerprint = BaseFingerprint.from_metadata(file.metadata() or {})
            return {name: file.get_tensor(name) for name in list(file.keys())}, fingerprint
    except (OSError, SafetensorError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read as safetensors: {error}; download or write it again") from error
