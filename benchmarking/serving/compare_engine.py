"""The engine against one request at a time, static batches and continuous batching of transformers.

python -m benchmarking.serving.compare_engine --concurrency 8

The model has random weights, in float32 on the CPU. All implementations decode the same requests in turn, in one
process, and answers of equal settings are compared in every round. Lengths of prompts and answers are multiples of 12
up to 132, all equally likely.

Blocks of 4 in 4 steps, one token per forward and request: **static, leave** computes nothing for requests that are
complete; **static, padded** computes all until the longest is complete, as rectangular batches do.

Against transformers the weights are those of an autoregressive model: **next tokens** are greedy on both sides and must
be equal; **3 tokens per forward** decodes blocks of 3 in one step. Random weights pass no threshold, so the block
length fixes the number.
"""

from __future__ import annotations

import argparse
import importlib
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarking.bench_infer import random_model
from benchmarking.harness import (
    INSTALL_HINT,
    SPEEDUP_COLUMN,
    Comparison,
    at_least,
    collect_environment,
    compare,
    describe_model,
    is_installed,
    make_parser,
    make_report,
    make_table,
    run_benchmark,
)
from benchmarking.implementations.peers import convert_to_qwen3
from config.generation import GenerationConfig
from config.model import ModelConfig
from diffusionlm.inference.generate import generate
from diffusionlm.models.transformer import Transformer
from diffusionlm.serving.engine import Engine, release_team
from files.terminal_text import print_message
from logger.pages import Page

LENGTH_UNIT = 12
"""Lengths are multiples of it, so blocks of 3 and of 4 are whole and a longer answer begins like a shorter one."""
LONGEST = 132
CACHE_BYTES = 256 << 20
SHAPE = ModelConfig(
    hidden_size=512,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    intermediate_size=1536,
    max_position_embeddings=2 * LONGEST,
    vocab_size=32_768,
    mask_token_id=32_767,
    block_length=4,
)
ALONE, ENGINE, LEAVE, PADDED = "one at a time", "engine", "static, leave", "static, padded"
NEXT_TOKENS, THREE_TOKENS, PEER = "engine, next tokens", "engine, 3 tokens per forward", "transformers, next tokens"

Answers = list[tuple[int, ...]]
DecodeRequests = Callable[[], Answers]
"""Decodes all requests; returns their new tokens."""


@dataclass(frozen=True)
class CallerRequest:
    """What a caller asks for."""

    prompt: list[int]
    new_tokens: int


def draw_requests(model: ModelConfig, count: int, longest: int, seed: int) -> list[CallerRequest]:
    """Requests whose prompts and answers have lengths of up to ``longest`` tokens, all multiples equally likely.

    A larger count begins with the requests of a smaller one.
    """
    requests = []
    last = model.vocab_size if model.mask_token_id is None else model.mask_token_id
    for index in range(count):
        rng = np.random.default_rng([seed, index])
        prompt_length, new_tokens = (LENGTH_UNIT * rng.integers(1, longest // LENGTH_UNIT + 1, 2)).tolist()
        requests.append(CallerRequest(rng.integers(0, last, prompt_length).tolist(), new_tokens))
    return requests


def request_settings(block_length: int, steps: int, new_tokens: int) -> GenerationConfig:
    """Greedy decoding of blocks that ends at no token."""
    return GenerationConfig(
        max_new_tokens=new_tokens,
        attention="block_causal",
        cache="block",
        block_length=block_length,
        denoising_steps=steps,
        remasking_strategy="low_confidence_static",
        stop_token_ids=(),
    )


def decode_one_by_one(model: Transformer, requests: Sequence[CallerRequest]) -> Answers:
    """Decode one request at a time, in the calling thread."""
    answers = [
        generate(model, [request.prompt], request_settings(4, 4, request.new_tokens))[0].token_ids
        for request in requests
    ]
    release_team()  # an engine that decodes next has a thread of its own
    return answers


def decode_by_engine(engine: Engine, requests: Sequence[CallerRequest], block_length: int, steps: int) -> Answers:
    """Submit all requests at once; the engine decodes as many together as it was built for."""
    handles = [
        engine.submit(request.prompt, request_settings(block_length, steps, request.new_tokens)) for request in requests
    ]
    return [handle.result().token_ids for handle in handles]


def decode_static_batches(engine: Engine, requests: Sequence[CallerRequest], size: int, *, is_padded: bool) -> Answers:
    """Decode batches of ``size``, each begun when the one before it is complete.

    Args:
        is_padded: requests that are complete are computed until the longest one is, as decoders with rectangular
            batches do; else they leave, and nobody takes their place.
    """
    answers: Answers = []
    for start in range(0, len(requests), size):
        batch = requests[start : start + size]
        longest = max(request.new_tokens for request in batch)
        padded = [CallerRequest(request.prompt, longest) for request in batch] if is_padded else batch
        texts = decode_by_engine(engine, padded, 4, 4)
        answers += [text[: request.new_tokens] for text, request in zip(texts, batch, strict=True)]
    return answers


def start_transformers(model: Transformer, concurrency: int) -> Any:
    """Start continuous batching of `transformers` with the weights of an autoregressive model; returns its manager.

    ``concurrency`` requests are decoded at a time.
    """
    transformers: Any = importlib.import_module("transformers")
    page_size = 32
    manager = convert_to_qwen3(model).init_continuous_batching(
        generation_config=transformers.GenerationConfig(
            do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=1
        ),
        continuous_batching_config=transformers.ContinuousBatchingConfig(
            page_size=page_size,
            num_blocks=-(-(concurrency * 2 * LONGEST + 64) // page_size),
            max_batch_tokens=2048,
            max_requests_per_batch=concurrency,
            allow_block_sharing=False,
        ),
    )
    manager.start()
    return manager


def decode_by_transformers(manager: Any, requests: Sequence[CallerRequest]) -> Answers:
    """Decode requests that all wait at once.

    Raises:
        ValueError: it fails.
    """
    names = [
        manager.add_request(request.prompt, max_new_tokens=request.new_tokens, eos_token_id=-1) for request in requests
    ]
    answers: dict[str, tuple[int, ...]] = {}
    while len(answers) < len(requests):
        output = manager.get_result(timeout=1.0)
        if output is None and not manager.is_running():
            raise ValueError("the continuous batching of transformers has ended")
        if output is not None and output.error is not None:
            raise ValueError(f"the continuous batching of transformers has failed: {output.error}")
        if output is not None and output.is_finished():
            answers[output.request_id] = tuple(output.generated_tokens)
    return [answers[name] for name in names]


def build_calls(
    stack: ExitStack, requests: list[CallerRequest], concurrency: int, num_alone: int, *, has_peer: bool
) -> dict[str, DecodeRequests]:
    """Build the calls of all implementations, whose engines the stack closes."""

    def start_engine(model: Transformer) -> Engine:
        engine = Engine(
            model,
            cache_memory=CACHE_BYTES,
            max_requests=concurrency,
            max_waiting=len(requests),
            prefix_cache=False,
        )
        return stack.enter_context(engine)

    model = random_model(SHAPE, seed=0)
    static = partial(decode_static_batches, start_engine(model), requests, concurrency)
    calls: dict[str, DecodeRequests] = {
        ALONE: partial(decode_one_by_one, model, requests[:num_alone]),
        ENGINE: partial(decode_by_engine, start_engine(model), requests, 4, 4),
        LEAVE: partial(static, is_padded=False),
        PADDED: partial(static, is_padded=True),
    }
    if has_peer:
        changes = {"block_length": 1, "logit_alignment": "shifted", "mask_token_id": None}
        next_tokens = random_model(SHAPE.model_copy(update=changes), seed=0)
        three_tokens = random_model(SHAPE.model_copy(update={"block_length": 3}), seed=0)
        manager = start_transformers(next_tokens, concurrency)
        stack.callback(manager.stop, block=True)
        calls[NEXT_TOKENS] = partial(decode_by_engine, start_engine(next_tokens), requests, 1, 1)
        calls[THREE_TOKENS] = partial(decode_by_engine, start_engine(three_tokens), requests, 3, 1)
        calls[PEER] = partial(decode_by_transformers, manager, requests)
    return calls


COMPARED = [(ENGINE, ALONE), (ENGINE, LEAVE), (ENGINE, PADDED), (NEXT_TOKENS, PEER), (THREE_TOKENS, PEER)]
"""Pairs of ours and another implementation; the answers of all but the last pair must be equal."""


def run_concurrency(
    requests: list[CallerRequest], concurrency: int, num_alone: int, *, rounds: int, has_peer: bool
) -> list[list[str]]:
    """Measure all implementations; one row for each compared pair."""
    num_equal = dict.fromkeys(COMPARED[:-1], 0)

    def count_answers(outputs: Mapping[str, Answers]) -> None:
        for ours, other in pairs[:4]:
            num_equal[ours, other] += sum(map(operator.eq, outputs[ours], outputs[other]))

    pairs = COMPARED if has_peer else COMPARED[:3]
    tokens = float(sum(request.new_tokens for request in requests))
    with ExitStack() as stack:
        calls = build_calls(stack, requests, concurrency, num_alone, has_peer=has_peer)
        work = dict.fromkeys(calls, tokens)
        work[ALONE] = float(sum(request.new_tokens for request in requests[:num_alone]))
        times = compare(calls, rounds=rounds, label=f"concurrency {concurrency}", check=count_answers)
    per_token = Comparison({name: [value / work[name] for value in times.seconds[name]] for name in calls})
    rows = []
    for ours, other in pairs:
        num_answers = rounds * (num_alone if other == ALONE else len(requests))
        equal = f"{num_equal[ours, other]} of {num_answers}" if (ours, other) in num_equal else ""
        speeds = [f"{1.0 / per_token.median(name):,.1f}" for name in (ours, other)]
        rows.append([ours, other, str(concurrency), *speeds, *per_token.speedup_cells(ours, other), equal])
    return rows


def run(options: argparse.Namespace) -> Page:
    """Build one table of all concurrencies."""
    packages = ["torch", "transformers"]
    environment = collect_environment(threads=options.threads, packages=packages, rounds=options.rounds, warmup=0)
    has_peer = options.peers == ["transformers"]
    if has_peer and not is_installed("transformers"):
        print_message(f"transformers is not installed, so its rows are left out; {INSTALL_HINT}")
        has_peer = False
    rows = []
    for concurrency in options.concurrency:
        requests = draw_requests(SHAPE, options.requests or 3 * max(32, concurrency), LONGEST, seed=0)
        num_alone = min(options.alone, len(requests))
        rows += run_concurrency(requests, concurrency, num_alone, rounds=options.rounds, has_peer=has_peer)
    header = ["ours", "against", "concurrency", "ours tok/s", "its tok/s", "speedup", SPEEDUP_COLUMN, "equal answers"]
    facts = {
        "model": f"{describe_model(SHAPE)}, vocabulary {SHAPE.vocab_size:,}, float32, random weights",
        "requests": f"prompts and answers of 12, 24, ... {LONGEST} tokens; one at a time: the first {options.alone}",
    }
    return make_report("The engine against other ways to decode", [make_table(header, rows)], facts | environment)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the options and run the benchmark."""
    description = "Compare the engine with one request at a time, static batches and transformers."
    parser, number = make_parser(description, rounds=2, threads=2), at_least(1)
    parser.add_argument("--concurrency", type=number, nargs="+", default=[8], metavar="N", help="default: 8")
    parser.add_argument("--requests", type=number, metavar="N", help="default: 3 times the concurrency, at least 96")
    parser.add_argument("--alone", type=number, default=4, metavar="N", help="requests one at a time (default: 4)")
    parser.add_argument("--peers", nargs="*", choices=["transformers"], default=["transformers"], help="none: --peers")
    return run_benchmark(run, parser.parse_args(argv))


if __name__ == "__main__":
    raise SystemExit(main())
