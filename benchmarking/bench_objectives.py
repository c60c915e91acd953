"""Cost of a training step by objective: block diffusion and next-token prediction beside masked diffusion.

python -m benchmarking.bench_objectives
"""

from __future__ import annotations

import argparse
import statistics

import torch

from benchmarking.harness import (
    collect_environment,
    markdown_list,
    markdown_table,
    print_message,
    speedup,
    time_in_turns,
)
from benchmarking.implementations.training import TrainCase, build_ours
from config.bench_train import BenchShape, Precision
from config.objective import BlockDiffusionConfig, MaskedDiffusionConfig, NextTokenConfig, ObjectiveConfig
from profiling.cores import usable_cores

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


def report(*, rounds: int, warmup: int, threads: int, device: str) -> str:
    """Markdown table of the median step of each objective, one step of each in turn."""
    rows = []
    for precision in PRECISIONS:
        print_message(f"{precision}: {rounds} rounds")
        case = TrainCase(SHAPE, precision, device, threads, seed=0)
        implementations = {name: build_ours(case, objective).step for name, objective in OBJECTIVES.items()}
        seconds = time_in_turns(implementations, rounds=rounds, warmup=warmup)
        for name, times in seconds.items():
            # How many times as long as the baseline: the speed of the baseline over that of this one.
            cost = speedup(seconds[BASELINE], times)
            step = statistics.median(times)
            rows.append([name, precision, f"{1e3 * step:.1f}", f"{case.shape.tokens / step:,.0f}", cost.format_ratio()])
    header = ["objective", "precision", "ms a step", "tokens/s", "times masked diffusion [quartiles]"]
    return markdown_table(header, rows)


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description="Compare the cost of training objectives.", allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=15, help="measured steps of each (default: 15, at least 2)")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="CPU threads (default: all usable cores)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = parser.parse_args()
    if arguments.rounds < 2 or arguments.threads < 1:
        parser.error("--rounds must be at least 2 and --threads at least 1")
    torch.set_num_threads(arguments.threads)
    where = collect_environment(threads=arguments.threads, packages=["torch"])
    where["shape"] = f"{SHAPE.tokens} tokens a step in rows of {SHAPE.max_position_embeddings}, 4 layers, width 256"
    print(report(rounds=arguments.rounds, warmup=2, threads=arguments.threads, device=arguments.device))
    print(f"\n{markdown_list(where)}")


if __name__ == "__main__":
    main()
