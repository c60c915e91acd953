"""The engine against one request at a time and against static batches, for requests of unequal lengths.

python -m benchmarking.serving.bench_engine --concurrency 8

The model has random weights, in float32 on the CPU, blocks of 4 and 4 steps: one token per forward and request. All
implementations decode the same requests in turn, in one process, and their answers are compared in every round.

Lengths of prompts and answers are multiples of 12 up to 132, all equally likely: U[100, 1024] divided by 8, so that a
round takes seconds and the ratio of the longest to the mean stays the same.

Two static batches: **static, leave** computes nothing for requests that are complete (the decoder of `generate`);
**static, padded** computes all of them until the longest is complete, as rectangular batches do.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial

from benchmarking.bench_decoding_peers import SHAPE
from benchmarking.bench_infer import random_model
from benchmarking.harness import (
    SPEEDUP_COLUMN,
    Benchmark,
    Comparison,
    Report,
    Settings,
    Table,
    compare,
    describe_model,
    main,
)
from benchmarking.serving.callers import (
    Answers,
    CallerRequest,
    DecodeRequests,
    block_settings,
    count_equal,
    decode_by_engine,
    decode_one_by_one,
    decode_static_batches,
    draw_requests,
    static_limit,
)
from diffusionlm.models.transformer import Transformer
from diffusionlm.serving.engine import Engine, EngineStatus

LONGEST = 132
CACHE_BYTES = 256 << 20
ALONE, ENGINE, LEAVE, PADDED = "one at a time", "engine", "static, leave", "static, padded"


class Comparer:
    """Counts equal answers over all rounds."""

    def __init__(self) -> None:
        self.num_equal = self.num_compared = 0

    def __call__(self, outputs: Mapping[str, Answers]) -> None:
        """Compare the answers of each implementation with those of one request at a time and with the engine's."""
        for name, answers in outputs.items():
            for other in {ALONE, ENGINE} - {name}:
                self.num_equal += count_equal(answers, outputs[other])
                self.num_compared += min(len(answers), len(outputs[other]))


def run_concurrency(
    model: Transformer, requests: list[CallerRequest], concurrency: int, num_alone: int, settings: Settings
) -> tuple[list[list[str]], list[str]]:
    """Measure all implementations; rows of the table of speeds, and the row of the engine's rounds."""
    config = block_settings(4, 4)
    with ExitStack() as stack:

        def start_engine() -> Engine:
            engine = Engine(
                model,
                cache_bytes=CACHE_BYTES,
                max_requests=concurrency,
                max_waiting=len(requests),
                has_prefix_cache=False,
            )
            return stack.enter_context(engine)

        engine, static = start_engine(), start_engine()
        batches = partial(decode_static_batches, static, requests, config, size=concurrency)
        calls: dict[str, DecodeRequests] = {
            ALONE: partial(decode_one_by_one, model, requests[:num_alone], config),
            ENGINE: partial(decode_by_engine, engine, requests, config),
            LEAVE: partial(batches, is_padded=False),
            PADDED: partial(batches, is_padded=True),
        }
        tokens = sum(request.new_tokens for request in requests)
        alone_tokens = sum(request.new_tokens for request in requests[:num_alone])
        work = {name: float(alone_tokens if name == ALONE else tokens) for name in calls}
        comparer = Comparer()
        times = compare(calls, settings, label=f"concurrency {concurrency}", work=work, check=comparer)
        status = engine.status
    per_token = Comparison({name: [value / work[name] for value in times.seconds[name]] for name in calls})
    limits = {PADDED: f"{static_limit(requests, concurrency):.2f}"}
    rows = [
        [
            str(concurrency),
            name,
            f"{work[name] / times.median(name):,.1f}",
            *(["1", "1"] if name == ENGINE else per_token.speedup_cells(ENGINE, name)),
            limits.get(name, ""),
            f"{comparer.num_equal} of {comparer.num_compared}" if name == ENGINE else "",
        ]
        for name in calls
    ]
    return rows, [str(concurrency), *describe_rounds(status)]


ROUNDS_HEADER = ["concurrency", "rounds", "rows per round", "requests per round", "ms per round", "model", "host"]


def describe_rounds(status: EngineStatus) -> list[str]:
    """Cells of the columns of `ROUNDS_HEADER` after the first one."""
    counts = status.counts
    model_share = counts.model_seconds / status.busy_seconds
    return [
        f"{counts.num_rounds:,}",
        f"{counts.num_rows / counts.num_rounds:.1f}",
        f"{counts.num_request_steps / counts.num_rounds:.1f}",
        f"{1e3 * status.busy_seconds / counts.num_rounds:.2f}",
        f"{model_share:.1%}",
        f"{1.0 - model_share:.1%}",
    ]


def run(settings: Settings) -> Report:
    """Build two tables for each concurrency: speeds side by side, and rounds of the engine."""
    options = settings.options
    model = random_model(SHAPE.model_copy(update={"max_position_embeddings": 2 * LONGEST}), seed=0)
    speeds, rounds = [], []
    for concurrency in options.concurrency:
        count = options.requests or 3 * max(32, concurrency)
        requests = draw_requests(model.config, count, LONGEST, seed=0)
        rows, row = run_concurrency(model, requests, concurrency, min(options.alone, count), settings)
        speeds += rows
        rounds.append(row)
    header = ["concurrency", "decoder", "tok/s", "engine over it", SPEEDUP_COLUMN, "limit", "equal answers"]
    facts = {
        "model": f"{describe_model(SHAPE)}, vocabulary {SHAPE.vocab_size:,}, float32, random weights",
        "requests": f"prompts and answers of 12, 24, ... {LONGEST} tokens; one at a time: the first {options.alone}",
    }
    return Report([Table(header, speeds), "Rounds of the engine:", Table(ROUNDS_HEADER, rounds)], facts)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--concurrency", type=int, nargs="+", default=[8], metavar="N", help="default: 8")
    parser.add_argument("--requests", type=int, metavar="N", help="default: 3 times the concurrency, at least 96")
    parser.add_argument("--alone", type=int, default=4, metavar="N", help="requests one at a time (default: 4)")


def check_arguments(options: argparse.Namespace) -> str | None:
    numbers = [*options.concurrency, options.alone, *([] if options.requests is None else [options.requests])]
    return None if min(numbers) >= 1 else "--concurrency, --requests and --alone must be at least 1"


BENCHMARK = Benchmark(
    "Compare the engine with one request at a time and with static batches.",
    run,
    rounds=2,
    warmup=0,
    threads=2,
    add_arguments=add_arguments,
    check_arguments=check_arguments,
)

if __name__ == "__main__":
    raise SystemExit(main(BENCHMARK))
