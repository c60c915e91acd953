"""The fused head and loss against other implementations of the same sum and gradients: time, memory, error.

    python -m benchmarking.bench_kernels

Without a GPU: vocabulary 32,768 in both precisions. With one: the head of a model of 1.7 B parameters and half of the
positions masked. Peers get all positions, with ``ignore_index`` at the visible ones, as they are commonly used; ours
gets the masked positions, and indexing them is part of its time.

Shapes: P positions, N masked positions (those in the loss), D hidden, V vocabulary.
"""

from __future__ import annotations

import argparse
import gc
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarking.harness import (
    MEBIBYTE,
    Clock,
    collect_environment,
    compare,
    is_installed,
    make_parser,
    make_report,
    make_table,
    run_benchmark,
    run_in_fresh_process,
)
from diffusionlm.kernels.cross_entropy import LossInputs, linear_cross_entropy
from files.terminal_text import print_message
from logger.pages import Page
from profiling.cores import usable_cores
from profiling.memory import PeakGrowth

OURS = "diffusionlm"
BASELINE = "full logits"
WARMUP = 2
IGNORE_INDEX = -100
"""Target of a position that is not in the loss."""
ERROR_POSITIONS = 256
"""Positions over which gradients are compared with those in float64."""


@dataclass(frozen=True)
class HeadCase:
    """The shape of a head and of its inputs."""

    positions: int
    masked: int
    """Positions in the loss, chosen at random."""
    width: int
    vocab: int
    dtype: torch.dtype
    """Dtype of hidden states and head."""
    device: str
    threads: int

    @property
    def teraflops(self) -> float:
        """Three matrix products over the masked positions, in 10^12 operations."""
        return 6e-12 * self.masked * self.width * self.vocab

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.masked:,} of {self.positions:,} x {self.width:,} x {self.vocab:,} {dtype}"


@dataclass(frozen=True)
class HeadInputs:
    """The tensors of a case."""

    hidden_PD: Tensor
    head_VD: Tensor
    targets_P: Tensor
    """`IGNORE_INDEX` at visible positions."""
    positions_N: Tensor


LossFunction = Callable[[HeadInputs], Tensor]
"""Sum of the losses of the masked positions, with gradient."""


def make_inputs(case: HeadCase) -> HeadInputs:
    """Random tensors, the same for all implementations; logits have a standard deviation of one."""
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(case.positions, case.width, generator=rng)
    head = torch.randn(case.vocab, case.width, generator=rng) / case.width**0.5
    targets = torch.randint(0, case.vocab, (case.positions,), generator=rng)
    order = torch.randperm(case.positions, generator=rng)
    targets[order[: case.positions - case.masked]] = IGNORE_INDEX
    positions = order[case.positions - case.masked :].sort().values
    hidden, head = (tensor.to(case.device, case.dtype).requires_grad_() for tensor in (hidden, head))
    return HeadInputs(hidden, head, targets.to(case.device), positions.to(case.device))


def fused_loss(inputs: HeadInputs) -> Tensor:
    """Our loss, on the masked positions only."""
    hidden = inputs.hidden_PD
    hidden_ND = hidden if len(inputs.positions_N) == len(hidden) else hidden[inputs.positions_N]
    targets_N = inputs.targets_P[inputs.positions_N]
    weights_N = torch.ones(targets_N.shape, device=targets_N.device)
    return linear_cross_entropy(hidden_ND, inputs.head_VD, LossInputs(targets_N, weights_N)).loss_sum


def full_logits_loss(inputs: HeadInputs) -> Tensor:
    """All logits at once, then cross-entropy in float32: the common training loop."""
    logits_PV = (inputs.hidden_PD @ inputs.head_VD.T).float()
    return F.cross_entropy(logits_PV, inputs.targets_P, ignore_index=IGNORE_INDEX, reduction="sum")


def build_losses(device: str) -> dict[str, LossFunction]:
    """The implementations that can run on the device, ours first."""
    losses: dict[str, LossFunction] = {OURS: fused_loss, BASELINE: full_logits_loss}
    reduction: dict[str, Any] = {"reduction": "sum", "ignore_index": IGNORE_INDEX}
    if hasattr(F, "linear_cross_entropy"):
        options = torch.nn.LinearCrossEntropyOptions()
        losses["F.linear_cross_entropy"] = lambda inputs: F.linear_cross_entropy(
            inputs.hidden_PD, inputs.head_VD, inputs.targets_P, options=options, **reduction
        )
    if device == "cuda" and is_installed("liger_kernel"):
        liger = importlib.import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss(**reduction)
        losses["Liger"] = lambda inputs: liger(inputs.head_VD, inputs.hidden_PD, inputs.targets_P)
    return losses


def step(loss: LossFunction, inputs: HeadInputs) -> tuple[Tensor, Tensor]:
    """Forward and backward; returns the gradients of hidden states and head once the device has computed them."""
    grad_hidden, grad_head = torch.autograd.grad(loss(inputs), (inputs.hidden_PD, inputs.head_VD))
    if grad_head.device.type == "cuda":
        torch.cuda.synchronize()
    return grad_hidden, grad_head


def measure_error(case: HeadCase, loss: LossFunction) -> float:
    """Relative distance (L2) of the gradients from those in float64, the greater of the two, over the first
    `ERROR_POSITIONS` positions."""
    positions = min(ERROR_POSITIONS, case.positions)
    inputs = make_inputs(replace(case, positions=positions, masked=min(positions, case.masked)))
    hidden, head = (tensor.detach().double().requires_grad_() for tensor in (inputs.hidden_PD, inputs.head_VD))
    exact_loss = F.cross_entropy(hidden @ head.T, inputs.targets_P, ignore_index=IGNORE_INDEX, reduction="sum")
    exact = torch.autograd.grad(exact_loss, (hidden, head))
    pairs = zip(step(loss, inputs), exact, strict=True)
    return max(float((gradient.double() - reference).norm() / reference.norm()) for gradient, reference in pairs)


def measure_peak(case: HeadCase, name: str) -> int:
    """Measure the peak memory in bytes above the inputs and both gradients, in a fresh process.

    Raises:
        ValueError: the process was killed.
    """
    return run_in_fresh_process(_measure_peak_in_process, case, name, description=name, key="the positions of the case")


def _measure_peak_in_process(case: HeadCase, name: str) -> int:
    torch.set_num_threads(case.threads)
    loss = build_losses(case.device)[name]
    # A small first step allocates what libraries load at first use.
    step(loss, make_inputs(replace(case, positions=8, masked=4, vocab=512)))
    inputs = make_inputs(case)
    gc.collect()
    peak = PeakGrowth(case.device)
    gradients = step(loss, inputs)
    return peak.bytes() - sum(gradient.numel() * gradient.element_size() for gradient in gradients)


def compare_losses(case: HeadCase, *, rounds: int, names: Sequence[str] | None = None) -> list[list[str]]:
    """Compare time, memory and error of implementations, by default of all; one table row for each."""
    losses = {name: loss for name, loss in build_losses(case.device).items() if names is None or name in names}
    inputs = make_inputs(case)
    steps = {name: partial(step, loss, inputs) for name, loss in losses.items()}
    # On a CPU, CPU time: other processes on the machine affect it less.
    clock: Clock = "wall" if case.device == "cuda" else "process"
    times = compare(steps, rounds=rounds, warmup=WARMUP, clock=clock, label=str(case))
    del inputs, steps
    rows = []
    for name, loss in losses.items():
        print_message(f"{case}: memory and error of {name}")
        rate = f"{case.teraflops / times.median(name):.3g}"
        peak = f"{measure_peak(case, name) / MEBIBYTE:,.0f}"
        ratio = times.format_speedup(name, BASELINE)
        rows.append([str(case), name, times.format_ms(name), rate, ratio, peak, f"{measure_error(case, loss):.1e}"])
    return rows


def build_cases(device: str, threads: int) -> Sequence[HeadCase]:
    """The cases of the device."""
    dtypes = [torch.bfloat16] if device == "cuda" else [torch.float32, torch.bfloat16]
    sizes = (16384, 8192, 2048, 151936) if device == "cuda" else (4096, 4096, 256, 32768)
    positions, masked, width, vocab = sizes
    return [HeadCase(positions, masked, width, vocab, dtype, device, threads) for dtype in dtypes]


def run(options: argparse.Namespace) -> Page:
    """Compare all implementations in the cases of the device."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    header = ["masked of positions x hidden x vocabulary", "implementation", "ms", "useful TFLOP/s"]
    header += [f"speedup over {BASELINE} [quartiles]", "peak MiB", "error of gradients"]
    names = (OURS, BASELINE) if options.baseline_only else None
    environment = collect_environment(
        threads=options.threads,
        packages=["torch", "triton", "liger_kernel"],
        rounds=options.rounds,
        warmup=WARMUP,
        device=device,
    )
    rows = [
        row
        for case in build_cases(device, options.threads)
        for row in compare_losses(case, rounds=options.rounds, names=names)
    ]
    clock = "CPU time of all threads" if device == "cpu" else "wall time"
    facts = {
        "each call": f"forward and backward, sum over the masked positions; {clock}",
        "useful TFLOP/s": "three products over the masked positions, by the median time",
        "peak": "above inputs and both gradients, in a fresh process",
        "error": f"relative to gradients in float64, {ERROR_POSITIONS} positions",
    }
    return make_report("Head and loss", [make_table(header, rows)], facts | environment)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the options and run the benchmark."""
    parser = make_parser("Compare implementations of the head and the loss.", rounds=10, threads=usable_cores())
    parser.add_argument("--baseline-only", action="store_true", help=f"compare with {BASELINE!r} alone")
    return run_benchmark(run, parser.parse_args(argv))


if __name__ == "__main__":
    raise SystemExit(main())
