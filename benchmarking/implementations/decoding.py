"""Decoders of one model: block diffusion with and without a cache, and autoregressive decoding by transformers.

Shapes: B requests, P tokens of a prompt, L positions of the canvas, M of a block, V vocabulary.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import torch

from config.generation import GenerationConfig
from diffusionlm.inference.generate import generate
from diffusionlm.models.patterns import BlockCausal
from diffusionlm.models.transformer import Transformer

Prompts = list[list[int]]

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

DecodeCall = Callable[[], list[list[int]]]
"""Decodes the batch and returns the new tokens of each request."""


def build_block_cache_call(
    model: Transformer, prompts: Prompts, new_tokens: int, block_length: int, steps: int, forwards: int
) -> DecodeCall:
    """Block diffusion with our block cache.

    Args:
        model: a model for block-causal attention.
        prompts: token ids of the requests.
        new_tokens: decoded for each request.
        block_length: positions of a block.
        steps: denoising steps of a block.
        forwards: number of forwards that each request must take; a call asserts it.
    """
    config = GenerationConfig(
        max_new_tokens=new_tokens,
        attention="block_causal",
        cache="block",
        block_length=block_length,
        denoising_steps=steps,
        remasking_strategy="low_confidence_static",
        stop_token_ids=(),
    )

    def call() -> list[list[int]]:
        results = generate(model, prompts, config)
        num_forwards = {result.num_forwards for result in results}
        assert num_forwards == {forwards}, f"{num_forwards} forwards instead of {forwards}"
        return [list(result.token_ids) for result in results]

    return call


@torch.inference_mode()
def decode_without_cache(
    model: Transformer, prompts: Prompts, new_tokens: int, block_length: int, steps: int
) -> list[list[int]]:
    """Greedy block diffusion without a cache: each step computes the whole canvas and commits the most confident
    tokens of the current block. The prompts have one length, a multiple of the block length."""
    mask, prompt_length = model.config.required_mask_token_id, len(prompts[0])
    length = prompt_length + new_tokens
    assert prompt_length % block_length == 0 and new_tokens % block_length == 0
    canvas_BL = torch.tensor([[*prompt, *[mask] * new_tokens] for prompt in prompts])
    pattern = BlockCausal(block_length)
    tokens_per_step = [block_length // steps + (step < block_length % steps) for step in range(steps)]
    for start in range(prompt_length, length, block_length):
        block_BM = canvas_BL[:, start : start + block_length]
        for count in tokens_per_step:
            logits_BLV = model(canvas_BL, pattern=pattern)
            logits_BMV = logits_BLV[:, start : start + block_length].double()
            logits_BMV[:, :, mask] = -math.inf
            confidence_BM, tokens_BM = logits_BMV.softmax(dim=2).max(dim=2)
            best = confidence_BM.masked_fill(block_BM != mask, -math.inf).topk(count, dim=1).indices
            block_BM.scatter_(1, best, tokens_BM.gather(1, best))
    new_BN: list[list[int]] = canvas_BL[:, prompt_length:].tolist()
    return new_BN


def convert_to_qwen3(model: Transformer) -> Any:
    """Build a Qwen3 of transformers with the weights of a model."""
    # By name and untyped: the group `bench` need not be installed to run or to check this file.
    transformers: Any = importlib.import_module("transformers")
    settings = {key: getattr(model.config, key) for key in SHARED_KEYS}
    config = transformers.Qwen3Config(**settings, attn_implementation="sdpa")
    peer = transformers.Qwen3ForCausalLM(config).eval()
    peer.load_state_dict(model.state_dict(), strict=True)
    # Without an end-of-text token no request stops early.
    peer.generation_config.update(eos_token_id=None, pad_token_id=0, bos_token_id=None)
    return peer


def build_autoregressive_call(peer: Any, prompts: Prompts, new_tokens: int) -> DecodeCall:
    """Greedy autoregressive decoding with the peer's KV cache: one token per forward, logits of the last position."""
    prompts_BP = torch.tensor(prompts)
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
