"""Training speed and memory: this project, and peers that train the same shapes.

Speed is measured in one process, one optimizer step of each contestant in turn, and with them the step's own matrix
products alone. Memory is measured in a fresh process for each contestant and case, since allocators keep what they once
had.
"""

from __future__ import annotations

import gc
import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarking.harness import (
    Seconds,
    collect_environment,
    is_installed,
    markdown_list,
    markdown_table,
    print_message,
    run_in_fresh_process,
    speedup,
    time_in_turns,
)
from benchmarking.implementations.matrix_products import StepProducts
from benchmarking.implementations.training import (
    BUILDERS,
    MAX_GRAD_NORM,
    METHODS,
    OURS,
    TrainCase,
    build_ours,
    count_parameters,
)
from config.bench_train import BenchShape, BenchTrainConfig, BenchTrainSection
from config.runtime import RuntimeConfig
from profiling.cores import usable_cores
from profiling.flops import peak_flops
from profiling.memory import PeakGrowth, count_tensor_bytes, keep_freed_memory, release_freed_memory

MATRIX_PRODUCTS = "matrix products"
"""What takes its turn with the contestants: the matrix products of our step, and nothing else."""
MEMORY_STEPS = 3
"""The first makes the optimizer's state, the others have their peak with it."""
MEMORY_PARTS = ("weights", "gradients", "optimizer", "activations", "peak")
MEBIBYTE = 1 << 20

METHOD = f"""\
One step is draws, forward, backward, clipping to {MAX_GRAD_NORM:g} and the update, on the same tokens; weights are \
float32, bfloat16 is autocast. Reading, tokenising and packing text is no part of it. The contestants take turns, step \
by step, in one process. tok/s: tokens of the rows by the median step (block diffusion reads each of them twice). \
Speedup: ratio of the median steps, then median and quartiles of the ratios within a round."""

METHOD_OF_PRODUCTS = """\
Matrix products alone: those that torch is seen to compute in one of our steps, forward and backward, replayed in the \
same turns on fresh tensors of their shapes, layouts and dtypes; those inside of fused attention as batched products, \
of half the heads where it is causal; those inside of FlexAttention are not seen. Share: median and quartiles of their \
time over the step's, within a round. GFLOP: of the products that shape and draw ask for, two operations for each \
multiplication and addition; MFU: these by the median step and the maker's peak for bfloat16."""

METHOD_OF_MEMORY = f"""\
In a fresh process of {MEMORY_STEPS} steps, with the libraries already in use. Weights, gradients and optimizer: what \
their tensors hold. Activations: how far the resident set (on CUDA, allocated memory) rises in a further step, in \
which gradients have their place already. Peak: how far it rises over all steps above what it was before the model was \
built; not the sum of the parts, since gradients come as activations go."""


@dataclass(frozen=True)
class TrainResult:
    """A case as measured, by contestant."""

    case: TrainCase
    seconds: Seconds
    """Of the contestants, and of the matrix products."""
    memory: dict[str, dict[str, int]]
    """Bytes of each of `MEMORY_PARTS`."""
    parameters: dict[str, int]
    products: StepProducts
    flops: float
    """Of a step of ours."""

    @property
    def names(self) -> list[str]:
        """The contestants, ours first."""
        return list(self.parameters)

    def tokens_per_second(self, name: str) -> float:
        """At the median step."""
        return self.case.shape.tokens / statistics.median(self.seconds[name])

    def json_lines(self) -> str:
        """One line for each contestant, and one for the matrix products."""
        case = self.case
        about = {
            "shape": case.shape.model_dump(),
            "objective": case.objective.model_dump(),
            "precision": case.precision,
            "device": case.device,
            "threads": case.threads,
        }
        lines: list[dict[str, Any]] = []
        for name, times in self.seconds.items():
            measured: dict[str, Any] = {"seconds": [round(value, 6) for value in times]}
            if name == MATRIX_PRODUCTS:
                measured |= {"count": self.products.count, "flops": self.products.flops}
            else:
                measured |= {"parameters": self.parameters[name], "bytes": self.memory[name]}
            if name == OURS:
                measured["flops"] = self.flops
            lines.append({"contestant": name, **about, **measured})
        return "".join(json.dumps(line) + "\n" for line in lines)


def measure_case(case: TrainCase, names: list[str], *, rounds: int, warmup: int) -> TrainResult:
    """Speed in this process, then memory in fresh ones."""
    print_message(f"{case.label}: warm-up")
    # Not of the contestant itself: on CUDA its blocks are compiled, and compiled code shows no products.
    watched = build_ours(case, runtime=RuntimeConfig(compile="none"))
    watched.step()
    products = StepProducts.of(watched.step)
    del watched
    implementations = {name: BUILDERS[name](case) for name in names}
    parameters = {name: count_parameters(each.model.parameters()) for name, each in implementations.items()}
    flops = implementations[OURS].flops
    assert flops is not None

    def after_round(number: int, seconds: Mapping[str, float]) -> None:
        speeds = ", ".join(f"{name} {case.shape.tokens / seconds[name]:,.0f} tok/s" for name in names)
        print_message(f"{case.label}: round {number}/{rounds}: {speeds}")

    turns = {name: implementation.step for name, implementation in implementations.items()}
    seconds = time_in_turns(
        {**turns, MATRIX_PRODUCTS: products.replay(case.device)}, rounds=rounds, warmup=warmup, after_round=after_round
    )
    del implementations, turns
    gc.collect()
    memory = {}
    for name in names:
        memory[name] = measure_memory(case, name)
        print_message(f"{case.label}: peak memory of {name} {_format_mebibytes(memory[name]['peak'])}")
    return TrainResult(case, seconds, memory, parameters, products, flops)


def measure_memory(case: TrainCase, name: str) -> dict[str, int]:
    """Memory of a contestant in bytes, by `MEMORY_PARTS`, measured in a process of its own.

    Raises:
        ValueError: the process was killed.
    """
    return run_in_fresh_process(
        measure_memory_in_process, case, name, description=f"{name} ({case.label})", key="shapes.batch_size"
    )


def measure_memory_in_process(case: TrainCase, name: str) -> dict[str, int]:
    """The same in this process, which must be a fresh one."""
    torch.set_num_threads(case.threads)
    # A first step of a tiny model loads what libraries load at first use.
    BUILDERS[name](replace(case, shape=_tiny_shape(case.shape))).step()
    release_freed_memory()
    whole = PeakGrowth(case.device)
    implementation = BUILDERS[name](case)
    for _ in range(MEMORY_STEPS):
        implementation.step()
    peak = whole.bytes()
    weights = list(implementation.model.parameters())
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    gradients = count_tensor_bytes(weight.grad for weight in weights)
    release_freed_memory()
    rise = PeakGrowth(case.device)
    implementation.step()
    kept = (value for each in implementation.optimizers for state in each.state.values() for value in state.values())
    return {
        "weights": count_tensor_bytes(weights),
        "gradients": gradients,
        "optimizer": count_tensor_bytes(value for value in kept if isinstance(value, torch.Tensor)),
        "activations": rise.bytes(),
        "peak": peak,
    }


def _tiny_shape(shape: BenchShape) -> BenchShape:
    least = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "vocab_size": 64, "batch_size": 2}
    return shape.model_copy(update=least | {"max_position_embeddings": min(16, shape.max_position_embeddings)})


def bench_train(config: BenchTrainConfig) -> str:
    """Measure all cases; progress on stderr, files in the output directory.

    Returns:
        The report in Markdown.

    Raises:
        ValueError: a peer or a device that is not there.
    """
    bench = config.bench
    device, threads = select_device(bench)
    skipped_peers = find_skipped_peers(bench, device)
    cases = [
        TrainCase(shape, precision, device, threads, bench.seed, bench.objective(name))
        for shape in config.shapes
        for name in bench.objectives
        for precision in bench.precisions
    ]
    names = [OURS, *(peer for peer in bench.peers if peer not in skipped_peers)]
    folder = config.output.directory
    torch.set_num_threads(threads)
    if device == "cpu" and bench.keep_freed_memory:
        keep_freed_memory()
    accelerator = torch.cuda.get_device_name() if device == "cuda" else None
    packages = ["torch", *_packages(names)]
    where = collect_environment(threads=threads, packages=packages, accelerator=accelerator)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "training_speed.jsonl").write_text("", encoding="utf-8")
    results = []
    for case in cases:
        results.append(measure_case(case, names, rounds=bench.rounds, warmup=bench.warmup))
        _append(folder, results[-1])
    where["rounds"] = f"{bench.rounds} after {bench.warmup} of warm-up"
    text = report(results, skipped_peers, where)
    if folder is not None:
        (folder / "training_speed.md").write_text(text + "\n", encoding="utf-8")
    return text


def select_device(bench: BenchTrainSection) -> tuple[str, int]:
    """Device and number of threads.

    Raises:
        ValueError: a peer or a device that is not there.
    """
    if bench.peers and not is_installed("transformers"):
        raise ValueError(
            f'bench.peers has "{bench.peers[0]}", which needs transformers, and that is not installed; install the '
            "group bench (uv sync --group bench), or measure without it: --set bench.peers=[]"
        )
    has_cuda = torch.cuda.is_available()
    if bench.device == "cuda" and not has_cuda:
        raise ValueError('bench.device = "cuda", but torch finds no CUDA device; set bench.device = "cpu" or "auto"')
    device = "cuda" if has_cuda and bench.device != "cpu" else "cpu"
    return device, bench.threads or usable_cores()


def find_skipped_peers(bench: BenchTrainSection, device: str) -> dict[str, str]:
    """Peers of the config that cannot take part here, and why."""
    if "liger" not in bench.peers:
        return {}
    reasons = [
        (not is_installed("liger_kernel"), "liger-kernel is not installed"),
        (device != "cuda", "its kernels need CUDA"),
    ]
    found = [reason for holds, reason in reasons if holds]
    return {"liger": f"left out: {'; '.join(found)}"} if found else {}


def _packages(names: list[str]) -> list[str]:
    """Packages of the contestants whose versions matter."""
    return [*(["transformers"] if names[1:] else []), *(["liger-kernel"] if "liger" in names else [])]


def _append(folder: Path | None, result: TrainResult) -> None:
    if folder is not None:
        with (folder / "training_speed.jsonl").open("a", encoding="utf-8") as file:
            file.write(result.json_lines())


def report(results: list[TrainResult], skipped_peers: Mapping[str, str], where: dict[str, str]) -> str:
    """Tables, methods and conditions."""
    shapes = {result.case.shape.name: _describe_shape(result) for result in results}
    methods = {name: METHODS[name] for name in results[0].names} | dict(skipped_peers)
    parts = [
        _format_speeds(results),
        METHOD,
        _format_product_shares(results),
        METHOD_OF_PRODUCTS,
        _format_memory(results),
        METHOD_OF_MEMORY,
    ]
    return "\n\n".join([*parts, markdown_list(methods | shapes | where)])


HEADER = ["shape", "objective", "precision"]


def _row(case: TrainCase) -> list[str]:
    return [case.shape.name, case.objective_label, case.precision]


def _format_speeds(results: list[TrainResult]) -> str:
    names = results[0].names
    header = [*HEADER, *[f"{name} tok/s" for name in names]]
    header += [cell for peer in names[1:] for cell in (f"speedup over {peer}", "in a round [quartiles]")]
    rows = []
    for result in results:
        ratios = [speedup(result.seconds[OURS], result.seconds[peer]) for peer in names[1:]]
        row = _row(result.case) + [f"{result.tokens_per_second(name):,.0f}" for name in names]
        rows.append(
            row + [cell for ratio in ratios for cell in (f"{ratio.ratio_of_medians:.2f}", ratio.format_ratio())]
        )
    return markdown_table(header, rows)


def _format_product_shares(results: list[TrainResult]) -> str:
    header = [
        *HEADER,
        "step, ms",
        "matrix products alone, ms",
        "share in a round [quartiles]",
        "GFLOP",
        "GFLOP/s",
        "MFU",
    ]
    rows = []
    for result in results:
        step, alone = (statistics.median(result.seconds[name]) for name in (OURS, MATRIX_PRODUCTS))
        # The speed of the step over that of its products is the share of their time in its own.
        share = speedup(result.seconds[OURS], result.seconds[MATRIX_PRODUCTS]).format_ratio()
        row = [*_row(result.case), f"{1e3 * step:,.1f}", f"{1e3 * alone:,.1f}", share]
        row += [
            f"{result.flops / 1e9:,.1f}",
            f"{result.flops / step / 1e9:,.0f}",
            _format_mfu(result.case, result.flops / step),
        ]
        rows.append(row)
    return markdown_table(header, rows)


def _format_mfu(case: TrainCase, flops_per_second: float) -> str:
    """MFU, where there is a peak to compare with."""
    peak = peak_flops(torch.cuda.get_device_name()) if case.device == "cuda" else None
    return f"{flops_per_second / peak:.1%}" if peak is not None and case.precision == "bfloat16" else "no peak known"


def _format_memory(results: list[TrainResult]) -> str:
    rows = [
        [*_row(result.case), name, *(_format_mebibytes(result.memory[name][part]) for part in MEMORY_PARTS)]
        for result in results
        for name in result.names
    ]
    return markdown_table([*HEADER, "contestant", *MEMORY_PARTS], rows)


def _describe_shape(result: TrainResult) -> str:
    shape = result.case.shape
    head = "tied" if shape.tie_word_embeddings else "untied"
    return (
        f"{shape.num_hidden_layers} layers, hidden {shape.hidden_size}, {shape.num_attention_heads} heads "
        f"({shape.num_key_value_heads} of keys and values) of {shape.head_dim}, SwiGLU {shape.intermediate_size}, "
        f"vocabulary {shape.vocab_size:,}, {head} head, {result.parameters[OURS]:,} parameters; "
        f"{shape.batch_size} rows of {shape.max_position_embeddings} tokens a step"
    )


def _format_mebibytes(size: int) -> str:
    return f"{size / MEBIBYTE:,.0f} MiB"
