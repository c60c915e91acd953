"""The benchmark of loading compares the same weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarking.bench_load import (
    OURS,
    STATUS,
    THEIRS,
    LoadMeasurement,
    compare_loads,
    measure_load,
    measure_rounds,
    parse_resident,
    weight_file_bytes,
    write_model,
)
from benchmarking.harness import Settings


def make_load(seconds: float, checksum: float = 2.0) -> LoadMeasurement:
    return LoadMeasurement(seconds, 2 * seconds, 110, 50, 120, 7, checksum)


@pytest.mark.skipif(not STATUS.is_file(), reason="memory is read from /proc")
@pytest.mark.slow
def test_both_load_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    write_model(tmp_path / "model", "tiny")
    directory, threads = tmp_path / "model", torch.get_num_threads()
    calls = {library: partial(measure_load, library, directory, "bfloat16", threads) for library in (OURS, THEIRS)}
    loads = measure_rounds(calls, Settings(1))
    assert {library: len(measurements) for library, measurements in loads.items()} == {OURS: 1, THEIRS: 1}
    for [load] in loads.values():
        assert 2 * load.parameters <= weight_file_bytes(directory)
        assert 0.0 < load.seconds <= load.seconds_with_read
        assert load.peak_anonymous >= load.anonymous


def test_different_weights_are_an_error() -> None:
    calls = {OURS: lambda: make_load(1.0), THEIRS: lambda: make_load(1.0, checksum=2.1)}
    with pytest.raises(ValueError, match=r"sum 2\.0.*sum 2\.1"):
        measure_rounds(calls, Settings(1))


def test_table() -> None:
    loads = {OURS: [make_load(1.0), make_load(3.0), make_load(2.0)], THEIRS: [make_load(4.0)] * 3}
    ours, theirs = compare_loads(loads, 100).rows
    assert ours == [OURS, "2.00", "4.00", *["0.50 [0.38, 0.62]"] * 2, "1.10", "1.20", "0.50"]
    assert theirs == [THEIRS, "4.00", "8.00", *["1.00 [1.00, 1.00]"] * 2, "1.10", "1.20", "0.50"]


def test_resident_memory_is_in_bytes() -> None:
    text = "VmRSS:\t  30 kB\nRssAnon:\t      10 kB\nRssFile:\t      20 kB\n"
    assert parse_resident(text) == {"RssAnon": 10240, "RssFile": 20480}
