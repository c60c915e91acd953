"""Decoding speed, forwards and memory over a grid of strategies, block lengths, caches and batch sizes.

Speed is measured in one process, one call of each cell in turn. Forwards and tokens per forward are counted
in a call that is not timed; peak memory in a fresh process for each cell, because allocators keep freed memory.

Shapes: P tokens of a prompt, N new positions of a request.
"""

from __future__ import annotations

import functools
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarking.harness import (
    MEBIBYTE,
    Comparison,
    check_installed,
    collect_environment,
    compare,
    describe_model,
    make_report,
    make_table,
    prepare_output_file,
    run_in_fresh_process,
)
from benchmarking.implementations.peers import build_autoregressive_call, convert_to_qwen3
from config.bench.inference import BenchCell, BenchInferConfig, BenchInferSection, BenchModel
from config.generation import GenerationConfig
from config.model import ModelConfig
from config.training.runtime import AttentionBackend
from diffusionlm.checkpoints.huggingface import DTYPES, load_configured_model
from diffusionlm.checkpoints.model_files import load_tokenizer
from diffusionlm.inference.generate import generate
from diffusionlm.inference.settings import resolve_settings
from diffusionlm.models.init import initial_std, initial_value
from diffusionlm.models.transformer import Transformer
from files.atomic import write_text_atomic
from files.terminal_text import print_message
from files.usage_error import prefix_errors
from logger.pages import Page, Table
from profiling.cores import usable_cores
from profiling.memory import PeakGrowth, release_freed_memory
from profiling.torch_setup import select_device, select_dtype

PEER = "transformers, next tokens"
WARMUP_TOKENS = 4
"""New tokens of the call before memory is measured, in which libraries allocate what they load at first use."""

Prompts = list[list[int]]

METHOD = """\
A call decodes the whole batch; the cells take turns, call by call, in one process. \
Latency: of a call, median [quartiles]. tok/s: new tokens of all requests by the median call; forwards/s likewise. \
tok/forward: new tokens of a request by the forwards that it took part in, mean over requests; the forwards of the \
prompt and of caches are included. Over the first: speed over that of the first row of the batch size, median and \
quartiles of the ratios within a round; over transformers: over greedy decoding of the same weights as a causal Qwen3, \
with its KV cache, one token per forward. \
Peak: in a fresh process, the rise of the resident set (on CUDA, of allocated memory) in one call above the loaded \
model."""


@dataclass(frozen=True)
class DecodingCounts:
    """The work of a cell, independent of time."""

    forwards: int
    """Forwards of the model for the batch."""
    new_tokens: int
    """New tokens of all requests, without stop tokens."""
    request_forwards: tuple[int, ...]
    """Forwards that each request took part in."""
    tokens_per_forward: float
    """Mean over requests."""


@dataclass(frozen=True)
class CellResult:
    """The measurements of a cell."""

    cell: BenchCell
    counts: DecodingCounts
    times: Comparison
    """Of all cells, and of the peer."""
    peak_bytes: int | None

    @property
    def latency(self) -> float:
        """Seconds of the median call."""
        return self.times.median(self.cell.label)

    @property
    def latency_quartiles(self) -> list[float]:
        return statistics.quantiles(self.times.seconds[self.cell.label], n=4, method="inclusive")

    def speed_over(self, label: str) -> str:
        """Speed over another call, within rounds."""
        return "1" if label == self.cell.label else self.times.format_speedup(self.cell.label, label)

    def to_json(self) -> dict[str, Any]:
        """All measurements, and the rates that follow from them."""
        generation = self.cell.generation
        return {
            "strategy": self.cell.strategy,
            "batch_size": self.cell.batch_size,
            "block_length": generation.block_length,
            "cache": generation.cache,
            "generation": generation.model_dump(mode="json", exclude_none=True),
            **vars(self.counts),
            "seconds": self.times.seconds[self.cell.label],
            "latency_quartiles": self.latency_quartiles,
            "tokens_per_second": self.counts.new_tokens / self.latency,
            "forwards_per_second": self.counts.forwards / self.latency,
            "peak_bytes": self.peak_bytes,
        }


def build_model(config: BenchModel) -> Transformer:
    """Load the model of a directory, or build random weights of a shape; sets the number of threads.

    Raises:
        ValueError: the device or the model does not exist.
    """
    torch.set_num_threads(config.threads or usable_cores())
    if config.path is not None:
        return load_configured_model(config)
    assert config.shape is not None
    device = select_device(config.device, "model.device")
    shape = config.shape.to_model_config()
    model = random_model(shape, config.seed, attention_backend=config.attention_backend, device=device)
    model.uses_cuda_graphs = config.cuda_graphs == "auto"
    return model.to(DTYPES[select_dtype(config.dtype, device)])


@torch.no_grad()
def random_model(
    config: ModelConfig,
    seed: int,
    *,
    attention_backend: AttentionBackend = "auto",
    device: torch.device | str = "cpu",
) -> Transformer:
    """Build a model with random weights in float32, drawn on the device: a CPU takes a minute for four billion.

    Projections that are zero at the start of training are random as well, so that the tokens depend on every block and
    on attention.
    """
    with torch.device(device):
        model = Transformer(config, attention_backend=attention_backend)
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.copy_(initial_value(name, parameter.shape, config, seed))
        else:
            parameter.normal_(std=initial_std(name, parameter.shape, config), generator=generator)
    return model.eval()


def random_prompts(config: ModelConfig, length: int, batch_size: int, seed: int) -> Prompts:
    """Random token ids without the mask token; a larger batch begins with the prompts of a smaller one."""
    mask = config.vocab_size if config.mask_token_id is None else config.mask_token_id
    prompts = [
        np.random.default_rng([seed, index]).integers(0, config.vocab_size - 1, length) for index in range(batch_size)
    ]
    return [(tokens_P + (tokens_P >= mask)).tolist() for tokens_P in prompts]


def read_prompts(config: BenchInferConfig, model: ModelConfig, batch_size: int) -> Prompts:
    """The prompts of a batch: those of the file, or random ones.

    Raises:
        ValueError: the file cannot be read, or has a line without a prompt; names it.
    """
    path = config.bench.prompts_file
    if path is None:
        return random_prompts(model, config.bench.prompt_length, batch_size, config.bench.seed)
    assert config.model.path is not None, "checked by the config"
    tokenizer = load_tokenizer(config.model.path)
    try:
        texts = [json.loads(line)["prompt"] for line in path.read_text(encoding="utf-8").splitlines()]
        prompts = [tokenizer.encode(text) for text in texts]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f'bench.prompts_file = {path}: {error}: write lines of {{"prompt": TEXT}}') from None
    if not prompts:
        raise ValueError(f"bench.prompts_file = {path} is empty: write a prompt in each line")
    return [prompts[index % len(prompts)] for index in range(batch_size)]


def _seeds(bench: BenchInferSection, batch_size: int) -> list[int]:
    return list(range(bench.seed, bench.seed + batch_size))


def count(model: Transformer, prompts: Prompts, generation: GenerationConfig, seeds: Sequence[int]) -> DecodingCounts:
    """Decode once without timing, and count forwards and tokens; without CUDA graphs, whose replays no hook sees."""
    forwards: list[None] = []
    hook = model.register_forward_hook(lambda *_: forwards.append(None))
    uses_cuda_graphs, model.uses_cuda_graphs = model.uses_cuda_graphs, False
    try:
        results = generate(model, prompts, generation, seeds)
    finally:
        hook.remove()
        model.uses_cuda_graphs = uses_cuda_graphs
    return DecodingCounts(
        forwards=len(forwards),
        new_tokens=sum(len(result.token_ids) for result in results),
        request_forwards=tuple(result.num_forwards for result in results),
        tokens_per_forward=statistics.fmean(result.tokens_per_forward for result in results),
    )


def measure_peak_in_process(config: BenchInferConfig, cell: BenchCell) -> int:
    """Measure the peak memory of one call in bytes above the loaded model; this must be a fresh process."""
    model = build_model(config.model)
    prompts = read_prompts(config, model.config, cell.batch_size)
    generate(model, prompts[:1], cell.generation.model_copy(update={"max_new_tokens": WARMUP_TOKENS}))
    release_freed_memory()
    peak = PeakGrowth(model.lm_head.weight.device.type)
    generate(model, prompts, cell.generation, _seeds(config.bench, cell.batch_size))
    return peak.bytes()


def bench_infer(config: BenchInferConfig) -> Page:
    """Measure all cells; progress goes to stderr, JSON to the output file.

    Raises:
        ValueError: a model or a device does not exist, or the model cannot decode a cell; names the cell.
    """
    path = prepare_output_file(config.output)
    check_installed(config.bench.peers)
    model = build_model(config.model)
    cells = _with_model_defaults(config.cells(), model.config)
    facts = _describe_conditions(config, model)
    bench = config.bench
    prompts = {size: read_prompts(config, model.config, size) for size in config.grid.batch_sizes}
    counts, calls = {}, dict[str, Callable[[], object]]()
    for number, cell in enumerate(cells, 1):
        print_message(f"counting {number}/{len(cells)}: {cell.label}")
        arguments = (model, prompts[cell.batch_size], cell.generation, _seeds(config.bench, cell.batch_size))
        with prefix_errors(f'cell "{cell.label}"'):
            counts[cell.label] = count(*arguments)
        # A call returns Python numbers, so the device is done when it returns.
        calls[cell.label] = functools.partial(generate, *arguments)
    peers = dict[str, int]()
    """Label -> new tokens of a call."""
    if config.bench.peers:
        qwen3 = convert_to_qwen3(model)
        for size, batch in prompts.items():
            calls[_peer_label(size)] = build_autoregressive_call(qwen3, batch, config.bench.new_tokens)
            peers[_peer_label(size)] = size * config.bench.new_tokens
    times = compare(calls, rounds=bench.rounds, warmup=bench.warmup, label="decoding")
    peaks: list[int | None] = [None] * len(cells)
    for index, cell in enumerate(cells if config.bench.memory else []):
        print_message(f"memory {index + 1}/{len(cells)}: {cell.label}")
        peaks[index] = run_in_fresh_process(
            measure_peak_in_process, config, cell, description=f'"{cell.label}"', key="grid.batch_sizes"
        )
    results = [CellResult(cell, counts[cell.label], times, peak) for cell, peak in zip(cells, peaks, strict=True)]
    facts |= {label: f"{tokens / times.median(label):,.1f} tok/s" for label, tokens in peers.items()}
    if path is not None:
        record = {
            "config": config.model_dump(mode="json", exclude_none=True),
            "environment": facts,
            "cells": [result.to_json() for result in results],
        }
        write_text_atomic(path, json.dumps(record, indent=2) + "\n")
    return make_report("Decoding", [build_table(results), METHOD], facts)


def _peer_label(batch_size: int) -> str:
    return f"{PEER}, batch {batch_size}"


def _with_model_defaults(cells: Sequence[BenchCell], model: ModelConfig) -> list[BenchCell]:
    """Fill in the generation defaults of the model family.

    Raises:
        ValueError: the model cannot decode a cell.
    """
    filled = []
    for cell in cells:
        with prefix_errors(f'cell "{cell.label}"'):
            generation = resolve_settings(cell.generation, model).config
        filled.append(cell.model_copy(update={"generation": generation}))
    return filled


def _describe_conditions(config: BenchInferConfig, model: Transformer) -> dict[str, str]:
    bench, shape = config.bench, model.config
    parameters = sum(parameter.numel() for parameter in model.parameters())
    source = bench.prompts_file or f"{bench.prompt_length} random tokens"
    return {
        "model": "random weights" if config.model.path is None else str(config.model.path),
        "shape": f"{describe_model(shape)}, vocabulary {shape.vocab_size:,}, {parameters:,} parameters, "
        f"{str(model.lm_head.weight.dtype).removeprefix('torch.')}",
        "requests": f"{source} and {bench.new_tokens} new tokens each",
        **collect_environment(
            threads=torch.get_num_threads(),
            packages=["torch"],
            rounds=bench.rounds,
            warmup=bench.warmup,
            device=model.lm_head.weight.device.type,
        ),
    }


def build_table(results: Sequence[CellResult]) -> Table:
    """One row per cell; that of memory only if it was measured."""
    first = {result.cell.batch_size: result.cell.label for result in reversed(results)}
    columns: dict[str, Callable[[CellResult], str]] = {
        "strategy": lambda result: result.cell.strategy,
        "block": lambda result: str(result.cell.generation.block_length or "all"),
        "cache": lambda result: str(result.cell.generation.cache),
        "batch": lambda result: str(result.cell.batch_size),
        "latency, s": lambda result: "{1:.3f} [{0:.3f}, {2:.3f}]".format(*result.latency_quartiles),
        "tok/s": lambda result: f"{result.counts.new_tokens / result.latency:,.1f}",
        "over the first": lambda result: result.speed_over(first[result.cell.batch_size]),
        "forwards": lambda result: f"{result.counts.forwards:,}",
        "forwards/s": lambda result: f"{result.counts.forwards / result.latency:,.1f}",
        "tok/forward": lambda result: f"{result.counts.tokens_per_forward:.2f}",
    }
    if _peer_label(results[0].cell.batch_size) in results[0].times.seconds:
        columns[f"over {PEER}"] = lambda result: result.speed_over(_peer_label(result.cell.batch_size))
    if results[0].peak_bytes is not None:
        columns["peak"] = lambda result: f"{(result.peak_bytes or 0) / MEBIBYTE:,.1f} MiB"
    return make_table(list(columns), [[cell(result) for cell in columns.values()] for result in results])
