"""Directories are written in their family's keys and names, whole, and in shards where they are large."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from config.model import YarnRope
from diffusionlm.checkpoints.huggingface import build_config_json, load_model, save_model, save_model_directory
from diffusionlm.checkpoints.model_files import load_tokenizer
from diffusionlm.checkpoints.weights import MAX_SHARD_SIZE, read_weights, save_weights
from diffusionlm.families.model_directory import read_model_config
from tests.conftest import MakeConfig, MakeModel
from tokenizer import Tokenizer

FULL, SLIDING = "full_attention", "sliding_attention"
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 10}
GEMMA: dict[str, Any] = {
    "sandwich_norms": True,
    "norm_offset": True,
    "scale_embeddings": True,
    "qk_norm": False,
    "hidden_act": "gelu_pytorch_tanh",
}
LLADA: dict[str, Any] = {"model_type": "llada", "qk_norm": False, "hidden_size": 24, "head_dim": 6}
SCALED_YARN = YarnRope(factor=4.0, original_max_position_embeddings=16, llama_4_scaling_beta=0.1)
MINISTRAL: dict[str, Any] = {"qk_norm": False, "rope_scaling": SCALED_YARN}
AUTOREGRESSIVE: dict[str, Any] = {"mask_token_id": None, "block_length": 1, "logit_alignment": "shifted"}
MODELS = [
    pytest.param({"block_length": 4}, "qwen3", id="block"),
    pytest.param(AUTOREGRESSIVE, "qwen3", id="autoregressive"),
    pytest.param({"block_length": 4, "clean_alignment": "shifted"}, "qwen3", id="token-causal text"),
    pytest.param(
        AUTOREGRESSIVE | {"mask_token_id": 18, "clean_alignment": "shifted", "noisy_attention": "token"},
        "qwen3",
        id="causal halves",
    ),
    pytest.param({"rope_scaling": YarnRope(factor=4.0, original_max_position_embeddings=16)}, "qwen3", id="yarn"),
    pytest.param({**EXPERTS, "mlp_only_layers": [1], "router_aux_loss_coef": 0.5}, "qwen3_moe", id="qwen3-moe-mlp"),
    pytest.param(
        {**GEMMA, "eos_token_id": None, "layer_types": [FULL, SLIDING], "sliding_window": 3, "head_dim": 8}
        | {"query_pre_attn_scalar": 5.0, "final_logit_softcapping": 3.0, "tie_word_embeddings": False},
        "gemma2",
        id="gemma2",
    ),
    pytest.param({"model_type": "sdar", "block_length": 8, "block_origin": "turn"}, "sdar", id="sdar"),
    pytest.param(
        {"model_type": "sdar", "block_length": 3, "logit_alignment": "shifted", "clean_alignment": "shifted"}
        | {"noisy_attention": "token"},
        "sdar",
        id="i-dlm",
    ),
    pytest.param({**MINISTRAL, **AUTOREGRESSIVE}, "ministral3", id="ministral3"),
    pytest.param(
        {**MINISTRAL, "model_type": "nemotron_labs_diffusion", "tie_word_embeddings": False, "block_length": 8}
        | {"clean_alignment": "shifted"},
        "nemotron_labs_diffusion",
        id="nemotron",
    ),
    pytest.param({"model_type": "wedlm", "block_length": 8}, "wedlm", id="wedlm with block-causal text"),
    pytest.param({"model_type": "wedlm", "block_length": 8, "clean_alignment": "shifted"}, "wedlm", id="wedlm"),
    pytest.param(
        {
            **LLADA,
            "tie_word_embeddings": False,
            "pad_token_id": None,
            "block_origin": "turn",
            "clean_alignment": "shifted",
        },
        "llada",
        id="llada",
    ),
]


@pytest.mark.parametrize("size", [MAX_SHARD_SIZE, 6_000])
@pytest.mark.parametrize(("overrides", "family"), MODELS)
def test_write_and_read_round_trip(
    overrides: dict[str, Any], family: str, size: int, tiny_model: MakeModel, tmp_path: Path
) -> None:
    model = tiny_model(**overrides)
    save_model(model, tmp_path, max_shard_size=size)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == family
    assert (tmp_path / "model.safetensors").exists() == (size == MAX_SHARD_SIZE)
    again = load_model(tmp_path)
    assert again.config == model.config
    parameters = dict(again.named_parameters())
    assert parameters.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(parameters[name], parameter) for name, parameter in model.named_parameters())


def test_shards_keep_to_the_size_and_the_index_to_the_shards(tiny_model: MakeModel, tmp_path: Path) -> None:
    model = tiny_model(tie_word_embeddings=False)
    save_model(model, tmp_path, max_shard_size=5000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    count = len(files)
    assert files == [f"model-{number + 1:05d}-of-{count:05d}.safetensors" for number in range(count)]
    file_by_name = {name: file for file in files for name in load_file(tmp_path / file)}
    assert index["weight_map"] == file_by_name
    numbers = sum(parameter.numel() for parameter in model.parameters())
    assert index["metadata"] == {"total_parameters": numbers, "total_size": 4 * numbers}
    assert list(index["weight_map"]) == [name for name, _ in model.named_parameters()]
    for file in files:
        sizes = [tensor.nbytes for tensor in load_file(tmp_path / file).values()]
        assert sum(sizes) <= 5000 or len(sizes) == 1
        with safe_open(tmp_path / file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}


def test_old_weights_do_not_stay_behind(tiny_model: MakeModel, tmp_path: Path) -> None:
    """A single file is read before an index: an old one would win."""
    for seed, size in enumerate([MAX_SHARD_SIZE, 4_000, 9_000, MAX_SHARD_SIZE]):
        model = tiny_model(seed=seed)
        save_model(model, tmp_path, max_shard_size=size)
        assert torch.equal(load_model(tmp_path).model.norm.weight, model.model.norm.weight)
    assert [path.name for path in tmp_path.glob("model*")] == ["model.safetensors"]


def test_views_of_one_storage_are_written(tmp_path: Path) -> None:
    table = torch.arange(12.0).view(3, 4)
    save_weights({"a": table[0], "b": table[1:].T}, tmp_path)
    tensors = read_weights(tmp_path)
    assert torch.equal(tensors["a"], table[0]) and torch.equal(tensors["b"], table[1:].T)


def test_a_complete_directory(tiny_model: MakeModel, tokenizer: Tokenizer, tmp_path: Path) -> None:
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.eos_token_id}
    model = tiny_model(
        vocab_size=tokenizer.vocab_size, block_length=4, mask_token_id=tokenizer.mask_token_id, **special
    )
    target = tmp_path / "deep" / "model"
    save_model_directory(model, tokenizer, target)
    assert json.loads((target / "generation_config.json").read_text()) == special
    card = (target / "README.md").read_text()
    numbers = sum(parameter.numel() for parameter in model.parameters())
    for part in ("library_name: diffusionlm", "diffusion]", "blocks of 4 tokens", f"| parameters | {numbers:,} |"):
        assert part in card
    assert load_tokenizer(target).encode("some words") == tokenizer.encode("some words")
    assert load_model(target).config == model.config


def test_generation_config_of_the_source_is_copied(tiny_model: MakeModel, tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = tiny_model(vocab_size=tokenizer.vocab_size)
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    content = '{"eos_token_id": [17, 16], "temperature": 0.6}'
    (source / "generation_config.json").write_text(content)
    save_model_directory(model, tokenizer, target, source=source)
    assert (target / "generation_config.json").read_text() == content
    assert read_model_config(target).stop_token_ids == (17, 16)
    more = tiny_model(vocab_size=tokenizer.vocab_size, stop_token_ids=(17, 5))
    save_model_directory(more, tokenizer, target, source=source)
    expected = {"eos_token_id": [17, 5, 16], "temperature": 0.6}
    assert json.loads((target / "generation_config.json").read_text()) == expected, "what is missing is added"
    assert json.loads((target / "config.json").read_text())["eos_token_id"] == 17
    (source / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"generation_config\.json: is not valid JSON"):
        save_model_directory(model, tokenizer, target, source=source)
    save_model_directory(model, tokenizer, target, source=tmp_path)
    assert json.loads((target / "generation_config.json").read_text()) == {"eos_token_id": 17, "pad_token_id": 17}


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"model_type": "qwen4"}, "model_type = 'qwen4' must be one of qwen3"),
        ({"model_type": "sdar", "qk_norm": False}, "model_type = 'sdar'.*.*qk_norm = False"),
        ({"model_type": "llada", "qk_norm": False, "head_dim": 8}, "head_dim = 8.*'llada'"),
        ({"sandwich_norms": True}, "model_type = 'gemma2'.*.*norm_offset = False.*qk_norm = True"),
        ({**EXPERTS, "layer_types": [FULL, SLIDING], "sliding_window": 3}, "sliding_attention.*qwen3_moe"),
        ({"rope_scaling": SCALED_YARN}, "model_type = 'ministral3'.*qk_norm = True"),
        ({"model_type": "qwen3", "rope_scaling": SCALED_YARN}, "'qwen3'.*with llama_4_scaling_beta in rope_scaling"),
        ({"model_type": "ministral3", "qk_norm": False}, "'ministral3'.*with no llama_4_scaling_beta in rope_scaling"),
        ({"qk_norm": False, "layer_types": [FULL, SLIDING], "sliding_window": 4}, "sliding_attention.*llama.*qk_norm"),
    ],
)
def test_config_without_matching_family_is_rejected(
    overrides: dict[str, Any], named: str, make_config: MakeConfig
) -> None:
    with pytest.raises(ValueError, match=rf"(?s){named}"):
        build_config_json(make_config(**overrides), torch.float32)


def test_a_window_that_no_layer_has_is_not_written(make_config: MakeConfig) -> None:
    values = build_config_json(make_config(layer_types=(FULL, FULL), sliding_window=4), torch.float32)
    assert not values.keys() & {"layer_types", "sliding_window", "use_sliding_window"}


def test_the_family_is_named_only_where_the_options_do_not_say_it(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(model_type="qwen3")
    (tmp_path / "config.json").write_text(json.dumps(build_config_json(config, torch.float32)))
    assert read_model_config(tmp_path) == make_config()
