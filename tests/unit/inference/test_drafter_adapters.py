"""Adapters of masked positions in decoding: they change drafts and blocks, never committed text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from config.generation import GenerationConfig
from diffusionlm.inference.cuda_graphs import select_graph_pool
from diffusionlm.inference.decoder import Decoder
from diffusionlm.inference.generate import decode, generate, infill
from diffusionlm.inference.request_builder import prepare_prompt_scoring
from diffusionlm.inference.requests import RequestOptions
from diffusionlm.inference.settings import resolve_settings
from diffusionlm.models.row_adapters import ModelAdapter, share_weights
from diffusionlm.models.transformer import Transformer
from diffusionlm.serving.engine import Engine
from diffusionlm.serving.requests import EngineRequest
from tests.decoding_jobs import limit_decoder, run_all
from tests.masked_adapters import HookedAdapter, add_drafter
from tests.unit.inference.test_speculation import KINDS, MASK, MODELS, assert_same_text, config_of, make_mixed_jobs
from tests.unit.inference.test_token_causal_blocks import decode_plainly

Like = Callable[..., Transformer]
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [4, 3, 2, 1], [11] * 17, [5]]
WITH_MASKS_IN_TEXT = [[1, MASK, 3, 4, MASK, 6], [4, 3, 2, MASK]]
SAMPLING = [{}, {"temperature": 1.0}]


@pytest.fixture(params=MODELS)
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return MODELS[request.param]


def make_adapter(model: Transformer, **options: Any) -> ModelAdapter:
    """An adapter of requests, with large random values."""
    return ModelAdapter.from_model(add_drafter(share_weights(model), **options))


def hook(base: Transformer, adapted: Transformer) -> Transformer:
    """The base with the adapter where an input is a mask token, for texts without mask tokens."""
    HookedAdapter(base, adapted, lambda tokens: tokens == MASK)
    return base


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("values", SAMPLING, ids=["greedy", "keyed"])
def test_texts_are_next_tokens_of_the_base(
    like: Like, options: dict[str, Any], kind: str, values: dict[str, Any]
) -> None:
    base, model = like(**options), add_drafter(like(**options))
    prompts, values = [*PROMPTS[:2], *WITH_MASKS_IN_TEXT], {"max_new_tokens": 14, **values}
    expected = generate(base, prompts, config_of(**values))
    ours, plain = (generate(one, prompts, config_of(kind, 3, **values)) for one in (model, base))
    for own, other in zip(ours, expected, strict=True):
        assert_same_text(own, other)
    assert [own.step_map for own in ours] != [other.step_map for other in plain], "drafts differ"


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_masked_rows(like: Like, options: dict[str, Any], kind: str) -> None:
    """The same tokens are accepted in each forward, as with a second implementation of the adapter."""
    model = add_drafter(like(**options))
    hooked = hook(like(**options), model)
    for draft_length in (2, 5):
        config = config_of(kind, draft_length, temperature=0.7)
        ours, expected = (generate(one, PROMPTS, config) for one in (model, hooked))
        assert [answer.step_map for answer in ours] == [answer.step_map for answer in expected]
        assert {answer.num_forwards for answer in ours} != {20}


@pytest.mark.parametrize("cache", ["block", "none"])
@pytest.mark.parametrize("name", ["block", "token", "token, shifted"])
def test_blocks_are_those_of_masked_rows(like: Like, name: str, cache: str) -> None:
    model = add_drafter(like(**MODELS[name]))
    base, hooked = like(**MODELS[name]), hook(like(**MODELS[name]), model)
    config = GenerationConfig(max_new_tokens=7, stop_token_ids=(), cache=cache)
    texts = []
    for prompt in PROMPTS[:2]:
        texts.append(decode_plainly(hooked, [*prompt, *[MASK] * 7]))
        [answer] = generate(model, [prompt], config)
        assert [*prompt, *answer.token_ids] == texts[-1]
        with Engine(base, cache_memory=1 << 18, page_size=4, adapters={"drafts": make_adapter(base)}) as engine:
            request = engine.submit(prompt, config, options=RequestOptions(adapter="drafts"))
            assert request.result(30).token_ids == answer.token_ids
    canvas = [1, MASK, 2, MASK, 3, 4, MASK, MASK, 5, 6, 7, 8, MASK, 9, MASK]
    [filled] = infill(model, [canvas], GenerationConfig(cache=cache))
    assert list(filled.token_ids) == decode_plainly(hooked, canvas)
    assert texts != [decode_plainly(base, [*prompt, *[MASK] * 7]) for prompt in PROMPTS[:2]]


@pytest.mark.parametrize("strategy", ["p2", "penalized_entropy"])
def test_rows_of_requests_are_in_the_order_of_their_block(like: Like, strategy: str) -> None:
    """Also where all inputs of a block have outputs."""
    options = {"block_length": 5, "clean_alignment": "shifted", "noisy_attention": "visible_first"}
    base, model = like(**options), add_drafter(like(**options))
    config = GenerationConfig(max_new_tokens=13, stop_token_ids=(), remasking_strategy=strategy)
    expected = generate(model, [PROMPTS[0]], config)[0]
    with Engine(base, cache_memory=1 << 18, page_size=5, adapters={"drafts": make_adapter(base)}) as engine:
        ours = engine.submit(PROMPTS[0], config, options=RequestOptions(adapter="drafts")).result(30)
    assert_same_text(ours, expected)


@pytest.mark.usefixtures("_one_thread")
def test_bits_of_blocks_do_not_depend_on_other_requests(like: Like) -> None:
    base = like(**MODELS["token"]).float()
    limits: dict[str, Any] = {"cache_memory": 1 << 18, "page_size": 4, "deterministic": True}
    config = GenerationConfig(max_new_tokens=8, stop_token_ids=(), temperature=1.0)
    with Engine(base, adapters={"drafts": make_adapter(base)}, **limits) as engine:
        ours = [engine.submit(prompt, config, options=RequestOptions(adapter="drafts")) for prompt in PROMPTS]
        together = [request.result(30) for request in ours]
        for prompt, answer in zip(PROMPTS, together, strict=True):
            alone = engine.submit(prompt, config, options=RequestOptions(adapter="drafts")).result(30)
            assert_same_text(alone, answer, tolerance=0.0)


@pytest.fixture
def _one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize("name", ["block", "token, shifted"])
def test_deterministic_texts_have_the_bits_of_the_base(like: Like, name: str) -> None:
    base, model = like(**MODELS[name]).float(), add_drafter(like(**MODELS[name]).float())
    ours, plain = zip(*make_mixed_jobs(base)[:5], strict=True)
    limits: dict[str, Any] = {"page_size": 4, "deterministic": True, "max_num_batched_tokens": 7}
    expected = run_all(Decoder(base, *limit_decoder(num_pages=40, **limits)), [*plain], [0] * 5)
    decoder = Decoder(model, *limit_decoder(num_pages=16, prefix_cache=True, **limits))
    for answer, other in zip(run_all(decoder, [*ours], [0, 0, 2, 4, 5]), expected, strict=True):
        assert_same_text(answer, other, tolerance=0.0)


@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize("kind", KINDS)
def test_requests_share_pages_and_bits_with_the_base(like: Like, kind: str) -> None:
    """Together, and one after the other: what an adapter of all positions computes is its own."""
    base = like(**MODELS["block"]).float()
    adapters = {"drafts": make_adapter(base), "all": make_adapter(base, positions="all")}
    limits: dict[str, Any] = {"cache_memory": 1 << 18, "page_size": 4, "deterministic": True}
    texts, config = [PROMPTS[0], [3, *PROMPTS[0][1:]]], config_of(kind, 3, temperature=0.7)
    with Engine(base, adapters=adapters, **limits) as engine:

        def submit(text: list[int], adapter: str | None, config: GenerationConfig = config) -> EngineRequest:
            return engine.submit(text, config, 5, RequestOptions(adapter=adapter))

        together = {name: submit(texts[0], name) for name in ("drafts", None, "all")}
        answers = {name: request.result(30) for name, request in together.items()}
        first = submit(texts[1], "drafts").result(30)
        later = {name: submit([*texts[1], 4, 4, 4, 4], name) for name in (None, "all")}
        others = {name: request.result(30) for name, request in later.items()}
        expected = submit(texts[1], None, config_of(temperature=0.7)).result(30)
    assert_same_text(answers["drafts"], answers[None], tolerance=0.0)
    assert answers["all"].logprobs != answers[None].logprobs != others["all"].logprobs
    assert_same_text(first, expected, tolerance=0.0)
    assert {name: request.state.num_cached_tokens for name, request in later.items()} == {None: 8, "all": 0}


def test_scores_of_known_text_are_those_of_the_base(like: Like) -> None:
    base, model = like(**MODELS["block"]), add_drafter(like(**MODELS["block"]))
    [ours], [expected] = (
        decode(one, [prepare_prompt_scoring(resolve_settings(config_of(), one.config), [*PROMPTS[0], MASK, 3])])
        for one in (model, base)
    )
    assert ours.logprobs == expected.logprobs


def test_an_adapter_of_the_model_has_no_graphs(like: Like, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph would be without it."""
    monkeypatch.setattr(torch.Tensor, "device", torch.device("cuda"))
    models = like(**MODELS["block"]), add_drafter(like(**MODELS["block"]))
    for model in models:
        model.uses_cuda_graphs = True
    assert [select_graph_pool(model) is None for model in models] == [False, True]
