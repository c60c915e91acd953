"""Requests with different adapters in one batch: each gets the answer of its adapter alone."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from config.finetune.lora import LoraConfig
from config.generation import GenerationConfig
from diffusionlm.checkpoints.adapter_files import load_adapter, read_adapter, save_adapter
from diffusionlm.inference.generate import Generation, generate, infill
from diffusionlm.inference.requests import RequestOptions
from diffusionlm.models.lora import adapter_modules, add_adapter
from diffusionlm.models.transformer import Transformer
from diffusionlm.serving.engine import Engine
from diffusionlm.serving.requests import EngineRequest, UnknownAdapterError
from tests.conftest import MakeModel

MASK = 18
ADAPTERS: dict[str, dict[str, Any]] = {
    "v1.5": {"rank": 3},
    "dora": {"rank": 2, "dora": True, "targets": ("q_proj", "down_proj")},
    "rows": {"rank": 2, "rslora": True, "trainable_tokens": (3, MASK), "targets": ("v_proj",)},
    "pissa": {"rank": 2, "init": "pissa", "dora": True, "trainable_tokens": (1,), "trainable_head_rows": False},
}
MODELS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "dense": ({"attention_bias": True}, tuple(ADAPTERS)),
    "tied": ({"tie_word_embeddings": True}, ("rows",)),
    "experts": ({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}, ("v1.5", "rows")),
    "bidirectional": ({"block_length": None}, ("v1.5",)),
}
"""Name -> model and its adapters."""


def write_adapter(model: Transformer, directory: Path, seed: int, options: dict[str, Any]) -> None:
    """Write an adapter with values of its own for a model, which gets it."""
    directory.mkdir()
    config = LoraConfig(**options)
    add_adapter(model, config, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in model.parameters():
            if value.requires_grad:
                value.add_(0.4 * torch.randn(value.shape, generator=generator))
    save_adapter(model, config, directory)


@pytest.fixture
def make_base(tiny_model: MakeModel) -> Callable[..., Transformer]:
    def make(**options: Any) -> Transformer:
        values = {"vocab_size": 19, "mask_token_id": MASK, "block_length": 4, **options}
        return tiny_model(torch.float64, **values).eval()

    return make


@pytest.mark.parametrize("name", MODELS)
def test_each_row_has_its_own_adapter(make_base: Callable[..., Transformer], name: str, tmp_path: Path) -> None:
    values, own_adapters = MODELS[name]
    base, names = make_base(**values), [None, *own_adapters]
    configs = [
        GenerationConfig(max_new_tokens=4, stop_token_ids=(), temperature=0.8),
        GenerationConfig(max_new_tokens=3, stop_token_ids=(), cfg_scale=0.5, remasking_strategy="low_confidence"),
    ]
    prompts, hole = [[1, 2, 3], [4] * 6], [1, MASK, 3, MASK]
    adapters, expected = {}, {}
    for seed, adapter in enumerate(names):
        alone = make_base(**values)
        if adapter is not None:
            write_adapter(make_base(**values), tmp_path / adapter, seed, ADAPTERS[adapter])
            adapters[adapter] = read_adapter(base, tmp_path / adapter)
            load_adapter(alone, tmp_path / adapter)
        answers = [generate(alone, [prompt], config, [7])[0] for prompt in prompts for config in configs]
        expected[adapter] = [*answers, infill(alone, [hole], configs[0], [7])[0]]
    assert not list(adapter_modules(base)) and all(weight.requires_grad for weight in base.parameters())
    with Engine(base, cache_memory=1 << 18, page_size=4, adapters=adapters) as engine:
        assert engine.adapter_names == tuple(adapters)
        for _ in range(2):  # the second time with shared pages
            requests = {
                adapter: [
                    *(
                        engine.submit(prompt, config, 7, RequestOptions(adapter=adapter))
                        for prompt in prompts
                        for config in configs
                    ),
                    engine.submit(hole, configs[0], 7, RequestOptions(adapter=adapter, is_infill=True)),
                ]
                for adapter in names
            }
            for adapter, own in requests.items():
                for request, answer in zip(own, expected[adapter], strict=True):
                    ours = request.result(60)
                    assert (ours.token_ids, ours.step_map) == (answer.token_ids, answer.step_map), adapter
                    assert ours.num_forwards == answer.num_forwards
                    assert ours.logprobs == pytest.approx(answer.logprobs, abs=1e-9)
    assert len({answers[0].logprobs for answers in expected.values()}) == len(names), "they differ"


def test_adapters_that_do_not_fit_are_refused(make_base: Callable[..., Transformer], tmp_path: Path) -> None:
    base, other = make_base(), make_base(seed=5)
    write_adapter(make_base(), tmp_path / "a", 0, {"rank": 1})
    adapter = read_adapter(base, tmp_path / "a")
    with pytest.raises(ValueError, match="was trained on another base than this model"):
        read_adapter(other, tmp_path / "a")
    for model in (other, make_base(), make_base(num_hidden_layers=1)):
        with pytest.raises(ValueError, match="adapter 'my' is of another model"):
            Engine(model, adapters={"my": adapter})
    with Engine(base, cache_memory=1 << 16, adapters={"my": adapter}) as engine:
        with pytest.raises(ValueError, match="adapter = 'a' does not exist: this engine has 'my'"):
            engine.submit([1], GenerationConfig(max_new_tokens=1), 0, RequestOptions(adapter="a"))
        with pytest.raises(ValueError, match="outside the model's vocabulary"):
            engine.submit([99], GenerationConfig(max_new_tokens=1), 0, RequestOptions(adapter="my"))
    load_adapter(base, tmp_path / "a")
    with pytest.raises(ValueError, match="the model has an adapter already, which all requests would have"):
        Engine(base, adapters={"my": adapter})


LIMITS: dict[str, Any] = {"deterministic": True, "cache_memory": 1 << 18, "page_size": 4}


def decode_alone(make: Callable[[], Transformer], directory: Path | None, config: GenerationConfig) -> Generation:
    """The answer of an engine that never has another adapter; its tokens are those of `generate`."""
    alone, base = make(), make()
    adapters = {} if directory is None else {"only": read_adapter(base, directory)}
    if directory is not None:
        load_adapter(alone, directory)
    with Engine(base, adapters=adapters, **LIMITS) as engine:
        options = RequestOptions(adapter=None if directory is None else "only")
        answer = engine.submit([1] * 9, config, options=options).result(30)
    assert answer.token_ids == generate(alone, [[1] * 9], config)[0].token_ids
    return answer


@pytest.mark.parametrize("name", ["dense", "experts"])
def test_adapters_come_and_go_between_two_steps(
    tiny_model: MakeModel, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request is decoded with the adapter that had its name when it was submitted, to the bit."""

    def make() -> Transformer:
        return tiny_model(vocab_size=19, mask_token_id=MASK, block_length=4, **MODELS[name][0]).eval()

    base, config = make(), GenerationConfig(max_new_tokens=6, stop_token_ids=())
    expected: dict[str | None, Generation] = {None: decode_alone(make, None, config)}
    for seed, (own, adapter) in enumerate({"old": "v1.5", "new": "rows", "other": "v1.5"}.items()):
        write_adapter(make(), tmp_path / own, seed, ADAPTERS[adapter])
        expected[own] = decode_alone(make, tmp_path / own, config)
    assert len({answer.logprobs for answer in expected.values()}) == 4
    with Engine(base, **LIMITS) as engine:
        gate, entered, step = threading.Event(), threading.Event(), engine._decoder.step

        def wait() -> Any:
            entered.set()
            assert gate.wait(30)
            return step()

        def submit(adapter: str | None) -> EngineRequest:
            return engine.submit([1] * 9, config, options=RequestOptions(adapter=adapter))

        def load(adapter: str, version: str) -> weakref.ref[Any]:
            loaded = read_adapter(base, tmp_path / version)
            engine.load_adapter(adapter, loaded)
            return weakref.ref(next(iter(loaded.modules.values())))

        monkeypatch.setattr(engine._decoder, "step", wait)
        requests: list[tuple[EngineRequest, str | None]] = [(submit(None), None)]
        assert entered.wait(30)  # all that follows comes while a step is computed
        loaded = [load("a", "old")]
        requests += [(submit("a"), "old"), (submit(None), None)]
        loaded += [load("a", "new"), load("b", "other")]
        requests += [(submit("a"), "new"), (submit("b"), "other")]
        engine.unload_adapter("b")
        for use in (submit, engine.unload_adapter):
            with pytest.raises(UnknownAdapterError, match="adapter = 'b' does not exist: this engine has 'a'"):
                use("b")
        gate.set()
        for request, version in requests:
            assert request.result(30) == expected[version], version
        # The pages of a text are shared, but not with those of another adapter that has had the name.
        for version, num_cached in (("new", 8), (None, 8), ("old", 0)):
            if version == "old":
                loaded.append(load("a", "old"))
            again = submit(None if version is None else "a")
            assert again.result(30) == expected[version] and again.state.num_cached_tokens == num_cached
        engine.unload_adapter("a")
        assert submit(None).result(30) == expected[None]
        del request, requests, again
        gc.collect()
        assert not any(reference() for reference in loaded), "their memory is free"
        with pytest.raises(ValueError, match="adapter 'a' is of another model"):
            engine.load_adapter("a", read_adapter(make(), tmp_path / "old"))
