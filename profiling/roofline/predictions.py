"""Predicted training steps on GPUs that are not there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarking.gpu.judges import HEAD_SHARE, MFU_GOALS
from benchmarking.harness import Report, Table, format_command_line, version
from benchmarking.implementations.training import TrainCase
from config.bench.training import BenchTrainConfig
from config.training.optimizer import AdamWConfig, MuonConfig
from config.training.runtime import RuntimeConfig
from diffusionlm.training.block_wrapping import should_compile_blocks
from files.terminal_text import print_message
from profiling.roofline import gpus
from profiling.roofline.gpus import GPUS, LAUNCH_SECONDS, GpuModel
from profiling.roofline.kernels import Kernel, list_kernels
from profiling.roofline.operators import PARTS, Phase
from profiling.roofline.steps import CUDA, RecordedStep, record_gpu_step

PHASES: Sequence[Phase] = ("forward", "recomputed", "backward", "update")

OBJECTIVES_OF_GOALS = {"124m": "masked_diffusion", "qwen3-0.6b": "block_diffusion", "qwen3-1.7b": "block_diffusion"}
"""Shape -> objective that its goal is for."""

METHOD_OF_KERNELS = f"""\
A kernel takes the longest of three times: its FLOPs at {gpus.LARGE_PRODUCT_SHARE:.0%} of the dense bfloat16 peak (all \
sides of the product {gpus.LARGE_SIDE:,} or more), {gpus.PRODUCT_SHARE:.0%} (other products) or \
{{attention_share:.0%}} (fused attention, over whole tiles); its bytes at {gpus.BANDWIDTH_SHARE:.0%} of the data \
sheet's bandwidth; {1e6 * gpus.KERNEL_SECONDS:g} µs."""

"""Text with the key attention_share."""

METHOD = f"""\
A step is recorded on tensors without values: every operator, its matrix products and the bytes that it reads and \
writes. {METHOD_OF_KERNELS} A step takes the sum, or the host's {1e6 * LAUNCH_SECONDS:g} µs for each launch if they \
are more. MFU: FLOPs that shape and noise require (`profiling/flops.py`), over step and peak. The goal for head and \
loss is {HEAD_SHARE:.0%} at hidden 2,048 and a vocabulary of 151,936."""


@dataclass(frozen=True)
class StepOptions:
    """How the step of a case is computed."""

    runtime: RuntimeConfig
    optimizer: AdamWConfig | MuonConfig
    has_average: bool = False
    attention_share: float = gpus.ATTENTION_SHARE
    """Share of the peak that fused attention is assumed to reach."""

    @property
    def is_compiled(self) -> bool:
        return should_compile_blocks(self.runtime, CUDA)


@dataclass(frozen=True)
class Prediction:
    """The kernels of a case's step."""

    case: TrainCase
    kernels: Sequence[Kernel]
    step: RecordedStep

    def seconds(self, gpu: GpuModel) -> float:
        """Predicted duration of the step: of its kernels, or of the host that launches them if that is longer."""
        return max(sum(gpu.seconds(kernel) for kernel in self.kernels), self.host_seconds)

    @property
    def host_seconds(self) -> float:
        """Time that the host takes to launch all kernels."""
        return len(self.kernels) * LAUNCH_SECONDS

    def mfu(self, gpu: GpuModel) -> float:
        return self.step.required_flops / (self.seconds(gpu) * gpu.peak)

    def head_share(self, gpu: GpuModel) -> float:
        """Rate of head and loss, as a share of the peak."""
        kernels = [kernel for kernel in self.kernels if kernel.part == "head and loss"]
        return sum(kernel.flops for kernel in kernels) / (sum(map(gpu.seconds, kernels)) * gpu.peak)


def predict_case(case: TrainCase, options: StepOptions) -> Prediction:
    """Record a step of a case, and list its kernels."""
    step = record_gpu_step(case, options.runtime, options.optimizer, has_average=options.has_average)
    return Prediction(case, list_kernels(step.operators, is_compiled=options.is_compiled), step)


def predict(config: BenchTrainConfig, device: str, options: StepOptions) -> Report:
    """Predict the steps of all cases of a config; the tables by part are those of ``device``.

    Raises:
        ValueError: a case is not bfloat16.
    """
    bench = config.bench
    if "float32" in bench.precisions:
        raise ValueError(
            f"bench.precisions = {list(bench.precisions)}: peaks of GPUs are known for bfloat16 alone; "
            'add --set bench.precisions=["bfloat16"], or --device cpu'
        )
    predictions = []
    for shape in config.shapes:
        for name in bench.objectives:
            case = TrainCase(shape, "bfloat16", "cuda", 1, bench.seed, bench.objective(name))
            print_message(f"{case.label}: recording a step")
            predictions.append(predict_case(case, options))
    models = {name: replace(gpu, attention_share=options.attention_share) for name, gpu in GPUS.items()}
    method = METHOD.format(attention_share=options.attention_share)
    parts: list[Table | str] = [build_summary(predictions, list(models.values())), method]
    for prediction in predictions:
        parts += [
            f"### {prediction.case.label}, {models[device].accelerator.name}",
            build_part_table(prediction.kernels, models[device]),
        ]
    facts = {"command": f"`{format_command_line()}`", "software": f"torch {version('torch')}"}
    return Report(parts, facts)


def build_summary(predictions: Sequence[Prediction], models: Sequence[GpuModel]) -> Table:
    """Step, tokens per second and MFU of each case on each GPU, beside the goals."""
    names = [gpu.accelerator.name for gpu in models]
    rows = []
    for prediction in predictions:
        shape = prediction.case.shape
        seconds = [prediction.seconds(gpu) for gpu in models]
        has_goal = OBJECTIVES_OF_GOALS.get(shape.name) == prediction.case.objective.kind
        rows.append(
            [
                f"{shape.name}, {prediction.case.objective_label}",
                " / ".join(f"{1e3 * value:,.0f}" for value in seconds),
                " / ".join(f"{1e-3 * shape.tokens / value:,.0f}" for value in seconds),
                " / ".join(f"{prediction.mfu(gpu):.0%}" for gpu in models),
                f"{MFU_GOALS[shape.name]:.0%}" if has_goal else "",
                " / ".join(f"{prediction.head_share(gpu):.0%}" for gpu in models),
                f"{len(prediction.kernels):,}",
                f"{1e3 * prediction.host_seconds:,.1f}",
            ]
        )
    label = " / ".join(names)
    header = ["case", f"step, ms: {label}", "1,000 tok/s", "MFU", "goal", "head and loss, of the peak"]
    return Table([*header, "kernels", "host, ms"], rows)


def build_part_table(kernels: Sequence[Kernel], gpu: GpuModel) -> Table:
    """FLOPs, bytes, kernels and milliseconds of each part of a step."""
    total = sum(map(gpu.seconds, kernels))
    phases = [phase for phase in PHASES if any(kernel.phase == phase for kernel in kernels)]
    groups = {part: [kernel for kernel in kernels if kernel.part == part] for part in PARTS}
    rows = [
        [part, *_count_cells(group), *_time_cells(group, gpu, phases, total)]
        for part, group in {**groups, "all": kernels}.items()
        if group
    ]
    return Table(["part", "TFLOP", "GB", "kernels", *(f"{phase}, ms" for phase in phases), "share", "bound by"], rows)


def _count_cells(kernels: Sequence[Kernel]) -> list[str]:
    flops, num_bytes = sum(kernel.flops for kernel in kernels), sum(kernel.num_bytes for kernel in kernels)
    return [f"{1e-12 * flops:,.2f}", f"{1e-9 * num_bytes:,.1f}", f"{len(kernels):,}"]


def _time_cells(kernels: Sequence[Kernel], gpu: GpuModel, phases: Sequence[Phase], total: float) -> list[str]:
    seconds = {phase: sum(gpu.seconds(each) for each in kernels if each.phase == phase) for phase in phases}
    cells = [f"{1e3 * value:,.2f}" if value else "" for value in seconds.values()]
    return [*cells, f"{sum(seconds.values()) / total:.0%}", _format_bounds(gpu.time_by_bound(kernels))]


def _format_bounds(seconds: Mapping[str, float]) -> str:
    """Bounds with a tenth of the time or more, the longest first."""
    total = sum(seconds.values())
    ordered = sorted(seconds, key=lambda name: -seconds[name])
    return ", ".join(f"{name} {seconds[name] / total:.0%}" for name in ordered if seconds[name] >= 0.1 * total)
