"""Likelihoods of multiple-choice items: forwards, time and sampling error beside the published way.

    python -m benchmarking.evaluation.bench_likelihood --model DIR

Three tables: the error of the difference between two options, by estimator, from a table of all masks of each option;
the time of items with four options; the time of one-token answers after contexts of different lengths, packed and
padded.

Shapes: C masks, n answer tokens.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarking.evaluation.published_likelihood import DRAWS, draw_bernoulli_masks, estimate_answer
from benchmarking.harness import SPEEDUP_COLUMN, Benchmark, Report, Settings, Table, compare, main
from config.evaluation.likelihood import AnswerLikelihoodConfig
from diffusionlm.checkpoints.huggingface import load_model
from diffusionlm.checkpoints.model_files import load_tokenizer
from diffusionlm.diffusion.layout import InputLayout
from diffusionlm.diffusion.noised_batch import CleanBatch
from diffusionlm.diffusion.rng import RngStream, keyed_rng
from diffusionlm.evaluation.likelihood.answers import BlockedAnswer
from diffusionlm.evaluation.likelihood.copies import CopyTable
from diffusionlm.evaluation.likelihood.masks import (
    WeightedMasks,
    count_order_pair_masks,
    enumerate_masks,
    mean_cover_sets,
    sample_covers,
    sample_levels,
    sample_order_pairs,
)
from diffusionlm.evaluation.likelihood.options import OptionsRequest, score_documents
from diffusionlm.evaluation.likelihood.scoring import ScoringRequest, score_continuations
from diffusionlm.evaluation.nelbo import compute_masked_nll
from diffusionlm.models.transformer import Transformer
from files.terminal_text import print_message

PUBLISHED_ROWS = 128
OURS = ("orders", "covers")
CONTEXT_TOKENS = 24
NUM_OPTIONS = 4


@dataclass(frozen=True)
class Items:
    """Contexts and options from one text: the right option goes on, the others are from elsewhere."""

    tokens: NDArray[np.int64]

    def draw(self, num_context: int, lengths: Sequence[int], seed: int) -> OptionsRequest:
        """An item whose options have the given numbers of tokens."""
        rng = np.random.default_rng(seed)
        starts = rng.integers(0, len(self.tokens) - num_context - max(lengths), len(lengths))
        context = self.tokens[starts[0] : starts[0] + num_context]
        ends = [start + num_context for start in starts.tolist()]
        options = [self.tokens[end : end + length] for end, length in zip(ends, lengths, strict=True)]
        return OptionsRequest(tuple(context.tolist()), tuple(tuple(option.tolist()) for option in options), seed)


# ----------------------------------------------------------------------------------------------------------------------
# Error of a difference


def tabulate_masks(model: Transformer, context: Sequence[int], option: Sequence[int]) -> NDArray[np.float64]:
    """Log-probability of each token under each mask with bidirectional attention, [2^n, n]; 0 where it is visible."""
    layout = InputLayout.from_config(model.config, None)
    answer, table = BlockedAnswer(layout, context, option, "option"), CopyTable(layout)
    [block], is_masked_Cn = answer.blocks, enumerate_masks(len(option)).is_masked_Cn
    handles = []
    for is_masked_n in is_masked_Cn:
        positions = block.positions[is_masked_n]
        copy = answer.mask_block(block, positions)
        handles.append(table.add(answer.clean_tokens, copy, answer.tokens_T[positions], answer.num_context))
    table.compute(model, 4096)
    values = np.zeros((len(handles) + 1, len(option)))
    for index, handle in enumerate(handles):
        values[index + 1, is_masked_Cn[index]] = handle.read()
    return values


def draw_ours(num_tokens: int, name: str, seed: int) -> tuple[WeightedMasks, int]:
    """Masks of an estimator and the number of draws."""
    if name == "orders":
        return sample_order_pairs(num_tokens, 0, 1, seed, ()), 1
    num_draws = max(1, int(count_order_pair_masks(num_tokens) / mean_cover_sets(num_tokens)))
    levels_D = sample_levels(num_draws, num_draws, keyed_rng(seed, RngStream.ANSWER_LEVELS))
    return sample_covers(num_tokens, levels_D, 0, seed, ()), num_draws


def count_distinct(is_masked_Cn: NDArray[np.bool_]) -> int:
    return len(np.unique(is_masked_Cn[is_masked_Cn.any(axis=1)], axis=0))


def sum_masks(table: NDArray[np.float64], is_masked_Cn: NDArray[np.bool_], weights_Cn: NDArray[np.float64]) -> float:
    masks_C = is_masked_Cn @ (1 << np.arange(is_masked_Cn.shape[1]))
    return float((table[masks_C] * weights_Cn).sum())


def measure_errors(model: Transformer, items: Items, num_tokens: int, num_items: int, num_seeds: int) -> list[str]:
    """Cells of one length: forwards of an option, and the root mean square error of a difference of two options."""
    errors: dict[str, list[float]] = {}
    forwards: dict[str, list[int]] = {}
    for item in range(num_items):
        request = items.draw(CONTEXT_TOKENS, [num_tokens] * 2, item)
        tables = [tabulate_masks(model, request.context, option) for option in request.options]
        all_masks = enumerate_masks(num_tokens)
        bounds = [sum_masks(table, all_masks.is_masked_Cn, all_masks.weights_Cn) for table in tables]
        exact = bounds[0] - bounds[1]
        for seed in range(num_seeds):
            for name, draw in DRAWS.items():
                rng = np.random.default_rng((item, seed))
                sums = [sum_masks(table, *draw(num_tokens, PUBLISHED_ROWS, rng)) for table in tables]
                errors.setdefault(name, []).append((sums[0] - sums[1]) / PUBLISHED_ROWS - exact)
            for name in OURS:
                masks, num_draws = draw_ours(num_tokens, name, item * num_seeds + seed)
                sums = [sum_masks(table, masks.is_masked_Cn, masks.weights_Cn) for table in tables]
                errors.setdefault(name, []).append((sums[0] - sums[1]) / num_draws - exact)
                forwards.setdefault(name, []).append(count_distinct(masks.is_masked_Cn))
    rms = {name: math.sqrt(np.mean(np.square(values))) for name, values in errors.items()}
    means = {name: float(np.mean(values)) for name, values in forwards.items()}
    cost = means["orders"] * rms["orders"] ** 2
    ratios = [PUBLISHED_ROWS * rms[name] ** 2 / cost for name in ("Bernoulli masks", "counts")]
    return [
        str(num_tokens),
        *(f"{rms[name]:.2f}" for name in DRAWS),
        *itertools.chain.from_iterable((f"{means[name]:.0f}", f"{rms[name]:.2f}") for name in OURS),
        str(2**num_tokens - 1),
        f"{PUBLISHED_ROWS / means['orders']:.1f}",
        *(f"{ratio:.0f}" for ratio in ratios),
    ]


def build_error_table(model: Transformer, items: Items, settings: Settings) -> Table:
    options = settings.options
    rows = []
    for num_tokens in options.lengths:
        print_message(f"errors: {num_tokens} tokens")
        rows.append(measure_errors(model, items, num_tokens, options.items, options.seeds))
    header = [
        "tokens",
        *(f"{name}, 128 forwards: error" for name in DRAWS),
        "an order and its reverse: forwards",
        "error",
        "covers: forwards",
        "error",
        "exact: forwards",
        "fewer forwards (order)",
        "fewer at equal error, than Bernoulli",
        "than counts",
    ]
    return Table(header, rows)


# ----------------------------------------------------------------------------------------------------------------------
# Time


def build_time_table(model: Transformer, items: Items, settings: Settings, block_length: int | None) -> Table:
    """Time of items with four options of 4 to 12 tokens: rows of one option in batches of 32, and ours."""
    rng = np.random.default_rng(0)
    requests = [
        items.draw(int(rng.integers(16, 64)), rng.integers(4, 13, NUM_OPTIONS).tolist(), seed)
        for seed in range(settings.options.documents)
    ]
    layout = InputLayout.from_config(model.config, block_length)

    def score_as_published() -> None:
        rng = np.random.default_rng(0)
        values = [
            [estimate_answer(model, layout, item.context, option, draw_bernoulli_masks, rng) for option in item.options]
            for item in requests
        ]
        choices["published"] = np.argmax(values, axis=1).tolist()

    def score(num_mc_samples: int) -> None:
        config = AnswerLikelihoodConfig(
            num_mc_samples=num_mc_samples, block_length=block_length, bidirectional=block_length is None
        )
        scores = score_documents(model, requests, config)
        forwards[f"ours, {num_mc_samples}"] = sum(item.num_forwards for item in scores) / len(requests)
        choices[f"ours, {num_mc_samples}"] = [item.chosen for item in scores]

    forwards = {"published": float(PUBLISHED_ROWS * NUM_OPTIONS)}
    choices: dict[str, list[int]] = {}
    calls: dict[str, Callable[[], None]] = {"published": score_as_published}
    calls |= {f"ours, {n}": functools.partial(score, n) for n in (128, 48)}
    label = "bidirectional" if block_length is None else f"blocks of {block_length}"
    comparison = compare(calls, settings, label=label)
    rows = [
        [
            f"{label}: {name}",
            f"{forwards[name]:.0f}",
            f"{forwards['published'] / forwards[name]:.1f}",
            f"{1e3 * comparison.median(name) / len(requests):.0f}",
            *comparison.speedup_cells(name, "published"),
            f"{np.mean(np.array(choices[name]) == np.array(choices['ours, 128'])):.2f}",
        ]
        for name in calls
    ]
    cost_header = ["forwards per item", "fewer", "ms per item", "faster", SPEEDUP_COLUMN]
    return Table(["items of four options", *cost_header, "same choice"], rows)


def build_packing_table(model: Transformer, items: Items, settings: Settings) -> Table:
    """Time of one-token answers after contexts of 4 to 100 tokens: padded to the longest of 32, and packed."""
    rng = np.random.default_rng(1)
    texts = [items.draw(int(rng.integers(4, 101)), [1], seed) for seed in range(128)]
    requests = [ScoringRequest(text.context, text.options[0]) for text in texts]
    layout = InputLayout.from_config(model.config, None)
    config = AnswerLikelihoodConfig(bidirectional=True, batch_tokens=2048)

    def score_padded() -> list[float]:
        values: list[float] = []
        for first in range(0, len(requests), 32):
            rows = [(*request.context, *request.continuation) for request in requests[first : first + 32]]
            length = max(map(len, rows))
            tokens_BL = torch.tensor([[*row, *[0] * (length - len(row))] for row in rows])
            documents_BL = torch.tensor([[0] * len(row) + [-1] * (length - len(row)) for row in rows])
            is_last_BL = torch.tensor([[index == len(row) - 1 for index in range(length)] for row in rows])
            batch = CleanBatch(tokens_BL, is_last_BL, documents_BL)
            nll_BL = compute_masked_nll(model, layout, batch, is_last_BL.numpy())
            values += (-nll_BL[is_last_BL.numpy()]).tolist()
        return values

    def score_packed() -> list[float]:
        return [score.log_likelihood for score in score_continuations(model, requests, config)]

    def check(outputs: Mapping[str, Any]) -> None:
        np.testing.assert_allclose(outputs["padded"], outputs["packed"], atol=1e-3)

    calls = {"padded": score_padded, "packed": score_packed}
    comparison = compare(calls, settings, label="one token", check=check)
    rows = [
        [name, f"{1e3 * comparison.median(name) / len(requests):.2f}", *comparison.speedup_cells(name, "padded")]
        for name in calls
    ]
    return Table(["one-token answers, contexts of 4 to 100 tokens", "ms per answer", "faster", SPEEDUP_COLUMN], rows)


def run(settings: Settings) -> Report:
    directory: Path = settings.options.model
    model = load_model(directory, device="cpu", dtype="float32")
    text = "".join(path.read_text(encoding="utf-8") for path in settings.options.text)
    items = Items(np.array(load_tokenizer(directory).encode(text), dtype=np.int64))
    parts: list[Table | str] = []
    if settings.options.lengths:
        parts.append(build_error_table(model, items, settings))
    parts += [build_time_table(model, items, settings, block_length) for block_length in (None, 4)]
    parts.append(build_packing_table(model, items, settings))
    return Report(parts, {"items": f"{settings.options.items} of each length, {settings.options.seeds} seeds"})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, help="directory of a model with a mask token")
    default = [Path(argparse.__file__)]
    parser.add_argument("--text", type=Path, nargs="+", default=default, help="files of items (default: argparse.py)")
    parser.add_argument(
        "--lengths", type=int, nargs="*", default=[4, 5, 6, 8, 10, 12], help="answer tokens of the table of errors"
    )
    parser.add_argument("--items", type=int, default=8, help="items of each length (default: 8)")
    parser.add_argument("--seeds", type=int, default=200, help="seeds of each estimator (default: 200)")
    parser.add_argument("--documents", type=int, default=8, help="items whose time is measured (default: 8)")


BENCHMARK = Benchmark(
    "Compare likelihoods of multiple-choice items with the published way.",
    run,
    rounds=5,
    warmup=1,
    threads=1,
    add_arguments=add_arguments,
)

if __name__ == "__main__":
    raise SystemExit(main(BENCHMARK))
