"""Rounds that a request waits beside a long prompt, counted: no times.

python -m benchmarking.serving.bench_first_text

Seven requests decode blocks of 4. A prompt of 400 tokens arrives, and right after it a short one. With a limit of rows
per round the long prompt is read in parts, and each round stays short for its neighbors.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarking.bench_infer import random_model
from benchmarking.harness import Benchmark, Report, Settings, Table, main
from benchmarking.serving.callers import CallerRequest, block_settings
from config.model import ModelConfig
from diffusionlm.inference.decoder import Decoder, DecoderLimits
from diffusionlm.inference.requests import ActiveRequest, prepare_prompt
from diffusionlm.inference.settings import resolve_settings
from diffusionlm.models.transformer import Transformer

SHAPE = ModelConfig(
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=128,
    max_position_embeddings=512,
    vocab_size=128,
    mask_token_id=127,
    block_length=4,
)
"""The number of rounds does not depend on the model."""
LONG_PROMPT, SHORT_PROMPT, NEW_TOKENS, NUM_NEIGHBORS = 400, 12, 24, 7


@dataclass(frozen=True)
class FirstTexts:
    """Rounds from the arrival of the last requests to their first final token, and the largest round since then."""

    long: int
    short: int
    max_rows: int
    stalled_rounds: int
    """Rounds in which a neighbor did not decode."""


def count_rounds(model: Transformer, max_rows: int | None, *, has_neighbors: bool, has_long: bool = True) -> FirstTexts:
    """Let a long prompt and then a short one arrive beside neighbors that decode."""
    decoder = Decoder(model, DecoderLimits(num_pages=200, max_rows=max_rows))
    neighbors = [
        _add(decoder, model, CallerRequest([index] * SHORT_PROMPT, 8 * NEW_TOKENS)) for index in range(NUM_NEIGHBORS)
    ]
    if not has_neighbors:
        for neighbor in neighbors:
            decoder.remove(neighbor)
        neighbors = []
    for _ in range(6):
        decoder.run_round()
    prompts = ([[1] * LONG_PROMPT] if has_long else []) + [[2] * SHORT_PROMPT]
    requests = [_add(decoder, model, CallerRequest(prompt, NEW_TOKENS)) for prompt in prompts]
    rounds: dict[int, int] = {}
    max_rows_of_round = stalled = number = 0
    while len(rounds) < len(requests):
        number += 1
        rows = decoder.counts.num_rows
        decoded = decoder.run_round().decoded
        max_rows_of_round = max(max_rows_of_round, decoder.counts.num_rows - rows)
        stalled += not _contains_all(decoded, neighbors)
        for index, request in enumerate(requests):
            if request.final_token_ids() and index not in rounds:
                rounds[index] = number
    return FirstTexts(rounds[0], rounds[len(requests) - 1], max_rows_of_round, stalled)


def _contains_all(decoded: Sequence[ActiveRequest], requests: Sequence[ActiveRequest]) -> bool:
    return {id(request) for request in requests} <= {id(request) for request in decoded}


def _add(decoder: Decoder, model: Transformer, request: CallerRequest) -> ActiveRequest:
    config = block_settings(4, 4).model_copy(update={"max_new_tokens": request.new_tokens})
    settings = resolve_settings(config, model.config)
    active = ActiveRequest(prepare_prompt(settings, request.prompt), settings)
    decoder.add(active)
    return active


def run(settings: Settings) -> Report:
    """Count for each limit of rows per round."""
    model = random_model(SHAPE, seed=0)
    alone = count_rounds(model, None, has_neighbors=False, has_long=False).short
    rows = []
    for max_rows in [None, *settings.options.max_rows]:
        busy = count_rounds(model, max_rows, has_neighbors=True)
        idle = count_rounds(model, max_rows, has_neighbors=False)
        rows.append(
            [
                "no limit" if max_rows is None else str(max_rows),
                *(str(value) for value in (alone, busy.short, busy.short - alone)),
                *(str(value) for value in (idle.long, busy.long, busy.max_rows, busy.stalled_rounds)),
            ]
        )
    header = [
        "rows per round",
        "short request alone",
        "beside the long prompt",
        "rounds late",
        "long prompt, without neighbors",
        "with neighbors",
        "largest round, rows",
        "rounds without a neighbor",
    ]
    facts = {"requests": f"{NUM_NEIGHBORS} neighbors, a prompt of {LONG_PROMPT} tokens, then one of {SHORT_PROMPT}"}
    return Report(["Rounds until the first text:", Table(header, rows)], facts)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-rows", type=int, nargs="+", default=[2048, 256, 96], metavar="N", help="default: 2048 256 96"
    )


def check_arguments(options: argparse.Namespace) -> str | None:
    return None if min(options.max_rows) >= 1 else "--max-rows must be at least 1"


BENCHMARK = Benchmark(
    "Count the rounds until the first text beside a long prompt.",
    run,
    rounds=None,
    threads=1,
    add_arguments=add_arguments,
    check_arguments=check_arguments,
)

if __name__ == "__main__":
    raise SystemExit(main(BENCHMARK))
