"""Read the adapter_config.json of PEFT (0.21). What the model cannot compute is refused by key. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from config.finetune.lora import LoraConfig
from diffusionlm.checkpoints.model_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, join_problems
from files.json_files import read_json_object

HEAD_NAMES = {"lm_head", "ff_out", "diffusion_head"}
"""Names of the head in the families' checkpoints."""
_NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "fan_in_fan_out": (False,),
    "lora_bias": (False,),
    "layers_pattern": (None, [], "", "layers", ["layers"], "blocks", ["blocks"]),
    "layer_replication": (None, []),
    "target_parameters": (None, []),
    "megatron_config": (None,),
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    "use_qalora": (False,),
    "use_bdlora": (None, False),
}
"""Keys that change the computation -> the values without effect."""
_INITS_OF_THE_SAME_BASE = (True, False, "gaussian", "eva", "orthogonal")
"""Initial values that leave the base as it is. PEFT changes it for the others."""


_OPTIONS: dict[str, tuple[str, object]] = {
    "rank": ("r", 8),
    "alpha": ("lora_alpha", 8),
    "dropout": ("lora_dropout", 0.0),
    "targets": ("target_modules", ""),
    "exclude": ("exclude_modules", []),
    "layers_to_transform": ("layers_to_transform", []),
    "modules_to_save": ("modules_to_save", []),
    "bias": ("bias", "none"),
    "rank_patterns": ("rank_pattern", {}),
    "alpha_patterns": ("alpha_pattern", {}),
    "rslora": ("use_rslora", False),
    "dora": ("use_dora", False),
    "positions": ("positions", "all"),
}
"""Option -> its key in the file, and the value if the file has none."""
_NULLABLE = ("targets", "exclude", "layers_to_transform", "modules_to_save", "rank_patterns", "alpha_patterns")


def resolve_adapter_directory(path: Path) -> Path:
    """Find the directory with adapter_config.json: the path itself, or the newest checkpoint of a run directory.

    Raises:
        ValueError: a file of the adapter is missing.
    """
    latest = path / "checkpoints" / "latest"
    directory = latest if (latest / ADAPTER_CONFIG).is_file() else path
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (directory / name).is_file():
            raise ValueError(f"{path} has no {name}: name the directory of a PEFT adapter, or of a run with [lora]")
    return directory


def read_adapter_config(path: Path) -> LoraConfig:
    """Read the adapter_config.json of a directory of `resolve_adapter_directory`.

    Raises:
        ValueError: a file of the adapter is missing, the config is damaged, or keys have values that are not supported;
            lists all of them.
    """
    path = resolve_adapter_directory(path) / ADAPTER_CONFIG
    values = read_json_object(path)
    problems = [
        f"{key} = {json.dumps(values[key])} is not supported"
        for key, neutral in _NEUTRAL_VALUES.items()
        if key in values and values[key] not in neutral
    ]
    if values.get("peft_type") != "LORA":
        problems.insert(0, f'peft_type = {json.dumps(values.get("peft_type"))} is not supported, only "LORA" is')
    init = values.get("init_lora_weights", True)
    if init not in _INITS_OF_THE_SAME_BASE:
        problems.append(
            f"init_lora_weights = {json.dumps(init)} changes the base: save the adapter in PEFT with "
            "path_initial_model_for_weight_conversion"
        )
    if problems:
        raise ValueError(f"{path}: {join_problems(problems)}")
    try:
        options = {option: values.get(key, default) for option, (key, default) in _OPTIONS.items()}
        if type(options["layers_to_transform"]) is int:
            options["layers_to_transform"] = [options["layers_to_transform"]]
        options |= {option: options[option] or _OPTIONS[option][1] for option in _NULLABLE}
        return LoraConfig.model_validate(options | _read_trained_rows(values.get("trainable_token_indices"), path))
    except ValidationError as error:
        details = [f"{_key_of(problem['loc'])}: {problem['msg']}" for problem in error.errors()]
        raise ValueError(f"{path}: {join_problems(details)}") from error


def _key_of(location: tuple[int | str, ...]) -> str:
    """The key in the file, of the place of an error in the options."""
    option, *rest = location or ("",)
    key = "trainable_token_indices" if option == "trainable_tokens" else _OPTIONS.get(str(option), (option,))[0]
    return ".".join(map(str, [key, *rest]))


def _read_trained_rows(value: object, path: Path) -> dict[str, Any]:
    """The options of trained rows. A list means those of the embedding."""
    ids_of_module = value if value and isinstance(value, dict) else {"embed_tokens": value or []}
    lists = list(ids_of_module.values())
    if not ids_of_module.keys() - HEAD_NAMES or any(ids != lists[0] for ids in lists):
        raise ValueError(
            f"{path}: trainable_token_indices = {json.dumps(value)} must have the same tokens for the embedding "
            "and the head, or only for the embedding"
        )
    return {"trainable_tokens": lists[0], "trainable_head_rows": bool(ids_of_module.keys() & HEAD_NAMES)}
