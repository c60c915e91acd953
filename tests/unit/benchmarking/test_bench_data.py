"""The benchmark of the loader measures each reader once per round."""

from __future__ import annotations

import pytest

from benchmarking.bench_data import TRAINING_STEP, bench_data
from benchmarking.harness import Settings
from config.data import MarkovChain


@pytest.mark.slow
def test_every_reader_is_measured() -> None:
    source = MarkovChain(documents_per_epoch=600, validation_documents=8, length=400)
    [table] = bench_data(Settings(1), seconds=0.05, source=source, length=16, batch_size=4).tables
    assert [row[0] for row in table.rows] == [
        "noised batches from text, 0 workers",
        "noised batches from text, 1 worker",
        "noised batches from text, 2 workers",
        "sequences from text, no noise",
        "noised batches from shards, 0 workers",
        "noised batches from shards, 1 worker",
        "sequences from shards, no noise",
        TRAINING_STEP,
    ]
    assert all(float(row[1].replace(",", "")) > 0 for row in table.rows)
