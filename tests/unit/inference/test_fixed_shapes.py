"""Deterministic decoding: log-probabilities are compared bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from diffusionlm.inference.cuda_graphs import InputText
from diffusionlm.inference.decoder import Decoder
from diffusionlm.inference.generate import Generation, decode, to_generation
from diffusionlm.inference.model_runner import TILE_ROWS, pack_tiles
from diffusionlm.inference.requests import ActiveRequest
from diffusionlm.models.patterns import Bidirectional, BlockCausal
from diffusionlm.models.row_adapters import ModelAdapter
from diffusionlm.models.transformer import Transformer
from diffusionlm.models.varlen import SequenceSlice
from tests.conftest import MakeModel
from tests.decoding_jobs import BLOCKS, CANVASES, MASK, Job, check_pages, limit_decoder, make_jobs, run_all

MODELS: dict[str, tuple[dict[str, Any], Sequence[dict[str, Any]]]] = {
    "blocks": ({"block_length": 4}, BLOCKS),
    "shifted": (
        {"block_length": 4, "logit_alignment": "shifted", "layer_types": ["sliding_attention", "full_attention"]},
        [BLOCKS[0], BLOCKS[7], {"block_length": 5}],
    ),
    "experts": (
        {"block_length": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
        [BLOCKS[0], BLOCKS[2], {"block_length": 20, "temperature": 1.0}],
    ),
    "canvases": ({}, CANVASES[1:4]),
}


def build(tiny_model: MakeModel, name: str, **options: Any) -> tuple[Transformer, list[dict[str, Any]]]:
    values, settings = MODELS[name]
    if "layer_types" in values:
        values = {**values, "sliding_window": 7}
    shape = {"vocab_size": 23, "mask_token_id": MASK, "eos_token_id": 21, "max_position_embeddings": 40}
    return tiny_model(**{**shape, **values, **options}).eval(), list(settings)


def decode_alone(model: Transformer, jobs: Sequence[Job]) -> list[Generation]:
    limits = limit_decoder(20, 4, deterministic=True)
    return [run_all(Decoder(model, *limits), [job], [0])[0] for job in jobs]


def decode_with_aborts(decoder: Decoder, jobs: Sequence[Job], rng: np.random.Generator) -> dict[int, Generation]:
    """Decode jobs that arrive at random, and abort a third of them at random. Index -> answer of the others."""
    requests = [ActiveRequest(prepared) for prepared in jobs]
    waiting = rng.permutation(len(jobs)).tolist()
    removed: set[int] = set()
    while waiting or decoder.has_work:
        for _ in range(int(rng.integers(0, 3))):
            if waiting:
                decoder.add(requests[waiting.pop()])
        decoder.step()
        if rng.random() < 0.4 and len(removed) < len(jobs) // 3:
            victim = int(rng.integers(len(jobs)))
            if victim not in waiting:
                decoder.remove(requests[victim])  # waiting, being read, being decoded, or done
                removed.add(victim)
        check_pages(decoder, requests)
    assert decoder.pool.num_owned == 0
    return {index: to_generation(request) for index, request in enumerate(requests) if index not in removed}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "blocks" else [pytest.mark.slow]) for name in MODELS]
)
def test_log_probabilities_are_the_same_bits_in_many_mixes(tiny_model: MakeModel, name: str) -> None:
    model, options = build(tiny_model, name, hidden_size=96, head_dim=24, intermediate_size=250)
    jobs = make_jobs(model, options, 12, seed=1)
    expected = decode_alone(model, jobs)
    rng = np.random.default_rng(3)
    for page_size in (1, 4, 16):
        limits = limit_decoder(
            num_pages=int(rng.integers(96, 300)) // page_size,
            page_size=page_size,
            max_num_batched_tokens=int(rng.integers(1, 60)),
            max_requests=int(rng.integers(1, 20)),
            prefix_cache=bool(rng.integers(2)),
            deterministic=True,
        )
        answers = decode_with_aborts(Decoder(model, *limits), jobs, rng)
        assert len(answers) >= 8
        for index, answer in answers.items():
            assert answer == expected[index], (limits, index)
    for job, answer in zip(jobs, expected, strict=True):
        [plain] = decode(model, [job])
        assert replace(plain, logprobs=()) == replace(answer, logprobs=())
        assert plain.logprobs == pytest.approx(answer.logprobs, abs=1e-4)


def text(start: int, end: int, length: int, block_length: int, adapter: ModelAdapter | None = None) -> InputText:
    pattern = BlockCausal(block_length)
    outputs = np.arange(end - 1, end)
    sequence = SequenceSlice(start, end, end, pattern, pages=range(length), outputs=outputs)
    return InputText(np.arange(length), sequence, adapter)


def test_each_block_has_one_place() -> None:
    tiles = pack_tiles(
        [text(4, 12, 12, 4), text(5, 10, 10, 4), text(0, 4, 4, 4, ModelAdapter({}, {})), text(30, 45, 45, 20)]
    )
    starts = [{slot: (index, block.sequence.start) for slot, (index, block) in tile.blocks.items()} for tile in tiles]
    assert starts == [{1: (0, 4), 2: (0, 8)}, {1: (1, 4), 2: (1, 8)}, {0: (2, 0)}, {0: (3, 20)}, {0: (3, 40)}]
    for tile in tiles:
        inputs = [item.sequence.num_inputs for item in tile.input_texts()]
        assert sum(inputs) == (20 if tile.block_length == 20 else TILE_ROWS)
    last = list(tiles[1].input_texts())
    assert [item.sequence.num_inputs for item in last] == [4, 4, 2, 2, 4], "the text has 10 positions"
    assert last[2].sequence.num_visible == 10 and isinstance(last[3].sequence.pattern, Bidirectional)
    uncached = InputText(np.arange(3), SequenceSlice(0, 3, 3, Bidirectional(), outputs=np.arange(1)))
    assert pack_tiles([uncached]) == []
