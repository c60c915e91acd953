"""Training speed and memory, against peers that train the same shapes.

Speed is measured in one process, one optimizer step of each implementation in turn. Memory is measured in a fresh
process for each implementation and case, because allocators keep freed memory.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarking.harness import (
    MEBIBYTE,
    Comparison,
    ResultFiles,
    check_installed,
    collect_environment,
    compare,
    describe_model,
    is_installed,
    make_report,
    make_speed_table,
    make_table,
    run_in_fresh_process,
)
from benchmarking.implementations.peers import METHODS_OF_PEERS, PEER_BUILDERS
from benchmarking.implementations.training import (
    MAX_GRAD_NORM,
    METHOD_OF_OURS,
    OURS,
    TrainCase,
    TrainImplementation,
    build_ours,
)
from config.bench.training import BenchShape, BenchTrainConfig, BenchTrainSection
from files.terminal_text import print_message
from logger.pages import Page, Part, Table
from profiling.cores import usable_cores
from profiling.flops import peak_flops
from profiling.memory import PeakGrowth, count_tensor_bytes, keep_freed_memory, release_freed_memory
from profiling.torch_setup import select_device

MEMORY_STEPS = 3
"""The first step creates the optimizer state, the others reach their peak with it."""
MEMORY_PARTS = ("weights", "gradients", "optimizer", "activations", "peak")

METHOD = f"""\
One step is noise, forward, backward, clipping to {MAX_GRAD_NORM:g} and the update, on the same tokens; weights are \
float32, bfloat16 is autocast. Reading, tokenizing and packing text is not part of it. The implementations take turns, \
step by step, in one process. tok/s: tokens of the sequences by the median step (block diffusion computes each of them \
twice). Speedup: ratio of the median steps, then median and quartiles of the ratios within a round."""

METHOD_OF_RATES = """\
GFLOP: of the products that shape and noise require, two operations for each multiplication \
and addition; MFU: GFLOP by the median step and the vendor's peak for bfloat16."""

METHOD_OF_MEMORY = f"""\
In a fresh process of {MEMORY_STEPS} steps, after a first step of a tiny model. Weights, gradients and optimizer: the \
sizes of their tensors. Activations: the rise of the resident set (on CUDA, of allocated memory) in a further step, \
with gradients already allocated. Peak: its rise over all steps above the level before the model was built; not the \
sum of the parts, because gradients are allocated while activations are freed."""

COLUMNS_OF_CASE = ["shape", "objective", "precision"]
BUILDERS = {OURS: build_ours, **PEER_BUILDERS}


@dataclass(frozen=True)
class TrainMeasurement:
    """The measurements of a case."""

    case: TrainCase
    times: Comparison
    memory: Mapping[str, dict[str, int]]
    """Bytes of each of `MEMORY_PARTS`, by implementation; empty if it was not measured."""
    parameters: Mapping[str, int]
    """Number of parameters, by implementation; ours first."""
    flops: float
    """Floating-point operations of one of our steps."""

    def to_records(self) -> list[dict[str, Any]]:
        """One record for each implementation."""
        case = self.case
        facts = {"shape": case.shape.model_dump(), "objective": case.objective.model_dump()}
        facts |= {name: getattr(case, name) for name in ("precision", "device", "threads")}
        records: list[dict[str, Any]] = []
        for name, seconds in self.times.seconds.items():
            values: dict[str, Any] = {"seconds": [round(value, 6) for value in seconds]}
            values |= {"parameters": self.parameters[name], "bytes": self.memory.get(name, {})}
            if name == OURS:
                values["flops"] = self.flops
            records.append({"implementation": name, **facts, **values})
        return records


def measure_case(case: TrainCase, names: Sequence[str], bench: BenchTrainSection) -> TrainMeasurement:
    """Measure speed in this process, then memory in fresh ones, with the rounds of a config."""
    forget_compiled_code()
    print_message(f"{case.label}: warm-up")
    implementations: dict[str, TrainImplementation] = {name: BUILDERS[name](case) for name in names}
    parameters = {
        name: sum(parameter.numel() for parameter in implementation.model.parameters())
        for name, implementation in implementations.items()
    }
    flops = implementations[OURS].flops
    assert flops is not None
    calls = {name: implementation.step for name, implementation in implementations.items()}
    times = compare(calls, rounds=bench.rounds, warmup=bench.warmup, label=case.label)
    del implementations, calls
    gc.collect()
    memory = {}
    for name in names if bench.memory else ():
        memory[name] = measure_memory(case, name)
        print_message(f"{case.label}: peak memory of {name} {_format_mebibytes(memory[name]['peak'])}")
    return TrainMeasurement(case, times, memory, parameters, flops)


def forget_compiled_code() -> None:
    """Let torch.compile begin anew: code that it has seen with other sizes it compiles for sizes that vary, and after
    eight versions not at all, so what is measured would depend on what was measured before."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def measure_memory(case: TrainCase, name: str) -> dict[str, int]:
    """Measure the memory of an implementation in bytes, by `MEMORY_PARTS`, in a fresh process.

    Raises:
        ValueError: the process was killed.
    """
    return run_in_fresh_process(
        measure_memory_in_process, case, name, description=f"{name} ({case.label})", key="shapes.batch_size"
    )


def measure_memory_in_process(case: TrainCase, name: str) -> dict[str, int]:
    """Measure memory in this process, which must be a fresh one."""
    torch.set_num_threads(case.threads)
    # A first step of a tiny model allocates what libraries load at first use.
    BUILDERS[name](replace(case, shape=_tiny_shape(case.shape))).step()
    release_freed_memory()
    forget_compiled_code()
    growth = PeakGrowth(case.device)
    implementation = BUILDERS[name](case)
    for _ in range(MEMORY_STEPS):
        implementation.step()
    peak = growth.bytes()
    weights = list(implementation.model.parameters())
    trained = [weight for weight in weights if weight.requires_grad]
    for weight in trained:
        weight.grad = torch.zeros_like(weight)
    gradients = count_tensor_bytes(weight.grad for weight in trained)
    release_freed_memory()
    step_growth = PeakGrowth(case.device)
    implementation.step()
    states = (state for optimizer in implementation.optimizers for state in optimizer.state.values())
    return {
        "weights": count_tensor_bytes(weights),
        "gradients": gradients,
        "optimizer": count_tensor_bytes(
            value for state in states for value in state.values() if isinstance(value, torch.Tensor)
        ),
        "activations": step_growth.bytes(),
        "peak": peak,
    }


def _tiny_shape(shape: BenchShape) -> BenchShape:
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "vocab_size": 64, "batch_size": 2}
    return shape.model_copy(update=sizes | {"max_position_embeddings": min(16, shape.max_position_embeddings)})


def bench_train(config: BenchTrainConfig) -> Page:
    """Measure all cases; progress goes to stderr, files to the output directory.

    Raises:
        ValueError: a peer or a device does not exist.
    """
    bench = config.bench
    check_installed(["transformers"] if bench.peers else [])
    device = select_device(bench.device, "bench.device")
    threads = bench.threads or usable_cores()
    skipped_peers = find_skipped_peers(bench, device)
    cases = [
        TrainCase(shape, precision, device, threads, bench.seed, bench.objective(name))
        for shape in config.shapes
        for name in bench.objectives
        for precision in bench.precisions
    ]
    names = [OURS, *(peer for peer in bench.peers if peer not in skipped_peers)]
    torch.set_num_threads(threads)
    if device == "cpu" and bench.keep_freed_memory:
        keep_freed_memory()
    packages = ["torch", *(["transformers"] if names[1:] else []), *(["liger_kernel"] if "liger" in names else [])]
    environment = collect_environment(
        threads=threads, packages=packages, rounds=bench.rounds, warmup=bench.warmup, device=device
    )
    files = ResultFiles(config.output.directory, "training_speed")
    results = []
    for case in cases:
        results.append(measure_case(case, names if case.shape.has_peers else [OURS], bench))
        files.append(results[-1].to_records())
    parts = build_parts(results)
    if bench.rollouts is not None:
        from benchmarking.implementations.rollouts import METHOD_OF_ROLLOUTS, measure_rollouts

        parts += [measure_rollouts(bench, threads), METHOD_OF_ROLLOUTS]
    if bench.towers:
        from benchmarking.implementations.vision import METHOD_OF_TOWERS, measure_tower

        parts += [*(measure_tower(name, bench) for name in bench.towers), METHOD_OF_TOWERS]
    methods = {OURS: METHOD_OF_OURS, **METHODS_OF_PEERS} if results else {}
    facts = {name: methods[name] for name in names if name in methods} | skipped_peers
    facts |= {result.case.shape.name: _describe_shape(result) for result in results}
    report = make_report("Speed of training", parts, {**facts, **environment})
    files.write_report(report)
    return report


def find_skipped_peers(bench: BenchTrainSection, device: str) -> dict[str, str]:
    """Find the peers of the config that cannot run on this machine, and the reasons."""
    is_skipped = "liger" in bench.peers and (device != "cuda" or not is_installed("liger_kernel"))
    return {"liger": "left out: it needs CUDA and liger-kernel"} if is_skipped else {}


def build_parts(results: Sequence[TrainMeasurement]) -> list[Part]:
    """Build the tables of speed and memory, with their methods."""
    if not results:
        return []
    names = list(dict.fromkeys(name for result in results for name in result.parameters))
    rows = [(_case_cells(result.case), float(result.case.shape.tokens), result.times) for result in results]
    parts: list[Part] = [
        make_speed_table(COLUMNS_OF_CASE, rows, names, unit="tok/s", style=",.0f"),
        METHOD,
        _build_rate_table(results),
        METHOD_OF_RATES,
    ]
    return parts + ([_build_memory_table(results), METHOD_OF_MEMORY] if results[0].memory else [])


def _case_cells(case: TrainCase) -> list[str]:
    return [case.shape.name, case.objective_label, case.precision]


def _build_rate_table(results: Sequence[TrainMeasurement]) -> Table:
    rows = []
    for result in results:
        case, times = result.case, result.times
        flops_per_second = result.flops / times.median(OURS)
        row = [*_case_cells(case), times.format_ms(OURS), f"{result.flops / 1e9:,.1f}"]
        rows.append([*row, f"{flops_per_second / 1e9:,.0f}", _format_mfu(case, flops_per_second)])
    return make_table([*COLUMNS_OF_CASE, "step, ms", "GFLOP", "GFLOP/s", "MFU"], rows)


def _format_mfu(case: TrainCase, flops_per_second: float) -> str:
    peak = peak_flops(torch.cuda.get_device_name()) if case.device == "cuda" else None
    return f"{flops_per_second / peak:.1%}" if peak is not None and case.precision == "bfloat16" else "unknown peak"


def _build_memory_table(results: Sequence[TrainMeasurement]) -> Table:
    rows = [
        [*_case_cells(result.case), name, *(_format_mebibytes(result.memory[name][part]) for part in MEMORY_PARTS)]
        for result in results
        for name in result.parameters
    ]
    return make_table([*COLUMNS_OF_CASE, "implementation", *MEMORY_PARTS], rows)


def _describe_shape(result: TrainMeasurement) -> str:
    shape = result.case.shape
    head = "tied" if shape.tie_word_embeddings else "untied"
    return (
        f"{describe_model(shape)}, vocabulary {shape.vocab_size:,}, {head} head, {result.parameters[OURS]:,} "
        f"parameters; {shape.batch_size} sequences of {shape.max_position_embeddings} tokens per step"
    )


def _format_mebibytes(size: int) -> str:
    return f"{size / MEBIBYTE:,.0f} MiB"
