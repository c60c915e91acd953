"""Speed and memory of fine-tuning: adapters against PEFT and against full training, packed rows against padded ones.

python -m benchmarking.finetune.bench_finetune --data train.jsonl

All on the CPU in float32 unless ``--precision`` says otherwise; the implementations take turns, step by step, in one
process. Times are CPU seconds, so keep one thread. Memory is measured in fresh processes: the rise of the resident set
from before the model is built.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from benchmarking.finetune.chat_rows import build_row_steps
from benchmarking.finetune.lora_steps import BUILDERS, METHOD_OF_PEFT, PEFT
from benchmarking.harness import (
    INSTALL_HINT,
    MEBIBYTE,
    SPEEDUP_COLUMN,
    Benchmark,
    Report,
    Settings,
    Table,
    compare,
    describe_model,
    is_installed,
    main,
    run_in_fresh_process,
)
from benchmarking.implementations.training import METHOD_OF_OURS, OURS, TrainCase, build_ours
from config.bench.training import BenchShape
from config.finetune.lora import LoraConfig
from profiling.memory import PeakGrowth, keep_freed_memory, release_freed_memory, resident_bytes

RANK = 8
MEMORY_STEPS = 2
FULL, ADAPTER = "all weights", f"LoRA, rank {RANK}"


def build_shape(options: argparse.Namespace) -> BenchShape:
    """The model and batch of all measurements."""
    hidden = options.hidden
    return BenchShape(
        name=f"hidden {hidden}",
        batch_size=options.batch,
        hidden_size=hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=max(1, hidden // 64),
        num_key_value_heads=max(1, hidden // 128),
        head_dim=64,
        intermediate_size=3 * hidden,
        max_position_embeddings=options.length,
        vocab_size=options.vocab,
    )


def run(settings: Settings) -> Report:
    """Measure the three comparisons."""
    options = settings.options
    keep_freed_memory()
    shape = build_shape(options)
    adapter = LoraConfig(rank=RANK, alpha=2.0 * RANK)
    full = TrainCase(shape, options.precision, "cpu", settings.threads, seed=0)
    case = replace(full, adapter=adapter)
    parts: list[Table | str] = [_compare_with_full(full, case, settings)]
    facts = {
        "shape": f"{describe_model(shape)}, vocabulary {shape.vocab_size:,}; {shape.batch_size} sequences of "
        f"{shape.max_position_embeddings} tokens; {options.precision}",
        OURS: METHOD_OF_OURS,
    }
    if is_installed("peft") and is_installed("transformers"):
        parts.append(_compare_with_peft(case, settings))
        facts[PEFT] = METHOD_OF_PEFT
    else:
        facts[PEFT] = f"left out: peft or transformers is not installed; {INSTALL_HINT}"
    if options.data is not None:
        parts.append(compare_rows(options.data, shape, settings))
    return Report(parts, facts)


def _compare_with_full(full: TrainCase, case: TrainCase, settings: Settings) -> Table:
    steps = {FULL: build_ours(full).step, ADAPTER: build_ours(case).step}
    times = compare(steps, settings, label="adapter against all weights")
    rows = []
    for name in steps:
        speed = f"{full.shape.tokens / times.median(name):,.0f}"
        rows.append([name, times.format_ms(name), speed, _format_share(times.seconds, name)])
    return Table(["trained", "ms per step", "tok/s", "time over all weights"], rows)


def _format_share(seconds: Mapping[str, list[float]], name: str) -> str:
    ratios = sorted(own / whole for own, whole in zip(seconds[name], seconds[FULL], strict=True))
    return f"{ratios[len(ratios) // 2]:.2f}"


def _compare_with_peft(case: TrainCase, settings: Settings) -> Table:
    steps = {name: build(case).step for name, build in BUILDERS.items()}

    def check(losses: Mapping[str, torch.Tensor]) -> None:
        torch.testing.assert_close(losses[OURS], losses[PEFT], rtol=1e-2, atol=0.0, check_dtype=False)

    times = compare(steps, settings, label=f"rank {RANK}", check=check)
    del steps
    gc.collect()
    rows = []
    for name in BUILDERS:
        peak = run_in_fresh_process(_measure_peak, case, name, description=name, key="--batch")
        cells = times.speedup_cells(name, PEFT) if name != PEFT else ["1.00", "1.00"]
        speed = f"{case.shape.tokens / times.median(name):,.0f}"
        rows.append([name, times.format_ms(name), speed, *cells, f"{peak / MEBIBYTE:,.0f}"])
    return Table(["", "ms per step", "tok/s", "speed over peft", SPEEDUP_COLUMN, "peak memory, MiB"], rows)


def _measure_peak(case: TrainCase, name: str) -> int:
    """Rise of the resident set, in bytes, from before the model is built to its peak in some steps."""
    torch.set_num_threads(case.threads)
    tiny = case.shape.model_copy(
        update={"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "vocab_size": 64, "batch_size": 2}
    )
    # A first step of a tiny model allocates what libraries load at first use.
    BUILDERS[name](replace(case, shape=tiny)).step()
    release_freed_memory()
    before = resident_bytes()
    implementation = BUILDERS[name](case)
    release_freed_memory()
    # Building converts weights, which is no part of training: the peak begins with the model that was built.
    built, growth = resident_bytes() - before, PeakGrowth()
    for _ in range(MEMORY_STEPS):
        implementation.step()
    return built + growth.bytes()


def compare_rows(data: Path, shape: BenchShape, settings: Settings) -> Table:
    """Compare full training on packed and on padded rows of the same conversations."""
    implementations = build_row_steps(data, shape)
    times = compare({name: item.step for name, item in implementations.items()}, settings, label="rows")
    speeds = {
        name: sum(item.tokens_of_steps[settings.warmup :]) / sum(times.seconds[name])
        for name, item in implementations.items()
    }
    rows = []
    for name, item in implementations.items():
        ratio = f"{speeds[name] / speeds['padded']:.2f}"
        rows.append([name, f"{item.padding_share:.0%}", times.format_ms(name), f"{speeds[name]:,.0f}", ratio])
    return Table(["rows", "padding", "ms per step", "tok/s without padding", "over padded"], rows)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, help="JSON lines with question and answer, for packed against padded rows")
    parser.add_argument("--hidden", type=int, default=512, help="hidden size; default: 512")
    parser.add_argument("--layers", type=int, default=4, help="default: 4")
    parser.add_argument("--vocab", type=int, default=8192, help="tokens of the vocabulary; default: 8192")
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence; default: 256")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a step; default: 4")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32", help="default: float32")


def check_arguments(options: argparse.Namespace) -> str | None:
    """Return an error message for options that are out of range."""
    for name in ("hidden", "layers", "vocab", "length", "batch"):
        if getattr(options, name) < 1:
            return f"--{name} {getattr(options, name)} must be at least 1"
    if options.data is not None and not options.data.is_file():
        return f"--data {options.data}: there is no such file"
    return None


BENCHMARK = Benchmark(
    "Compare fine-tuning: LoRA with PEFT and with full training, packed rows with padded ones.",
    run,
    rounds=10,
    warmup=2,
    threads=1,
    clock="process",
    packages=("torch", "transformers", "peft"),
    add_arguments=add_arguments,
    check_arguments=check_arguments,
)

if __name__ == "__main__":
    raise SystemExit(main(BENCHMARK))
