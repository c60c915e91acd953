"""Speed of the loader: from text, from text with workers, and from shards, beside the training step.

python -m benchmarking.bench_data
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarking.harness import collect_environment, markdown_list, markdown_table, print_message
from benchmarking.implementations.training import TrainCase, build_ours
from config.bench_train import BenchShape
from config.data import DataConfig, PythonStdlib, Shards, TextSource
from config.make_data import MakeDataConfig, MakeDataOutputConfig
from config.objective import MaskedDiffusionConfig
from config.tokenizer import TokenizerConfig
from diffusionlm.data.loader import LoaderSpec, WorkerLoader, collate_rows
from diffusionlm.data.make_data import make_data
from diffusionlm.data.pipeline import build_row_reader, open_components
from diffusionlm.data.shards import ShardDocuments
from profiling.cores import usable_cores
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

STDLIB = PythonStdlib()

ReadStep = Callable[[], int]
"""Takes one step's data and says how many tokens there were."""


def open_row_stream(config: DataConfig, tokenizer: Tokenizer, row_length: int, batch_size: int) -> ReadStep:
    """Rows, stacked; no noise."""
    reader = build_row_reader(open_components(config, "train"), config, tokenizer, row_length, seed=0)
    epoch, position = 0, None

    def pull() -> int:
        nonlocal epoch, position
        rows, position = reader.read(epoch, position, batch_size)
        epoch += position is None
        return collate_rows(rows).tokens_BL.numel() if rows else 0

    return pull


@contextlib.contextmanager
def open_noised_batch_reader(
    config: DataConfig, tokenizer: Tokenizer, row_length: int, batch_size: int
) -> Iterator[ReadStep]:
    """Rows and noise, as a training step takes them."""
    ids = {"vocab_size": tokenizer.vocab_size, "mask_token_id": tokenizer.mask_token_id}
    model = MODEL.to_model_config().model_copy(update=ids)
    plan = LoaderSpec(config, tokenizer, row_length, MaskedDiffusionConfig(), model, batch_size, batch_size, seed=0)
    loader = WorkerLoader(plan) if config.workers else plan.open()
    step = 0

    def pull() -> int:
        nonlocal step
        [draw] = loader.next_step(step)
        step += 1
        return draw.inputs_BS.numel()

    try:
        yield pull
    finally:
        loader.close()


def tokens_per_second(pull: ReadStep, seconds: float) -> float:
    """After a first step, which fills the windows of the shuffles."""
    pull()
    started, tokens = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - started) < seconds:
        tokens += pull()
    return tokens / elapsed


def bench_data(
    *,
    rounds: int,
    seconds: float,
    threads: int,
    source: TextSource = STDLIB,
    row_length: int = 512,
    batch_size: int = 64,
) -> str:
    """The table."""
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        output = MakeDataOutputConfig(directory=Path(folder) / "shards", workers=0)
        tokenizer_config = TokenizerConfig(vocab_size=MODEL.vocab_size)
        make_data(MakeDataConfig(source=source, tokenizer=tokenizer_config, output=output), print_message)
        documents = ShardDocuments.open(Shards(path=output.directory), "train")
        tokenizer = load_tokenizer(documents.tokenizer_directory)
        text, shards = DataConfig(source=source), DataConfig(source=Shards(path=output.directory))
        rates: dict[str, list[float]] = {}
        for number in range(rounds):
            for name, config in (("text", text), ("shards", shards)):
                for workers in (0, 1, 2):
                    if name == "shards" and workers == 2:
                        continue  # there is nothing to tokenise
                    what = f"draws from {name}, " + (f"{workers} workers" if workers != 1 else "1 worker")
                    print_message(f"round {number + 1} of {rounds}: {what}")
                    chosen = config.model_copy(update={"workers": workers})
                    with open_noised_batch_reader(chosen, tokenizer, row_length, batch_size) as pull:
                        rates.setdefault(what, []).append(tokens_per_second(pull, seconds))
                pull = open_row_stream(config, tokenizer, row_length, batch_size)
                rates.setdefault(f"rows from {name}, no noise", []).append(tokens_per_second(pull, seconds))
            train = build_ours(TrainCase(MODEL, "bfloat16", "cpu", threads, seed=0)).step

            def step(train: Callable[[], object] = train) -> int:
                train()
                return MODEL.tokens

            rates.setdefault("the quickstart's training step", []).append(tokens_per_second(step, seconds))
        trained = rates["the quickstart's training step"]
        table = [
            [
                name,
                f"{statistics.median(each):,.0f}",
                f"{statistics.median([rate / step for rate, step in zip(each, trained, strict=True)]):,.1f}",
            ]
            for name, each in rates.items()
        ]
        header = ["what", "tokens/s, median of the rounds", "times the training step's, in a round"]
        corpus = f"{source.kind}, {documents.num_tokens:,} tokens in {len(documents):,} documents"
    about = {
        **collect_environment(threads=threads, packages=["torch", "numpy"]),
        "rows": f"{batch_size} of {row_length} tokens a step, packed; {corpus}",
        "rounds": f"{rounds}, {seconds:g} s of each in turn; the training step has the processor alone",
    }
    return f"{markdown_table(header, table)}\n\n{markdown_list(about)}"


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of all in turn (default: 5)")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each in a round (default: 5)")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="of torch (default: all usable cores)")
    arguments = parser.parse_args()
    print(bench_data(rounds=arguments.rounds, seconds=arguments.seconds, threads=arguments.threads))


if __name__ == "__main__":
    main()
