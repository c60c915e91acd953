"""The benchmark of loading compares the same weights, and says in its table what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarking.bench_load import (
    OURS,
    STATUS,
    THEIRS,
    LoadMeasurement,
    file_bytes,
    measure,
    measure_in_turns,
    resident,
    table,
    write_model,
)


def load(seconds: float, checksum: float = 2.0) -> LoadMeasurement:
    return LoadMeasurement(seconds, 2 * seconds, 110, 50, 120, 7, checksum)


@pytest.mark.skipif(not STATUS.is_file(), reason="memory is read from /proc")
def test_both_load_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    write_model(tmp_path / "model", "tiny")
    loads = measure_in_turns(lambda library: measure(library, tmp_path / "model", "bfloat16"), rounds=1, warmup=0)
    assert {library: len(found) for library, found in loads.items()} == {OURS: 1, THEIRS: 1}
    for found in loads.values():
        assert 2 * found[0].parameters <= file_bytes(tmp_path / "model")
        assert 0.0 < found[0].seconds <= found[0].seconds_with_touch
        assert found[0].peak_anonymous >= found[0].anonymous


def test_other_weights_are_no_comparison() -> None:
    answers = {OURS: load(1.0), THEIRS: load(1.0, checksum=2.1)}
    with pytest.raises(ValueError, match="say nothing"):
        measure_in_turns(answers.__getitem__, rounds=1, warmup=0)


def test_table() -> None:
    loads = {OURS: [load(1.0), load(3.0), load(2.0)], THEIRS: [load(4.0), load(4.0), load(4.0)]}
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table(loads, 100).splitlines()]
    assert lines[2] == [OURS, "2.00", "4.00", *["0.50 [0.38, 0.62]"] * 2, "1.10", "1.20", "0.50"]
    assert lines[3] == [THEIRS, "4.00", "8.00", *["1.00 [1.00, 1.00]"] * 2, "1.10", "1.20", "0.50"]


def test_resident_memory_is_read_in_bytes() -> None:
    text = "VmRSS:\t  30 kB\nRssAnon:\t      10 kB\nRssFile:\t      20 kB\n"
    assert resident(text) == {"RssAnon": 10240, "RssFile": 20480}
