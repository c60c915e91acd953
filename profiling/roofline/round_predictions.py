"""Predicted decoding on GPUs that are not there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarking.gpu.judges import DECODING_GOAL
from benchmarking.harness import Report, Table, describe_model, format_command_line, version
from config.bench.inference import BenchCell, BenchInferConfig
from files.terminal_text import print_message
from profiling.roofline.gpus import GPUS, LAUNCH_SECONDS, GpuModel
from profiling.roofline.kernels import Kernel, list_kernels
from profiling.roofline.operators import Operator
from profiling.roofline.predictions import METHOD_OF_KERNELS, build_part_table
from profiling.roofline.rounds import RecordedDecoding, Rounds, record_decoding

METHOD = f"""\
The rounds of the first block, and of one in the middle of the answers, are recorded on tensors without values; the \
other blocks are like the latter. {METHOD_OF_KERNELS} A round takes the sum of its kernels, or the host's \
{1e6 * LAUNCH_SECONDS:g} µs for each launch if they are more and no CUDA graph launches them. Kernels are those \
without graphs. A graph has more work, which is left out: the head for all of its inputs instead of the masked ones, \
padded sequences and keys, a mask in each attention; so where the GPU is the limit, tokens per second with graphs are \
probably lower. Python's work between two rounds is left out. Weights count in each product that reads them. The goal \
for the shape of SDAR-4B with blocks of 4 and 128 requests is {DECODING_GOAL:,.0f} tokens per second on an H200."""


@dataclass(frozen=True)
class DecodingPrediction:
    """The kernels of a cell's rounds."""

    cell: BenchCell
    decoding: RecordedDecoding

    def seconds(self, gpu: GpuModel, *, has_graphs: bool) -> float:
        """Duration of the whole call, prompts included."""
        first, later = (
            sum(max(_device_seconds(each, gpu), 0.0 if has_graphs else _host_seconds(each)) for each in rounds)
            for rounds in (self.decoding.first_rounds, self.decoding.block_rounds)
        )
        return first + self.decoding.num_later_blocks * later

    def tokens_per_second(self, gpu: GpuModel, *, has_graphs: bool) -> float:
        return self.decoding.new_tokens / self.seconds(gpu, has_graphs=has_graphs)

    @property
    def typical_rounds(self) -> Rounds:
        """Rounds of a block in the middle, or of the only one but for the first, which reads the prompts."""
        return self.decoding.block_rounds or self.decoding.first_rounds[1:] or self.decoding.first_rounds


def _kernels(rounds: Rounds) -> list[Kernel]:
    return [kernel for operators in rounds for kernel in list_kernels(operators, is_compiled=False)]


def _device_seconds(operators: Sequence[Operator], gpu: GpuModel) -> float:
    return sum(map(gpu.seconds, list_kernels(operators, is_compiled=False)))


def _host_seconds(operators: Sequence[Operator]) -> float:
    return len(operators) * LAUNCH_SECONDS


def predict_decoding(config: BenchInferConfig, device: str) -> Report:
    """Predict all cells of a config; the tables by part are those of ``device``."""
    predictions = []
    for cell in config.cells():
        print_message(f"{cell.label}: recording rounds")
        predictions.append(DecodingPrediction(cell, record_decoding(config, cell)))
    gpu = GPUS[device]
    parts: list[Table | str] = [_build_summary(predictions), METHOD.format(attention_share=gpu.attention_share)]
    for prediction in predictions:
        rounds = prediction.typical_rounds
        parts += [
            f"### {prediction.cell.label}, {len(rounds)} rounds, {gpu.accelerator.name}",
            build_part_table(_kernels(rounds), gpu),
        ]
    shape, bench = config.model.shape, config.bench
    assert shape is not None
    facts = {
        "model": f"{describe_model(shape)}, vocabulary {shape.vocab_size:,}, bfloat16",
        "requests": f"prompts of {bench.prompt_length} tokens, answers of {bench.new_tokens}",
        "command": f"`{format_command_line()}`",
        "software": f"torch {version('torch')}",
    }
    return Report(parts, facts)


def _build_summary(predictions: Sequence[DecodingPrediction]) -> Table:
    """Tokens per second and rounds of each cell on each GPU."""
    label = " / ".join(gpu.accelerator.name for gpu in GPUS.values())
    header = ["case", f"tok/s: {label}", "tok/s without CUDA graphs", "first round, ms", "other rounds, ms", "rounds"]
    rows = []
    for prediction in predictions:
        decoding, typical = prediction.decoding, prediction.typical_rounds
        cells = [
            [f"{prediction.tokens_per_second(gpu, has_graphs=value):,.0f}" for gpu in GPUS.values()]
            for value in (True, False)
        ]
        cells.append([f"{1e3 * _device_seconds(decoding.first_rounds[0], gpu):,.0f}" for gpu in GPUS.values()])
        means = [sum(_device_seconds(each, gpu) for each in typical) / len(typical) for gpu in GPUS.values()]
        cells.append([f"{1e3 * value:,.1f}" for value in means])
        host = sum(map(_host_seconds, typical)) / len(typical)
        counts = [str(decoding.num_rounds), f"{len(_kernels(typical)) / len(typical):,.0f}", f"{1e3 * host:,.1f}"]
        rows.append([prediction.cell.label, *(" / ".join(values) for values in cells), *counts])
    return Table([*header, "kernels of a round", "host, ms"], rows)
