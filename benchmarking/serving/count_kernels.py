"""What a round of decoding launches and moves on a GPU, counted on a CPU: no times, and no GPU is needed.

python -m benchmarking.serving.count_kernels

The path of a GPU is forced (sequences with equally many inputs share their attention) and every operator of torch is
counted that computes something: views, and tensors without content, are not. A GPU launches at least one kernel for
each. Bytes: inputs and outputs of each operator; of tables that are indexed, the rows that are read or written.

A CUDA graph has a fixed shape, to which rounds are padded. The second table counts the rounds of a closed loop whose
kind and size have a graph, and those that come when it is recorded.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarking.bench_decoding_peers import SHAPE
from benchmarking.bench_infer import random_model
from benchmarking.harness import MEBIBYTE, Benchmark, Report, Settings, Table, describe_model, main
from benchmarking.serving.bench_engine import LONGEST
from benchmarking.serving.bench_first_text import SHAPE as SMALL_SHAPE
from benchmarking.serving.callers import block_settings, draw_requests
from diffusionlm.inference import decoder as decoder_module
from diffusionlm.inference.decoder import Decoder, DecoderLimits
from diffusionlm.inference.graphs.graphed_forward import MIN_USES, GraphedForward, find_shape
from diffusionlm.inference.graphs.static_batch import ReadText, StaticShape
from diffusionlm.inference.requests import ActiveRequest, prepare_prompt
from diffusionlm.inference.settings import resolve_settings
from diffusionlm.models import transformer
from diffusionlm.models.ragged import prepare_ragged_attention
from diffusionlm.models.transformer import Transformer

GATHERS = {"aten.embedding.default", "aten.index.Tensor", "aten.index_select.default", "aten.gather.default"}
SCATTERS = {"aten.index_copy_.default", "aten.index_put_.default", "aten._index_put_impl_.default"}
WITHOUT_KERNELS = {
    "empty", "empty_like", "new_empty", "empty_strided", "_unsafe_view", "detach", "lift_fresh", "_local_scalar_dense",
    "promote_types",
}  # fmt: skip
ATTENTION = "scaled_dot_product"


class KernelCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base class
    """Counts operators that compute something, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: Counter[str] = Counter()
        self.num_bytes = 0
        self.is_paused = False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not (self.is_paused or func.is_view or name in WITHOUT_KERNELS):
            self.operators[name] += 1
            self.num_bytes += _count_bytes(str(func), (args, kwargs), output)
        return output


def _count_bytes(name: str, inputs: Any, output: Any) -> int:
    sizes, results = (
        [tensor.numel() * tensor.element_size() for tensor in tree_leaves(tree) if isinstance(tensor, torch.Tensor)]
        for tree in (inputs, output)
    )
    if name in GATHERS:
        return sum(sizes[1:]) + 2 * sum(results)
    if name in SCATTERS:
        return sum(sizes[1:]) + sizes[-1]
    return sum(sizes) + sum(results)


@dataclass(frozen=True)
class RoundCounts:
    """A round of decoding."""

    num_requests: int
    num_rows: int
    num_kernels: int
    num_attention_kernels: int
    num_bytes: int


def count_rounds(model: Transformer, num_requests: int, num_rounds: int) -> list[RoundCounts]:
    """Decode requests that began at different rounds, and count rounds in which all of them take part.

    What prepares the indices of a forward runs on the host, also beside a GPU, and is not counted.
    """
    decoder = _fill(model, num_requests)
    rounds = []
    for _ in range(num_rounds):
        rows, counter = decoder.counts.num_rows, KernelCounter()

        def prepare(*args: Any, counter: KernelCounter = counter, **options: Any) -> Any:
            counter.is_paused = True
            prepared = prepare_ragged_attention(*args, **options, share_kernels=True)
            counter.is_paused = False
            return prepared

        with patch.object(transformer, "prepare_ragged_attention", prepare), counter:
            decoded = decoder.run_round().decoded
        num_attention = sum(count for name, count in counter.operators.items() if ATTENTION in name)
        num_rows = decoder.counts.num_rows - rows
        rounds.append(RoundCounts(len(decoded), num_rows, counter.operators.total(), num_attention, counter.num_bytes))
    return rounds


def _fill(model: Transformer, num_requests: int) -> Decoder:
    """A decoder whose requests have read their prompts, and are at different steps of their blocks."""
    decoder = Decoder(model, DecoderLimits(num_pages=-(-2 * LONGEST // 16) * num_requests))
    config = block_settings(4, 4).model_copy(update={"max_new_tokens": LONGEST})
    settings = resolve_settings(config, model.config)
    for index, request in enumerate(draw_requests(model.config, num_requests, LONGEST, seed=0)):
        decoder.add(ActiveRequest(prepare_prompt(settings, request.prompt), settings))
        if index % max(1, num_requests // 4) == 0:
            decoder.run_round()
    decoder.run_round()
    return decoder


@dataclass(frozen=True)
class RoundShape:
    """A round of a closed loop."""

    num_rows: int
    shape: StaticShape | None
    """Shape of its graph; None: it has none."""


def list_round_shapes(model: Transformer, concurrency: int, num_requests: int) -> list[RoundShape]:
    """The rounds of a closed loop."""
    rounds: list[RoundShape] = []

    def add_round(self: GraphedForward, texts: Sequence[ReadText]) -> None:
        sequences = [sequence for _, sequence in texts]
        rounds.append(RoundShape(sum(sequence.num_inputs for sequence in sequences), find_shape(sequences)))

    with (
        patch.object(decoder_module, "select_graph_factory", lambda model: RuntimeError),  # nothing is recorded
        patch.object(GraphedForward, "__call__", add_round),
    ):
        decoder = Decoder(
            model, DecoderLimits(num_pages=-(-2 * LONGEST // 16) * concurrency, max_requests=concurrency, max_rows=2048)
        )
        for request in draw_requests(model.config, num_requests, LONGEST, seed=0):
            config = block_settings(4, 4).model_copy(update={"max_new_tokens": request.new_tokens})
            settings = resolve_settings(config, model.config)
            decoder.add(ActiveRequest(prepare_prompt(settings, request.prompt), settings))
        while decoder.has_work:
            decoder.run_round()
    return rounds


def describe_rounds(rounds: Sequence[RoundShape]) -> list[str]:
    """Cells of a table: rounds, rows of a round, rounds by graphs, graphs, rows that pad them."""
    uses = Counter(one.shape for one in rounds if one.shape is not None)
    num_replayed = sum(max(0, count - MIN_USES) for count in uses.values())
    padded = [one for one in rounds if one.shape is not None]
    num_inputs = sum(one.shape.num_parts * one.shape.num_queries for one in padded if one.shape is not None)
    num_rows = sum(one.num_rows for one in padded)
    return [
        str(len(rounds)),
        f"{statistics.fmean(one.num_rows for one in rounds):.1f}",
        f"{uses.total() / len(rounds):.0%}",
        f"{num_replayed / len(rounds):.0%}",
        str(sum(count > MIN_USES for count in uses.values())),
        f"{num_inputs / num_rows - 1.0:.0%}" if num_rows else "",
    ]


def run(settings: Settings) -> Report:
    """Count kernels of rounds, and rounds by graphs."""
    options = settings.options
    model = random_model(SHAPE.model_copy(update={"max_position_embeddings": 2 * LONGEST}), seed=0)
    # The rows that are read of an input embedding are few; a tied one is the head as well.
    read_once = [
        parameter
        for name, parameter in model.named_parameters()
        if model.config.tie_word_embeddings or "embed" not in name
    ]
    weight_bytes = sum(parameter.numel() * parameter.element_size() for parameter in read_once)
    rows = []
    for num_requests in options.requests:
        rounds = count_rounds(model, num_requests, 4)
        rows.append(
            [
                str(num_requests),
                _format_range(counts.num_rows for counts in rounds),
                _format_range(counts.num_kernels for counts in rounds),
                _format_range(counts.num_attention_kernels for counts in rounds),
                f"{statistics.fmean(counts.num_bytes for counts in rounds) / MEBIBYTE:,.1f}",
                f"{weight_bytes / MEBIBYTE:,.1f}",
            ]
        )
    small = random_model(SMALL_SHAPE, seed=0)
    graphs = []
    for concurrency in options.concurrency:
        graphs.append([str(concurrency), *describe_rounds(list_round_shapes(small, concurrency, 3 * concurrency))])
    kernels = ["requests", "rows", "operators", "of attention", "MiB moved", "MiB of weights"]
    columns = [
        "concurrency",
        "rounds",
        "rows per round",
        "rounds with a graph",
        "by a graph",
        "graphs",
        "rows of padding",
    ]
    facts = {"model": f"{describe_model(SHAPE)}, vocabulary {SHAPE.vocab_size:,}, float32, random weights"}
    return Report([Table(kernels, rows), "Rounds that a CUDA graph computes:", Table(columns, graphs)], facts)


def _format_range(values: Any) -> str:
    numbers = sorted(set(values))
    return f"{numbers[0]:,}" if len(numbers) == 1 else f"{numbers[0]:,} to {numbers[-1]:,}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32], metavar="N", help="default: 1 8 32")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[8, 32], metavar="N", help="default: 8 32")


def check_arguments(options: argparse.Namespace) -> str | None:
    is_positive = min(options.requests + options.concurrency) >= 1
    return None if is_positive else "--requests and --concurrency must be at least 1"


BENCHMARK = Benchmark(
    "Count kernels and bytes of a round on a GPU.",
    run,
    rounds=None,
    threads=1,
    add_arguments=add_arguments,
    check_arguments=check_arguments,
)

if __name__ == "__main__":
    raise SystemExit(main(BENCHMARK))
