"""What is true of every strategy: an oracle's answer is found, batches and exact caches change nothing, and the
likelihoods of deterministic samplers are probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from config.generation import GenerationConfig
from diffusionlm.evaluation.sampler_likelihood import sampler_likelihood
from diffusionlm.inference.generate import Generation, generate, infill
from diffusionlm.inference.strategies import STRATEGIES
from tests.conftest import MakeModel
from tests.reference.decoding.choosing import Array, best, even_counts, softmax
from tests.reference.decoding.llada import by_factor, by_threshold
from tests.reference.decoding.sdar import Rule
from tests.reference.decoding.standins import MASK, Table, settings, table_model, tiny_transformer

STRATEGY_NAMES = tuple(STRATEGIES)
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 0, 1, 2], [9, 8, 7, 6, 5, 4]]
SEEDS = [7, 7, 0, 3]


def options(strategy: str, steps: int = 3) -> dict[str, Any]:
    """Few steps, where the strategy takes any."""
    takes_steps = "denoising_steps" in STRATEGIES[strategy].option_keys()
    return {"remasking_strategy": strategy, **({"denoising_steps": steps} if takes_steps else {})}


class Oracle(Table):
    """Sure of one token at each place, whatever is visible; the mask token has more still."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.shift = shift

    def __call__(self, tokens: Sequence[int]) -> Array:
        logits_LV = np.zeros((len(tokens), MASK + 1))
        logits_LV[:, MASK] = 99.0
        for row in range(len(tokens)):
            logits_LV[row, answer(row + self.shift)] = 60.0
        return logits_LV


def answer(position: int) -> int:
    return position * 7 % MASK


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
@pytest.mark.parametrize(
    ("config", "values"),
    [
        ({}, {"block_length": 5}),
        ({}, {"block_length": 5, "canvas": "growing"}),
        ({"logit_alignment": "shifted"}, {}),
        ({"block_length": 4}, {}),
        ({"block_length": 4, "logit_alignment": "shifted"}, {"cfg_scale": 1.0}),
    ],
    ids=str,
)
def test_every_strategy_finds_an_oracles_answer(strategy: str, config: dict[str, Any], values: dict[str, Any]) -> None:
    model = table_model(**config)
    model.table = Oracle(int("logit_alignment" in config))
    chosen = settings(max_new_tokens=11, **options(strategy), **values)
    for prompt, done in zip(PROMPTS, generate(model, PROMPTS, chosen), strict=True):
        assert done.token_ids == tuple(answer(position) for position in range(len(prompt), len(prompt) + 11))
        assert done.finish_reason == "length" and done.tokens_per_forward == 11 / done.num_forwards
    canvas = [8, MASK, MASK, 4, MASK, MASK, MASK, 2, MASK]
    [done] = infill(model, [canvas], chosen)
    assert done.token_ids == tuple(
        answer(position) if token == MASK else token for position, token in enumerate(canvas)
    )


def assert_same(first: Sequence[Generation], second: Sequence[Generation]) -> None:
    for a, b in zip(first, second, strict=True):
        assert (a.token_ids, a.step_map, a.num_forwards) == (b.token_ids, b.step_map, b.num_forwards)
        # The norms of the model are computed in fp32 whatever its dtype.
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


@pytest.mark.parametrize("size", [1, 3, 20])
@pytest.mark.parametrize("values", [{"cfg_scale": 0.7}, {"stop_token_ids": (1,)}], ids=str)
def test_the_cache_of_other_blocks_is_exact(tiny_model: MakeModel, size: int, values: dict[str, Any]) -> None:
    model = tiny_transformer(tiny_model, 6, block_length=size)
    config = settings(max_new_tokens=10, remasking_strategy="low_confidence", **values)
    cached = generate(model, PROMPTS[:3], config.model_copy(update={"cache": "block"}), SEEDS[:3])
    assert_same(cached, generate(model, PROMPTS[:3], config, SEEDS[:3]))
    assert len({done.token_ids for done in cached}) > 2


# ----------------------------------------------------------------------------------------------------------------------
# The likelihood of deterministic samplers

TOKENS, LENGTH = 3, 4
EVERY_TEXT = list(product(range(TOKENS), repeat=LENGTH))
DETERMINISTIC = [name for name, strategy in STRATEGIES.items() if strategy().has_exact_likelihood]


def negative_entropy(probs: Array) -> float:
    return float((probs * np.log(probs)).sum())


def margin(probs: Array) -> float:
    return float(np.diff(np.sort(probs)[-2:])[0])


def highest(probs: Array) -> float:
    return float(probs.max())


SCORES: dict[str, Callable[[Array], float]] = {
    "low_confidence": highest,
    "maskgit_plus": highest,
    "topk_margin": margin,
    "entropy": negative_entropy,
}
SDAR_RULES = {"sequential", "low_confidence_static", "low_confidence_dynamic", "entropy_bounded"}
WRITTEN_OUT = {"threshold", "factor", *SCORES, *SDAR_RULES}
"""Strategies whose order `revealed` has."""


def revealed(strategy: str, masked: list[int], probs: dict[int, Array], count: int) -> list[int]:
    """The positions that are committed by the distributions alone."""
    top = {position: highest(probs[position]) for position in masked}
    if strategy == "threshold":
        return by_threshold(0.5)(top, 0)
    if strategy == "factor":
        return by_factor(1.2)(top, 0)
    if strategy in SCORES:
        return best({position: SCORES[strategy](probs[position]) for position in masked}, count)
    return Rule(strategy, confidence_threshold=0.5, eb_threshold=1.5).chosen(masked, top, probs, count)


OPTIONS: dict[str, dict[str, Any]] = {
    "threshold": {"confidence_threshold": 0.5},
    "factor": {"factor": 1.2},
    "entropy_bounded": {"entropy_bound": 1.5},
    "low_confidence_dynamic": {"confidence_threshold": 0.5},
}


@pytest.mark.parametrize("strategy", DETERMINISTIC)
@pytest.mark.parametrize("block_length", [None, 2])
def test_exact_likelihoods_sum_to_one(strategy: str, block_length: int | None) -> None:
    """Over all texts, and are those of the order that is written out. Two steps for a block, the text or half of it."""
    model = table_model(TOKENS, seed=7, scale=1.0, block_length=block_length)
    config = GenerationConfig(**options(strategy, 2), **OPTIONS.get(strategy, {}), cache="none")
    report = sampler_likelihood(model, torch.tensor(EVERY_TEXT), config=config)
    assert math.fsum(math.exp(-nats) for nats in report.row_nats) == pytest.approx(1.0, abs=1e-9)
    if strategy not in WRITTEN_OUT:
        return
    counts = even_counts(block_length or LENGTH, 2)
    if strategy in ("maskgit_plus", "topk_margin", "entropy"):  # Dream's: int(masked * 0.4995), then the rest
        counts = [1, 3] if block_length is None else [2]
    num_forwards = 0
    for text, nats in zip(EVERY_TEXT, report.row_nats, strict=True):
        canvas, expected = [TOKENS] * LENGTH, 0.0
        for start in range(0, LENGTH, block_length or LENGTH):
            end, step = start + (block_length or LENGTH), 0
            while masked := [position for position in range(start, end) if canvas[position] == TOKENS]:
                probs = {position: softmax(model.table(canvas[:end])[position, :TOKENS]) for position in masked}
                for position in revealed(strategy, masked, probs, counts[min(step, len(counts) - 1)]):
                    canvas[position] = text[position]
                    expected -= math.log(probs[position][text[position]])
                step += 1
                num_forwards += 1
        assert nats == pytest.approx(expected, abs=1e-9)
    assert report.num_forwards == num_forwards
