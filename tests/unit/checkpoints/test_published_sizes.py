"""Released config.json files, key by key, give models of the size that the released weights have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from diffusionlm.families.model_directory import read_model_config
from diffusionlm.models.transformer import Transformer

QWEN: dict[str, Any] = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "use_sliding_window": False}
PUBLISHED: list[Any] = [
    pytest.param(
        {"model_type": "sdar", **QWEN, "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728}
        | {"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
        | {"max_position_embeddings": 32768, "attention_bias": False, "sliding_window": None, "max_window_layers": 36}
        | {"tie_word_embeddings": False, "eos_token_id": 151643, "bos_token_id": 151643, "rope_scaling": None}
        | {"torch_dtype": "bfloat16", "attn_implementation": "flex_attention", "fuse_cross_entropy": True},
        8_822_848_512 // 2,
        399,
        id="SDAR-4B-Chat",
    ),
    pytest.param(
        {"model_type": "llada", "d_model": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 32, "alibi": False}
        | {"mlp_hidden_size": 12288, "mlp_ratio": 4, "vocab_size": 126464, "embedding_size": 126464}
        | {"max_sequence_length": 4096, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "rope": True}
        | {"activation_type": "silu", "block_type": "llama", "block_group_size": 1, "layer_norm_type": "rms"}
        | {"include_bias": False, "include_qkv_bias": False, "weight_tying": False, "multi_query_attention": None}
        | {"eos_token_id": 126081, "pad_token_id": 126081, "mask_token_id": 126336, "scale_logits": False},
        8_015_581_184,
        291,
        id="LLaDA-8B",
    ),
    pytest.param(
        {"model_type": "gemma2", "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216}
        | {"num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
        | {"max_position_embeddings": 8192, "sliding_window": 4096, "query_pre_attn_scalar": 256}
        | {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "rope_theta": 10000.0}
        | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "cache_implementation": "hybrid"},
        2_614_341_888,
        288,
        id="gemma-2-2b",
    ),
]


@pytest.mark.parametrize(("values", "parameters", "tensors"), PUBLISHED)
def test_published_models_have_their_size(
    values: dict[str, Any], parameters: int, tensors: int, tmp_path: Path
) -> None:
    """The released config.json gives a model of as many numbers and tensors as the released files hold."""
    (tmp_path / "config.json").write_text(json.dumps(values))
    with torch.device("meta"):
        model = Transformer(read_model_config(tmp_path))
    sizes = [parameter.numel() for parameter in model.parameters()]
    assert (sum(sizes), len(sizes)) == (parameters, tensors)
