"""Blocks whose first token is a next-token choice of committed text: Nemotron-Labs-Diffusion's plain decoding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from config.generation import GenerationConfig
from diffusionlm.diffusion.rng import RngStream, keyed_rng
from diffusionlm.evaluation.sampler_likelihood import sampler_likelihood
from diffusionlm.inference.decoder import Decoder
from diffusionlm.inference.generate import decode, generate, infill, replay
from diffusionlm.inference.request_builder import prepare_request
from diffusionlm.inference.requests import ActiveRequest, RequestOptions
from diffusionlm.inference.sampling.distributions import choose_tokens, filter_logits
from diffusionlm.inference.settings import resolve_settings
from diffusionlm.models.patterns import DenseBias
from diffusionlm.models.transformer import Transformer
from diffusionlm.rl.rollouts import check_trainable
from tests.decoding_jobs import BLOCKS, LIMITS, assert_same, check_same_bits_in_parts, limit_decoder, make_jobs, run_all
from tests.reference.enumeration import table_config

MASK, BLOCK, NUM_NEW = 22, 4, 10
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8], [4, 3, 2, 1, 9], [11, 12, 13], []]
STARTS = [(3, 6), (), (2,), ()]
MODELS: dict[str, dict[str, Any]] = {
    "block": {},
    "token": {"noisy_attention": "token"},
    "token, shifted": {"noisy_attention": "token", "logit_alignment": "shifted"},
}
SAMPLING: dict[str, dict[str, Any]] = {"greedy": {}, "keyed": {"temperature": 0.7, "top_k": 9}}
THRESHOLD = 0.075
"""Some probabilities of the tiny models are above it."""
Like = Callable[..., Transformer]


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, like: Like) -> Transformer:
    return like(block_length=BLOCK, clean_alignment="shifted", **MODELS[request.param])


def config_of(**values: Any) -> GenerationConfig:
    own = {"remasking_strategy": "threshold", "confidence_threshold": THRESHOLD, "next_token_first": True}
    return GenerationConfig(**{**own, "max_new_tokens": NUM_NEW, "stop_token_ids": (), **values})


class PlainLoop:
    """Whole forwards with masks of all pairs."""

    def __init__(self, model: Transformer, prompt: list[int], seed: int, config: GenerationConfig) -> None:
        self._model, self._seed, self._config = model, seed, config
        self.text, self.step_map = [*prompt, *[MASK] * NUM_NEW], [0] * len(prompt) + [-1] * NUM_NEW
        self.num_forwards = 0

    def decode(self, starts: tuple[int, ...]) -> None:
        origins = [max(start for start in (0, *starts) if start <= position) for position in range(len(self.text))]
        blocks = [(origin, (position - origin) // BLOCK) for position, origin in enumerate(origins)]
        for block in sorted(set(blocks)):
            first = blocks.index(block)
            end = first + blocks.count(block)
            is_new = [position for position in range(first, end) if self.step_map[position] < 0]
            if is_new and is_new[0]:
                self._commit(
                    is_new[0], self._forward([[key <= row for key in range(is_new[0])] for row in range(is_new[0])])[-1]
                )
                self.num_forwards += 1
            while masked := [position for position in range(first, end) if self.step_map[position] < 0]:
                self._denoise(masked, first, end)

    def _denoise(self, masked: list[int], first: int, end: int) -> None:
        config = self._model.config
        is_full = config.noisy_attention == "block"
        rows = [[key <= row or (is_full and row >= first) for key in range(end)] for row in range(end)]
        logits_LV = self._forward(rows)[[position - (config.logit_alignment == "shifted") for position in masked]]
        tokens = [self._choose(position, logits_V) for position, logits_V in zip(masked, logits_LV, strict=True)]
        probs = [float(logits_V.softmax(-1)[token]) for token, logits_V in zip(tokens, logits_LV, strict=True)]
        for index, position in enumerate(masked):
            if probs[index] >= THRESHOLD or index == probs.index(max(probs)):
                self._commit(position, logits_LV[index])
        self.num_forwards += 1

    @torch.inference_mode()
    def _forward(self, rows: list[list[bool]]) -> torch.Tensor:
        logits_LV = self._model(torch.tensor([self.text[: len(rows)]]), pattern=DenseBias(torch.tensor(rows)))[0]
        logits_LV[:, MASK] = -torch.inf
        return logits_LV

    def _choose(self, position: int, logits_V: torch.Tensor) -> int:
        temperature, uniforms_1 = self._config.temperature or 0.0, None
        if temperature:
            rng = keyed_rng(self._seed, RngStream.TOKEN_SAMPLING, self.num_forwards)
            uniforms_1 = torch.tensor([rng.random(len(self.text))[position]])
        return int(choose_tokens(filter_logits(logits_V[None], self._config, temperature).softmax(-1), uniforms_1))

    def _commit(self, position: int, logits_V: torch.Tensor) -> None:
        self.text[position], self.step_map[position] = self._choose(position, logits_V), self.num_forwards + 1


@pytest.mark.parametrize("cache", ["block", "none"])
@pytest.mark.parametrize("sampling", SAMPLING)
def test_texts_are_those_of_a_plain_loop(model: Transformer, cache: str, sampling: str) -> None:
    config, counts = config_of(cache=cache, **SAMPLING[sampling]), set()
    num_prompts = 3 if model.config.logit_alignment == "shifted" else 4
    answers = generate(model, PROMPTS[:num_prompts], config, segment_starts=STARTS[:num_prompts])
    for seed, answer in enumerate(answers):
        loop = PlainLoop(model, PROMPTS[seed], seed, config)
        loop.decode(STARTS[seed])
        start = len(PROMPTS[seed])
        assert (list(answer.token_ids), list(answer.step_map)) == (loop.text[start:], loop.step_map[start:])
        assert answer.num_forwards == loop.num_forwards
        counts |= {answer.step_map.count(step) for step in answer.step_map}
    assert counts > {1, 2}, "a step commits one or several tokens"


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_blocks_have_one_forward_more(model: Transformer, num_steps: int) -> None:
    config = config_of(
        remasking_strategy="low_confidence", confidence_threshold=None, denoising_steps=num_steps, max_new_tokens=8
    )
    [answer] = generate(model, [PROMPTS[0]], config)
    assert answer.num_forwards == 2 * (num_steps + 1)
    assert (answer.step_map[0], answer.step_map[4]) == (1, num_steps + 2)


def test_the_committed_block_is_read_with_the_next_token(model: Transformer) -> None:
    """The forward of a next token reads what has no final keys; the forwards after it read their block alone."""
    settings = resolve_settings(config_of(max_new_tokens=8), model.config)
    decoder = Decoder(model, *limit_decoder(num_pages=20, page_size=4))
    request = ActiveRequest(prepare_request(settings, PROMPTS[0], 0))
    decoder.add(request)
    num_inputs, sizes = 0, []
    while decoder.has_work:
        num_committed = int((request.step_map_L > 0).sum())
        decoder.step()
        sizes.append((num_committed in (0, 4), decoder.counts.num_batched_tokens - num_inputs))
        num_inputs = decoder.counts.num_batched_tokens
    assert set(sizes) == {(True, 8), (True, 4), (False, 4)} and sizes[0] == (True, 8)


@pytest.mark.parametrize("name", LIMITS)
def test_requests_of_all_kinds_decode_as_alone(model: Transformer, name: str) -> None:
    """A stop token of one request ends no other one's block."""
    options = [values if values.get("block_length") == 1 else {**values, "next_token_first": True} for values in BLOCKS]
    jobs = make_jobs(model, [*options, {"next_token_first": True, "stop_token_ids": tuple(range(0, 21, 3))}], 12)
    expected = [decode(model, [job])[0] for job in jobs]
    assert {answer.finish_reason for answer in expected} == {"stop", "length"}
    for ours, answer in zip(run_all(Decoder(model, *LIMITS[name]), jobs, [*range(12)]), expected, strict=True):
        assert_same(ours, answer)


def test_deterministic_decoders_give_the_same_bits_in_parts(model: Transformer) -> None:
    settings = resolve_settings(config_of(temperature=1.0), model.config)
    jobs = [
        prepare_request(settings, prompt, seed, RequestOptions(segment_starts=starts))
        for seed, (prompt, starts) in enumerate(zip(PROMPTS[:3], STARTS, strict=False))
    ]
    check_same_bits_in_parts(model, jobs)


def test_infilling_has_no_next_tokens(model: Transformer) -> None:
    canvas = [1, 2, 3, 4, 5, MASK, 6, MASK, MASK, 7]
    assert infill(model, [canvas], config_of()) == infill(model, [canvas], config_of(next_token_first=False))


def test_replays_and_likelihoods_have_the_next_tokens(model: Transformer) -> None:
    settings = resolve_settings(config_of(remasking_strategy="low_confidence", confidence_threshold=None), model.config)
    job = prepare_request(settings, PROMPTS[0], 0)
    [answer] = decode(model, [job])
    assert answer.trajectory is not None
    [again] = replay(model, [job], [answer.trajectory])
    assert again.logprobs_L[8:] == pytest.approx(answer.trajectory.logprobs_L[8:], abs=1e-9)
    tokens_1L = torch.tensor([[*PROMPTS[0], *answer.token_ids]])
    report = sampler_likelihood(model, tokens_1L, torch.arange(18)[None] >= 8, settings.config)
    assert report.nats_per_token * NUM_NEW == pytest.approx(-sum(answer.logprobs), abs=1e-9)


@pytest.mark.parametrize(
    ("values", "changes"),
    [({}, {"clean_alignment": None}), ({"block_length": 1}, {}), ({"attention": "bidirectional"}, {})],
)
def test_what_has_no_noisy_blocks_is_refused(values: dict[str, Any], changes: dict[str, Any]) -> None:
    model = table_config(4, 64, **{"block_length": 4, "clean_alignment": "shifted", **changes})
    with pytest.raises(ValueError, match=r"next_token_first = true needs .*remove it"):
        resolve_settings(GenerationConfig(next_token_first=True, **values), model)


def test_speculation_and_reinforcement_learning_refuse_it() -> None:
    with pytest.raises(ValueError, match=r"next_token_first = true cannot be used with speculation"):
        GenerationConfig(next_token_first=True, speculation="two_forwards")
    model = table_config(4, 64, block_length=4, clean_alignment="shifted")
    config = GenerationConfig(next_token_first=True, temperature=1.0, remasking_strategy="random")
    with pytest.raises(ValueError, match=r"next_token_first = true .*set false"):
        check_trainable(resolve_settings(config, model))


def test_defaults_of_nemotron() -> None:
    shape = {"block_length": 4, "clean_alignment": "shifted"}
    model = table_config(4, 64, model_type="nemotron_labs_diffusion", **shape)
    config = resolve_settings(GenerationConfig(), model).config
    assert (config.next_token_first, config.temperature, config.remasking_strategy) == (True, 0.0, "threshold")
    assert config.model_dump()["confidence_threshold"] == 0.9 and config.confidence_from == "unfiltered"
    assert resolve_settings(config, model).config == config
    for values in ({"speculation": "one_forward"}, {"block_length": 1}):
        assert resolve_settings(GenerationConfig(**values), model).config.next_token_first is None
    assert resolve_settings(GenerationConfig(), table_config(4, 64, **shape)).config.next_token_first is False
