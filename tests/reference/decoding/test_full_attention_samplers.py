"""`generate` is LLaDA's, Dream's and Fast-dLLM's sampler, canvas by canvas: against slow transcriptions of these."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest

from diffusionlm.inference.generate import generate
from tests.conftest import MakeModel
from tests.reference.decoding.llada import (
    Transfer,
    by_count,
    by_factor,
    by_threshold,
    dream_generate,
    fast_dllm_generate,
    llada_generate,
)
from tests.reference.decoding.standins import (
    MASK,
    Plain,
    TableModel,
    assert_like,
    assert_same,
    choice,
    settings,
    spread,
    table_model,
    tiny_transformer,
)

PROMPTS = [[], [3], [1, 2, MASK, 4, 5], [9, 8, 7, 6, 5, 4, 3, 2]]
FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 1.0, "top_p": 0.8, "confidence_from": "filtered"},
    {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.2, "confidence_from": "unfiltered"},
    {"top_k": 2, "confidence_from": "filtered"},
]
WITHOUT_CONFIDENCE = [{key: value for key, value in filters.items() if key != "confidence_from"} for filters in FILTERS]
BLOCKS = [(12, 12, 5), (12, 4, 4), (12, 4, 3), (10, 4, 2), (5, 8, 9)]
"""New tokens, block length, steps a block."""


@pytest.fixture(scope="module")
def model() -> TableModel:
    return table_model()


@pytest.mark.parametrize("remasking", ["low_confidence", "random", "random_topk"])
@pytest.mark.parametrize(("new", "block", "steps"), BLOCKS)
@pytest.mark.parametrize("canvas", ["fixed", "growing"])
def test_llada(model: TableModel, remasking: str, new: int, block: int, steps: int, canvas: str) -> None:
    filters = WITHOUT_CONFIDENCE if remasking == "random" else FILTERS
    for seed, (prompt, values) in enumerate(spread(PROMPTS, filters, new + block + steps)):
        own: dict[str, Any] = {"denoising_steps": steps, "remasking_strategy": remasking, **values}
        config = settings(max_new_tokens=new, block_length=block, canvas=canvas, **own)
        published = partial(llada_generate, block_length=block, steps=steps, remasking=remasking, canvas=canvas)
        assert_like(published, model, prompt, config, seed, confidence_from="unfiltered")


def test_lladas_steps_are_those_of_all_blocks(model: TableModel) -> None:
    config = settings(max_new_tokens=12, block_length=4, steps=6)
    done, _ = assert_like(
        llada_generate, model, [1, 2], config, 0, confidence_from="unfiltered", block_length=4, steps=2
    )
    assert done.num_forwards == 6


@pytest.mark.parametrize("canvas", ["fixed", "growing"])
@pytest.mark.parametrize("scale", [0.5, 1.5])
def test_llada_with_guidance(model: TableModel, canvas: str, scale: float) -> None:
    blocks: dict[str, Any] = {"gen_length": 8, "block_length": 4, "steps": 3, "canvas": canvas}
    for seed, (prompt, values) in enumerate(spread(PROMPTS, FILTERS[:3], 0)):
        config = settings(max_new_tokens=8, block_length=4, denoising_steps=3, cfg_scale=scale, canvas=canvas, **values)
        guided = choice(config, seed, "unfiltered")
        done = assert_same(model, prompt, config, seed, llada_generate(model.table, prompt, guided, **blocks))
        without = llada_generate(model.table, prompt, replace(guided, cfg_scale=0.0), **blocks)
        assert not prompt or [*prompt, *done.token_ids] != without.x


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_llada_with_an_end_of_text_suppressed_or_put_off(model: TableModel, temperature: float) -> None:
    common = {"max_new_tokens": 12, "temperature": temperature}
    blocks: dict[str, Any] = {"gen_length": 12, "block_length": 6, "steps": 6}
    settled_late = 0
    for seed, prompt in enumerate(PROMPTS):
        for end in (2, 7):
            for values in ({"suppress_token_ids": [end]}, {"defer_token_ids": [end]}):
                config = settings(**common, **values, block_length=6, denoising_steps=6)
                text = llada_generate(model.table, prompt, choice(config, seed, "unfiltered"), **blocks)
                done = assert_same(model, prompt, config, seed, text)
                assert end not in done.token_ids or "defer_token_ids" in values
                plain = llada_generate(model.table, prompt, choice(settings(**common), seed, "unfiltered"), **blocks)
                settled_late += text.x != plain.x
    assert settled_late > 8, "the options must change something"


@pytest.mark.parametrize("alg", ["origin", "maskgit_plus", "topk_margin", "entropy"])
@pytest.mark.parametrize(("new", "steps"), [(12, 12), (12, 5), (7, 20), (10, 300), (9, 1)])
def test_dream(alg: str, new: int, steps: int) -> None:
    """Shifted outputs, one block."""
    model = table_model(seed=1, logit_alignment="shifted")
    filters = [{key: v for key, v in options.items() if key != "confidence_from"} for options in FILTERS[:4]]
    temperatures = [0.0] if alg == "origin" else [0.0, 0.1, 1.0]
    for seed, (prompt, (values, alg_temp)) in enumerate(
        spread(PROMPTS[1:], list(product(filters, temperatures)), 5 * steps)
    ):
        config = settings(
            max_new_tokens=new, denoising_steps=steps, remasking_strategy=alg, alg_temp=alg_temp, **values
        )
        assert_like(dream_generate, model, prompt, config, seed, steps=steps, alg=alg, alg_temp=alg_temp)


TRANSFERS: list[tuple[dict[str, Any], Transfer]] = [
    ({"remasking_strategy": "threshold", "confidence_threshold": 0.4}, by_threshold(0.4)),
    ({"remasking_strategy": "threshold", "confidence_threshold": 0.8}, by_threshold(0.8)),
    ({"remasking_strategy": "threshold", "confidence_threshold": 1.0}, by_threshold(1.0)),
    ({"remasking_strategy": "factor"}, by_factor(1.0)),
    ({"remasking_strategy": "factor", "factor": 2.2}, by_factor(2.2)),
]


@pytest.mark.parametrize("which", range(len(TRANSFERS)))
def test_fast_dllm(which: int) -> None:
    model, (strategy, transfer) = table_model(seed=2, scale=7.0), TRANSFERS[which]
    forwards = set()
    for seed, (prompt, values) in enumerate(spread(PROMPTS, FILTERS, which)):
        config = settings(max_new_tokens=10, block_length=4, **strategy, **values)
        text = fast_dllm_generate(
            lambda tokens, positions, past: (model.table(tokens), None),
            prompt,
            choice(config, seed, "unfiltered"),
            gen_length=10,
            block_length=4,
            transfer=transfer,
        )
        forwards.add(assert_same(model, prompt, config, seed, text).num_forwards)
    assert len(forwards) > 1 or strategy.get("confidence_threshold") == 1.0


def test_confidences_that_equal_the_threshold(model: TableModel) -> None:
    """A single token to choose from is certain: Fast-dLLM's threshold counts it, SDAR's and JetEngine's do not."""
    sure = {"max_new_tokens": 8, "top_k": 1, "confidence_from": "filtered", "confidence_threshold": 1.0}
    for strategy, comparison, num_forwards in (
        ("threshold", None, 1),
        ("threshold", ">", 8),
        ("low_confidence_dynamic", None, 8),
        ("low_confidence_dynamic", ">=", 1),
    ):
        config = settings(**sure, remasking_strategy=strategy, threshold_comparison=comparison)
        [done] = generate(model, [[1, 2]], config)
        assert done.num_forwards == num_forwards


@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
@pytest.mark.parametrize("alignment", ["same_position", "shifted"])
def test_fast_dllm_with_a_cache(cache: str, alignment: str, tiny_model: MakeModel) -> None:
    """A tiny Transformer against a second implementation of it, which holds the keys and values itself."""
    model = tiny_transformer(tiny_model, 3, logit_alignment=alignment)
    plain, strategies = Plain(model), [*TRANSFERS[1:4:2], ({"denoising_steps": 2}, by_count(4, 2))]
    for seed, prompt in enumerate(PROMPTS[1:]):
        for values, (strategy, transfer) in zip(FILTERS[seed : seed + 3], strategies, strict=True):
            config = settings(max_new_tokens=12, block_length=4, **values, **strategy, cache=cache)
            text = fast_dllm_generate(
                plain.forward,
                prompt,
                choice(config, seed, "unfiltered"),
                gen_length=12,
                block_length=4,
                transfer=transfer,
                cache=cache,
                shift=int(alignment == "shifted"),
            )
            assert_same(model, prompt, config, seed, text)


def test_random_topk_shuffles_ties() -> None:
    """All positions alike: their order is that of chance, and low_confidence's the one from left to right."""
    model = table_model()
    model.table.frequency_LV[:] = 0.0
    model.table.phase_LV[:] = model.table.phase_LV[0]
    model.table.scale_L1[:] = 1.0
    orders = set()
    for seed in range(4):
        for remasking in ("low_confidence", "random_topk"):
            config = settings(max_new_tokens=8, denoising_steps=8, remasking_strategy=remasking)
            published = partial(llada_generate, block_length=8, steps=8, remasking=remasking)
            done, _ = assert_like(published, model, [1], config, seed, confidence_from="unfiltered")
            orders.add(done.step_map)
            assert (done.step_map == tuple(range(1, 9))) == (remasking == "low_confidence")
    assert len(orders) == 5
