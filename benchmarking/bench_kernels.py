"""The fused head and loss against other ways to the same sum and gradients: time, memory, error.

    python -m benchmarking.bench_kernels

Without a GPU: vocabulary 32,768 in both precisions. With one: the head of a model of 1.7 B parameters, half of whose
positions are masked. There the others get all positions, with ``ignore_index`` at those that are not, as they are used;
ours gets the masked ones, and picking them is part of its time.

Shapes: P positions, R of them scored, D hidden, V vocabulary.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarking.harness import (
    collect_environment,
    is_installed,
    markdown_list,
    markdown_table,
    print_message,
    run_in_fresh_process,
    speedup,
    time_in_turns,
)
from diffusionlm.kernels.cross_entropy import LossInputs, linear_cross_entropy
from profiling.cores import usable_cores
from profiling.memory import PeakGrowth

OURS = "diffusionlm"
IGNORE_INDEX = -100
"""Target of a position that is not scored."""
ERROR_POSITIONS = 256
"""Positions over which gradients are compared with those in float64."""


@dataclass(frozen=True)
class HeadCase:
    """A head and the rows that it gets."""

    positions: int
    scored: int
    """The last so many of a random order."""
    width: int
    vocab: int
    dtype: torch.dtype
    """Of hidden states and head."""
    device: str
    threads: int

    @property
    def teraflops(self) -> float:
        """Of three products over the scored rows."""
        return 6e-12 * self.scored * self.width * self.vocab

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.scored:,} of {self.positions:,} x {self.width:,} x {self.vocab:,} {dtype}"


@dataclass(frozen=True)
class HeadInputs:
    """The tensors of a case."""

    hidden_PD: Tensor
    head_VD: Tensor
    targets_P: Tensor
    """`IGNORED` where nothing is scored."""
    positions_N: Tensor

    @property
    def targets_N(self) -> Tensor:
        """Of the scored rows."""
        return self.targets_P[self.positions_N]


LossFunction = Callable[[HeadInputs], Tensor]
"""Sum of the scored rows' losses, with gradient."""


def make_inputs(case: HeadCase) -> HeadInputs:
    """Random tensors, the same for all contestants; logits have a standard deviation of one."""
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(case.positions, case.width, generator=rng)
    head = torch.randn(case.vocab, case.width, generator=rng) / case.width**0.5
    targets = torch.randint(0, case.vocab, (case.positions,), generator=rng)
    order = torch.randperm(case.positions, generator=rng)
    targets[order[: case.positions - case.scored]] = IGNORE_INDEX
    rows = order[case.positions - case.scored :].sort().values
    hidden, head = (each.to(case.device, case.dtype).requires_grad_() for each in (hidden, head))
    return HeadInputs(hidden, head, targets.to(case.device), rows.to(case.device))


def fused_loss(data: HeadInputs) -> Tensor:
    """The project's own loss, on the scored rows alone."""
    hidden_ND = data.hidden_PD if len(data.positions_N) == len(data.hidden_PD) else data.hidden_PD[data.positions_N]
    targets_N = data.targets_N
    weights_N = torch.ones(targets_N.shape, device=targets_N.device)
    return linear_cross_entropy(hidden_ND, data.head_VD, LossInputs(targets_N, weights_N)).loss_sum


def full_logits_loss(data: HeadInputs) -> Tensor:
    """All logits at once, then in fp32: what most training loops do."""
    logits_PV = (data.hidden_PD @ data.head_VD.T).float()
    return F.cross_entropy(logits_PV, data.targets_P, ignore_index=IGNORE_INDEX, reduction="sum")


def torch_fused_loss(data: HeadInputs) -> Tensor:
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(
        data.hidden_PD, data.head_VD, data.targets_P, reduction="sum", ignore_index=IGNORE_INDEX, options=options
    )


def make_liger_loss() -> LossFunction:
    liger_loss = importlib.import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss(
        ignore_index=IGNORE_INDEX, reduction="sum"
    )
    return lambda data: liger_loss(data.head_VD, data.hidden_PD, data.targets_P)


def build_losses(device: str, *, compiles: bool) -> dict[str, LossFunction]:
    """The implementations that can run here; the project's own first."""
    losses: dict[str, LossFunction] = {OURS: fused_loss, "full logits": full_logits_loss}
    if compiles:
        losses["full logits, torch.compile"] = torch.compile(full_logits_loss)
    if hasattr(F, "linear_cross_entropy"):
        losses["F.linear_cross_entropy"] = torch_fused_loss
    if device == "cuda" and is_installed("liger_kernel"):
        losses["Liger"] = make_liger_loss()
    return losses


def step(loss: LossFunction, data: HeadInputs) -> tuple[Tensor, Tensor]:
    """Forward and backward; the gradients of hidden states and head, when they are there."""
    grad_hidden, grad_head = torch.autograd.grad(loss(data), (data.hidden_PD, data.head_VD))
    if grad_head.device.type == "cuda":
        torch.cuda.synchronize()
    return grad_hidden, grad_head


def measure_error(case: HeadCase, loss: LossFunction) -> float:
    """Distance of the gradients from those in float64 over the length of these, the greater of the two, over the first
    `ERROR_POSITIONS` positions."""
    few = min(ERROR_POSITIONS, case.positions)
    data = make_inputs(replace(case, positions=few, scored=min(few, case.scored)))
    exact = replace(
        data,
        hidden_PD=data.hidden_PD.detach().double().requires_grad_(),
        head_VD=data.head_VD.detach().double().requires_grad_(),
    )
    exact_loss = F.cross_entropy(
        exact.hidden_PD @ exact.head_VD.T, exact.targets_P, ignore_index=IGNORE_INDEX, reduction="sum"
    )
    theirs = torch.autograd.grad(exact_loss, (exact.hidden_PD, exact.head_VD))
    pairs = zip(step(loss, data), theirs, strict=True)
    return max(float((ours.double() - their).norm() / their.norm()) for ours, their in pairs)


def measure_peak(case: HeadCase, name: str, *, compiles: bool) -> int:
    """Peak memory of a contestant in bytes over its inputs and the two gradients, in a process of its own.

    Raises:
        ValueError: the process was killed.
    """
    return run_in_fresh_process(
        _measure_peak_in_process, case, name, compiles, description=name, key="the case's positions"
    )


def _measure_peak_in_process(case: HeadCase, name: str, compiles: bool) -> int:
    torch.set_num_threads(case.threads)
    loss = build_losses(case.device, compiles=compiles)[name]
    # A first small step loads what libraries load at first use.
    step(loss, make_inputs(replace(case, positions=8, scored=4, vocab=512)))
    data = make_inputs(case)
    gc.collect()
    peak = PeakGrowth(case.device)
    gradients = step(loss, data)
    return peak.bytes() - sum(each.numel() * each.element_size() for each in gradients)


def bench_case(case: HeadCase, *, rounds: int, warmup: int, compiles: bool) -> list[list[str]]:
    """Rows of the table: each contestant's time in turns, memory and error."""
    losses = build_losses(case.device, compiles=compiles)
    data = make_inputs(case)
    print_message(f"{case}: time")
    # On a CPU, the processor's time: of a machine that others use too, it tells more.
    clock = time.process_time if case.device == "cpu" else time.perf_counter
    implementations = {name: partial(step, loss, data) for name, loss in losses.items()}
    seconds = time_in_turns(implementations, rounds=rounds, warmup=warmup, clock=clock)
    del data, implementations
    rows = []
    for name, loss in losses.items():
        print_message(f"{case}: memory and error of {name}")
        median = statistics.median(seconds[name])
        ratio = speedup(seconds[name], seconds["full logits"])
        peak = measure_peak(case, name, compiles=compiles) / 2**20
        rate = f"{case.teraflops / median:.3g}"
        numbers = [f"{1e3 * median:,.1f}", rate, ratio.format_ratio(), f"{peak:,.0f}"]
        rows.append([str(case), name, *numbers, f"{measure_error(case, loss):.1e}"])
    return rows


def bench_kernels(cases: Sequence[HeadCase], *, rounds: int, warmup: int, compiles: bool) -> str:
    """Markdown table of all cases; progress on stderr."""
    header = ["scored of positions x hidden x vocabulary", "way", "ms", "useful TFLOP/s"]
    header += ["speedup over full logits, in a round [quartiles]", "peak MiB", "error of gradients"]
    measured = [bench_case(case, rounds=rounds, warmup=warmup, compiles=compiles) for case in cases]
    return markdown_table(header, [row for rows in measured for row in rows])


def default_cases(device: str, threads: int) -> list[HeadCase]:
    """What is measured on a device."""
    if device == "cuda":
        return [HeadCase(16384, 8192, 2048, 151936, torch.bfloat16, device, threads)]
    return [HeadCase(4096, 4096, 256, 32768, dtype, device, threads) for dtype in (torch.float32, torch.bfloat16)]


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description="Compare ways through head and loss.", allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=10, help="measured calls of each (default: 10, at least 2)")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="CPU threads (default: all usable cores)")
    parser.add_argument("--compile", action="store_true", help="torch.compile beside the others on a CPU too (minutes)")
    arguments = parser.parse_args()
    if arguments.rounds < 2 or arguments.threads < 1:
        parser.error("--rounds must be at least 2 and --threads at least 1")
    torch.set_num_threads(arguments.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    packages = ["torch", *(package for package in ("triton", "liger_kernel") if is_installed(package))]
    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    where = collect_environment(threads=arguments.threads, packages=packages, accelerator=gpu)
    where["each call"] = "forward and backward, sum over the scored rows; " + (
        "milliseconds are the processor's, of all threads" if device == "cpu" else "milliseconds on the clock"
    )
    where["useful TFLOP/s"] = "three products over the scored rows, by the median time"
    where["peak"] = "over inputs and both gradients, in a fresh process"
    where["error"] = f"relative to gradients in float64, {ERROR_POSITIONS} positions"
    where["rounds"] = f"{arguments.rounds} after 2 of warm-up"
    cases = default_cases(device, arguments.threads)
    compiles = device == "cuda" or arguments.compile
    print(bench_kernels(cases, rounds=arguments.rounds, warmup=2, compiles=compiles))
    print(f"\n{markdown_list(where)}")


if __name__ == "__main__":
    main()
