"""Throughput of the loader from text, from text with workers, and from shards, against that of a training step.

python -m benchmarking.bench_data
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarking.harness import Benchmark, Report, Settings, Table, main, run_in_turns
from benchmarking.implementations.training import TrainCase, build_ours
from config.bench.training import BenchShape
from config.data import DataConfig, PythonStdlib, Shards, TextSource
from config.make_data import MakeDataConfig, MakeDataOutputConfig
from config.tokenizer import TokenizerConfig
from config.training.objective import MaskedDiffusionConfig
from diffusionlm.data.loader import LoaderSpec, WorkerLoader, collate_rows
from diffusionlm.data.make_data import make_data
from diffusionlm.data.pipeline import build_row_reader, open_components
from diffusionlm.data.shards import ShardDocuments
from files.terminal_text import print_message
from tokenizer import Tokenizer, load_tokenizer

MODEL = BenchShape(
    name="quickstart",
    hidden_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=32,
    intermediate_size=384,
    max_position_embeddings=128,
    vocab_size=4_096,
    batch_size=16,
)
TRAINING_STEP = "training step of the quickstart"

ReadStep = Callable[[], int]
"""Reads the data of one step and returns the number of its tokens."""


def tokens_per_second(read: ReadStep, seconds: float) -> float:
    """Measure for some seconds, after one step that fills the shuffle buffers."""
    read()
    start, tokens = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - start) < seconds:
        tokens += read()
    return tokens / elapsed


def measure_sequences(config: DataConfig, tokenizer: Tokenizer, length: int, batch_size: int, seconds: float) -> float:
    """Measure tokens per second of reading and stacking sequences without noise."""
    reader = build_row_reader(open_components(config, "train"), config, tokenizer, length, seed=0)
    epoch, position = 0, None

    def read() -> int:
        nonlocal epoch, position
        sequences, position = reader.read(epoch, position, batch_size)
        epoch += position is None
        return collate_rows(sequences).tokens_BL.numel() if sequences else 0

    return tokens_per_second(read, seconds)


def measure_noised(config: DataConfig, tokenizer: Tokenizer, length: int, batch_size: int, seconds: float) -> float:
    """Measure tokens per second of noised batches, as a training step reads them."""
    ids = {"vocab_size": tokenizer.vocab_size, "mask_token_id": tokenizer.mask_token_id}
    model = MODEL.to_model_config().model_copy(update=ids)
    spec = LoaderSpec(config, tokenizer, length, MaskedDiffusionConfig(), model, batch_size, batch_size, seed=0)
    steps = itertools.count()
    with contextlib.closing(WorkerLoader(spec) if config.workers else spec.open()) as loader:
        return tokens_per_second(
            lambda: sum(batch.inputs_BS.numel() for batch in loader.next_step(next(steps))), seconds
        )


def measure_training_step(threads: int, seconds: float) -> float:
    """Measure tokens per second of the quickstart's training step."""
    train = build_ours(TrainCase(MODEL, "bfloat16", "cpu", threads, seed=0)).step

    def step() -> int:
        train()
        return MODEL.tokens

    return tokens_per_second(step, seconds)


def bench_data(
    settings: Settings,
    *,
    seconds: float,
    source: TextSource | None = None,
    length: int = 512,
    batch_size: int = 64,
) -> Report:
    """Measure tokens per second of each kind of reader and of a training step, in turn.

    Args:
        settings: rounds and threads.
        seconds: measured for each reader in each round.
        source: of the text; the Python standard library by default.
        length: tokens of a sequence.
        batch_size: sequences of a step.
    """
    source = source or PythonStdlib()
    with tempfile.TemporaryDirectory() as folder:
        output = MakeDataOutputConfig(directory=Path(folder) / "shards", workers=0)
        tokenizer_config = TokenizerConfig(vocab_size=MODEL.vocab_size)
        make_data(MakeDataConfig(source=source, tokenizer=tokenizer_config, output=output), print_message)
        documents = ShardDocuments.open(Shards(path=output.directory), "train", "data.source")
        tokenizer = load_tokenizer(documents.tokenizer_directory)

        calls: dict[str, Callable[[], float]] = {}
        # Shards need no second worker, because nothing is left to tokenize.
        for name, config, workers in (
            ("text", DataConfig(source=source), (0, 1, 2)),
            ("shards", DataConfig(source=Shards(path=output.directory)), (0, 1)),
        ):
            for count in workers:
                label = f"noised batches from {name}, {count} worker{'' if count == 1 else 's'}"
                workers_config = config.model_copy(update={"workers": count})
                calls[label] = partial(measure_noised, workers_config, tokenizer, length, batch_size, seconds)
            measure = partial(measure_sequences, config, tokenizer, length, batch_size, seconds)
            calls[f"sequences from {name}, no noise"] = measure
        calls[TRAINING_STEP] = partial(measure_training_step, settings.threads, seconds)
        rates = run_in_turns(
            calls,
            rounds=settings.rounds,
            warmup=settings.warmup,
            after_round=lambda number, _: print_message(f"round {number}/{settings.rounds}"),
        )
        corpus = f"{source.kind}, {documents.num_tokens:,} tokens in {len(documents):,} documents"
    facts = {
        "sequences": f"{batch_size} of {length} tokens per step, packed; {corpus}",
        "seconds": f"{seconds:g} of each reader in a round; no reader runs during the training step",
    }
    return Report([_build_table(rates)], facts)


def _build_table(rates: dict[str, list[float]]) -> Table:
    rows = []
    for name, values in rates.items():
        ratios = [rate / step for rate, step in zip(values, rates[TRAINING_STEP], strict=True)]
        rows.append([name, f"{statistics.median(values):,.0f}", f"{statistics.median(ratios):,.1f}"])
    return Table(["reader", "tok/s, median", "over the training step, median of rounds"], rows)


def run(settings: Settings) -> Report:
    return bench_data(settings, seconds=settings.options.seconds)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=5.0, help="of each reader in a round (default: 5)")


BENCHMARK = Benchmark(
    "Compare the throughput of the loader with that of a training step.",
    run,
    rounds=5,
    warmup=0,
    packages=("torch", "numpy"),
    add_arguments=add_arguments,
)

if __name__ == "__main__":
    raise SystemExit(main(BENCHMARK))
