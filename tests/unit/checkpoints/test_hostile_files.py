"""Files that promise more than they hold are refused before memory is allocated for it."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from config.finetune import lora
from config.finetune.lora import LoraConfig
from diffusionlm.checkpoints import huggingface
from diffusionlm.checkpoints.adapter_files import load_adapter, save_adapter
from diffusionlm.checkpoints.huggingface import load_model, save_model
from diffusionlm.checkpoints.weights import read_weights
from diffusionlm.families.model_directory import read_model_config
from diffusionlm.families.registry import FAMILIES
from diffusionlm.models.lora import add_adapter
from tests.conftest import MakeModel

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("this must not be reached")


def test_shapes_are_compared_before_memory_is_allocated(
    tiny_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tiny_model(), tmp_path)
    change_config(tmp_path, vocab_size=10**8)
    monkeypatch.setattr(huggingface, "_allocate_parameters", refuse)
    with pytest.raises(ValueError, match=r"has shape \[.*\], the model has"):
        load_model(tmp_path)


def test_a_pickle_with_compressed_entries_is_refused_unread(
    tiny_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tiny_model(), tmp_path)
    path = tmp_path / "pytorch_model.bin"
    torch.save(read_weights(tmp_path), path)
    (tmp_path / "model.safetensors").unlink()
    assert read_weights(tmp_path)
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    monkeypatch.setattr(torch, "load", refuse)
    with pytest.raises(ValueError, match=r"pytorch_model\.bin: .*entries are compressed.*save it again"):
        read_weights(tmp_path)


@pytest.mark.parametrize(("key", "value"), [("num_hidden_layers", 9999), ("num_experts", 9999)])
def test_layers_and_experts_are_counted_before_they_are_built(
    key: str, value: int, tiny_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tiny_model(**EXPERTS), tmp_path)
    change_config(tmp_path, **{key: value})
    monkeypatch.setattr(huggingface, "Transformer", refuse)
    with pytest.raises(ValueError, match=rf"{key} = {value}, but the weights are only \d+ tensors"):
        load_model(tmp_path)


def test_stacked_experts_without_values_are_not_split(tiny_model: MakeModel, tmp_path: Path) -> None:
    save_model(tiny_model(**EXPERTS), tmp_path)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    save_file(read_weights(tmp_path) | {name: torch.empty(10**12, 0, 5)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"unexpected {name}"):
        load_model(tmp_path)


def test_a_pickle_of_expanded_tensors_is_refused(tiny_model: MakeModel, tmp_path: Path) -> None:
    save_model(tiny_model(), tmp_path)
    name = "model.norm.weight"
    torch.save(read_weights(tmp_path) | {name: torch.ones(1).expand(10**12)}, tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=rf"pytorch_model\.bin: {name} has shape \[1000000000000\]"):
        load_model(tmp_path)


SIZES: dict[str, Any] = {
    **{"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    **{"intermediate_size": 56, "max_position_embeddings": 64, "vocab_size": 200_000},
}
LLADA_SIZES: dict[str, Any] = {"d_model": 32, "n_layers": 4, "n_heads": 4, "max_sequence_length": 64}
READ_KEYS = (
    "layer_types",
    "mlp_ratio",
    "rope_scaling",
    "eos_token_id",
    "stop_token_ids",
    "mask_token_id",
    "block_size",
)
HOSTILE_VALUES: list[Any] = [
    [], {}, "x", -1, 1.5, True, float("inf"), float("nan"), 10**30, [[]], [{}], {"rope_type": []}, {"type": "yarn"},
]  # fmt: skip


TOWER: dict[str, Any] = {
    "depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "num_position_embeddings": 4,
    "deepstack_visual_indexes": [1], "patch_size": 2, "spatial_merge_size": 2, "temporal_patch_size": 2,
    "out_hidden_size": 32, "in_channels": 3, "hidden_act": "gelu_pytorch_tanh", "rope_parameters": None,
}  # fmt: skip
SCALED_YARN: dict[str, Any] = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.1,
    "mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": None, "rope_theta": 1e4, "beta_fast": 32.0,
}  # fmt: skip
MROPE = {"mrope_section": [2, 1, 1], "mrope_interleaved": True}


def write_config(folder: Path, **values: Any) -> None:
    family = FAMILIES.get(values.get("model_type", ""))
    if family is not None and family.has_vision:
        text = {"rope_scaling": MROPE} | values
        values = {key: text.pop(key) for key in ("model_type", "mask_token_id", "vision_config") if key in text}
        values = {"text_config": text, "vision_config": TOWER} | values
    (folder / "config.json").write_text(json.dumps(values))


def test_values_of_any_type_in_a_tower_are_refused_by_the_file(tmp_path: Path) -> None:
    towers = [TOWER | {key: value} for key in TOWER for value in HOSTILE_VALUES]
    ropes = [MROPE | {key: value} for key in MROPE for value in HOSTILE_VALUES]
    changes = [{key: value} for key in ("vision_config", "image_token_id") for value in HOSTILE_VALUES]
    changes += [*({"vision_config": tower} for tower in towers), *({"rope_scaling": rope} for rope in ropes)]
    messages = []
    for change in changes:
        write_config(tmp_path, model_type="qwen3_vl", **SIZES | change)
        try:
            read_model_config(tmp_path)
        except ValueError as error:
            messages.append(str(error))
    assert messages and all(message.startswith(f"{tmp_path / 'config.json'}: ") for message in messages)


def test_values_of_any_type_in_a_rope_are_refused_by_the_file(tmp_path: Path) -> None:
    messages = []
    for rope in (SCALED_YARN | {key: value} for key in SCALED_YARN for value in HOSTILE_VALUES):
        write_config(tmp_path, model_type="ministral3", **SIZES, rope_parameters=rope)
        try:
            read_model_config(tmp_path)
        except ValueError as error:
            messages.append(str(error))
    assert messages and all(message.startswith(f"{tmp_path / 'config.json'}: ") for message in messages)


@pytest.mark.parametrize("family", FAMILIES)
def test_values_of_any_type_are_refused_by_the_file(family: str, tmp_path: Path) -> None:
    sizes = SIZES | (LLADA_SIZES if family == "llada" else {})
    if FAMILIES[family].requires_experts:
        sizes |= EXPERTS
    if FAMILIES[family].scales_queries:
        sizes |= {"rope_parameters": SCALED_YARN}
    write_config(tmp_path, model_type=family, **sizes)
    read_model_config(tmp_path)
    messages = []
    for key in (*sizes, *READ_KEYS):
        for value in HOSTILE_VALUES:
            write_config(tmp_path, model_type=family, **sizes | {key: value})
            try:
                read_model_config(tmp_path)
            except ValueError as error:
                messages.append(str(error))
    assert messages and all(message.startswith(f"{tmp_path / 'config.json'}: ") for message in messages)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"vocab_size": 10**12}, "vocab_size"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_attention_heads": 10**8, "head_dim": 10**8}, "num_attention_heads = 100000000 times head_dim"),
        ({"model_type": "qwen3_moe", **EXPERTS, "num_experts": 10**9}, "num_experts"),
        ({"model_type": "qwen3_moe", **EXPERTS, "mlp_only_layers": [0] * 5}, "mlp_only_layers has 5 entries"),
    ],
)
def test_sizes_have_a_maximum(values: dict[str, Any], problem: str, tmp_path: Path) -> None:
    write_config(tmp_path, **{"model_type": "qwen3", **SIZES, **values})
    with pytest.raises(ValueError, match=rf"config\.json: the model cannot be loaded: .*{problem}"):
        read_model_config(tmp_path)


NESTED = "[" * 200_000


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "MANIFEST.json", "model.safetensors.index.json"]
)
def test_nested_json_names_the_file(name: str, tiny_model: MakeModel, tmp_path: Path) -> None:
    save_model(tiny_model(), tmp_path)
    if name.startswith("model"):
        (tmp_path / "model.safetensors").unlink()
    (tmp_path / name).write_text(NESTED)
    with pytest.raises(ValueError, match=rf"{name}: is not valid JSON .nested too deeply"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "option"),
    [
        ("target_modules", "(?:.|..|...)+(?<=z)", "lora.targets"),
        ("rank_pattern", {"(?:.|..|...)+(?<=z)": 2}, "lora.rank_patterns"),
    ],
)
def test_a_pattern_that_takes_forever_names_the_file(
    key: str, value: Any, option: str, tiny_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, config = tiny_model(), LoraConfig(rank=1)
    add_adapter(model, config)
    save_adapter(model, config, tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    monkeypatch.setattr(lora, "MATCH_SECONDS", 0.01)
    with pytest.raises(ValueError, match="takes more than") as error:
        load_adapter(tiny_model(), tmp_path)
    message = str(error.value)
    assert str(path) in message and option in message and "(?<=z)" in message and "avoid" in message
