"""Speculation: the text of next-token decoding, whatever is drafted, alone and among other requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from config.generation import GenerationConfig
from diffusionlm.diffusion.rng import RngStream, keyed_rng
from diffusionlm.inference import cuda_graphs
from diffusionlm.inference import decoder as decoder_module
from diffusionlm.inference.decoder import Decoder
from diffusionlm.inference.generate import Generation, decode, generate, known_request, stream, to_generation
from diffusionlm.inference.request_builder import prepare_prompt_scoring, prepare_request
from diffusionlm.inference.requests import ActiveRequest, PreparedRequest, RequestOptions
from diffusionlm.inference.sampling.distributions import choose_tokens, filter_logits
from diffusionlm.inference.settings import resolve_settings
from diffusionlm.models.patterns import Causal
from diffusionlm.models.transformer import Transformer
from tests.decoding_jobs import LIMITS, add_requests, assert_same, check_pages, drain, limit_decoder, run_all
from tests.recorded_graph import RecordedGraph, make_pools_of
from tests.reference.enumeration import table_config

MASK = 22
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [4, 3, 2, 1], [11] * 17, [5]]
KINDS = ["two_forwards", "one_forward"]
Like = Callable[..., Transformer]
MODELS: dict[str, dict[str, Any]] = {
    "block": {"block_length": 4, "clean_alignment": "shifted"},
    "token": {"block_length": 4, "clean_alignment": "shifted", "noisy_attention": "token"},
    "token, shifted": {
        "block_length": 4,
        "clean_alignment": "shifted",
        "noisy_attention": "token",
        "logit_alignment": "shifted",
    },
    "next tokens": {"block_length": 1, "logit_alignment": "shifted"},
}
"""Random weights, so drafts are right by chance."""
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.5, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.7, "min_new_tokens": 6, "stop_token_ids": (3, 5, 8, 21)},
    {"temperature": 0.8, "repetition_penalty": 1.4, "frequency_penalty": 0.6, "presence_penalty": 0.2, "min_p": 0.02},
    {"repetition_penalty": 1.3, "suppress_token_ids": (4, 7)},
]


@pytest.fixture(params=MODELS)
def drafter(request: pytest.FixtureRequest, like: Like) -> Transformer:
    return like(**MODELS[request.param])


def config_of(kind: str | None = None, draft_length: int | None = None, **values: Any) -> GenerationConfig:
    """Speculation of a kind; None: next-token decoding."""
    own = {"block_length": 1} if kind is None else {"speculation": kind, "draft_length": draft_length}
    return GenerationConfig(**{"max_new_tokens": 20, "stop_token_ids": (), **own, **values})


def prepare(
    model: Transformer, config: GenerationConfig, prompt: Sequence[int], seed: int = 0, **options: Any
) -> PreparedRequest:
    return prepare_request(resolve_settings(config, model.config), prompt, seed, RequestOptions(**options))


def assert_same_text(ours: Generation, expected: Generation, tolerance: float = 1e-9) -> None:
    assert (ours.token_ids, ours.finish_reason) == (expected.token_ids, expected.finish_reason)
    assert ours.logprobs == pytest.approx(expected.logprobs, abs=tolerance)


@torch.inference_mode()
def decode_plainly(model: Transformer, prompt: list[int], seed: int, config: GenerationConfig) -> list[int]:
    """Next tokens by whole causal forwards."""
    text, first, length = [*prompt], len(prompt), len(prompt) + 20
    for position in range(first, length):
        logits_1V = model(torch.tensor([text]), pattern=Causal())[0, -1:].clone()
        logits_1V[:, MASK] = -torch.inf
        temperature, uniforms_1 = config.temperature or 0.0, None
        if temperature:
            draw = keyed_rng(seed, RngStream.TOKEN_SAMPLING, position - first).random(length)[position]
            uniforms_1 = torch.tensor([draw])
        probs_1V = filter_logits(logits_1V, config, temperature).softmax(dim=1)
        text.append(int(choose_tokens(probs_1V, uniforms_1)))
    return text[first:]


@pytest.mark.parametrize("values", [{}, {"temperature": 1.0, "top_k": 20, "top_p": 0.9}], ids=["greedy", "keyed"])
def test_blocks_of_one_token_are_next_tokens(drafter: Transformer, values: dict[str, Any]) -> None:
    answers = generate(drafter, PROMPTS, config_of(**values))
    for seed, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True)):
        assert list(answer.token_ids) == decode_plainly(drafter, prompt, seed, config_of(**values))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("values", [{}, {"temperature": 1.0}], ids=["greedy", "keyed"])
def test_texts_are_those_of_next_tokens(drafter: Transformer, kind: str, values: dict[str, Any]) -> None:
    expected = generate(drafter, PROMPTS, config_of(**values))
    num_forwards = set()
    for draft_length in range(1, 7):
        for ours, other in zip(
            generate(drafter, PROMPTS, config_of(kind, draft_length, **values)), expected, strict=True
        ):
            assert_same_text(ours, other)
            assert sorted(ours.step_map) == list(ours.step_map) and ours.step_map[-1] == ours.num_forwards
            num_forwards.add(ours.num_forwards)
    assert len(num_forwards) > 3, "drafts are right and wrong"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("values", SAMPLING)
def test_distributions_are_those_that_the_request_asks_for(like: Like, kind: str, values: dict[str, Any]) -> None:
    model = like(**MODELS["token, shifted"])
    options = {"logit_bias": {3: 0.7, 11: -2.0, MASK: 5.0}, "num_top_logprobs": 3}
    for seed, prompt in enumerate(PROMPTS):
        allowed = {len(prompt): [1, 2, 9], len(prompt) + 3: [2, 4, 6]}
        own = {**options, "allowed_token_ids": allowed, "max_new_tokens": 14}
        [expected] = decode(model, [prepare(model, config_of(**values), prompt, seed, **own)])
        for draft_length in (1, 3, 6):
            [ours] = decode(model, [prepare(model, config_of(kind, draft_length, **values), prompt, seed, **own)])
            assert_same_text(ours, expected)
            assert [[token for token, _ in row] for row in ours.top_logprobs] == [
                [token for token, _ in row] for row in expected.top_logprobs
            ]


def make_mixed_jobs(model: Transformer) -> list[tuple[PreparedRequest, PreparedRequest]]:
    """Requests with and without speculation, and the same ones as next-token decoding."""
    kinds = [("two_forwards", 3), (None, None), ("one_forward", 4), ("one_forward", 1), ("two_forwards", 6)]
    prompts = [*PROMPTS, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [4, 3, 2, 1, 0, 5, 6, 7], [11] * 19, [1, 2, 3]]
    jobs = []
    for seed, prompt in enumerate(prompts):
        kind, draft_length = kinds[seed % len(kinds)]
        values: dict[str, Any] = {"temperature": (seed % 3) / 2, "max_new_tokens": 6 + seed}
        configs = config_of(kind, draft_length, **values), config_of(**values)
        ours, plain = (prepare(model, config, prompt, seed) for config in configs)
        jobs.append((ours, plain))
    return jobs


@pytest.mark.parametrize("name", LIMITS)
def test_mixed_requests_in_parts_with_preemption_and_shared_pages(like: Like, name: str) -> None:
    model = like(**MODELS["block"])
    ours, plain = zip(*make_mixed_jobs(model), strict=True)
    alone = [decode(model, [job])[0] for job in ours]
    decoder = Decoder(model, *LIMITS[name])
    answers = run_all(decoder, [*ours], [0, 0, 1, 3, 5, 6, 8, 12])
    for answer, same, expected in zip(answers, alone, decode(model, plain), strict=True):
        assert_same(answer, same)
        assert_same_text(answer, expected)
    assert (decoder.counts.num_preemptions > 0) == (name in ("few pages", "everything"))
    assert (decoder.counts.num_prefix_hits > 0) == (name in ("shared pages", "everything"))


def test_graphs_of_drafts_have_the_same_texts(like: Like, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward of noisy blocks alone is bidirectional, so it has a graph; one with both texts has none."""
    model = like(**MODELS["block"])
    ours, _ = zip(*make_mixed_jobs(model), strict=True)
    expected = decode(model, ours)
    monkeypatch.setattr(decoder_module, "select_graph_pool", lambda model: make_pools_of(RecordedGraph))
    monkeypatch.setattr(cuda_graphs, "MIN_USES", 0)
    decoder = Decoder(model, *LIMITS["plenty"])
    for answer, other in zip(run_all(decoder, [*ours], [0, 0, 0, 1, 2, 20, 21, 40]), expected, strict=True):
        assert_same(answer, other)
    assert decoder._graphed_forward is not None and decoder._graphed_forward._graphs


@pytest.mark.parametrize("model_name", ["block", "token, shifted"])
def test_deterministic_decoders_give_the_bits_of_next_tokens(like: Like, model_name: str) -> None:
    model, num_threads = like(**MODELS[model_name]).float(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        jobs = make_mixed_jobs(model)
        expected = []
        for _, plain in jobs:
            decoder = Decoder(model, *limit_decoder(num_pages=40, page_size=4, deterministic=True))
            expected += run_all(decoder, [plain], [0])
        limits = limit_decoder(
            num_pages=16, page_size=4, deterministic=True, prefix_cache=True, max_num_batched_tokens=7
        )
        answers = run_all(Decoder(model, *limits), [ours for ours, _ in jobs], [0, 0, 0, 2, 4, 4, 5, 9])
    finally:
        torch.set_num_threads(num_threads)
    for answer, other in zip(answers, expected, strict=True):
        assert_same_text(answer, other, tolerance=0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_keys_of_what_is_not_text_have_no_effect(like: Like, kind: str) -> None:
    """All slots beyond the committed text are poisoned before each forward, and no page with one is shared."""
    model = like(**MODELS["block"])
    jobs = [prepare(model, config_of(kind, 5, temperature=0.7), prompt, seed) for seed, prompt in enumerate(PROMPTS)]
    expected = [decode(model, [job])[0] for job in jobs]
    decoder = Decoder(model, *limit_decoder(num_pages=60, page_size=2, prefix_cache=True))
    requests = add_requests(decoder, *jobs)
    assert decoder.cache is not None
    while decoder.has_work:
        decoder.step()
        check_pages(decoder, requests)
        for active in requests:
            num_keys = int((~active.is_masked_L).sum()) - 1
            assert active.cached_length <= num_keys and 2 * len(active.page_digests) <= num_keys
            if active.pages:
                slots = decoder.cache.slots(active.pages[0], active.cached_length, 2 * len(active.pages[0]))
                for storage in (*decoder.cache.keys_KTH, *decoder.cache.values_KTH):
                    storage[:, slots] = 1e6
    for active, answer in zip(requests, expected, strict=True):
        assert_same(to_generation(active), answer)


def test_later_texts_share_pages_of_committed_text(like: Like) -> None:
    model = like(**MODELS["block"])
    decoder = Decoder(model, *limit_decoder(num_pages=60, page_size=2, prefix_cache=True))
    [first] = add_requests(decoder, prepare(model, config_of("two_forwards", 5), PROMPTS[0]))
    drain(decoder, first)
    text = first.tokens_L[:24].tolist()
    [active] = add_requests(decoder, prepare(model, config_of(max_new_tokens=8), text))
    drain(decoder, active)
    assert active.num_cached_tokens >= 20
    assert_same(to_generation(active), generate(model, [text], config_of(max_new_tokens=8))[0])


def with_laws(like: Like, committed: Sequence[float], drafted: Sequence[float]) -> Transformer:
    """A model of the same two distributions everywhere: of next tokens, and of drafts at their own position."""
    size = {"vocab_size": 5, "mask_token_id": 4, "eos_token_id": None, "max_position_embeddings": 3000}
    model = like(**MODELS["block"], **size, tie_word_embeddings=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.model.norm.weight.fill_(1.0)
        embedding, width = model.model.embed_tokens.weight, model.config.hidden_size
        embedding[:4, 0], embedding[4, 1] = 1.0, 1.0
        model.lm_head.weight[:4, 0] = torch.tensor(committed).log() / width**0.5
        model.lm_head.weight[:4, 1] = torch.tensor(drafted).log() / width**0.5
    return model


@pytest.mark.parametrize("draft_length", [1, 4])
@pytest.mark.parametrize("acceptance", [0.0, 0.75, 1.0])
def test_tokens_per_forward_follow_from_the_acceptance(like: Like, acceptance: float, draft_length: int) -> None:
    """Acceptance of the coupling by the inverse CDF: the common length of the intervals of a token."""
    committed, low = [0.5, 0.5 - 1e-9, 5e-10, 5e-10], 1e-12
    drafted = {
        0.0: [low, low, 0.5, 0.5],
        0.75: [0.75, 0.25 - 2 * low, low, low],
        1.0: committed,
    }[acceptance]
    model, powers = with_laws(like, committed, drafted), acceptance ** np.arange(draft_length + 1)
    formulas = {"two_forwards": powers.sum() / 2, "one_forward": (1 + powers[:-1].sum()) / (2 - powers[-1])}
    num_tokens = 600
    for kind, expected in formulas.items():
        config = config_of(kind, draft_length, temperature=1.0, max_new_tokens=num_tokens)
        [answer] = generate(model, [[0]], config)
        assert num_tokens / answer.num_forwards == pytest.approx(expected, rel=0.06 if 0.0 < acceptance < 1.0 else 0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_are_the_exact_ones_of_the_text(drafter: Transformer, kind: str) -> None:
    prompt = PROMPTS[0]
    [answer] = generate(drafter, [prompt], config_of(kind, 3, temperature=1.0))
    settings = resolve_settings(config_of(), drafter.config)
    [scored] = decode(drafter, [prepare_prompt_scoring(settings, [*prompt, *answer.token_ids])])
    assert answer.logprobs == pytest.approx(scored.logprobs[len(prompt) - 1 :], abs=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_stop_tokens_end_the_text_within_a_draft(like: Like, kind: str) -> None:
    model = with_laws(like, [1.0, 1e-12, 1e-12, 1e-12], [1.0, 1e-12, 1e-12, 1e-12])
    stops = [
        prepare(model, config_of(kind, 6, stop_token_ids=(0,), min_new_tokens=count), [1, 2]) for count in range(9)
    ]
    for count, job in enumerate(stops):
        request = ActiveRequest(job)
        [answer] = decode(model, [job])
        assert answer.finish_reason == "stop" and len(answer.token_ids) == count
        decoder = Decoder.for_requests(model, [request])
        [*decoder.steps()]
        assert request.final_token_ids() == list(answer.token_ids)
        assert (~request.is_masked_L).sum() == 2 + count + 1, "nothing is committed after the stop token"


def test_streams_are_the_text(like: Like, tokenizer: Any) -> None:
    model = like(**MODELS["block"], vocab_size=len(tokenizer.vocab) + 2, mask_token_id=len(tokenizer.vocab) + 1)
    prompt = tokenizer.encode("the cat")
    ours, plain = (
        "".join(stream(model, tokenizer, prompt, config)) for config in (config_of("one_forward"), config_of())
    )
    assert ours == plain != ""


def test_what_has_no_speculation_is_refused(like: Like) -> None:
    model = like(**MODELS["block"])
    config = config_of("two_forwards")
    with pytest.raises(ValueError, match=r'canvas 0: speculation = "two_forwards".* no infilling: remove it'):
        prepare(model, config, [1, MASK], is_infill=True)
    job = prepare(model, config, [1])
    [answer] = decode(model, [job])
    assert answer.trajectory is not None
    with pytest.raises(ValueError, match="cannot be replayed"):
        known_request(job, answer.trajectory)
    for changes, words in (
        ({"block_length": 4}, "needs a model that predicts next tokens"),
        ({}, "needs a model that predicts next tokens"),
        ({"block_length": 1, "logit_alignment": "shifted", "mask_token_id": None}, "needs a drafter.*no mask_token_id"),
    ):
        with pytest.raises(ValueError, match=words):
            resolve_settings(config, table_config(4, 64, **changes))


def test_settings_are_idempotent() -> None:
    model = table_config(4, 64, block_length=4, clean_alignment="shifted")
    settings = resolve_settings(config_of("one_forward"), model)
    assert (settings.config.draft_length, settings.config.block_length, settings.config.cache) == (4, 1, "block")
    assert (
        resolve_settings(GenerationConfig.model_validate(settings.config.model_dump()), model).config == settings.config
    )
