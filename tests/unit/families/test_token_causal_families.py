"""Families whose committed text is token-causal: Nemotron-Labs-Diffusion, Ministral 3 below it, WeDLM and I-DLM."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from config.finetune.lora import LoraConfig
from config.model import ModelConfig, YarnRope
from diffusionlm.checkpoints.adapter_files import load_adapter, save_adapter
from diffusionlm.checkpoints.huggingface import build_config_json
from diffusionlm.families.model_directory import read_model_config
from diffusionlm.families.registry import get_family
from diffusionlm.models.lora import add_adapter
from tests.conftest import MakeConfig, MakeModel

BASE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 56,
    "max_position_embeddings": 64,
    "vocab_size": 152_000,
}
ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def read(folder: Path, **values: Any) -> ModelConfig:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(BASE | values))
    return read_model_config(folder)


# Ministral 3 and Nemotron-Labs-Diffusion.


def test_defaults_of_nemotron(tmp_path: Path) -> None:
    config = read(tmp_path, model_type="nemotron_labs_diffusion", rope_parameters=ROPE)
    assert (config.mask_token_id, config.block_length, config.eos_token_id) == (100, 32, 11)
    assert (config.logit_alignment, config.clean_alignment) == ("same_position", "shifted")
    assert (config.head_dim, config.rms_norm_eps, config.tie_word_embeddings) == (128, 1e-5, False)
    assert get_family(config).default_strategy == "threshold"
    assert isinstance(config.rope_scaling, YarnRope)
    assert (config.rope_scaling.attention_scaling, config.rope_scaling.llama_4_scaling_beta) == (1.0, 0.1)
    written = build_config_json(config, torch.bfloat16)
    assert written["rope_parameters"] == ROPE and not {"rope_scaling", "rope_theta"} & written.keys()
    assert written["block_size"] == 32 and written["architectures"] == ["NemotronLabsDiffusionModel"]


def test_ministral_is_autoregressive_and_known_by_its_scaled_queries(tmp_path: Path) -> None:
    config = read(tmp_path, model_type="ministral3", rope_parameters=ROPE)
    assert config.is_autoregressive and config.model_type is None and get_family(config).model_type == "ministral3"
    assert (config.eos_token_id, config.pad_token_id, config.mask_token_id) == (2, 11, None)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({}, "'ministral3' needs rope_parameters of type yarn with llama_4_scaling_beta"),
        ({"rope_parameters": ROPE | {"rope_type": "default"}}, "needs rope_parameters of type yarn"),
        ({"rope_parameters": ROPE | {"llama_4_scaling_beta": None}}, "yarn with llama_4_scaling_beta"),
        ({"rope_parameters": ROPE | {"llama_4_scaling_beta": -0.1}}, "llama_4_scaling_beta.*greater"),
        ({"rope_parameters": ROPE | {"mscale": 0.7}}, "mscale = 0.7: not supported"),
        ({"rope_parameters": ROPE, "sliding_window": 4096}, "sliding_window = 4096"),
        ({"rope_parameters": ROPE, "model_type": "qwen3"}, "'qwen3' does not support llama_4_scaling_beta"),
        (
            {"rope_parameters": ROPE, "model_type": "nemotron_labs_diffusion", "tie_word_embeddings": True},
            "tie_word_embeddings = True contradicts",
        ),
    ],
)
def test_what_ministral_does_not_compute_is_named(values: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=named):
        read(tmp_path, **{"model_type": "ministral3"} | values)


def test_an_adapter_of_nemotron_has_the_names_of_its_files(tiny_model: MakeModel, tmp_path: Path) -> None:
    scaled = YarnRope(factor=4.0, original_max_position_embeddings=8, llama_4_scaling_beta=0.1)
    options: dict[str, Any] = {"qk_norm": False, "tie_word_embeddings": False, "rope_scaling": scaled}
    make = {**options, "model_type": "nemotron_labs_diffusion", "block_length": 4, "clean_alignment": "shifted"}
    model, config = tiny_model(**make), LoraConfig(rank=2, alpha=8.0, targets=("o_proj",))
    add_adapter(model, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora" in name:
                parameter.normal_()
    save_adapter(model, config, tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert "base_model.model.encoder.layers.0.self_attn.o_proj.lora_A.weight" in tensors
    again = tiny_model(**make)
    load_adapter(again, tmp_path)
    parameters = dict(again.named_parameters())
    assert all(torch.equal(parameter, parameters[name]) for name, parameter in model.named_parameters())


# WeDLM.


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, (False, True)),  # Qwen2.5
        ({"qk_norm": True, "attention_bias": False}, (True, False)),  # Qwen3
        ({"qk_norm": True}, (True, True)),
    ],
)
def test_keys_of_wedlm_say_its_layers(keys: dict[str, bool], expected: tuple[bool, bool], tmp_path: Path) -> None:
    config = read(tmp_path, model_type="wedlm", **keys)
    assert (config.qk_norm, config.attention_bias) == expected and not config.attention_output_bias
    assert config.noisy_attention == "visible_first" and get_family(config).default_strategy == "penalized_entropy"
    causal = read(tmp_path / "causal", model_type="wedlm", noisy_attention="token", **keys)
    assert causal.noisy_attention == "token", "the file precedes the family"
    written = build_config_json(config, torch.bfloat16)
    assert (written["qk_norm"], written["attention_bias"]) == expected and "attention_output_bias" not in written


# I-DLM, under the name of SDAR: alignment of noisy outputs, alignment of clean ones, attention of noisy queries.

IDLM = ("shifted", "shifted", "token")
SDAR = ("same_position", None, "block")


@pytest.mark.parametrize(
    ("folder", "values"),
    [
        ("I-DLM-8B", {}),
        ("models--yifanyu--I-DLM-8B/snapshots/3cecd8", {"block_size": 4}),
        ("idlm", {}),
        ("Qwen3-8B-allmasked", {"block_size": 1}),
        ("Qwen3-8B-allmasked", {"block_size": 3}),
        ("I-DLM-8B", {"clean_alignment": "shifted"}),
    ],
)
def test_an_sdar_that_may_be_idlm_needs_keys(folder: str, values: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"may mean I-DLM") as caught:
        read(tmp_path / folder, model_type="sdar", **values)
    idlm, sdar = (json.loads(keys) for keys in re.findall(r"{.*?}", str(caught.value)))
    shifted = read(tmp_path / folder, model_type="sdar", **values | idlm)
    assert (shifted.logit_alignment, shifted.clean_alignment, shifted.noisy_attention) == IDLM
    written = build_config_json(shifted, torch.bfloat16)
    assert {key: written[key] for key in idlm} == idlm and written["model_type"] == "sdar"
    blocks = read(tmp_path / folder, model_type="sdar", **sdar)
    assert (blocks.logit_alignment, blocks.clean_alignment, blocks.noisy_attention) == SDAR


@pytest.mark.parametrize("folder", ["SDAR-8B-Chat", "SDAR-8B-Chat-b16", "MidLM-sdar"])
def test_an_sdar_needs_no_keys(folder: str, tmp_path: Path) -> None:
    assert read(tmp_path / folder, model_type="sdar").clean_alignment is None


@pytest.mark.parametrize(
    ("model_type", "alignments", "is_own"),
    [
        ("sdar", IDLM, True),
        ("sdar", SDAR, True),
        ("sdar", ("same_position", "shifted", "block"), False),
        ("sdar", ("shifted", None, "block"), False),
        ("sdar", ("shifted", "shifted", "block"), False),
        ("wedlm", ("same_position", "shifted", "visible_first"), True),
        ("wedlm", ("same_position", "shifted", "block"), False),
        ("wedlm", SDAR, False),
        ("Dream", ("shifted", "shifted", "block"), False),
    ],
)
def test_alignments_that_a_family_has(
    model_type: str, alignments: tuple[str | None, ...], is_own: bool, make_config: MakeConfig
) -> None:
    keys = ("logit_alignment", "clean_alignment", "noisy_attention")
    config = make_config(block_length=4, **dict(zip(keys, alignments, strict=True)))
    family = get_family(config.model_copy(update={"model_type": model_type}))
    if is_own:
        family.check_diffusion(config)
    else:
        with pytest.raises(ValueError, match="it has"):
            family.check_diffusion(config)
