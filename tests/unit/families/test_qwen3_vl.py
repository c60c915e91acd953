"""Qwen3-VL's nested config.json and tensor names: what is read, what is written, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from config.model import ModelConfig, YarnRope
from diffusionlm.families.model_directory import read_model_config
from diffusionlm.families.registry import FAMILIES, infer_model_type, parameter_name
from diffusionlm.models.transformer import Transformer
from tests.qwen3_vl_oracle import CONFIG

MROPE = {"rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True}
EXPERTS: dict[str, Any] = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def build(model_type: str = "qwen3_vl", **changes: Any) -> dict[str, Any]:
    """A config.json, with changes of its parts ``text``, ``vision`` and ``rope``, and of its top-level keys."""
    text = {
        "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "rope_theta": 5e6,
        "max_position_embeddings": 256, "eos_token_id": 7, "rope_scaling": MROPE | changes.pop("rope", {}),
    }  # fmt: skip
    text |= (EXPERTS if model_type == "qwen3_vl_moe" else {}) | changes.pop("text", {})
    vision = {
        "depth": 4, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 2], "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
        "out_hidden_size": 64, "in_channels": 3, "hidden_act": "gelu_pytorch_tanh",
    } | changes.pop("vision", {})  # fmt: skip
    tokens = {"image_token_id": 290, "video_token_id": 291, "vision_start_token_id": 292, "vision_end_token_id": 293}
    return {"model_type": model_type, **tokens, "text_config": text, "vision_config": vision, **changes}


def read(folder: Path, values: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(values))
    return read_model_config(folder)


def test_options_of_the_parts(tmp_path: Path) -> None:
    config = read(tmp_path, build(mask_token_id=294, logit_alignment="same_position"))
    changes = {"eos_token_id": 7, "video_token_id": 291}
    assert config == CONFIG.model_copy(update=changes)
    assert infer_model_type(config) == "qwen3_vl"


def test_spelling_of_transformers_5(tmp_path: Path) -> None:
    rope = MROPE | {"rope_theta": 5e6}
    values = build(text={"rope_scaling": None, "rope_theta": None, "rope_parameters": rope})
    values["vision_config"]["rope_parameters"] = {"rope_type": "axial", "rope_theta": 10_000.0}
    assert read(tmp_path, values) == read(tmp_path, build())


@pytest.mark.parametrize(
    ("top", "text", "expected"),
    [({}, {}, False), ({}, {"tie_word_embeddings": True}, True)]
    + [({"tie_word_embeddings": tied}, {"tie_word_embeddings": not tied}, tied) for tied in (True, False)],
)
def test_tied_embeddings(top: dict[str, Any], text: dict[str, Any], expected: bool, tmp_path: Path) -> None:
    """The outer key decides: transformers 5 writes the default of its class, true, for the text of Qwen3-VL-MoE."""
    assert read(tmp_path, build(text=text, **top)).tie_word_embeddings is expected


def test_defaults(tmp_path: Path) -> None:
    """Those of the classes in transformers."""
    values = build(text={"head_dim": None, "rope_theta": None, "rope_scaling": None, "vocab_size": 152_000})
    values = {key: value for key, value in values.items() if not key.endswith("token_id")}
    config = read(tmp_path, values)
    assert config.head_dim == 128 and config.rope_theta == 500_000.0 and config.is_autoregressive
    assert config.vision is not None and config.vision.mrope_section == (24, 20, 20)
    ids = (config.image_token_id, config.vision_start_token_id, config.vision_end_token_id, config.video_token_id)
    assert ids == (151655, 151652, 151653, None)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"block_length": 4, "block_origin": "turn", "stop_token_ids": (7, 8), "begin_with_eos": True},
        {"tie_word_embeddings": True, "pad_token_id": 3, "video_token_id": 291, "mask_token_id": None},
        {"rope_scaling": YarnRope(factor=4.0, original_max_position_embeddings=64)},
        EXPERTS | {"mlp_only_layers": (1,), "router_aux_loss_coef": 0.5},
    ],
)
def test_round_trip(changes: dict[str, Any], tmp_path: Path) -> None:
    """Our config.json is read again, and transformers reads it without a complaint about its keys."""
    from transformers import AutoConfig

    config = ModelConfig.model_validate(CONFIG.model_dump() | {"eos_token_id": 7} | changes)
    family = FAMILIES[infer_model_type(config)]
    values = family.to_config_json(config)
    assert not values.keys() & {"vision", "hidden_size", "mrope_section"}
    assert values["text_config"]["tie_word_embeddings"] == config.tie_word_embeddings, "transformers 4 reads this one"
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": list(config.stop_token_ids) or 7}))
    assert read(tmp_path, values) == config
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert theirs.architectures == [family.architecture] and theirs.tie_word_embeddings == config.tie_word_embeddings
    assert theirs.video_token_id == (config.video_token_id or 151656)
    rope = theirs.text_config.rope_parameters
    assert (rope["rope_theta"], rope["mrope_section"]) == (5e6, [6, 5, 5])
    assert theirs.vision_config.out_hidden_size == 64 and theirs.text_config.hidden_size == 64


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"vision_config": None}, "model_type = 'qwen3_vl' needs the objects text_config and vision_config"),
        ({"vision": {"in_channels": 1}}, "vision_config has in_channels = 1, only 3 is supported"),
        ({"vision": {"hidden_act": "quick_gelu"}}, "vision_config has hidden_act = 'quick_gelu', only 'gelu_pytorch"),
        ({"vision": {"out_hidden_size": 48}}, "vision_config has out_hidden_size = 48, only 64 is supported"),
        ({"vision": {"rope_parameters": {"rope_theta": 5.0}}}, "rope_parameters of vision_config has rope_theta = 5.0"),
        ({"vision": {"depth": None}}, "vision.depth: Field required"),
        ({"rope": {"mrope_interleaved": False}}, "rope of text_config has mrope_interleaved = False, only True"),
        ({"rope": {"mrope_section": [7, 5, 5]}}, r"mrope_section = \[7, 5, 5\] must sum to head_dim / 2"),
        ({"rope": {"rope_type": "mrope"}}, "rope_scaling = .*'mrope'.* is not supported"),
        ({"text": {"hidden_act": "gelu"}}, "hidden_act = 'gelu' is not supported, only silu"),
        ({"text": {"use_sliding_window": True}}, "use_sliding_window = true is not supported for qwen3_vl"),
        ({"text": EXPERTS}, "num_experts = 3 contradicts model_type = 'qwen3_vl'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config = {'bits': 4} is not supported"),
        ({"image_token_id": 300}, "image_token_id = 300 is outside the vocabulary of 300 tokens"),
        ({"model_type": "qwen3_vl_moe", "text": {"norm_topk_prob": False}}, "norm_topk_prob = False contradicts"),
    ],
)
def test_refusals(changes: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"config\.json: the model cannot be loaded: .*{problem}"):
        read(tmp_path, build(**changes))


@pytest.mark.parametrize("experts", [{}, EXPERTS])
def test_names(experts: dict[str, Any]) -> None:
    config = CONFIG.model_copy(update=experts)
    with torch.device("meta"):
        names = [name for name, _ in Transformer(config).named_parameters()]
    family = FAMILIES[infer_model_type(config)]
    stored = [family.stored_name(name) for name in names]
    assert [parameter_name(name) for name in stored] == names
    prefixes = {name.split(".layers.")[0].split(".blocks.")[0] for name in stored}
    assert {"model.language_model", "model.visual", "lm_head.weight", "model.language_model.norm.weight"} < prefixes
    other_spellings = {
        "language_model.layers.0.mlp.gate_proj.weight": "model.layers.0.mlp.gate_proj.weight",
        "language_model.model.norm.weight": "model.norm.weight",
        "language_model.lm_head.weight": "lm_head.weight",
        "visual.pos_embed.weight": "model.visual.pos_embed.weight",
    }
    assert {name: parameter_name(name) for name in other_spellings} == other_spellings
