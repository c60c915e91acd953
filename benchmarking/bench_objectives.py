"""The cost of a training step by objective: block diffusion and next-token prediction against masked diffusion.

python -m benchmarking.bench_objectives
"""

from __future__ import annotations

import argparse

from benchmarking.harness import (
    Benchmark,
    Report,
    Settings,
    Table,
    compare,
    describe_accelerator,
    describe_model,
    main,
)
from benchmarking.implementations.training import TrainCase, build_ours
from config.bench.training import BenchShape, Precision
from config.training.objective import BlockDiffusionConfig, MaskedDiffusionConfig, NextTokenConfig, ObjectiveConfig

SHAPE = BenchShape(
    name="256 wide",
    batch_size=16,
    hidden_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=64,
    intermediate_size=704,
    max_position_embeddings=256,
    vocab_size=4096,
)
PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16")
BASELINE = "masked diffusion"

OBJECTIVES: dict[str, ObjectiveConfig] = {
    BASELINE: MaskedDiffusionConfig(),
    "next token": NextTokenConfig(),
    **{f"block diffusion, {length}": BlockDiffusionConfig(block_length=length) for length in (1, 4, 16, 64)},
}


def run(settings: Settings) -> Report:
    """Compare one step of each objective in both precisions."""
    device = settings.options.device
    rows = []
    for precision in PRECISIONS:
        case = TrainCase(SHAPE, precision, device, settings.threads, seed=0)
        steps = {name: build_ours(case, objective).step for name, objective in OBJECTIVES.items()}
        times = compare(steps, settings, label=precision)
        for name in steps:
            # The speedup of the baseline over an objective is the cost of that objective in baseline steps.
            cost = times.speedup(BASELINE, name).format_ratio()
            tokens_per_second = f"{SHAPE.tokens / times.median(name):,.0f}"
            rows.append([name, precision, times.format_ms(name), tokens_per_second, cost])
    header = ["objective", "precision", "ms per step", "tok/s", f"cost over {BASELINE} [quartiles]"]
    shape = f"{describe_model(SHAPE)}; {SHAPE.tokens} tokens per step in sequences of {SHAPE.max_position_embeddings}"
    return Report([Table(header, rows)], {"shape": shape, **describe_accelerator(device)})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")


BENCHMARK = Benchmark("Compare the cost of training objectives.", run, rounds=15, warmup=2, add_arguments=add_arguments)

if __name__ == "__main__":
    raise SystemExit(main(BENCHMARK))
