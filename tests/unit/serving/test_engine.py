"""The engine and its thread: answers, aborts, refusals, errors, the end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from config.generation import GenerationConfig
from diffusionlm.inference.generate import generate, infill
from diffusionlm.inference.requests import RequestOptions
from diffusionlm.models.transformer import Transformer
from diffusionlm.serving.engine import Engine
from diffusionlm.serving.requests import EngineError, EngineStoppedError, QueueFullError
from tests.conftest import MakeModel
from tests.unit.serving.model_gate import ModelGate

MASK = 18
CACHE_BYTES = 1 << 16
MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="module")
def model(tiny_model: MakeModel) -> Transformer:
    return tiny_model(torch.float64, vocab_size=19, mask_token_id=MASK, block_length=4).eval()


@pytest.fixture
def make_engine(model: Transformer) -> Iterator[MakeEngine]:
    engines = []

    def make(**options: Any) -> Engine:
        engines.append(Engine(model, **{"cache_memory": CACHE_BYTES, **options}))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close(drain=False)
        assert engine.status.num_owned_pages == 0


def fail(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("a defect")


def settings(**values: Any) -> GenerationConfig:
    return GenerationConfig.model_validate({"max_new_tokens": 12, "stop_token_ids": (), **values})


@pytest.fixture
def gate(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelGate]:
    gate = ModelGate(model, monkeypatch)
    yield gate
    gate.open()


def test_callers_in_many_threads_get_the_answers_of_generate(model: Transformer, make_engine: MakeEngine) -> None:
    configs = [settings(), settings(temperature=0.8), settings(block_length=2, stop_token_ids=(3, 4))]
    prompts = [[1, 2, 3], [5] * 9, list(range(15)), [7]]
    cases = [(prompt, config, seed) for seed, prompt in enumerate(prompts) for config in configs]
    engine = make_engine(max_requests=4)
    with ThreadPoolExecutor(len(cases)) as threads:
        results = [*threads.map(lambda case: engine.submit(*case).result(60), cases)]
    for (prompt, config, seed), ours in zip(cases, results, strict=True):
        [expected] = generate(model, [prompt], config, [seed])
        assert (ours.token_ids, ours.step_map) == (expected.token_ids, expected.step_map)
        assert ours.finish_reason == expected.finish_reason
        assert ours.logprobs == pytest.approx(expected.logprobs, abs=1e-9)
    status = engine.status
    assert (status.num_running, status.num_waiting, status.num_owned_pages) == (0, 0, 0)


def test_a_canvas_and_a_chat_have_the_answers_of_infill_and_generate(
    model: Transformer, make_engine: MakeEngine
) -> None:
    engine, canvas, starts = make_engine(), [1, MASK, 3, MASK, MASK, 6], (3, 9)
    request = engine.submit(canvas, settings(), 3, RequestOptions(is_infill=True, with_canvas=True))
    states = list(request.follow())
    [expected] = infill(model, [canvas], settings(), [3])
    assert request.result().token_ids == expected.token_ids
    assert states[-1].canvas is not None and states[-1].canvas.token_ids == expected.token_ids
    [expected] = generate(model, [list(range(11))], settings(), [5], segment_starts=[starts])
    assert engine.submit(list(range(11)), settings(), 5, RequestOptions(segment_starts=starts)).result(30) == expected


@pytest.mark.parametrize("strategy", ["low_confidence", "p2"])
def test_tokens_come_from_the_left_and_stay(make_engine: MakeEngine, strategy: str) -> None:
    calls: list[Any] = []
    engine = make_engine()
    request = engine.submit([1, 2], settings(remasking_strategy=strategy, temperature=0.5), 1)
    request.add_listener(lambda: calls.append(request.state))
    states = list(request.follow())
    engine.close()
    answer = request.result()
    assert states[-1].token_ids == answer.token_ids and len(answer.token_ids) == 12
    for state in states:
        assert answer.token_ids[: len(state.token_ids)] == state.token_ids
    order = [calls.index(state) for state in states[1:]]
    assert order == sorted({*order})
    last = states[-1]
    assert last.started is not None and last.finished is not None
    assert last.submitted <= last.started <= last.finished
    assert calls.pop() is last
    request.add_listener(lambda: calls.append("now"))
    assert calls.pop() == "now", "at once, when it is done"


def test_a_request_is_aborted_in_every_state(make_engine: MakeEngine, gate: ModelGate) -> None:
    engine = make_engine(max_requests=1)
    running = engine.submit([1], settings())
    assert gate.entered.acquire(timeout=30)
    waiting, other = engine.submit([2], settings()), engine.submit([3], settings(max_new_tokens=4))
    engine.abort(running)
    engine.abort(waiting)
    gate.open()
    for request in (running, waiting):
        with pytest.raises(EngineError, match="aborted"):
            request.result(30)
    answer = other.result(30)
    engine.abort(other)
    assert other.result() == answer, "it was done"


def test_a_full_queue_refuses(make_engine: MakeEngine, gate: ModelGate) -> None:
    engine = make_engine(max_requests=1, max_waiting=2)
    requests = [engine.submit([1], settings(max_new_tokens=4))]
    assert gate.entered.acquire(timeout=30)
    requests += [engine.submit([1], settings(max_new_tokens=4)) for _ in range(2)]
    with pytest.raises(QueueFullError, match="3 requests are not done yet"):
        engine.submit([1], settings())
    with pytest.raises(TimeoutError, match=r"not complete within 0.01 s"):
        requests[0].result(0.01)
    gate.open()
    assert len({request.result(30) for request in requests}) == 1


def test_bad_requests_are_refused_at_once(
    make_engine: MakeEngine, model: Transformer, tiny_model: MakeModel, tmp_path: Path
) -> None:
    engine = make_engine(cache_memory=1 << 13)
    bias = tmp_path / "bias.safetensors"
    with_bias = settings(attention="bidirectional", attention_bias=bias)
    bias.write_bytes(b"no tensor")
    with pytest.raises(ValueError, match=r"bias\.safetensors"):
        engine.submit([1], with_bias)
    save_file({"attention_bias": torch.zeros(8, 8)}, bias)
    with pytest.raises(ValueError, match="is for 8 positions: give as many as the model"):
        engine.submit([1], with_bias)
    with pytest.raises(ValueError, match='attention_backend = "tiled" has no cached form'):
        Engine(tiny_model(backend="tiled"))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="autocast is on"):
        Engine(model)
    for prompt, message in (
        ([99], "outside the model's vocabulary"),
        ([1] * 40, "pages of 16 positions"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.submit(prompt, settings())
    assert engine.submit([1], settings()).result(30).token_ids
    with pytest.raises(ValueError, match="cache_memory = 10 does not hold a page"):
        Engine(model, cache_memory=10)
    with pytest.raises(ValueError, match="max_waiting"):
        Engine(model, cache_memory=CACHE_BYTES, max_waiting=0)


@pytest.mark.parametrize("how", ["at once, then drained", "after a timeout", "by a listener"])
def test_requests_end_with_a_closed_engine(make_engine: MakeEngine, gate: ModelGate, how: str) -> None:
    """Each caller raises an error of its own. A listener that fails changes nothing."""
    engine = make_engine(max_requests=1)
    requests = [engine.submit([1], settings()) for _ in range(2)]
    assert gate.entered.acquire(timeout=30)
    requests[1].add_listener(lambda: 1 // 0)  # type: ignore[arg-type]
    if how == "by a listener":
        requests[0].add_listener(lambda: engine.close(drain=False))
    options: dict[str, Any] = {
        "at once, then drained": [{"drain": False}, {"drain": True}],
        "after a timeout": [{"timeout": 0.01}],
    }
    closers = [threading.Thread(target=engine.close, kwargs=values) for values in options.get(how, [])]
    for closer in closers:
        closer.start()
        closer.join(0.1)
    gate.open()
    for closer in closers:
        closer.join()
    errors = []
    for request in (*requests, requests[0]):
        with pytest.raises(EngineStoppedError, match="closed before the request was done") as caught:
            request.result(30)
        errors.append(caught.value)
    assert len(set(map(id, errors))) == 3 and requests[0].state.error not in errors
    engine.close()
    with pytest.raises(EngineStoppedError, match="was closed"):
        engine.submit([1], settings())


@pytest.mark.parametrize("method", ["commit", "prepare_step", "final_positions"])
def test_a_failure_of_one_request_ends_it_alone(
    model: Transformer, make_engine: MakeEngine, gate: ModelGate, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    engine = make_engine()
    requests = [engine.submit([1, 2, 3], settings()) for _ in range(3)]
    assert gate.entered.acquire(timeout=30)
    monkeypatch.setattr(requests[1]._request, method, fail)
    gate.open()
    with pytest.raises(RuntimeError, match="a defect"):
        requests[1].result(30)
    [expected] = generate(model, [[1, 2, 3]], settings())
    for request in (requests[0], requests[2]):
        assert request.result(30).token_ids == expected.token_ids
    assert engine.is_alive


def test_all_requests_end_whatever_fails(
    model: Transformer, make_engine: MakeEngine, gate: ModelGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither pages that cannot be freed nor a request that cannot be read leaves another caller waiting."""
    engine = make_engine()
    requests = [engine.submit([1], settings()) for _ in range(3)]
    assert gate.entered.acquire(timeout=30)
    with monkeypatch.context() as patch:
        patch.setattr(engine._decoder, "remove", fail)
        patch.setattr(requests[0]._request, "final_positions", fail)
        gate.open()
        for request in requests:
            with pytest.raises(EngineStoppedError, match="an error has ended the engine: a defect"):
                request.result(30)
        assert not engine.is_alive
        with pytest.raises(EngineStoppedError, match="an error has ended it"):
            engine.submit([1], settings())
        engine.close()
    for request in requests:
        engine._decoder.remove(request._request)


def test_pages_hold_whole_blocks(tiny_model: MakeModel) -> None:
    with Engine(tiny_model(block_length=12), cache_memory=CACHE_BYTES) as engine:
        for _ in range(2):
            engine.submit([1] * 30, settings(max_new_tokens=4)).result(30)
        assert engine.status.counts.num_prefix_hits == 24


def test_deterministic_answers(tiny_model: MakeModel) -> None:
    """The same bits alone and beside others; the engine computes in one thread, the others keep theirs."""
    model = tiny_model(vocab_size=19, mask_token_id=MASK, block_length=4).eval()
    torch.set_num_threads(2)
    threads: list[int] = []
    cases = [([1, 2, 3], settings()), ([5] * 9, settings(temperature=0.8)), ([1, 2], settings(cfg_scale=1.0))]
    options = RequestOptions(num_top_logprobs=3, logit_bias={3: 1.0})
    with Engine(model, cache_memory=CACHE_BYTES, deterministic=True) as engine:
        alone = [engine.submit(prompt, config, 1, options).result(30) for prompt, config in cases]
    with Engine(model, cache_memory=CACHE_BYTES, deterministic=True, max_num_batched_tokens=5) as engine:
        requests = [engine.submit(prompt, config, 1, options) for prompt, config in cases]
        requests[0].add_listener(lambda: threads.append(torch.get_num_threads()))
        assert [request.result(30) for request in requests] == alone
    other = threading.Thread(target=lambda: threads.append(torch.get_num_threads()))
    other.start()
    other.join()
    assert set(threads[:-1]) == {1} and threads[-1] == torch.get_num_threads() == 2
    with pytest.raises(ValueError, match=r"deterministic = True needs a model on the CPU in float32 or float64"):
        Engine(model.bfloat16(), cache_memory=CACHE_BYTES, deterministic=True)
