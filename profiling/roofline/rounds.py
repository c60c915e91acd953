"""Record the operators of rounds of decoding on a GPU that is not there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarking.bench_infer import random_prompts
from config.bench.inference import BenchCell, BenchInferConfig
from config.model import ModelConfig
from diffusionlm.inference import sampling
from diffusionlm.inference.generate import generate
from diffusionlm.inference.settings import resolve_settings
from diffusionlm.models.transformer import Transformer
from profiling.roofline.fake_gpu import FakeGpuRecorder, fake_gpu
from profiling.roofline.operators import Operator, record_operators
from profiling.roofline.steps import CUDA

PREDICTED_TOKEN = 0
"""Token that every prediction is."""

Rounds = Sequence[Sequence[Operator]]
"""Operators of each forward and of the sampling after it, until the predictions are copied to the host."""


@dataclass(frozen=True)
class RecordedDecoding:
    """The rounds of a batch of requests with equally long prompts and answers."""

    first_rounds: Rounds
    """Of the prompts and of the first block; the first one reads the prompts."""
    block_rounds: Rounds
    """Of a later block, in the middle of the answer; empty if there is one block."""
    num_later_blocks: int
    new_tokens: int
    """Tokens that all requests get together."""

    @property
    def num_rounds(self) -> int:
        return len(self.first_rounds) + self.num_later_blocks * len(self.block_rounds)


def record_decoding(config: BenchInferConfig, cell: BenchCell) -> RecordedDecoding:
    """Decode the requests of a cell in bfloat16. The config must have a shape in place of a directory.

    Answers of several blocks are recorded by their first block, and by one in the middle, before which the rest of the
    answer is part of the prompt. Rounds are recorded without CUDA graphs, which pad sequences and keys and compute the
    head for all inputs.
    """
    bench, shape = config.bench, config.model.shape
    assert shape is not None
    model_config = shape.to_model_config()
    length = resolve_settings(cell.generation, model_config).config.block_length or bench.new_tokens
    new_tokens, num_blocks = cell.batch_size * bench.new_tokens, -(-bench.new_tokens // length)
    if num_blocks == 1:
        return RecordedDecoding(_record(config, cell, model_config, bench.prompt_length, length), [], 0, new_tokens)
    first_rounds = _record(config, cell, model_config, bench.prompt_length, length)
    middle = bench.prompt_length + num_blocks // 2 * length
    rounds = _record(config, cell, model_config, middle - length, 2 * length)
    return RecordedDecoding(first_rounds, rounds[len(first_rounds) :], num_blocks - 1, new_tokens)


def _record(
    config: BenchInferConfig, cell: BenchCell, model_config: ModelConfig, prompt_length: int, new_tokens: int
) -> Rounds:
    prompts = random_prompts(model_config, prompt_length, cell.batch_size, config.bench.seed)
    generation = cell.generation.model_copy(update={"max_new_tokens": new_tokens})
    recorders: list[FakeGpuRecorder] = []
    rounds: list[list[Operator]] = []

    def read_predictions(tensors: Sequence[torch.Tensor]) -> list[Any]:
        rounds.append(list(recorders[-1].operators))
        recorders[-1].operators.clear()
        return [np.full(tensor.shape, PREDICTED_TOKEN, dtype=np.float64) for tensor in tensors]

    with fake_gpu(lambda: recorders[-1]):
        with CUDA:
            model = Transformer(model_config, attention_backend=config.model.attention_backend).eval()
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
        model.uses_cuda_graphs = False  # what a graph computes in addition is not predicted
        with (
            record_operators(model, (), FakeGpuRecorder, after_forward="sampling") as recorder,
            patch.object(sampling, "_to_arrays", read_predictions),
        ):
            assert isinstance(recorder, FakeGpuRecorder)
            recorders.append(recorder)
            generate(model, prompts, generation)
    return rounds
