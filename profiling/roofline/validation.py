"""Predicted against measured training steps on this machine's CPU."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from benchmarking.harness import Report, Table, collect_environment, speedup
from benchmarking.implementations.training import TrainCase, TrainImplementation, build_ours
from config.bench.training import BenchTrainConfig
from files.terminal_text import print_message
from profiling.memory import keep_freed_memory
from profiling.roofline.calibration import Calibration
from profiling.roofline.operators import PARTS, Operator, read_clock, record_operators

HOST = "host"
"""Name of what runs beside the operators: Python and autograd."""
GOAL = 0.25
"""Largest relative error of a predicted step."""

METHOD = f"""\
Each kind of operator of a recorded step is measured alone: matrix products at each shape, other operators by their \
bytes, at the largest call, on tensors that are not in the caches. The prediction of a step is the sum over its \
operators, and for Python and autograd the time of a chain of tiny operators. Prediction, step, and a step whose \
operators are timed one by one (the parts) alternate. Error: median of predicted over measured, less 1, within a \
round, with quartiles; the goal is {GOAL:.0%} at most."""


TITLE_OF_PARTS = "Predicted / measured milliseconds of each part:"


@dataclass(frozen=True)
class Validation:
    """Predictions and measurements of a case, in seconds."""

    case: TrainCase
    predicted: Mapping[str, float]
    """By part, `HOST` included; from the medians of all rounds."""
    measured: Mapping[str, float]
    """Seconds of each part: medians of all rounds."""
    predicted_steps: Sequence[float]
    """The prediction of each round alone."""
    steps: Sequence[float]
    """Steps of the same rounds, measured as a whole."""
    num_operators: int
    num_kinds: int

    @property
    def error(self) -> float:
        """Median of predicted over measured, less 1."""
        return speedup(self.steps, self.predicted_steps).median_ratio - 1.0


def validate_case(case: TrainCase, rounds: int, warmup: int) -> Validation:
    """Measure a case. Torch's threads must be set already."""
    implementation = build_ours(case)
    for _ in range(warmup + 1):
        implementation.step()
    operators = _record_step(implementation)
    calibration = Calibration(operators)
    steps: list[float] = []
    predicted_steps: list[float] = []
    recorded: list[Mapping[str, float]] = []
    for index in range(rounds):
        calibration.sample()
        start = read_clock()
        implementation.step()
        steps.append(read_clock() - start)
        predicted_steps.append(sum(predict_parts(operators, calibration, index).values()))
        parts = Counter[str]()
        for operator in _record_step(implementation):
            parts[operator.part] += operator.seconds  # type: ignore[assignment]
        recorded.append(parts)
        print_message(f"{case.label}: round {index + 1}/{rounds}: {predicted_steps[-1]:.3g} s, step {steps[-1]:.3g} s")
    measured = {part: statistics.median(parts.get(part, 0.0) for parts in recorded) for part in PARTS}
    measured[HOST] = statistics.median(steps) - sum(measured.values())
    return Validation(
        case,
        predict_parts(operators, calibration),
        measured,
        predicted_steps,
        steps,
        len(operators),
        calibration.num_kinds,
    )


def _record_step(implementation: TrainImplementation) -> list[Operator]:
    model = implementation.model
    with record_operators(model, implementation.optimizers) as recorder:  # type: ignore[arg-type]
        implementation.step()
    return recorder.operators


def predict_parts(
    operators: Sequence[Operator], calibration: Calibration, sample: int | None = None
) -> dict[str, float]:
    """Seconds of each part of a step, `HOST` included, by one sample of the calibration or by the medians of all."""
    seconds = dict.fromkeys(PARTS, 0.0)
    for operator in operators:
        seconds[operator.part] += calibration.predict(operator, sample)
    seconds[HOST] = calibration.predict_host(len(operators), sample)
    return seconds


def validate(config: BenchTrainConfig) -> Report:
    """Predict and measure all cases of a config on the CPU."""
    bench = config.bench
    threads = bench.threads or 1
    torch.set_num_threads(threads)
    if bench.keep_freed_memory:
        keep_freed_memory()
    environment = collect_environment(threads=threads, packages=["torch"])
    results = []
    for shape in config.shapes:
        for name in bench.objectives:
            for precision in bench.precisions:
                case = TrainCase(shape, precision, "cpu", threads, bench.seed, bench.objective(name))
                results.append(validate_case(case, bench.rounds, bench.warmup))
    parts = [part for part in (*PARTS, HOST) if any(result.predicted.get(part) for result in results)]
    clock = "CPU time of the thread" if threads == 1 else "wall time"
    environment["rounds"] = f"{bench.rounds} after {bench.warmup} of warm-up; {clock}"
    return Report([_build_table(results), METHOD, TITLE_OF_PARTS, _build_part_table(results, parts)], environment)


def _build_table(results: Sequence[Validation]) -> Table:
    header = ["shape", "objective", "precision", "operators", "kinds", "predicted, ms", "measured, ms"]
    rows = []
    for result in results:
        ratio = speedup(result.steps, result.predicted_steps)
        error = f"{result.error:+.0%} [{ratio.low - 1:+.0%}, {ratio.high - 1:+.0%}]"
        cells = [
            str(result.num_operators),
            str(result.num_kinds),
            f"{1e3 * statistics.median(result.predicted_steps):,.0f}",
        ]
        rows.append([*_case_cells(result), *cells, f"{1e3 * statistics.median(result.steps):,.0f}", error])
    return Table([*header, "error per round [quartiles]"], rows)


def _build_part_table(results: Sequence[Validation], parts: Sequence[str]) -> Table:
    """Predicted and measured milliseconds of each part."""
    rows = [
        [
            *_case_cells(result),
            *(f"{1e3 * result.predicted.get(part, 0.0):,.1f} / {1e3 * result.measured[part]:,.1f}" for part in parts),
        ]
        for result in results
    ]
    return Table(["shape", "objective", "precision", *parts], rows)


def _case_cells(result: Validation) -> list[str]:
    case = result.case
    return [case.shape.name, case.objective_label, case.precision]
