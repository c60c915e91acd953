"""An engine whose model is divided over processes: the answers of one process, and its end when one is lost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from config.generation import GenerationConfig
from ddp import tensor_parallel
from ddp.mesh import Axis
from diffusionlm.checkpoints.adapter_files import load_adapter, read_adapter
from diffusionlm.inference.generate import generate
from diffusionlm.inference.requests import RequestOptions
from diffusionlm.models.transformer import Transformer
from diffusionlm.serving import followers
from diffusionlm.serving.engine import Engine
from diffusionlm.serving.requests import EngineStoppedError
from tests.conftest import MakeModel
from tests.unit.serving.test_adapters import write_adapter

pytestmark = pytest.mark.slow  # processes that import torch


@pytest.fixture(scope="module")
def model(tiny_model: MakeModel) -> Transformer:
    """With a vocabulary that two ranks cannot halve."""
    return tiny_model(torch.float64, vocab_size=19, mask_token_id=18, block_length=4).eval()


@pytest.fixture
def engine(model: Transformer) -> Iterator[Engine]:
    engine = Engine(model, cache_memory=1 << 14, max_requests=4, tensor_parallel=2)
    yield engine
    engine.close(drain=False)
    assert not dist.is_initialized()


def settings(**values: Any) -> GenerationConfig:
    return GenerationConfig.model_validate({"max_new_tokens": 12, "stop_token_ids": (), **values})


def test_answers_are_those_of_one_process(model: Transformer, engine: Engine) -> None:
    """Many at a time, with fewer pages than they need together, filters, and prompts that share pages."""
    configs = [
        settings(),
        settings(temperature=0.8, top_p=0.9),
        settings(block_length=2, stop_token_ids=(3, 4)),
        settings(remasking_strategy="entropy", temperature=1.0, confidence_of="most_probable"),
    ]
    prompts = [[1, 2, 3], [5] * 9, list(range(15)), [*range(15), 7]]
    cases = [(prompt, config, seed) for seed, prompt in enumerate(prompts) for config in configs]
    with ThreadPoolExecutor(len(cases)) as threads:
        results = [*threads.map(lambda case: engine.submit(*case).result(60), cases)]
    for (prompt, config, seed), ours in zip(cases, results, strict=True):
        [expected] = generate(model, [prompt], config, [seed])
        assert (ours.token_ids, ours.step_map) == (expected.token_ids, expected.step_map)
        assert ours.logprobs == pytest.approx(expected.logprobs, abs=1e-9)
    assert engine.status.counts.num_steps > 12


SAMPLED_FROM_COLUMNS: list[dict[str, Any]] = [
    {"remasking_strategy": "low_confidence"},
    {"remasking_strategy": "entropy"},
    {"remasking_strategy": "topk_margin"},
    {"remasking_strategy": "low_confidence", "temperature": 0.8},
    {"remasking_strategy": "entropy", "temperature": 1.0, "confidence_of": "most_probable"},
    {"remasking_strategy": "maskgit_plus", "temperature": 1.5, "confidence_from": "filtered"},
    {"remasking_strategy": "ancestral"},
]
"""Settings whose tokens are sampled without whole logits."""


@pytest.mark.parametrize("others", [[], [{"top_k": 5, "temperature": 1.0}]])
def test_samples_from_columns_are_those_of_one_process(
    model: Transformer, engine: Engine, others: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between requests that need whole logits, and without these: then no rank gathers logits."""
    shapes: list[torch.Size] = []
    gather = tensor_parallel._GatherColumns.apply

    def record(logits: torch.Tensor, axis: Axis) -> object:
        shapes.append(logits.shape)
        return gather(logits, axis)

    monkeypatch.setattr(tensor_parallel, "_GatherColumns", SimpleNamespace(apply=record))
    cases = [
        ([1, 2, 3 + seed], settings(**values), seed)
        for seed, values in enumerate([*others, *SAMPLED_FROM_COLUMNS, *others])
    ]
    handles = [engine.submit(*case) for case in cases]
    for (prompt, config, seed), handle in zip(cases, handles, strict=True):
        [expected] = generate(model, [prompt], config, [seed])
        ours = handle.result(60)
        assert (ours.token_ids, ours.step_map) == (expected.token_ids, expected.step_map)
        assert ours.logprobs == pytest.approx(expected.logprobs, rel=1e-12, abs=1e-12)
    num_steps = engine.status.counts.num_steps
    assert 12 <= len(shapes) < num_steps if others else not shapes


def test_each_request_has_its_adapter(tiny_model: MakeModel, tmp_path: Path) -> None:
    """Also beside requests without one; a model that is divided by heads and inner widths, of experts too."""
    options = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "attention_bias": True}

    def make_base() -> Transformer:
        return tiny_model(torch.float64, vocab_size=19, mask_token_id=18, block_length=4, **options).eval()

    base, expected = make_base(), dict[str | None, tuple[int, ...]]()
    config = settings()
    expected[None] = generate(base, [[1, 2, 3]], config, [0])[0].token_ids
    for seed, name in enumerate(("one", "dora"), start=1):
        write_adapter(make_base(), tmp_path / name, seed, {"rank": 2, "dora": name == "dora"})
        adapted = make_base()
        load_adapter(adapted, tmp_path / name)
        expected[name] = generate(adapted, [[1, 2, 3]], config, [0])[0].token_ids
    assert len({tuple(answer) for answer in expected.values()}) == 3
    adapters = {name: read_adapter(base, tmp_path / name) for name in ("one", "dora")}
    with Engine(base, cache_memory=1 << 15, tensor_parallel=2, adapters={"one": adapters["one"]}) as engine:
        handles = {name: engine.submit([1, 2, 3], config, 0, RequestOptions(adapter=name)) for name in (None, "one")}
        assert {name: handle.result(60).token_ids for name, handle in handles.items()} == {
            name: expected[name] for name in (None, "one")
        }
        engine.unload_adapter("one")
        engine.load_adapter("dora", adapters["dora"])
        assert (
            engine.submit([1, 2, 3], config, 0, RequestOptions(adapter="dora")).result(60).token_ids
            == (expected["dora"])
        )


def test_a_lost_process_ends_the_engine(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine._followers is not None
    request = engine.submit([1, 2, 3], settings(max_new_tokens=4000 // 100), 0)
    request.result(60)
    engine._followers._processes[0].kill()
    started = time.monotonic()
    with pytest.raises(EngineStoppedError, match="an error has ended the engine"):
        engine.submit([1, 2, 3], settings(), 0).result(60)
    assert not engine.is_alive and time.monotonic() - started < followers.TIMEOUT_SECONDS + 5


def test_an_idle_engine_notices_a_lost_process(engine: Engine) -> None:
    assert engine._followers is not None
    engine._followers._processes[0].kill()
    deadline = time.monotonic() + followers.TIMEOUT_SECONDS
    while engine.is_alive and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not engine.is_alive


def test_what_cannot_be_divided_is_refused(model: Transformer) -> None:
    with pytest.raises(ValueError, match="num_attention_heads"):
        Engine(model, cache_memory=1 << 16, tensor_parallel=3)
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="deterministic = true computes in one process"):
        Engine(model, cache_memory=1 << 16, tensor_parallel=2, deterministic=True)
