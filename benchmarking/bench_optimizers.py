"""Muon against torch's, and Lion against torch's fused AdamW: the time of one optimizer step on the CPU.

    python -m benchmarking.bench_optimizers --threads 1

Both optimizers of a pair update equal matrices with equal gradients. With one thread, times are CPU time of that
thread, else wall time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from benchmarking.harness import Benchmark, Report, Settings, Table, compare, main
from diffusionlm.optim.lion import Lion
from diffusionlm.optim.muon import Muon

Parameters = list[nn.Parameter]
Step = Callable[[], object]


@dataclass(frozen=True)
class OptimizerCase:
    """A set of matrices."""

    name: str
    shapes: tuple[tuple[int, int, int], ...]
    """Number, rows and columns of the matrices of each shape."""


CASES = (
    OptimizerCase("quickstart", ((16, 128, 128), (8, 384, 128), (4, 128, 384))),
    OptimizerCase("4 layers of 512", ((16, 512, 512), (8, 1408, 512), (4, 512, 1408))),
    OptimizerCase("64 experts of 256 x 64", ((128, 64, 256), (64, 256, 64))),
)


def make_parameters(case: OptimizerCase) -> Parameters:
    """Random matrices with gradients, the same at each call."""
    generator = torch.Generator().manual_seed(0)
    parameters = []
    for count, rows, columns in case.shapes:
        for _ in range(count):
            parameter = nn.Parameter(torch.randn(rows, columns, generator=generator))
            parameter.grad = torch.randn(rows, columns, generator=generator)
            parameters.append(parameter)
    return parameters


def build_steps(kind: str, ours: Parameters, theirs: Parameters) -> dict[str, Step]:
    """The optimizer step of ours and of torch's."""
    optimizer: torch.optim.Optimizer
    peer: torch.optim.Optimizer
    if kind == "Muon":
        optimizer = Muon(ours, lr=1e-3, momentum=0.95, weight_decay=0.1)
        peer = torch.optim.Muon(theirs, lr=1e-3, momentum=0.95, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    else:
        optimizer = Lion(ours, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
        peer = torch.optim.AdamW(theirs, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1, fused=True)
    return {"ours": optimizer.step, "theirs": peer.step}


def compare_optimizers(cases: Sequence[OptimizerCase], settings: Settings) -> Table:
    """Compare steps, and state how far Muon's weights are from torch's after all of them."""
    rows = []
    for kind, peer_name in (("Muon", "torch.optim.Muon"), ("Lion", "torch.optim.AdamW")):
        for case in cases:
            ours, theirs = make_parameters(case), make_parameters(case)
            times = compare(build_steps(kind, ours, theirs), settings, label=f"{kind}, {case.name}")
            ratio = times.speedup("ours", "theirs").format_ratio()
            difference = max(float((a - b).detach().abs().max()) for a, b in zip(ours, theirs, strict=True))
            cells = [kind, case.name, times.format_ms("ours"), peer_name, times.format_ms("theirs"), ratio]
            rows.append([*cells, f"{difference:g}" if kind == "Muon" else "-"])
    header = ["ours", "matrices", "ours ms", "theirs", "theirs ms", "speedup over theirs [quartiles]"]
    return Table([*header, "largest difference of weights"], rows)


def run(settings: Settings) -> Report:
    clocked = replace(settings, clock="thread") if settings.threads == 1 else settings
    return Report([compare_optimizers(CASES, clocked)])


BENCHMARK = Benchmark("Compare optimizer steps with torch's.", run)

if __name__ == "__main__":
    raise SystemExit(main(BENCHMARK))
