"""The error of the approximate KV caches of bidirectional decoding.

    python -m benchmarking.cache_error --model runs/quickstart

Each cache decodes the same prompts. Before every forward with a cache, the model computes the same canvas without one,
and the two distributions of every masked position of the block are compared. The committed tokens are those of the
cache, so that the errors of single forwards are measured on the canvases that the cache produces.

Shapes: N open positions of a forward, V vocabulary.
"""

from __future__ import annotations

import argparse
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from benchmarking.harness import Benchmark, Report, Settings, Table, main
from config.generation import GenerationConfig
from diffusionlm.checkpoints.huggingface import load_model
from diffusionlm.checkpoints.model_files import load_tokenizer
from diffusionlm.inference.decoder import PAGE_SIZE
from diffusionlm.inference.generate import decode
from diffusionlm.inference.model_runner import ModelRunner, ScheduledRequest, build_pattern, masked_position_logits
from diffusionlm.inference.requests import ActiveRequest, prepare_prompt
from diffusionlm.inference.sampling import BatchSampler, LogitRows
from diffusionlm.inference.settings import resolve_settings
from diffusionlm.models.cache import PagedCache
from diffusionlm.models.layers import compute_dtype
from diffusionlm.models.transformer import Transformer
from files.terminal_text import print_message

CACHES = ("prefix", "dual")


@dataclass(frozen=True)
class CacheErrors:
    """Errors of one cache, over all forwards."""

    kl: float
    """Mean KL divergence of the cached distribution from the exact one, in nats."""
    top1_agreement: float
    """Share of positions at which both have the same most probable token."""
    token_agreement: float
    """Share of generated tokens that decoding without a cache generates as well."""
    input_share: float
    """Positions that a forward computes, as a share of the canvas."""


@torch.inference_mode()
def measure_errors(model: Transformer, prompts: Sequence[Sequence[int]], config: GenerationConfig) -> CacheErrors:
    """Decode with the cache of ``config`` and compare each forward with one without a cache."""
    settings = resolve_settings(config, model.config)
    exact_settings = replace(settings, config=settings.config.model_copy(update={"cache": "none"}))
    prepared_requests = [prepare_prompt(settings, prompt, seed) for seed, prompt in enumerate(prompts)]
    requests = [ActiveRequest(request, settings) for request in prepared_requests]
    num_pages = [-(-len(request.tokens_L) // PAGE_SIZE) for request in requests]
    for request, (first, end) in zip(requests, pairwise(np.cumsum([0, *num_pages]).tolist()), strict=True):
        request.pages = [list(range(first, end))]
    weight = model.lm_head.weight
    cache = PagedCache(model.config, sum(num_pages), PAGE_SIZE, weight.device, compute_dtype(weight))
    run_forward, pattern = ModelRunner(model, cache), build_pattern(settings)
    forbidden_token_ids = torch.tensor(settings.forbidden_token_ids)
    sampler = BatchSampler(forbidden_token_ids.device)
    kl, same_top1, positions, input_share, forwards = 0.0, 0, 0, 0.0, 0
    while True:
        for request in requests:
            while not request.is_prepared:
                request.prepare_step()
        active = [request for request in requests if not request.is_done]
        if not active:
            break
        slices = [run_forward.input_slice(request) for request in active]
        for input_slice, request in zip(slices, active, strict=True):
            input_share += (input_slice.end - input_slice.start) / len(request.tokens_L)
        forwards += len(active)
        logits_NV = run_forward([ScheduledRequest(request, part) for request, part in zip(active, slices, strict=True)])
        canvases = [request.tokens_L[: part.num_visible] for request, part in zip(active, slices, strict=True)]
        exact_NV = masked_position_logits(
            model, canvases, [request.output_positions for request in active], [pattern] * len(active)
        )
        cached_NV, exact_NV = (
            logits.double().index_fill(1, forbidden_token_ids, float("-inf")).log_softmax(dim=1)
            for logits in (logits_NV, exact_NV)
        )
        kl += float((exact_NV.exp() * (exact_NV - cached_NV).nan_to_num()).sum())
        same_top1 += int((cached_NV.argmax(dim=1) == exact_NV.argmax(dim=1)).sum())
        positions += len(cached_NV)
        for request, predictions in zip(active, sampler.sample_predictions(LogitRows(logits_NV, active)), strict=True):
            if isinstance(predictions, ValueError):
                raise predictions
            request.commit(predictions)
    exact = decode(model, exact_settings, prepared_requests)
    agreement = [
        np.mean(request.tokens_L[request.answer_positions] == np.array(result.token_ids))
        for request, result in zip(requests, exact, strict=True)
    ]
    return CacheErrors(kl / positions, same_top1 / positions, float(np.mean(agreement)), input_share / forwards)


def read_prompts(options: argparse.Namespace, prefix_ids: Sequence[int]) -> list[list[int]]:
    """Cut the text of ``--data`` into prompts of ``--prompt-length`` tokens."""
    ids = load_tokenizer(options.model).encode(options.data.read_text(encoding="utf-8"))
    length = options.prompt_length
    prompts = [[*prefix_ids, *ids[start : start + length]] for start in range(0, len(ids) - length, length)]
    return prompts[: options.prompts]


def run(settings: Settings) -> Report:
    """Measure the errors of each cache at each block length."""
    options = settings.options
    model = load_model(options.model)
    prompts = read_prompts(options, model.config.prefix_ids)
    rows = []
    for block_length in options.block_lengths:
        for cache in CACHES:
            print_message(f"blocks of {block_length}, {cache}")
            config = GenerationConfig(
                attention="bidirectional",
                max_new_tokens=options.new_tokens,
                block_length=block_length,
                cache=cache,
                stop_token_ids=(),
            )
            errors = measure_errors(model, prompts, config)
            shares = (errors.top1_agreement, errors.token_agreement, errors.input_share)
            rows.append([str(block_length), cache, f"{errors.kl:.4f}", *(f"{share:.1%}" for share in shares)])
    header = ["block length", "cache", "KL, nats", "same top-1 token", "same tokens", "computed positions"]
    return Report([Table(header, rows)])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, help="a model directory or a run")
    parser.add_argument("--data", type=Path, default=Path(tokenize.__file__), help="text of the prompts")
    parser.add_argument("--prompts", type=int, default=16, help="number of prompts (default: 16)")
    parser.add_argument("--prompt-length", type=int, default=32, help="tokens of a prompt (default: 32)")
    parser.add_argument("--new-tokens", type=int, default=64, help="new tokens of each prompt (default: 64)")
    parser.add_argument("--block-lengths", type=int, nargs="+", default=[8, 16, 32], help="(default: 8 16 32)")


BENCHMARK = Benchmark("Compare cached decoding with exact decoding.", run, rounds=None, add_arguments=add_arguments)

if __name__ == "__main__":
    raise SystemExit(main(BENCHMARK))
