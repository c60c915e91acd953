"""Tiny cases of the training benchmark, and the parts of a report."""

from __future__ import annotations

from typing import Any

from benchmarking.implementations.training import TrainCase
from config.bench.training import BenchShape, Precision
from config.training.objective import MaskedDiffusionConfig
from logger.pages import Page, Table

SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
}


def make_shape(**changes: Any) -> BenchShape:
    values = {**SIZES, "name": "tiny", "vocab_size": 64, "batch_size": 4, "max_position_embeddings": 32, **changes}
    return BenchShape(**values)


def make_case(precision: Precision = "float32", shape: BenchShape | None = None, **options: Any) -> TrainCase:
    """A case of masked diffusion on one thread of the CPU."""
    options = {"objective": MaskedDiffusionConfig(), **options}
    return TrainCase(shape or make_shape(), precision, "cpu", threads=1, seed=0, **options)


def read_columns(table: Table) -> dict[str, list[str]]:
    """The texts of each column of a table, by heading."""
    return {head: list(cells) for head, *cells in zip(table.heads, *map(table.texts, table.rows), strict=True)}


def read_tables(report: Page) -> list[dict[str, list[str]]]:
    """The columns of the tables of the results."""
    return [read_columns(part) for part in report.sections["Results"] if isinstance(part, Table)]


def read_facts(report: Page) -> dict[str, str]:
    """The conditions of a report."""
    [table] = report.sections["Conditions"]
    assert isinstance(table, Table)
    return dict(map(table.texts, table.rows))
