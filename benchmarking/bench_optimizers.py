"""Muon against torch's, and Lion against torch's fused AdamW: the time of one optimizer step on the CPU.

    python -m benchmarking.bench_optimizers --threads 1

Both optimizers of a pair update equal matrices by equal gradients. Times are CPU time of the calling thread where
there is one thread, else wall time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from benchmarking.harness import (
    collect_environment,
    markdown_list,
    markdown_table,
    print_message,
    speedup,
    time_in_turns,
)
from diffusionlm.optim.lion import Lion
from diffusionlm.optim.muon import Muon
from profiling.cores import usable_cores

Parameters = list[nn.Parameter]
Step = Callable[[], object]


@dataclass(frozen=True)
class OptimizerCase:
    """Matrices: how many of each shape."""

    name: str
    shapes: tuple[tuple[int, int, int], ...]
    """Number, rows, columns."""


CASES = (
    OptimizerCase("quickstart", ((16, 128, 128), (8, 384, 128), (4, 128, 384))),
    OptimizerCase("4 layers of 512", ((16, 512, 512), (8, 1408, 512), (4, 512, 1408))),
    OptimizerCase("64 experts of 256 x 64", ((128, 64, 256), (64, 256, 64))),
)


def make_parameters(case: OptimizerCase) -> Parameters:
    """Random matrices with gradients, the same at each call."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for count, rows, columns in case.shapes:
        for _ in range(count):
            parameter = nn.Parameter(torch.randn(rows, columns, generator=generator))
            parameter.grad = torch.randn(rows, columns, generator=generator)
            made.append(parameter)
    return made


def build_steps(kind: str, ours: Parameters, theirs: Parameters) -> tuple[Step, Step]:
    """One step of each."""
    one: torch.optim.Optimizer
    other: torch.optim.Optimizer
    if kind == "Muon":
        one = Muon(ours, lr=1e-3, momentum=0.95, weight_decay=0.1)
        other = torch.optim.Muon(theirs, lr=1e-3, momentum=0.95, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    else:
        one = Lion(ours, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
        other = torch.optim.AdamW(theirs, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1, fused=True)
    return one.step, other.step


def bench_optimizers(cases: Sequence[OptimizerCase], *, rounds: int, warmup: int, clock: Callable[[], float]) -> str:
    """Markdown table, one step of each in turn, and how far Muon's weights are from torch's after all of them."""
    rows = []
    for kind, their_name in (("Muon", "torch.optim.Muon"), ("Lion", "torch.optim.AdamW")):
        for case in cases:
            print_message(f"{kind}, {case.name}")
            ours, theirs = make_parameters(case), make_parameters(case)
            one, other = build_steps(kind, ours, theirs)
            seconds = time_in_turns({"ours": one, "theirs": other}, rounds=rounds, warmup=warmup, clock=clock)
            times = [f"{1e3 * statistics.median(each):.2f}" for each in seconds.values()]
            ratio = speedup(seconds["ours"], seconds["theirs"]).format_ratio()
            apart = max(float((a - b).detach().abs().max()) for a, b in zip(ours, theirs, strict=True))
            rows.append(
                [kind, case.name, times[0], their_name, times[1], ratio, f"{apart:g}" if kind == "Muon" else "-"]
            )
    header = ["ours", "matrices", "ours ms", "theirs", "theirs ms", "speed over theirs [quartiles]", "weights apart"]
    return markdown_table(header, rows)


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description="Compare optimizer steps with torch's.", allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=20, help="measured steps of each (default: 20, at least 2)")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="CPU threads (default: all usable cores)")
    arguments = parser.parse_args()
    if arguments.rounds < 2 or arguments.threads < 1:
        parser.error("--rounds must be at least 2 and --threads at least 1")
    torch.set_num_threads(arguments.threads)
    clock = time.thread_time if arguments.threads == 1 else time.perf_counter
    table = bench_optimizers(CASES, rounds=arguments.rounds, warmup=3, clock=clock)
    print(f"{table}\n\n{markdown_list(collect_environment(threads=arguments.threads, packages=['torch']))}")


if __name__ == "__main__":
    main()
