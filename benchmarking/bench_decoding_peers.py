"""Decoding speed beside two peers that decode the same model: recomputing everything, and next tokens one by one.

python -m benchmarking.bench_decoding_peers

The model has random weights, in float32 on the CPU; the contestants take turns, call by call, in one process.

**Recomputing everything** is block diffusion without a cache (SDAR's generate.py, Cheng et al. 2025): every denoising
step is a forward of the whole canvas with all of its logits. Ours keeps keys and values of finished blocks. Both must
give the same tokens.

**Next tokens**: `transformers` decodes the same weights as a causal Qwen3, greedily, with its cache of keys and values.
Ours settles three tokens a forward, as a trained model does at a usual confidence threshold; random weights would pass
no threshold, so the number is fixed by blocks and steps. Blocks are counted from the start of the text and each has
length / 3 steps, whose even share is 3 for every full block. With `PROMPT_LENGTH` = 64 = 1 modulo 3 the first block
has 2 modulo 3 open positions, all others are full: 128 = 2 + 42 * 3, and every forward but one settles exactly three.
That is ceil(128 / 3) = 43 forwards, which is what any sampler of three tokens a forward needs, and is checked.

Shapes: B requests, P tokens of a prompt, L positions of the canvas, M of a block, V vocabulary.
"""

from __future__ import annotations

import argparse
import importlib
import math
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from benchmarking.bench_infer import Prompts, random_model, random_prompts
from benchmarking.harness import (
    collect_environment,
    is_installed,
    markdown_list,
    markdown_table,
    print_message,
    speedup,
    time_in_turns,
)
from config.generation import GenerationConfig
from config.model import ModelConfig
from diffusionlm.inference.generate import generate
from diffusionlm.models.patterns import BlockCausal
from diffusionlm.models.transformer import Transformer
from profiling.cores import usable_cores

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
"""Denoising steps of a block, beside recomputing everything: one for each token."""
TOKENS_PER_FORWARD = 3
PARALLEL_BLOCK_LENGTHS = (3, 12)
"""Block lengths beside next tokens."""

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
"""Of our config and of a Qwen3's."""

DecodeCall = Callable[[], list[list[int]]]
"""Decodes the batch: the new tokens of each request."""


def build_block_cache_call(
    model: Transformer, prompts: Prompts, new_tokens: int, block_length: int, steps: int, forwards: int
) -> DecodeCall:
    """Ours: block diffusion with the cache of finished blocks.

    Args:
        steps: of each block.
        forwards: how many there must be, for each request.
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
        done = generate(model, prompts, config)
        took = {one.num_forwards for one in done}
        assert took == {forwards}, f"{took} forwards in place of {forwards}"
        return [list(one.token_ids) for one in done]

    return call


@torch.inference_mode()
def decode_without_cache(
    model: Transformer, prompts: Prompts, new_tokens: int, block_length: int, steps: int
) -> list[list[int]]:
    """Block diffusion as it is written down: a forward of the whole canvas for each step, the most confident tokens of
    the current block kept. Prompts of one length, a multiple of the block's; greedy."""
    mask, prompt_length = model.config.mask_token, len(prompts[0])
    length = prompt_length + new_tokens
    assert prompt_length % block_length == 0 and new_tokens % block_length == 0
    canvas_BL = torch.tensor([[*prompt, *[mask] * new_tokens] for prompt in prompts])
    pattern = BlockCausal(block_length)
    quotas = [block_length // steps + (step < block_length % steps) for step in range(steps)]
    for start in range(prompt_length, length, block_length):
        block_BM = canvas_BL[:, start : start + block_length]
        for quota in quotas:
            logits_BLV = model(canvas_BL, pattern=pattern)
            logits_BMV = logits_BLV[:, start : start + block_length].double()
            logits_BMV[:, :, mask] = -math.inf
            confidence_BM, tokens_BM = logits_BMV.softmax(dim=2).max(dim=2)
            best = confidence_BM.masked_fill(block_BM != mask, -math.inf).topk(quota, dim=1).indices
            block_BM.scatter_(1, best, tokens_BM.gather(1, best))
    new_BN: list[list[int]] = canvas_BL[:, prompt_length:].tolist()
    return new_BN


def convert_to_qwen3(model: Transformer) -> Any:
    """The same weights as a Qwen3 of transformers."""
    # By name and untyped: the group `bench` need not be installed to run or to check this file.
    transformers: Any = importlib.import_module("transformers")
    settings = {key: getattr(model.config, key) for key in SHARED_KEYS}
    config = transformers.Qwen3Config(**settings, attn_implementation="sdpa")
    peer = transformers.Qwen3ForCausalLM(config).eval()
    peer.load_state_dict(model.state_dict(), strict=True)
    # Without an end of text nothing stops early.
    peer.generation_config.update(eos_token_id=None, pad_token_id=0, bos_token_id=None)
    return peer


def build_autoregressive_call(peer: Any, prompts: Prompts, new_tokens: int) -> DecodeCall:
    """One token a forward, greedily, with the peer's cache; logits of the last position alone."""
    prompts_BP = torch.tensor(prompts)
    seen_BP = torch.ones_like(prompts_BP)

    @torch.inference_mode()
    def call() -> list[list[int]]:
        texts_BL = peer.generate(
            prompts_BP,
            attention_mask=seen_BP,
            do_sample=False,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            use_cache=True,
        )
        new: list[list[int]] = texts_BL[:, prompts_BP.shape[1] :].tolist()
        return new

    return call


def compare_with_recomputation(model: Transformer, prompts: Prompts, new_tokens: int) -> dict[str, DecodeCall]:
    """The cache of blocks, and no cache; checked to give the same tokens.

    Raises:
        ValueError: they do not.
    """
    length = model.config.block_length
    assert length is not None
    ours = build_block_cache_call(model, prompts, new_tokens, length, STEPS, new_tokens // length * STEPS)
    theirs: DecodeCall = partial(decode_without_cache, model, prompts, new_tokens, length, STEPS)
    if ours() != theirs():
        raise ValueError("the cache of blocks and recomputing everything gave different tokens: they are not the same")
    return {f"block cache, {length} steps a block of {length}": ours, "recomputing everything": theirs}


def compare_with_autoregressive(
    model: Transformer, peer: Any, prompts: Prompts, new_tokens: int
) -> dict[str, DecodeCall]:
    """Three tokens a forward, and one."""
    forwards = math.ceil(new_tokens / TOKENS_PER_FORWARD)
    calls = {
        f"block cache, 3 tokens a forward, blocks of {length}": build_block_cache_call(
            model, prompts, new_tokens, length, length // TOKENS_PER_FORWARD, forwards
        )
        for length in PARALLEL_BLOCK_LENGTHS
    }
    return calls | {"transformers, next tokens": build_autoregressive_call(peer, prompts, new_tokens)}


def measure(calls: Mapping[str, DecodeCall], batch_size: int, new_tokens: int, rounds: int) -> list[list[str]]:
    """Rows of the table: each contestant beside the last one, the peer."""

    def after_round(number: int, seconds: Mapping[str, float]) -> None:
        shown = ", ".join(f"{name} {value:.2f} s" for name, value in seconds.items())
        print_message(f"batch {batch_size}: round {number}/{rounds}: {shown}")

    seconds = time_in_turns(calls, rounds=rounds, warmup=0, after_round=after_round)
    *ours, peer = calls
    speed = {name: f"{batch_size * new_tokens / statistics.median(times):,.1f}" for name, times in seconds.items()}
    rows = []
    for name in ours:
        ratio = speedup(seconds[name], seconds[peer])
        cells = [name, peer, str(batch_size), speed[name], speed[peer]]
        rows.append([*cells, f"{ratio.ratio_of_medians:.2f}", ratio.format_ratio()])
    return rows


def compare(batch_sizes: list[int], rounds: int, peers: list[str]) -> str:
    """The table of all comparisons."""
    model, rows = random_model(SHAPE, seed=0), []
    causal = convert_to_qwen3(model) if "transformers" in peers else None
    for batch_size in batch_sizes:
        prompts = random_prompts(SHAPE, PROMPT_LENGTH, batch_size, seed=0)
        if "recomputing" in peers:
            print_message(f"batch {batch_size}: the same tokens?")
            calls = compare_with_recomputation(model, prompts, NEW_TOKENS)
            rows += measure(calls, batch_size, NEW_TOKENS, rounds)
        if causal is not None:
            calls = compare_with_autoregressive(model, causal, prompts, NEW_TOKENS)
            print_message(f"batch {batch_size}: warm-up")
            for call in calls.values():
                call()
            rows += measure(calls, batch_size, NEW_TOKENS, rounds)
    header = ["ours", "peer", "batch", "ours tok/s", "peer tok/s", "speedup", "in a round [quartiles]"]
    return markdown_table(header, rows)


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description="Compare decoding with two peers.", allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=5, help="measured calls of each (default: 5, at least 2)")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="CPU threads (default: all usable cores)")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8], metavar="N", help="default: 1 8")
    names = ["recomputing", "transformers"]
    parser.add_argument("--peers", nargs="+", choices=names, default=names, help="default: both")
    arguments = parser.parse_args()
    if arguments.rounds < 2 or arguments.threads < 1 or min(arguments.batch_sizes) < 1:
        parser.error("--rounds must be at least 2, --threads and --batch-sizes at least 1")
    peers = list(arguments.peers)
    if "transformers" in peers and not is_installed("transformers"):
        print_message("transformers is not installed, so its rows are left out; uv sync --group bench installs it")
        peers.remove("transformers")
    torch.set_num_threads(arguments.threads)
    packages = ["torch", *(["transformers"] if "transformers" in peers else [])]
    where = collect_environment(threads=arguments.threads, packages=packages)
    where["model"] = (
        f"{SHAPE.num_hidden_layers} layers, hidden {SHAPE.hidden_size}, {SHAPE.num_attention_heads} heads "
        f"({SHAPE.num_key_value_heads} of keys and values) of {SHAPE.head_dim}, SwiGLU {SHAPE.intermediate_size}, "
        f"vocabulary {SHAPE.vocab_size:,}, float32, random weights"
    )
    where["requests"] = f"{PROMPT_LENGTH} random tokens and {NEW_TOKENS} new ones each; {arguments.rounds} rounds"
    print(f"{compare(arguments.batch_sizes, arguments.rounds, peers)}\n\n{markdown_list(where)}")


if __name__ == "__main__":
    main()
