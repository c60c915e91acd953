"""Noisy blocks whose tokens precede their masks (WeDLM): the order of the inputs, and its rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from config.generation import GenerationConfig
from diffusionlm.diffusion.rng import RngStream, keyed_rng
from diffusionlm.inference.cuda_graphs import find_shape
from diffusionlm.inference.decoder import Decoder
from diffusionlm.inference.generate import decode, generate, infill
from diffusionlm.inference.request_builder import prepare_request
from diffusionlm.inference.sampling.distributions import choose_tokens, filter_logits
from diffusionlm.inference.settings import resolve_settings
from diffusionlm.inference.strategies import PenalizedEntropy
from diffusionlm.inference.strategy import DecodeState
from diffusionlm.models.patterns import BlockCausal, DenseBias
from diffusionlm.models.transformer import Transformer
from diffusionlm.models.varlen import SequenceSlice
from tests.decoding_jobs import BLOCKS, LIMITS, assert_same, check_same_bits_in_parts, make_jobs, run_all
from tests.reference.enumeration import table_config

MASK, BLOCK, NUM_NEW = 22, 5, 11
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [4, 3, 2, 1, 9], []]
SAMPLING: dict[str, dict[str, Any]] = {"greedy": {}, "keyed": {"temperature": 0.7, "top_k": 9}}
OPTIONS = {"entropy_threshold": 2.4, "position_penalty": 0.01}
"""Some entropies of the tiny models are below it."""
SHAPES: dict[str, dict[str, Any]] = {
    "all layers": {},
    "window": {"layer_types": ("full_attention", "sliding_attention"), "sliding_window": 3, "num_hidden_layers": 2},
}
TOWER = {"depth": 1, "hidden_size": 4, "num_heads": 1, "intermediate_size": 4, "num_position_embeddings": 4}
VISION = {"vision": {**TOWER, "mrope_section": (1, 0, 0)}, "image_token_id": 1, "vision_start_token_id": 2}
Like = Callable[..., Transformer]


@pytest.fixture(params=SHAPES)
def model(request: pytest.FixtureRequest, like: Like) -> Transformer:
    keys = {"clean_alignment": "shifted", "noisy_attention": "visible_first"}
    return like(block_length=BLOCK, **keys, **SHAPES[request.param])


def config_of(**values: Any) -> GenerationConfig:
    own = {"remasking_strategy": "penalized_entropy", "max_new_tokens": NUM_NEW, "stop_token_ids": ()}
    return GenerationConfig(**{**own, **OPTIONS, **values})


@torch.inference_mode()
def decode_plainly(model: Transformer, canvas: list[int], seed: int, config: GenerationConfig) -> tuple[list[int], int]:
    """Whole forwards, for each of which the inputs, their position ids and a mask of all pairs are written out."""
    text, is_open, num_forwards = [*canvas], [token == MASK for token in canvas], 0
    for first in range(0, len(text), BLOCK):
        end = min(first + BLOCK, len(text))
        while masked := [position for position in range(first, end) if is_open[position]]:
            visible = [position for position in range(first, end) if not is_open[position]]
            order = [*range(first), *visible, *masked]
            is_causal = torch.tensor([[key <= row for key in range(end)] for row in range(end)])
            inputs, ids = torch.tensor([[text[position] for position in order]]), torch.tensor([order])
            logits_LV = model(inputs, pattern=DenseBias(is_causal), positions=ids)[0, -len(masked) :]
            logits_LV[:, MASK] = -torch.inf
            entropies = torch.distributions.Categorical(logits=logits_LV).entropy().tolist()
            scores = [
                entropy + OPTIONS["position_penalty"] * (position - masked[0])
                for entropy, position in zip(entropies, masked, strict=True)
            ]
            uniforms = keyed_rng(seed, RngStream.TOKEN_SAMPLING, num_forwards).random(len(text))
            for index, position in enumerate(masked):
                if scores[index] < OPTIONS["entropy_threshold"] or index == scores.index(min(scores)):
                    temperature = config.temperature or 0.0
                    probs_1V = filter_logits(logits_LV[index : index + 1], config, temperature).softmax(dim=1)
                    uniform_1 = torch.tensor([uniforms[position]]) if temperature else None
                    text[position], is_open[position] = int(choose_tokens(probs_1V, uniform_1)), False
            num_forwards += 1
    return text, num_forwards


@pytest.mark.parametrize("cache", ["block", "none"])
@pytest.mark.parametrize("sampling", SAMPLING)
def test_texts_are_those_of_a_plain_loop(model: Transformer, cache: str, sampling: str) -> None:
    config, counts, orders = config_of(cache=cache, **SAMPLING[sampling]), set(), set()
    for seed, (prompt, answer) in enumerate(zip(PROMPTS, generate(model, PROMPTS, config), strict=True)):
        text, num_forwards = decode_plainly(model, [*prompt, *[MASK] * NUM_NEW], seed, config)
        assert ([*prompt, *answer.token_ids], answer.num_forwards) == (text, num_forwards)
        counts |= {answer.step_map.count(step) for step in answer.step_map}
        orders.add(list(answer.step_map) == sorted(answer.step_map))
    assert len(counts) > 1 and False in orders, "a step commits one or several tokens, also behind a mask"
    canvas = [1, MASK, 2, MASK, 3, MASK, 4, MASK, MASK, 5, 6, 7, 8, MASK, 9, MASK]
    [filled] = infill(model, [canvas], config, seeds=[3])
    assert (list(filled.token_ids), filled.num_forwards) == decode_plainly(model, canvas, 3, config)


@pytest.mark.parametrize("name", LIMITS)
def test_requests_of_all_kinds_decode_as_alone(model: Transformer, name: str) -> None:
    jobs = make_jobs(model, [*BLOCKS, {"remasking_strategy": "penalized_entropy", **OPTIONS}], 12)
    expected = [decode(model, [job])[0] for job in jobs]
    for ours, answer in zip(run_all(Decoder(model, *LIMITS[name]), jobs, [*range(12)]), expected, strict=True):
        assert_same(ours, answer)


def test_deterministic_decoders_give_the_same_bits_in_parts(model: Transformer) -> None:
    settings = resolve_settings(config_of(temperature=1.0), model.config)
    jobs = [prepare_request(settings, prompt, seed) for seed, prompt in enumerate(PROMPTS)]
    check_same_bits_in_parts(model, jobs)


@pytest.mark.parametrize("kind", ["two_forwards", "one_forward"])
def test_drafts_follow_the_text_so_they_are_those_of_causal_blocks(model: Transformer, like: Like, kind: str) -> None:
    shape = {key: getattr(model.config, key) for key in ("layer_types", "sliding_window", "num_hidden_layers")}
    causal = like(block_length=BLOCK, clean_alignment="shifted", noisy_attention="token", **shape)
    config = GenerationConfig(speculation=kind, max_new_tokens=9, temperature=1.0, stop_token_ids=())
    for ours, other in zip(generate(model, PROMPTS[:2], config), generate(causal, PROMPTS[:2], config), strict=True):
        assert_same(ours, other)


def test_inputs_with_positions_of_their_own_have_no_graph() -> None:
    part = SequenceSlice(4, 8, 8, BlockCausal(4), pages=(0,))
    assert find_shape([part]) is not None
    assert find_shape([replace(part, position_ids=np.array([4, 6, 5, 7]))]) is None


def test_the_rule_of_wedlm() -> None:
    """By its published code: entropy + 0.02 (i - first) < 0.4, else the lowest of these sums."""
    positions = np.array([3, 4, 7, 12])

    def select(entropies: list[float]) -> list[int]:
        state: dict[str, Any] = {"is_masked_M": np.ones(4, np.bool_), "uniforms_M": np.zeros(4), "schedule_value": 1}
        confidence_M = -np.array(entropies)
        own = DecodeState(confidence_M=confidence_M, positions_M=positions, step=0, num_steps=4, **state)
        return np.flatnonzero(PenalizedEntropy().select_positions(own)).tolist()

    assert select([0.39, 0.39, 0.31, 0.23]) == [0, 2]
    assert select([0.5, 0.37, 0.33, 0.21]) == [1, 3]
    assert select([0.5, 0.47, 0.45, 0.4]) == [1], "0.49 is less than 0.5, 0.53 and 0.58"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"clean_alignment": None}, 'noisy_attention = "visible_first" needs token-causal text: set clean_alignment'),
        ({"logit_alignment": "shifted"}, 'set logit_alignment = "same_position"'),
        ({**VISION, "vision_end_token_id": 3}, 'noisy_attention = "visible_first" reads no images'),
    ],
)
def test_what_has_no_such_order_is_refused(changes: dict[str, Any], words: str) -> None:
    keys = {"block_length": 4, "clean_alignment": "shifted", "noisy_attention": "visible_first", **changes}
    with pytest.raises(ValueError, match=words):
        table_config(4, 64, **keys)


def test_defaults_of_wedlm() -> None:
    keys = {"block_length": 4, "clean_alignment": "shifted", "noisy_attention": "visible_first"}
    config = resolve_settings(GenerationConfig(), table_config(4, 64, model_type="wedlm", **keys)).config
    values = config.model_dump()
    assert (values["remasking_strategy"], values["confidence_from"]) == ("penalized_entropy", "unfiltered")
    assert (values["entropy_threshold"], values["position_penalty"], values["temperature"]) == (0.4, 0.02, 0.0)
    assert config.next_token_first is False
