"""An engine whose model is divided over processes: the answers of one process, and its end when one is lost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from config.generation import GenerationConfig
from diffusionlm.inference.generate import generate
from diffusionlm.models.transformer import Transformer
from diffusionlm.serving import followers
from diffusionlm.serving.engine import Engine
from diffusionlm.serving.requests import EngineStoppedError
from tests.conftest import MakeModel

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
