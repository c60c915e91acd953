"""The benchmark of the loader measures each way to the data once."""

from __future__ import annotations

import pytest

from benchmarking.bench_data import bench_data
from config.data import MarkovChain


@pytest.mark.slow
def test_every_way_is_measured() -> None:
    source = MarkovChain(documents_per_epoch=600, validation_documents=8, length=400)
    text = bench_data(rounds=1, seconds=0.05, threads=1, source=source, row_length=16, batch_size=4)
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")][2:]
    assert [row[0] for row in rows] == [
        "draws from text, 0 workers",
        "draws from text, 1 worker",
        "draws from text, 2 workers",
        "rows from text, no noise",
        "draws from shards, 0 workers",
        "draws from shards, 1 worker",
        "rows from shards, no noise",
        "the quickstart's training step",
    ]
    assert all(float(row[1].replace(",", "")) > 0 for row in rows)
