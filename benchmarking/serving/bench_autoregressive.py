"""The engine against continuous batching of `transformers`, on the weights of one autoregressive model.

python -m benchmarking.serving.bench_autoregressive --concurrency 8

**Next tokens**: both decode greedily, one token per forward, and must return the same tokens. **3 tokens per forward**:
the engine decodes blocks of 3 in one step, as a model does that fills three positions at a time; random weights pass no
threshold, so the block length fixes the number. Requests as in `bench_engine`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial

from benchmarking.bench_decoding_peers import SHAPE
from benchmarking.bench_infer import random_model
from benchmarking.harness import (
    SPEEDUP_COLUMN,
    Benchmark,
    Report,
    Settings,
    Table,
    compare,
    describe_model,
    main,
)
from benchmarking.serving.bench_engine import CACHE_BYTES, LONGEST, ROUNDS_HEADER, describe_rounds
from benchmarking.serving.callers import (
    Answers,
    TransformersBatching,
    block_settings,
    count_equal,
    decode_by_engine,
    draw_requests,
)
from diffusionlm.serving.engine import Engine

NEXT_TOKENS, THREE_TOKENS, PEER = "engine, next tokens", "engine, 3 tokens per forward", "transformers, next tokens"
CONTEXT = SHAPE.model_copy(update={"max_position_embeddings": 2 * LONGEST})
SHAPES = {
    NEXT_TOKENS: CONTEXT.model_copy(update={"block_length": 1, "logit_alignment": "shifted", "mask_token_id": None}),
    THREE_TOKENS: CONTEXT.model_copy(update={"block_length": 3}),
}


def run(settings: Settings) -> Report:
    """Build two tables for each concurrency: speeds side by side, and rounds of the engine."""
    options = settings.options
    models = {name: random_model(shape, seed=0) for name, shape in SHAPES.items()}
    speeds, rounds = [], []
    for concurrency in options.concurrency:
        requests = draw_requests(SHAPE, options.requests or 3 * concurrency, LONGEST, seed=0)
        engines = {
            name: Engine(
                model,
                cache_bytes=CACHE_BYTES,
                max_requests=concurrency,
                max_waiting=len(requests),
                has_prefix_cache=False,
            )
            for name, model in models.items()
        }
        num_positions = concurrency * 2 * LONGEST + 64
        peer = TransformersBatching(models[NEXT_TOKENS], concurrency, num_positions)
        calls = {
            **{
                name: partial(decode_by_engine, engine, requests, block_settings(SHAPES[name].block_length or 1, 1))
                for name, engine in engines.items()
            },
            PEER: partial(peer.decode, requests),
        }
        equal: list[int] = []

        tokens = float(sum(request.new_tokens for request in requests))
        times = compare(
            calls,
            settings,
            label=f"concurrency {concurrency}",
            work=dict.fromkeys(calls, tokens),
            check=partial(_append_equal, equal),
        )
        peer.close()
        for name, engine in engines.items():
            engine.close()
            rounds.append([name, *describe_rounds(engine.status)])
            equal_cell = f"{sum(equal)} of {len(equal) * len(requests)}" if name == NEXT_TOKENS else ""
            speed = [f"{tokens / times.median(other):,.1f}" for other in (name, PEER)]
            speeds.append([name, str(concurrency), *speed, *times.speedup_cells(name, PEER), equal_cell])
    header = ["ours", "concurrency", "ours tok/s", f"{PEER}, tok/s", "speedup", SPEEDUP_COLUMN, "equal answers"]
    facts = {
        "model": f"{describe_model(SHAPE)}, vocabulary {SHAPE.vocab_size:,}, float32, random weights",
        "requests": f"prompts and answers of 12, 24, ... {LONGEST} tokens",
    }
    rounds_header = ["decoder", *ROUNDS_HEADER[1:]]
    return Report([Table(header, speeds), "Rounds of the engine:", Table(rounds_header, rounds)], facts)


def _append_equal(equal: list[int], outputs: Mapping[str, Answers]) -> None:
    equal.append(count_equal(outputs[NEXT_TOKENS], outputs[PEER]))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--concurrency", type=int, nargs="+", default=[8], metavar="N", help="default: 8")
    parser.add_argument("--requests", type=int, metavar="N", help="default: 3 times the concurrency")


def check_arguments(options: argparse.Namespace) -> str | None:
    numbers = [*options.concurrency, *([] if options.requests is None else [options.requests])]
    return None if min(numbers) >= 1 else "--concurrency and --requests must be at least 1"


BENCHMARK = Benchmark(
    "Compare the engine with continuous batching of transformers.",
    run,
    rounds=3,
    warmup=0,
    threads=2,
    packages=("torch", "transformers"),
    required_packages=("transformers",),
    add_arguments=add_arguments,
    check_arguments=check_arguments,
)

if __name__ == "__main__":
    raise SystemExit(main(BENCHMARK))
