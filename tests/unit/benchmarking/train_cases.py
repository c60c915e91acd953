"""A tiny shape and cases of the training benchmark."""

from __future__ import annotations

from typing import Any

from benchmarking.implementations.training import TrainCase
from config.bench.training import BenchShape, Precision
from config.training.objective import MaskedDiffusionConfig, ObjectiveConfig


def make_shape(**changes: Any) -> BenchShape:
    values: dict[str, Any] = {
        "name": "tiny",
        "vocab_size": 64,
        "batch_size": 4,
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 48,
        "max_position_embeddings": 32,
    }
    return BenchShape(**(values | changes))


def make_case(
    precision: Precision = "float32", objective: ObjectiveConfig | None = None, shape: BenchShape | None = None
) -> TrainCase:
    """A case of masked diffusion on one thread of the CPU."""
    return TrainCase(
        shape or make_shape(), precision, "cpu", threads=1, seed=0, objective=objective or MaskedDiffusionConfig()
    )
