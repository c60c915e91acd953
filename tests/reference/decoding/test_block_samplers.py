"""`generate` is SDAR's sampler, canvas by canvas, without the forwards that only fill a cache."""

from __future__ import annotations

from typing import Any

import pytest

from diffusionlm.inference.generate import generate
from tests.conftest import MakeModel
from tests.reference.decoding.choosing import LogitsOf, Text
from tests.reference.decoding.sdar import Rule, block_diffusion_generate
from tests.reference.decoding.standins import (
    MASK,
    Plain,
    TableModel,
    assert_same,
    choice,
    settings,
    spread,
    table_model,
    tiny_transformer,
)

PROMPTS = [[], [3], [1, 2, MASK, 4], [1, 2, 3, 4, 5], [9, 8, 7, 6, 5, 4, 3, 2], [5] * 11]
"""Before, inside and at the end of a block of 4."""
FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 4, "min_p": 0.3},
    {"temperature": 1.0, "top_p": 0.8, "confidence_from": "unfiltered"},
]
RULES = [
    Rule("sequential"),
    Rule("low_confidence_static"),
    Rule("low_confidence_dynamic", confidence_threshold=0.3),
    Rule("low_confidence_dynamic", confidence_threshold=0.7),
    Rule("low_confidence_dynamic", confidence_threshold=0.6, fallback="leftmost"),
    Rule("low_confidence_dynamic", confidence_threshold=0.6, fallback="one"),
    Rule("entropy_bounded", eb_threshold=0.35),
    Rule("entropy_bounded", eb_threshold=2.5),
]


def options(rule: Rule, steps: int) -> dict[str, Any]:
    """Those of `generate`."""
    options_of_rule: dict[str, Any] = {"remasking_strategy": rule.remasking_strategy}
    if rule.remasking_strategy == "low_confidence_dynamic":
        options_of_rule |= {"confidence_threshold": rule.confidence_threshold, "threshold_fallback": rule.fallback}
    if rule.remasking_strategy == "entropy_bounded":
        return {**options_of_rule, "entropy_bound": rule.eb_threshold}
    return options_of_rule if rule.fallback == "one" else {**options_of_rule, "denoising_steps": steps}


def transcribed(
    logits_of: LogitsOf, prompt: list[int], config: Any, seed: int, rule: Rule, new: int, steps: int
) -> Text:
    # JetEngine settles one position at least; generate.py takes as many forwards as its steps allow.
    steps = config.block_length if rule.remasking_strategy == "entropy_bounded" else steps
    return block_diffusion_generate(
        logits_of,
        prompt,
        choice(config, seed, "filtered"),
        rule,
        gen_length=new,
        block_length=config.block_length,
        denoising_steps=steps,
    )


def overhead(prompt: list[int], new: int, block_length: int) -> int:
    """Forwards that only fill the cache: one behind every block, and one for a prompt of at least a block."""
    first, end = len(prompt) // block_length, -(-(len(prompt) + new) // block_length)
    return end - first + int(first > 0)


@pytest.fixture(scope="module")
def model() -> TableModel:
    return table_model(seed=3, block_length=4)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize(("new", "steps"), [(10, 2), (9, 3), (8, 7)])
def test_block_diffusion_generate(model: TableModel, rule: Rule, new: int, steps: int) -> None:
    """The last block is decoded whole, and then cut."""
    for seed, (prompt, values) in enumerate(spread(PROMPTS, FILTERS, steps)):
        if rule.remasking_strategy == "sequential":
            values = {key: value for key, value in values.items() if key != "confidence_from"}
        config = settings(max_new_tokens=new, block_length=4, **options(rule, steps), **values)
        text = transcribed(model.table, prompt, config, seed, rule, new, steps)
        done = assert_same(model, prompt, config, seed, text, overhead(prompt, new, 4))
        assert len(done.token_ids) == new and MASK not in done.token_ids


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_block_diffusion_generate_on_a_transformer(rule: Rule, tiny_model: MakeModel) -> None:
    """With keys and values that are kept, against a second implementation without any."""
    model = tiny_transformer(tiny_model, 3, block_length=4)
    plain = Plain(model)
    for seed, prompt in enumerate(PROMPTS[1:]):
        values = FILTERS[seed % 2]
        config = settings(max_new_tokens=10, block_length=4, **options(rule, 2), **values, cache="block")
        text = transcribed(lambda tokens: plain.in_blocks(tokens, 4), prompt, config, seed, rule, 10, 2)
        assert_same(model, prompt, config, seed, text, overhead(prompt, 10, 4))


@pytest.mark.parametrize("size", [1, 3, 8])
def test_other_block_lengths(model: TableModel, size: int) -> None:
    for seed, (prompt, rule) in enumerate(spread(PROMPTS, RULES, size)):
        config = settings(max_new_tokens=7, block_length=size, **options(rule, size))
        text = transcribed(model.table, prompt, config, seed, rule, 7, size)
        assert_same(model, prompt, config, seed, text, overhead(prompt, 7, size))


def test_the_familys_defaults_are_generate_pys(model: TableModel) -> None:
    """low_confidence_dynamic above 0.85, one step for each position of a block, confidences as filtered."""
    family = table_model(seed=3, scale=12.0, block_length=4, model_type="sdar")
    parallel = 0
    for seed, prompt in enumerate(PROMPTS):
        config = settings(max_new_tokens=12, temperature=1.0, top_k=4)
        full = config.model_copy(update={"block_length": 4})
        text = transcribed(family.table, prompt, full, seed, Rule("low_confidence_dynamic"), 12, 4)
        done = assert_same(family, prompt, config, seed, text, overhead(prompt, 12, 4))
        parallel += done.num_forwards < len(text.x) - len(prompt)
    assert parallel > 2


def test_stop_tokens_truncate_the_block(model: TableModel) -> None:
    """generate.py looks once a block and keeps what is behind the stop."""
    stopped = 0
    for prompt in PROMPTS:
        rule = Rule("low_confidence_static")
        config = settings(max_new_tokens=12, block_length=4, **options(rule, 2))
        text = transcribed(model.table, prompt, config, 0, rule, 12, 2)
        answer = text.x[len(prompt) : len(prompt) + 12]
        stop = answer[5]
        [done] = generate(model, [prompt], config.model_copy(update={"stop_token_ids": (stop,)}), [0])
        assert list(done.token_ids) == answer[: answer.index(stop)]
        assert done.finish_reason == "stop"
        stopped += done.num_forwards < len(text.history)
    assert stopped == len(PROMPTS)
