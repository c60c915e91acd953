"""Decoding speed, forwards and memory over a grid of policies, block lengths, caches and batch sizes.

Speed is measured in one process, one call of each cell in turn. Forwards, tokens per forward and mask ratio are counted
in a call that is not timed; peak memory in a fresh process for each cell, since allocators keep what they once had.

Shapes: P tokens of a prompt, N new positions of a request.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarking.harness import (
    collect_environment,
    markdown_list,
    markdown_table,
    print_message,
    run_in_fresh_process,
    speedup,
    time_in_turns,
)
from config.bench_infer import BenchCell, BenchInferConfig, BenchInferSection, BenchModel, BenchValidationSection
from config.eval import EvalConfig, EvalDataConfig, NelboConfig
from config.generation import GenerationConfig
from config.infer import InferModelConfig
from config.model import ModelConfig
from config.runtime import AttentionBackend
from diffusionlm.checkpoints.huggingface import DTYPES, load_configured_model, load_tokenizer
from diffusionlm.evaluation.text_likelihood import evaluate_likelihood
from diffusionlm.inference.blocks import block_causal_length
from diffusionlm.inference.generate import DecodingStep, Generation, generate
from diffusionlm.inference.settings import fill_defaults
from diffusionlm.models.init import OUTPUT_PROJECTIONS, init_weights
from diffusionlm.models.transformer import Transformer
from files.atomic import write_text_atomic
from profiling.cores import usable_cores
from profiling.memory import PeakGrowth, release_freed_memory

MEBIBYTE = 1 << 20
WARM_UP_TOKENS = 4
"""Of the call before memory is measured, in which libraries load what they load at first use."""

Prompts = list[list[int]]

METHOD = """\
A call decodes the whole batch; the cells take turns, call by call, in one process. \
Latency: of a call, median [quartiles]. tok/s: new tokens of all requests by the median call; forwards/s likewise. \
tok/forward: new tokens of a request by the forwards that it took part in, the mean over requests; the forwards of the \
prompt and of caches are among them. Mask ratio: how much of its current block is masked when a forward reads it, the \
mean over forwards and requests. Over the first: speed over that of the batch size's first row, median and quartiles \
of the ratios within a round. \
Peak: in a fresh process, how far the resident set (on CUDA, allocated memory) rises in one call above what it was \
with the model loaded."""


@dataclass(frozen=True)
class DecodingCounts:
    """What a cell does, whatever the time that it takes."""

    forwards: int
    """Calls of the model for the batch."""
    new_tokens: int
    """Of all requests, without stop tokens."""
    request_forwards: tuple[int, ...]
    """Forwards that each request took part in."""
    tokens_per_forward: float
    """Mean over requests."""
    mask_ratio: float
    """Mean share of masked positions among those of the current block, before each forward of each request."""


@dataclass(frozen=True)
class CellResult:
    """A cell as measured."""

    cell: BenchCell
    counts: DecodingCounts
    seconds: list[float]
    speed_over_first: str
    """Speed over the first cell of the batch size, within rounds."""
    peak_bytes: int | None
    bits_per_byte: float | None
    """Bound on those of the validation text; None: not asked for."""

    @property
    def latency(self) -> float:
        """The median call in seconds."""
        return statistics.median(self.seconds)

    def to_json(self) -> dict[str, Any]:
        """All of it, with what follows from it."""
        generation = self.cell.generation
        return {
            "policy": self.cell.policy,
            "batch_size": self.cell.batch_size,
            "block_length": generation.block_length,
            "cache": generation.cache,
            "generation": generation.model_dump(mode="json", exclude_none=True),
            "forwards": self.counts.forwards,
            "new_tokens": self.counts.new_tokens,
            "request_forwards": list(self.counts.request_forwards),
            "tokens_per_forward": self.counts.tokens_per_forward,
            "mask_ratio": self.counts.mask_ratio,
            "seconds": self.seconds,
            "latency_quartiles": _quartiles(self.seconds),
            "tokens_per_second": self.counts.new_tokens / self.latency,
            "forwards_per_second": self.counts.forwards / self.latency,
            "peak_bytes": self.peak_bytes,
            "bits_per_byte_bound": self.bits_per_byte,
        }


@dataclass
class MaskRatioRecorder:
    """Notes before each forward how much of each request's current block is masked."""

    prompt_lengths: Sequence[int]
    new_tokens: int
    block_length: int | None
    """None: one block."""
    is_block_causal: bool
    """Blocks are counted from the start of the text, else from the first new position."""
    shares: list[list[float]] = field(init=False)
    """Of each request, one for each forward from the first on."""

    def __post_init__(self) -> None:
        self.shares = [[1.0] for _ in self.prompt_lengths]

    def __call__(self, step: DecodingStep) -> None:
        for shares, prompt_length, canvas in zip(self.shares, self.prompt_lengths, step.canvases, strict=True):
            is_masked = canvas.is_masked[prompt_length:]
            # Positions that a growing canvas does not have yet are masked, too.
            missing = max(0, self.new_tokens - len(is_masked))
            shares.append(self._share(np.array([*is_masked, *[True] * missing]), prompt_length))

    def _share(self, is_masked_N: NDArray[np.bool_], prompt_length: int) -> float:
        if not is_masked_N.any():
            return 0.0
        places_N = np.arange(len(is_masked_N)) + (prompt_length if self.is_block_causal else 0)
        blocks_N = places_N // (self.block_length or len(is_masked_N))
        return float(is_masked_N[blocks_N == blocks_N[is_masked_N.argmax()]].mean())

    def mean(self, done: Sequence[Generation]) -> float:
        """Over the forwards that each request took part in."""
        read = [share for shares, one in zip(self.shares, done, strict=True) for share in shares[: one.num_forwards]]
        return statistics.fmean(read)


def build_model(config: BenchModel) -> Transformer:
    """The model of a directory, or random weights of a shape, with the number of threads set.

    Raises:
        ValueError: a device or a model that is not there.
    """
    torch.set_num_threads(config.threads or usable_cores())
    if config.path is not None:
        return load_configured_model(config)
    assert config.shape is not None
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError('model.device = "cuda", but torch finds no CUDA device here: use "cpu" or "auto"')
    device = "cuda" if torch.cuda.is_available() and config.device != "cpu" else "cpu"
    model = random_model(config.shape.to_model_config(), config.seed, attention_backend=config.attention_backend)
    return model.to(device, DTYPES[config.dtype])


def random_model(config: ModelConfig, seed: int, *, attention_backend: AttentionBackend = "auto") -> Transformer:
    """Random weights in fp32 on the CPU, those too that are zero at the start of training: every block does something,
    and the tokens depend on what attention sees."""
    model = Transformer(config, attention_backend=attention_backend)
    init_weights(model, seed)
    rng = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith(OUTPUT_PROJECTIONS):
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5, generator=rng)
    return model.eval()


def random_prompts(config: ModelConfig, length: int, batch_size: int, seed: int) -> Prompts:
    """Random token ids without the mask token; the same prompts begin a larger batch."""
    mask = config.vocab_size if config.mask_token_id is None else config.mask_token_id
    drawn = [
        np.random.default_rng([seed, index]).integers(0, config.vocab_size - 1, length) for index in range(batch_size)
    ]
    return [(tokens_P + (tokens_P >= mask)).tolist() for tokens_P in drawn]


def build_prompts(config: BenchInferConfig, model: ModelConfig, batch_size: int) -> Prompts:
    """The batch's prompts: texts of the config in turn, or random tokens."""
    if not config.bench.prompts:
        return random_prompts(model, config.bench.prompt_length, batch_size, config.bench.seed)
    assert config.model.path is not None
    tokenizer = load_tokenizer(config.model.path)
    texts = [[*model.prefix_ids, *tokenizer.encode(text)] for text in config.bench.prompts]
    return [texts[index % len(texts)] for index in range(batch_size)]


def _seeds(bench: BenchInferSection, batch_size: int) -> list[int]:
    return list(range(bench.seed, bench.seed + batch_size))


def count(model: Transformer, prompts: Prompts, generation: GenerationConfig, seeds: Sequence[int]) -> DecodingCounts:
    """Decode once, and count."""
    filled = fill_defaults(generation, model.config)
    causal_length = block_causal_length(filled, model.config)
    assert filled.max_new_tokens is not None
    watch = MaskRatioRecorder(
        [len(prompt) for prompt in prompts],
        filled.max_new_tokens,
        filled.block_length if causal_length is None else causal_length,
        is_block_causal=causal_length is not None,
    )
    calls: list[None] = []
    counting = model.register_forward_hook(lambda *_: calls.append(None))
    try:
        done = generate(model, prompts, generation, seeds, watch)
    finally:
        counting.remove()
    return DecodingCounts(
        forwards=len(calls),
        new_tokens=sum(len(one.token_ids) for one in done),
        request_forwards=tuple(one.num_forwards for one in done),
        tokens_per_forward=statistics.fmean(one.tokens_per_forward for one in done),
        mask_ratio=watch.mean(done),
    )


def measure_peak(config: BenchInferConfig, cell: BenchCell) -> int:
    """Peak memory of one call in bytes, above the loaded model, measured in a process of its own.

    Raises:
        ValueError: the process was killed.
    """
    return run_in_fresh_process(
        _measure_peak_in_process, config, cell, description=f'"{cell.label}"', key="grid.batch_sizes"
    )


def _measure_peak_in_process(config: BenchInferConfig, cell: BenchCell) -> int:
    model = build_model(config.model)
    prompts = build_prompts(config, model.config, cell.batch_size)
    generate(model, prompts[:1], cell.generation.model_copy(update={"max_new_tokens": WARM_UP_TOKENS}))
    release_freed_memory()
    peak = PeakGrowth(model.lm_head.weight.device.type)
    generate(model, prompts, cell.generation, _seeds(config.bench, cell.batch_size))
    return peak.bytes()


def measure_bounds(config: BenchModel, validation: BenchValidationSection, cells: Sequence[BenchCell]) -> list[float]:
    """Bound on the bits per byte of the validation text for each cell, measured once for each way of attention."""
    data = EvalDataConfig(**{name: getattr(validation, name) for name in EvalDataConfig.model_fields})
    loaded = InferModelConfig(**{name: getattr(config, name) for name in InferModelConfig.model_fields})
    done: dict[tuple[str | None, int | None], float] = {}
    bounds = []
    for cell in cells:
        attention = cell.generation.attention
        is_bidirectional = attention == "bidirectional"
        length = None if is_bidirectional else cell.generation.block_length
        if (attention, length) not in done:
            print_message(f"bound, {'bidirectional' if is_bidirectional else f'blocks of {length}'}")
            likelihood = NelboConfig(
                block_length=length,
                bidirectional=is_bidirectional,
                num_mc_samples=validation.num_mc_samples,
                batch_size=validation.batch_size,
            )
            result = evaluate_likelihood(EvalConfig(model=loaded, data=data, likelihood=likelihood))
            done[(attention, length)] = result.bits_per_byte
        bounds.append(done[(attention, length)])
    return bounds


def bench_infer(config: BenchInferConfig) -> str:
    """Measure all cells; progress on stderr, JSON in the output file.

    Returns:
        The report in Markdown.

    Raises:
        ValueError: a model or a device that is not there, or a cell that the model cannot decode; names the cell.
    """
    path = config.output.path
    if path is not None:
        if path.is_dir():
            raise ValueError(f"output.path = {path} is a directory: name a file in it")
        path.parent.mkdir(parents=True, exist_ok=True)
    model = build_model(config.model)
    if config.model.path is not None and config.model.shape is not None:
        print_message(f"model: {config.model.path}; model.shape plays no part")
    cells = _with_model_defaults(config.cells(), model.config)
    where = _describe_conditions(config, model)
    prompts = {size: build_prompts(config, model.config, size) for size in config.grid.batch_sizes}
    counts, calls = [], {}
    for number, cell in enumerate(cells, 1):
        print_message(f"counting {number}/{len(cells)}: {cell.label}")
        counts.append(_count_cell(config, model, prompts[cell.batch_size], cell))
        calls[cell.label] = _build_decode_call(model, prompts[cell.batch_size], cell.generation, config.bench)

    def after_round(number: int, seconds: Mapping[str, float]) -> None:
        for count_, (label, value) in zip(counts, seconds.items(), strict=True):
            print_message(f"round {number}/{config.bench.rounds}: {label}: {count_.new_tokens / value:,.1f} tok/s")

    seconds = time_in_turns(calls, rounds=config.bench.rounds, warmup=config.bench.warmup, after_round=after_round)
    peaks: list[int | None] = [None] * len(cells)
    for index, cell in enumerate(cells if config.bench.memory else []):
        print_message(f"memory {index + 1}/{len(cells)}: {cell.label}")
        peaks[index] = measure_peak(config, cell)
    bounds: list[float | None] = [None] * len(cells)
    if config.validation is not None:
        bounds = [*measure_bounds(config.model, config.validation, cells)]
    results = [
        CellResult(
            cell,
            counts[index],
            seconds[cell.label],
            _speed_over_first(cells, index, seconds),
            peaks[index],
            bounds[index],
        )
        for index, cell in enumerate(cells)
    ]
    if path is not None:
        record = {
            "config": config.model_dump(mode="json", exclude_none=True),
            "environment": where,
            "cells": [result.to_json() for result in results],
        }
        write_text_atomic(path, json.dumps(record, indent=2) + "\n")
    return report(results, where)


def _with_model_defaults(cells: Sequence[BenchCell], model: ModelConfig) -> list[BenchCell]:
    """The cells with the defaults of the model's family.

    Raises:
        ValueError: what the model cannot decode.
    """
    filled = []
    for cell in cells:
        try:
            generation = fill_defaults(cell.generation, model)
        except ValueError as error:
            raise ValueError(f'cell "{cell.label}": {error}') from None
        filled.append(cell.model_copy(update={"generation": generation}))
    return filled


def _count_cell(config: BenchInferConfig, model: Transformer, prompts: Prompts, cell: BenchCell) -> DecodingCounts:
    try:
        return count(model, prompts, cell.generation, _seeds(config.bench, cell.batch_size))
    except ValueError as error:
        raise ValueError(f'cell "{cell.label}": {error}') from None


def _build_decode_call(
    model: Transformer, prompts: Prompts, generation: GenerationConfig, bench: BenchInferSection
) -> Callable[[], list[Generation]]:
    """A call of a cell; generations are lists of numbers, so that the device is done when it returns."""
    seeds = _seeds(bench, len(prompts))
    return lambda: generate(model, prompts, generation, seeds)


def _describe_conditions(config: BenchInferConfig, model: Transformer) -> dict[str, str]:
    """What the numbers need beside them."""
    is_cuda = model.lm_head.weight.is_cuda
    accelerator = torch.cuda.get_device_name() if is_cuda else None
    bench, shape = config.bench, model.config
    prompts = "texts" if bench.prompts else f"{bench.prompt_length} random tokens"
    where = {
        "model": "random weights" if config.model.path is None else str(config.model.path),
        "shape": f"{shape.num_hidden_layers} layers, hidden {shape.hidden_size}, {shape.num_attention_heads} heads "
        f"({shape.num_key_value_heads} of keys and values) of {shape.head_dim}, vocabulary {shape.vocab_size:,}, "
        f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters, {config.model.dtype}",
        "requests": f"{prompts} and {bench.new_tokens} new ones each",
        **collect_environment(threads=torch.get_num_threads(), packages=["torch"], accelerator=accelerator),
    }
    return where | {"rounds": f"{bench.rounds} after {bench.warmup} of warm-up"}


def _speed_over_first(cells: Sequence[BenchCell], index: int, seconds: Mapping[str, list[float]]) -> str:
    first = next(cell for cell in cells if cell.batch_size == cells[index].batch_size)
    if first is cells[index]:
        return "1"
    return speedup(seconds[cells[index].label], seconds[first.label]).format_ratio()


def _quartiles(seconds: Sequence[float]) -> list[float]:
    return statistics.quantiles(seconds, n=4, method="inclusive")


def report(results: Sequence[CellResult], where: Mapping[str, str]) -> str:
    """Table, method and conditions."""
    header = ["policy", "block", "cache", "batch", "latency, s", "tok/s", "over the first", "forwards", "forwards/s"]
    header += ["tok/forward", "mask ratio"]
    header += [] if results[0].peak_bytes is None else ["peak"]
    header += [] if results[0].bits_per_byte is None else ["bits per byte <="]
    rows = []
    for result in results:
        counts, generation = result.counts, result.cell.generation
        low, middle, high = _quartiles(result.seconds)
        row = [result.cell.policy, str(generation.block_length or "all"), str(generation.cache)]
        row += [str(result.cell.batch_size), f"{middle:.3f} [{low:.3f}, {high:.3f}]"]
        row += [f"{counts.new_tokens / result.latency:,.1f}", result.speed_over_first, f"{counts.forwards:,}"]
        row += [f"{counts.forwards / result.latency:,.1f}", f"{counts.tokens_per_forward:.2f}"]
        row += [f"{counts.mask_ratio:.2f}"]
        row += [] if result.peak_bytes is None else [f"{result.peak_bytes / MEBIBYTE:,.1f} MiB"]
        row += [] if result.bits_per_byte is None else [f"{result.bits_per_byte:.3f}"]
        rows.append(row)
    return "\n\n".join([markdown_table(header, rows), METHOD, markdown_list(where)])
