"""Products of a decoding model's weights with a few rows, by torch's ways in fp32 on a CPU.

python -m benchmarking.serving.bench_linear

All weights of the model of `bench_engine` are multiplied in turn, so they come from memory as in decoding. Each way is
compared with `torch.nn.functional.linear`; **chosen** is what the model's projections do without gradients.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarking.bench_decoding_peers import SHAPE
from benchmarking.harness import Benchmark, Report, Settings, Table, compare, describe_model, main
from diffusionlm.kernels.cpu_linear import linear_without_gradient, multiply_by_onednn, multiply_transposed

TORCH, TRANSPOSED, ONEDNN, CHOSEN = "F.linear", "W x^T", "oneDNN", "chosen"
WAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    TORCH: F.linear,
    TRANSPOSED: multiply_transposed,
    ONEDNN: multiply_by_onednn,
    CHOSEN: linear_without_gradient,
}


def weight_shapes() -> list[tuple[int, int]]:
    """Shapes [O, I] of the projections of all layers, and of the head."""
    hidden, wide = SHAPE.hidden_size, SHAPE.intermediate_size
    heads, key_heads = (count * SHAPE.head_dim for count in (SHAPE.num_attention_heads, SHAPE.num_key_value_heads))
    layer = [(heads, hidden), (key_heads, hidden), (key_heads, hidden), (hidden, heads)]
    layer += [(wide, hidden), (wide, hidden), (hidden, wide)]
    return layer * SHAPE.num_hidden_layers + [(SHAPE.vocab_size, hidden)]


def check_equal(outputs: Mapping[str, Any]) -> None:
    """Compare the ways with torch's.

    Raises:
        ValueError: they differ by more than rounding.
    """
    for name, products in outputs.items():
        for ours, expected in zip(products, outputs[TORCH], strict=True):
            if not torch.allclose(ours, expected, rtol=1e-3, atol=1e-4):
                raise ValueError(f"{name}: its products are not those of {TORCH}")


@torch.inference_mode()
def run(settings: Settings) -> Report:
    """A row for each number of rows."""
    weights = [torch.randn(shape) / shape[1] ** 0.5 for shape in weight_shapes()]
    rows = []
    for count in settings.options.rows:
        inputs = {width: torch.randn(count, width) for width in {weight.shape[1] for weight in weights}}

        def multiply(way: str, inputs: dict[int, Tensor]) -> list[Tensor]:
            return [WAYS[way](inputs[weight.shape[1]], weight) for weight in weights]

        times = compare({way: partial(multiply, way, inputs) for way in WAYS}, settings, check=check_equal)
        cells = [times.speedup(way, TORCH).format_ratio() for way in WAYS if way != TORCH]
        rows.append([str(count), times.format_ms(TORCH), *cells])
    header = ["rows", f"{TORCH}, ms", *(f"{way} over it [quartiles]" for way in WAYS if way != TORCH)]
    return Report([Table(header, rows)], {"weights": f"{describe_model(SHAPE)}, vocabulary {SHAPE.vocab_size:,}"})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 40, 160], metavar="N", help="rows of x")


def check_arguments(options: argparse.Namespace) -> str | None:
    return None if min(options.rows) >= 1 else "--rows must be at least 1"


BENCHMARK = Benchmark(
    "Compare torch's ways to multiply weights with a few rows on a CPU.",
    run,
    rounds=10,
    warmup=2,
    threads=2,
    add_arguments=add_arguments,
    check_arguments=check_arguments,
)

if __name__ == "__main__":
    raise SystemExit(main(BENCHMARK))
