"""Batches of skipped steps: what is on disk is what the model read, a few of them, and never the end of a run."""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from diffusionlm.diffusion.noised_batch import NoisedBatch
from diffusionlm.models.patterns import Bidirectional, BlockDiffusion
from diffusionlm.training import skipped_batches
from diffusionlm.training.metrics import StepMetrics
from diffusionlm.training.skipped_batches import SkippedBatches, load_skipped_step


def skipped(step: int, loss: float = 2.5) -> StepMetrics:
    return StepMetrics(step, *torch.tensor([loss, 1.0, 0.0, 0.0]))


def letters(ids: list[int]) -> str:
    return "".join(chr(ord("a") + token) for token in ids)


def noised_batches() -> list[NoisedBatch]:
    """Two micro-batches: a row of two streams, and three rows of one; letter z is the mask."""
    documents = torch.tensor([[0, 0, 1, 1]], dtype=torch.int32)
    two = NoisedBatch(
        inputs_BS=torch.tensor([[0, 25, 2, 25, 0, 1, 2, 3]]),
        pattern=BlockDiffusion(2, documents),
        positions_N=torch.tensor([1, 3]),
        targets_N=torch.tensor([1, 3]),
        weights_N=torch.tensor([0.1, 1 / 3], dtype=torch.float64),
        num_targets=4,
        denominator=4.0,
    )
    one = NoisedBatch(
        inputs_BS=torch.tensor([[25, 5], [25, 25], [7, 25]]),
        pattern=Bidirectional(),
        positions_N=torch.tensor([0, 2, 3, 5]),
        targets_N=torch.tensor([4, 8, 9, 6]),
        weights_N=torch.ones(4, dtype=torch.float64),
        num_targets=6,
        denominator=6.0,
    )
    return [two, one]


def parts(draw: NoisedBatch) -> dict[str, Any]:
    """All that a draw holds, in plain values."""
    fields = {**vars(draw), **{f"pattern.{name}": value for name, value in vars(draw.pattern).items()}}
    fields["pattern"] = type(draw.pattern)
    return {
        name: (value.dtype, value.tolist()) if isinstance(value, torch.Tensor) else value
        for name, value in fields.items()
    }


@pytest.fixture
def batches(tmp_path: Path) -> SkippedBatches:
    return SkippedBatches(tmp_path / "skipped", letters, seed=11, rank=1)


def test_skipped_batch_record_has_batch_and_context(batches: SkippedBatches, tmp_path: Path) -> None:
    for step in (6, 7, 8):
        batches.hold(step, noised_batches(), {"epoch": 0, "position": [step]})
    path = tmp_path / "skipped/step-00000007-rank-1.json"
    assert batches.record(skipped(7, math.nan)) == f"its batch is kept in {path}"
    batches.record(skipped(6, 99.0))
    record, read = load_skipped_step(path)
    assert [parts(draw) for draw in read] == [parts(draw) for draw in noised_batches()]
    assert record == {
        "step": 7,
        "seed": 11,
        "rank": 1,
        "reason": "not finite",
        "loss": "nan",
        "grad_norm": 1.0,
        "first_rows": [
            {"input": "azcz", "target": "bd"},
            {"input": "zf", "target": "e"},
            {"input": "zz", "target": "ij"},
            {"input": "hz", "target": "g"},
        ],
        "loader": {"epoch": 0, "position": [7]},
    }
    earlier, _ = load_skipped_step(path.with_name("step-00000006-rank-1.json"))
    assert (earlier["reason"], earlier["loss"]) == ("spike", 99.0)


def test_newest_records_of_each_rank_are_retained(
    batches: SkippedBatches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(skipped_batches, "MAX_RECORDS", 2)
    other = SkippedBatches(tmp_path / "skipped", letters, seed=11, rank=0)
    other.hold(1, noised_batches(), {})
    other.record(skipped(1))
    for step in (2, 3, 10):
        batches.hold(step, noised_batches(), {})
        batches.record(skipped(step))
    assert sorted(path.name for path in (tmp_path / "skipped").iterdir()) == [
        f"step-{step:08d}-rank-{rank}.{ending}" for step, rank in ((1, 0), (3, 1), (10, 1)) for ending in ("json", "pt")
    ]


def test_full_disk_is_reported_and_leaves_no_file(
    batches: SkippedBatches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    batches.hold(1, noised_batches(), {})
    message = batches.record(skipped(1))
    assert (
        message.startswith("its batch could not be kept: [Errno 28] No space left on device: ")
        and ".tmp-" not in message
    )
    assert list((tmp_path / "skipped").iterdir()) == []


def test_a_damaged_record_is_named(batches: SkippedBatches, tmp_path: Path) -> None:
    batches.hold(1, noised_batches(), {})
    batches.record(skipped(1))
    path = tmp_path / "skipped/step-00000001-rank-1.json"
    stored = path.with_suffix(".pt")
    content = stored.read_bytes()
    stored.write_bytes(content[:-300])
    with pytest.raises(ValueError, match=r"step-00000001-rank-1\.json is not the whole record"):
        load_skipped_step(path)
    stored.write_bytes(b"")
    with pytest.raises(ValueError, match="not the whole record"):
        load_skipped_step(path)
    torch.save([path], stored)
    with pytest.raises(ValueError, match="not the whole record"):
        load_skipped_step(path)
    with pytest.raises(ValueError, match="not the whole record"):
        load_skipped_step(tmp_path / "skipped/none.json")
