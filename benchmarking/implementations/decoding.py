"""Autoregressive decoding by transformers, with the weights of one of our models."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from diffusionlm.models.transformer import Transformer

SHARED_KEYS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "max_position_embeddings",
    "vocab_size",
    "rms_norm_eps",
    "rope_theta",
    "tie_word_embeddings",
)
"""Keys that our config and a Qwen3 config have in common."""


def convert_to_qwen3(model: Transformer) -> Any:
    """Build a Qwen3 of transformers with the weights of a model, on its device and in its dtype.

    Raises:
        ValueError: the model has other weights than a Qwen3.
    """
    # By name and untyped: the group `bench` need not be installed to run or to check this file.
    transformers: Any = importlib.import_module("transformers")
    settings = {key: getattr(model.config, key) for key in SHARED_KEYS}
    config = transformers.Qwen3Config(**settings, attn_implementation="sdpa")
    peer = transformers.Qwen3ForCausalLM(config).to(model.lm_head.weight).eval()
    weights = model.state_dict()
    if {name: weight.shape for name, weight in weights.items()} != {
        name: weight.shape for name, weight in peer.state_dict().items()
    }:
        raise ValueError(
            'bench.peers has "transformers", which decodes a Qwen3, and [model.shape] is none: leave out the options '
            "of other families, or the peer"
        )
    peer.load_state_dict(weights, strict=True)
    # Without an end-of-text token no request stops early.
    peer.generation_config.update(eos_token_id=None, pad_token_id=0, bos_token_id=None)
    return peer


def build_autoregressive_call(peer: Any, prompts: list[list[int]], new_tokens: int) -> Callable[[], list[list[int]]]:
    """Build a call of greedy decoding with the peer's KV cache, which returns the new tokens of each request."""
    prompts_BP = torch.tensor(prompts, device=peer.device)
    attention_mask_BP = torch.ones_like(prompts_BP)

    @torch.inference_mode()
    def call() -> list[list[int]]:
        texts_BL = peer.generate(
            prompts_BP,
            attention_mask=attention_mask_BP,
            do_sample=False,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            use_cache=True,
        )
        new: list[list[int]] = texts_BL[:, prompts_BP.shape[1] :].tolist()
        return new

    return call
