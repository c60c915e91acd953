"""How far the approximate caches of bidirectional decoding are from the model.

    python -m benchmarking.cache_error --model runs/quickstart

Texts are decoded with each cache; before every forward with it the model is asked once more without one, on the same
canvas, and the two distributions of every masked position of the block are compared. Tokens that are settled are those
of the cache, so that errors of one forward are seen and not only what comes of them.

Shapes: R open positions of a forward, V vocabulary.
"""

from __future__ import annotations

import argparse
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarking.harness import collect_environment, markdown_list, markdown_table, print_message
from config.generation import GenerationConfig
from diffusionlm.checkpoints.huggingface import load_model, load_tokenizer
from diffusionlm.inference.generate import generate, prepare_prompts
from diffusionlm.inference.model_runner import ModelRunner
from diffusionlm.inference.sampling import TokenSampler
from diffusionlm.inference.settings import fill_defaults
from diffusionlm.inference.strategies import build_strategy
from diffusionlm.models.transformer import Transformer
from profiling.cores import usable_cores

CACHES = ("prefix", "dual")


@dataclass(frozen=True)
class CacheErrors:
    """Of one cache, over all forwards."""

    kl: float
    """Mean divergence of the cached distribution from the model's, in nats."""
    same_best: float
    """Share of positions with the same most probable token."""
    same_tokens: float
    """Share of the answers' tokens that decoding without a cache gives, too."""
    read: float
    """Inputs that a forward reads, as a share of the text."""


@torch.inference_mode()
def measure(model: Transformer, prompts: Sequence[Sequence[int]], config: GenerationConfig) -> CacheErrors:
    """Decode with the config's cache and compare each forward with one that has none."""
    config = fill_defaults(config, model.config)
    strategy = build_strategy(config)
    requests = prepare_prompts(model, prompts, config)
    plain = ModelRunner(model, config.model_copy(update={"cache": "none"}), requests)
    cached = ModelRunner(model, config, requests)
    forbidden_token_ids = torch.tensor([model.config.mask_token])
    token_sampler = TokenSampler(config, strategy, forbidden_token_ids)
    kl, same, rows, read, forwards = 0.0, 0, 0, 0.0, 0
    while True:
        for request in requests:
            request.prepare_step(strategy)
        active = [request for request in requests if not request.is_done]
        if not active:
            break
        spans = [cached.input_slice(request) for request in active]
        read += sum(
            (input_slice.end - input_slice.start) / len(each.tokens_L)
            for input_slice, each in zip(spans, active, strict=True)
        )
        forwards += len(active)
        logits_NV = cached(active)
        ours_NV, true_NV = (
            each.double().index_fill(1, forbidden_token_ids, float("-inf")).log_softmax(dim=1)
            for each in (logits_NV, plain(active))
        )
        kl += float((true_NV.exp() * (true_NV - ours_NV).nan_to_num()).sum())
        same += int((ours_NV.argmax(dim=1) == true_NV.argmax(dim=1)).sum())
        rows += len(ours_NV)
        for request, predictions in zip(active, token_sampler.sample_predictions(logits_NV, active), strict=True):
            request.commit(predictions, strategy, ())
    right = generate(model, prompts, config.model_copy(update={"cache": "none"}))
    pairs = zip(requests, right, strict=True)
    agreement = [np.mean(request.tokens_L[request.new] == np.array(done.token_ids)) for request, done in pairs]
    return CacheErrors(kl / rows, same / rows, float(np.mean(agreement)), read / forwards)


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description="Compare cached decoding with the model.", allow_abbrev=False)
    parser.add_argument("--model", type=Path, required=True, help="a model directory or a run")
    parser.add_argument("--data", type=Path, default=Path(tokenize.__file__), help="text of the prompts")
    parser.add_argument("--prompts", type=int, default=16, help="how many (default: 16)")
    parser.add_argument("--prompt-length", type=int, default=32, help="tokens of each (default: 32)")
    parser.add_argument("--new-tokens", type=int, default=64, help="decoded for each (default: 64)")
    parser.add_argument("--block-lengths", type=int, nargs="+", default=[8, 16, 32], help="(default: 8 16 32)")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="CPU threads (default: all usable cores)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model, tokenizer = load_model(arguments.model), load_tokenizer(arguments.model)
    ids = tokenizer.encode(arguments.data.read_text(encoding="utf-8"))
    size = arguments.prompt_length
    prompts = [[*model.config.prefix_ids, *ids[start : start + size]] for start in range(0, len(ids) - size, size)]
    prompts = prompts[: arguments.prompts]
    lines = []
    for block_length in arguments.block_lengths:
        for cache in CACHES:
            print_message(f"blocks of {block_length}, {cache}")
            config = GenerationConfig(
                attention="bidirectional",
                max_new_tokens=arguments.new_tokens,
                block_length=block_length,
                cache=cache,  # type: ignore[arg-type]
                stop_token_ids=(),
            )
            found = measure(model, prompts, config)
            shares = [f"{100 * share:.1f} %" for share in (found.same_best, found.same_tokens, found.read)]
            lines.append([str(block_length), cache, f"{found.kl:.4f}", *shares])
    header = ["block length", "cache", "KL, nats", "same best token", "same answer", "inputs of a forward"]
    facts = collect_environment(threads=arguments.threads, packages=["torch"])
    print(f"{markdown_table(header, lines)}\n\n{markdown_list(facts)}")


if __name__ == "__main__":
    main()
