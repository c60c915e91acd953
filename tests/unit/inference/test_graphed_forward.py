"""Forwards of decoding by graphs: answers are those without, whoever comes and goes."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from torch import nn

from config.finetune.lora import LoraConfig
from config.generation import GenerationConfig
from diffusionlm.inference import cuda_graphs
from diffusionlm.inference import decoder as decoder_module
from diffusionlm.inference.cuda_graphs import CudaGraph, GraphedForward, InputText, StaticBatch, StaticShape, find_shape
from diffusionlm.inference.decoder import Decoder
from diffusionlm.inference.generate import Generation, decode, decode_steps, generate, to_generation
from diffusionlm.inference.request_builder import prepare_request
from diffusionlm.inference.requests import ActiveRequest
from diffusionlm.inference.settings import resolve_settings
from diffusionlm.models.cache import PagedCache
from diffusionlm.models.lora import LoRALinear, add_adapter
from diffusionlm.models.patterns import Bidirectional, BlockCausal
from diffusionlm.models.row_adapters import ModelAdapter
from diffusionlm.models.transformer import Transformer
from diffusionlm.models.varlen import SequenceSlice
from tests.conftest import MakeModel
from tests.decoding_jobs import LIMITS, MASK, Job, assert_same, make_jobs, run_all
from tests.recorded_graph import RecordedGraph, make_pools_of

OPTIONS: list[dict[str, Any]] = [
    {"denoising_steps": 4},
    {"temperature": 0.8, "top_k": 5},
    {"remasking_strategy": "p2", "temperature": 1.0},
    {"cfg_scale": 1.5, "denoising_steps": 3},
]


GRAPH_LIMITS = {**LIMITS, "everything": (40, LIMITS["everything"][1])}


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[RecordedGraph]:
    """All graphs that are recorded, each in the first forward of its shape."""
    graphs: list[RecordedGraph] = []

    def make_graph() -> RecordedGraph:
        graphs.append(RecordedGraph())
        return graphs[-1]

    monkeypatch.setattr(decoder_module, "select_graph_pool", lambda model: make_pools_of(make_graph))
    monkeypatch.setattr(cuda_graphs, "MIN_USES", 0)
    cuda_graphs._idle_graphs.clear()
    return graphs


def check_answers(model: Transformer, jobs: list[Job], results: list[Generation]) -> None:
    """Compare answers with those of the requests alone, without graphs."""
    with patch.object(decoder_module, "select_graph_pool", lambda model: None):
        for prepared, result in zip(jobs, results, strict=True):
            assert_same(result, decode(model, [prepared])[0])


@pytest.mark.parametrize("limits", GRAPH_LIMITS)
@pytest.mark.parametrize("name", ["blocks", "shifted_blocks"])
def test_answers_are_those_without_graphs(
    name: str, limits: str, request: pytest.FixtureRequest, graphs: list[RecordedGraph]
) -> None:
    """Requests come and go, are preempted, share pages and have guidance."""
    model: Transformer = request.getfixturevalue(name)
    jobs = make_jobs(model, OPTIONS, 12)
    arrivals = np.random.default_rng(1).integers(0, 6, len(jobs)).tolist()
    decoder = Decoder(model, *GRAPH_LIMITS[limits])
    check_answers(model, jobs, run_all(decoder, jobs, arrivals))
    assert len(graphs) > 1
    assert sum(graph.num_replays for graph in graphs) > decoder.counts.num_steps / 5
    if name == "blocks":
        assert (decoder.counts.num_preemptions > 0) == (limits in ("few pages", "everything"))


@pytest.mark.parametrize("cache", ["dual", "prefix"])
def test_bidirectional_attention_with_a_cache(
    cache: str, model: Transformer, graphs: list[RecordedGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"cache": cache, "block_length": 4, "denoising_steps": 4}
    jobs = make_jobs(model, [options, {**options, "cfg_scale": 1.0}], 6)
    arrivals = [0, 0, 1, 2, 9, 9]
    check_answers(model, jobs, run_all(Decoder(model, *LIMITS["plenty"]), jobs, arrivals))
    assert sum(graph.num_replays for graph in graphs) > 5


@pytest.mark.parametrize(
    "options",
    [
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6},
        {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 7.0, "scale_embeddings": True, "norm_offset": True},
    ],
    ids=["window", "soft cap"],
)
def test_windows_and_soft_caps(options: dict[str, Any], tiny_model: MakeModel, graphs: list[RecordedGraph]) -> None:
    model = tiny_model(torch.float64, vocab_size=23, mask_token_id=MASK, block_length=4, **options).eval()
    jobs = make_jobs(model, OPTIONS[:1], 4)
    check_answers(model, jobs, run_all(Decoder(model, *LIMITS["plenty"]), jobs, [0, 0, 2, 5]))
    assert sum(graph.num_replays for graph in graphs) > 3


GENERATION = GenerationConfig(max_new_tokens=12, denoising_steps=4, stop_token_ids=())
PROMPTS = [[1, 2, 3], [4] * 9]


def check_generate(model: Transformer, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[Generation]:
    """Generate, and compare with the answers without graphs."""
    answers = generate(model, prompts, GENERATION)
    with patch.object(decoder_module, "select_graph_pool", lambda model: None):
        expected = generate(model, prompts, GENERATION)
    for answer, other in zip(answers, expected, strict=True):
        assert_same(answer, other)
    return answers


def add_to_weights(model: Transformer) -> None:
    """As an optimizer does."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3)


def adapt_model(model: Transformer) -> None:
    add_adapter(model, LoraConfig(rank=2))
    for name, parameter in model.named_parameters():
        if name.endswith("lora_B"):
            nn.init.normal_(parameter)


def test_graphs_are_recorded_once_for_many_calls(blocks: Transformer, graphs: list[RecordedGraph]) -> None:
    """With other prompts too; a larger cache needs new ones."""
    check_generate(blocks)
    num_graphs = len(graphs)
    assert num_graphs > 0
    check_generate(blocks)
    check_generate(blocks, [[3] * 5, [1, 2]])
    assert len(graphs) == num_graphs
    check_generate(blocks, [[3] * 5] * 9)
    assert len(graphs) > num_graphs


def replace_weights(model: Transformer) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data + 0.3


CHANGES: dict[str, Callable[[Transformer], Any]] = {
    "values": add_to_weights,
    "tensors": replace_weights,
    "hook": lambda model: model.model.layers[0].register_forward_hook(lambda module, inputs, output: output * 3),
    "option": lambda model: setattr(model.model.layers[0].input_layernorm, "eps", 3.0),
    "adapter": adapt_model,
}


@pytest.mark.parametrize("change", CHANGES)
def test_graphs_of_a_model_that_has_changed(change: str, tiny_model: MakeModel, graphs: list[RecordedGraph]) -> None:
    """New values in the same place are read; other changes have graphs of their own."""
    model = tiny_model(torch.float64, vocab_size=23, mask_token_id=MASK, block_length=4).eval()
    before = check_generate(model)
    num_graphs = len(graphs)
    CHANGES[change](model)
    after = check_generate(model)
    assert [answer.logprobs for answer in after] != [answer.logprobs for answer in before]
    assert (len(graphs) > num_graphs) == (change != "values")


def test_two_decoders_of_a_model_at_a_time(blocks: Transformer, graphs: list[RecordedGraph]) -> None:
    """As in two threads: the graphs that are kept belong to the first one."""
    check_generate(blocks)
    settings = resolve_settings(GENERATION, blocks.config)
    requests = [[ActiveRequest(prepare_request(settings, prompt))] for prompt in PROMPTS]
    steps = [decode_steps(blocks, own) for own in requests]
    while sum(next(own, None) is not None for own in steps):
        pass
    with patch.object(decoder_module, "select_graph_pool", lambda model: None):
        for [request], prompt in zip(requests, PROMPTS, strict=True):
            assert_same(to_generation(request), generate(blocks, [prompt], GENERATION)[0])
    assert len(cuda_graphs._idle_graphs) == 1


def test_graphs_are_gone_with_their_model(
    tiny_model: MakeModel, graphs: list[RecordedGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a large cache are not kept at all."""
    model = tiny_model(torch.float64, vocab_size=23, mask_token_id=MASK, block_length=4).eval()
    check_generate(model)
    kept = [weakref.ref(graph) for graph in graphs]
    graphs.clear()
    gc.collect()
    assert any(graph() for graph in kept)
    del model
    gc.collect()
    assert not any(graph() for graph in kept) and not cuda_graphs._idle_graphs
    monkeypatch.setattr(cuda_graphs, "MAX_KEPT_BYTES", 1000)
    check_generate(tiny_model(torch.float64, vocab_size=23, mask_token_id=MASK, block_length=4).eval())
    assert graphs and not cuda_graphs._idle_graphs


def test_steps_without_adapters_have_graphs_beside_adapters(tiny_model: MakeModel, graphs: list[RecordedGraph]) -> None:
    """One request of a server with an adapter costs the others their graphs only while it is decoded."""
    model, adapted = (
        tiny_model(torch.float64, vocab_size=23, mask_token_id=MASK, block_length=4).eval() for _ in range(2)
    )
    adapt_model(adapted)
    expected = generate(adapted, PROMPTS[:1], GENERATION)[0]
    for name, module in adapted.named_modules():
        if isinstance(module, LoRALinear):
            module.weight = model.get_parameter(f"{name}.weight")
    settings = resolve_settings(GENERATION, model.config)
    plain = [prepare_request(settings, prompt) for prompt in PROMPTS]
    jobs, adapter = [*plain, plain[0]], ModelAdapter.from_model(adapted)
    decoder = Decoder(model, *LIMITS["plenty"])
    check_answers(model, jobs[:2], run_all(decoder, jobs[:2], [0, 0]))
    num_replays = sum(graph.num_replays for graph in graphs)
    assert num_replays > 3
    decoder.runner.prepare_adapter(adapter)  # while graphs are kept
    *answers, with_adapter = run_all(decoder, jobs, [0, 0, 0], adapter)
    assert_same(with_adapter, expected)
    check_answers(model, jobs[:2], answers)
    assert sum(graph.num_replays for graph in graphs) == num_replays


@pytest.mark.parametrize("name", ["StaticBatch", "new_empty"])
def test_without_memory_for_a_graph_forwards_go_on(
    name: str, blocks: Transformer, graphs: list[RecordedGraph], caplog: pytest.LogCaptureFixture
) -> None:
    """Neither is the forward repeated in halves, nor does the memory of earlier graphs stay occupied. Before the second
    attempt torch's cache is emptied."""
    jobs = make_jobs(blocks, OPTIONS[:1], 4)
    decoder = Decoder(blocks, *LIMITS["plenty"])
    num_batches = 0

    def fail(*args: Any) -> Any:
        nonlocal num_batches
        num_batches += 1
        if name == "new_empty" or num_batches > 1:
            raise torch.OutOfMemoryError("no memory")
        return StaticBatch(*args)

    target: Any = cuda_graphs if name == "StaticBatch" else torch.Tensor
    with patch.object(target, name, fail), patch.object(torch.cuda, "empty_cache") as empty_cache:
        results = run_all(decoder, jobs, [0, 0, 2, 5])
    assert num_batches == (3 if name == "StaticBatch" else 2)
    empty_cache.assert_called_once_with()
    assert [record.message.count("without CUDA graphs") for record in caplog.records] == [1]
    check_answers(blocks, jobs, results)
    kept = [weakref.ref(graph) for graph in graphs]
    graphs.clear()
    gc.collect()
    assert not any(graph() for graph in kept)


def sequence(num_inputs: int, num_visible: int, pattern: Any = None, pages: Any = range(999)) -> SequenceSlice:
    start = num_visible - num_inputs
    return SequenceSlice(start, num_visible, num_visible, pattern or BlockCausal(4), pages=pages)


def test_shapes_of_graphs() -> None:
    block = sequence(4, 40)
    for sequences, expected in (
        ([block], StaticShape(1, 4, 64)),
        ([block, sequence(8, 100)], StaticShape(3, 4, 128)),
        ([sequence(5, 40), sequence(1, 65)], StaticShape(3, 4, 128)),
        ([block] * 128, StaticShape(128, 4, 64)),
        ([block] * 129, None),
        ([sequence(9, 40)], None),
        ([block, sequence(4, 40, Bidirectional())], None),
        ([block, sequence(40, 40, pages=None)], None),
        ([sequence(4, 40, Bidirectional()), sequence(5, 30, Bidirectional())], StaticShape(2, 6, 64)),
        ([sequence(513, 600, Bidirectional())], None),
        ([sequence(100, 100, Bidirectional())] + [sequence(9, 40, Bidirectional())] * 3, None),
        ([block] * 7 + [sequence(4, 300)], None),
        ([sequence(4, 200)] * 7 + [sequence(4, 300)], StaticShape(8, 4, 320)),
        ([sequence(4, 520)], StaticShape(1, 4, 640)),
    ):
        assert find_shape(sequences) == expected


def test_all_graphs_are_dropped_when_there_are_too_many(blocks: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """And shapes that still come have one again."""
    monkeypatch.setattr(cuda_graphs, "MIN_USES", 1)
    monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", 2)
    graphs: weakref.WeakSet[Any] = weakref.WeakSet()

    class EmptyGraph:
        def capture(self, forward: Callable[[], None]) -> None:
            graphs.add(self)

        def replay(self) -> None:
            pass

    make_pool = Mock(side_effect=make_pools_of(EmptyGraph))
    forward = GraphedForward(blocks, PagedCache(blocks.config, 9, 4, "cpu", torch.float64), make_pool)

    def read(*numbers: int) -> list[bool]:
        """Whether forwards of so many texts have a graph."""
        part = replace(sequence(4, 4, pages=range(9)), outputs=np.arange(1))
        return [forward([InputText(np.arange(4), part)] * number) is not None for number in numbers]

    assert read(1, 1, 2, 2, 3) == [False, True, False, True, False]
    assert len(graphs) == 2
    assert read(3) == [True]
    assert len(graphs) == 1
    assert read(1, 3, 1, 2) == [False, True, True, False]
    assert make_pool.call_count == 2, "torch accepts no pool whose graphs are gone"


@pytest.mark.parametrize("read", [lambda x: x.item(), lambda x: x[x > 0], lambda x: x.nonzero(), lambda x: x and x])
def test_reads_of_the_host_cannot_be_recorded(read: Callable[[torch.Tensor], None]) -> None:
    with torch.inference_mode(), pytest.raises(AssertionError, match=r"cannot record|index"):
        RecordedGraph().capture(partial(read, torch.ones(1)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", ["blocks", "shifted_blocks"])
def test_cuda_graphs(name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "MIN_USES", 1)
    model: Transformer = copy.deepcopy(request.getfixturevalue(name)).cuda()
    model.uses_cuda_graphs = True
    jobs = make_jobs(model, OPTIONS, 12)
    replays = Counter[str]()
    replay = CudaGraph.replay

    def count_replays(graph: CudaGraph) -> None:
        replays["all"] += 1
        replay(graph)

    monkeypatch.setattr(CudaGraph, "replay", count_replays)
    check_answers(model, jobs, run_all(Decoder(model, *GRAPH_LIMITS["everything"]), jobs, [*range(12)]))
    assert replays["all"] > 10
