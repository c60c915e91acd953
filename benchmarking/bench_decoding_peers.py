"""Decoding speed against two peers that decode the same model: block diffusion without a cache, and autoregression.

python -m benchmarking.bench_decoding_peers

The model has random weights, in float32 on the CPU; the implementations take turns, call by call, in one process.

**Recomputing everything** is block diffusion without a cache (SDAR's generate.py, Cheng et al. 2025): every denoising
step computes the whole canvas and all of its logits. Ours caches keys and values of finished blocks. Both must return
the same tokens.

**Next tokens**: `transformers` decodes the same weights as a causal Qwen3, greedily, with its KV cache. Ours commits
three tokens per forward, as a trained model does at a common confidence threshold; random weights would pass no
threshold, so block lengths and steps fix the number. Blocks are counted from the start of the text and each has
length / 3 steps, so that every full block commits 3 tokens per step. With `PROMPT_LENGTH` = 64 = 1 modulo 3 the first
block has 2 modulo 3 open positions and all others are full: 128 = 2 + 42 * 3, and every forward but one commits exactly
three. That is ceil(128 / 3) = 43 forwards, the minimum of any sampler of three tokens per forward; it is asserted.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarking.bench_infer import random_model, random_prompts
from benchmarking.harness import (
    INSTALL_HINT,
    SPEEDUP_COLUMN,
    Benchmark,
    Report,
    Settings,
    Table,
    compare,
    describe_model,
    is_installed,
    main,
)
from benchmarking.implementations.decoding import (
    DecodeCall,
    Prompts,
    build_autoregressive_call,
    build_block_cache_call,
    convert_to_qwen3,
    decode_without_cache,
)
from config.model import ModelConfig
from diffusionlm.models.transformer import Transformer
from files.terminal_text import print_message

SHAPE = ModelConfig(
    hidden_size=512,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    intermediate_size=1536,
    max_position_embeddings=256,
    vocab_size=32_768,
    mask_token_id=32_767,
    block_length=4,
)
PROMPT_LENGTH = 64
NEW_TOKENS = 128
STEPS = 4
"""Denoising steps of a block against recomputation: one per token."""
TOKENS_PER_FORWARD = 3
PARALLEL_BLOCK_LENGTHS = (3, 12)
"""Block lengths against autoregression."""
PEERS = ["recomputing", "transformers"]


def compare_with_recomputation(model: Transformer, prompts: Prompts, new_tokens: int) -> dict[str, DecodeCall]:
    """Build calls with the block cache and without a cache, and check that they return the same tokens.

    Raises:
        ValueError: they return different tokens.
    """
    length = model.config.block_length
    assert length is not None
    ours = build_block_cache_call(model, prompts, new_tokens, length, STEPS, new_tokens // length * STEPS)
    theirs: DecodeCall = partial(decode_without_cache, model, prompts, new_tokens, length, STEPS)
    if ours() != theirs():
        raise ValueError("the block cache and recomputing everything returned different tokens")
    return {f"block cache, {length} steps per block of {length}": ours, "recomputing everything": theirs}


def compare_with_autoregressive(
    model: Transformer, peer: Any, prompts: Prompts, new_tokens: int
) -> dict[str, DecodeCall]:
    """Build calls with three tokens per forward and with one."""
    forwards = math.ceil(new_tokens / TOKENS_PER_FORWARD)
    calls = {
        f"block cache, 3 tokens per forward, blocks of {length}": build_block_cache_call(
            model, prompts, new_tokens, length, length // TOKENS_PER_FORWARD, forwards
        )
        for length in PARALLEL_BLOCK_LENGTHS
    }
    return calls | {"transformers, next tokens": build_autoregressive_call(peer, prompts, new_tokens)}


def measure(calls: Mapping[str, DecodeCall], batch_size: int, new_tokens: int, settings: Settings) -> list[list[str]]:
    """Time all calls in turn; one table row for each of ours against the last call, the peer."""
    times = compare(calls, settings, label=f"batch {batch_size}")
    *ours, peer = calls
    speed = {name: f"{batch_size * new_tokens / times.median(name):,.1f}" for name in calls}
    return [[name, peer, str(batch_size), speed[name], speed[peer], *times.speedup_cells(name, peer)] for name in ours]


def run(settings: Settings) -> Report:
    """Compare with all peers that are installed, at each batch size."""
    peers = list(settings.options.peers)
    if "transformers" in peers and not is_installed("transformers"):
        print_message(f"transformers is not installed, so its rows are left out; {INSTALL_HINT}")
        peers.remove("transformers")
    model = random_model(SHAPE, seed=0)
    qwen3 = convert_to_qwen3(model) if "transformers" in peers else None
    rows = []
    for batch_size in settings.options.batch_sizes:
        prompts = random_prompts(SHAPE, PROMPT_LENGTH, batch_size, seed=0)
        if "recomputing" in peers:
            print_message(f"batch {batch_size}: comparing tokens")
            rows += measure(compare_with_recomputation(model, prompts, NEW_TOKENS), batch_size, NEW_TOKENS, settings)
        if qwen3 is not None:
            calls = compare_with_autoregressive(model, qwen3, prompts, NEW_TOKENS)
            print_message(f"batch {batch_size}: warm-up")
            for call in calls.values():
                call()
            rows += measure(calls, batch_size, NEW_TOKENS, settings)
    header = ["ours", "peer", "batch", "ours tok/s", "peer tok/s", "speedup", SPEEDUP_COLUMN]
    facts = {
        "model": f"{describe_model(SHAPE)}, vocabulary {SHAPE.vocab_size:,}, float32, random weights",
        "requests": f"{PROMPT_LENGTH} random tokens and {NEW_TOKENS} new ones each",
    }
    return Report([Table(header, rows)], facts)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8], metavar="N", help="default: 1 8")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=PEERS, help="default: both")


def check_arguments(options: argparse.Namespace) -> str | None:
    return None if min(options.batch_sizes) >= 1 else "--batch-sizes must be at least 1"


BENCHMARK = Benchmark(
    "Compare decoding speed with two peers.",
    run,
    rounds=5,
    warmup=0,
    packages=("torch", "transformers"),
    add_arguments=add_arguments,
    check_arguments=check_arguments,
)

if __name__ == "__main__":
    raise SystemExit(main(BENCHMARK))
