"""The benchmark of ranks: all implementations take the same steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarking.bench_ddp import OURS, TORCH_DDP, DistributedCase, build_all, measure
from config.model import ModelConfig
from ddp.process_group import World
from logger.pages import Table
from tests.distributed.forked import run_ranks
from tests.unit.benchmarking.cases import SIZES, read_columns

CASE = DistributedCase(
    ModelConfig(**SIZES, max_position_embeddings=8, vocab_size=32), batch_size=2, bucket_mib=0.01, steps=1
)


@pytest.mark.slow  # five implementations, each of two ranks
def test_losses_agree_and_the_report_has_every_implementation(tmp_path: Path) -> None:
    def act(world: World) -> tuple[list[float], Table]:
        losses = [world.sum(float(implementation.turn(3)))[0] for implementation in build_all(CASE, world).values()]
        return losses, measure(CASE, world, rounds=2)

    (losses, table), (other_losses, _) = run_ranks(act, tmp_path)
    assert losses == other_losses
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-5)
    columns = read_columns(table)
    optimizer_mib = dict(zip(columns["implementation"], columns["optimizer MiB per rank"], strict=True))
    assert optimizer_mib.keys() >= {*OURS, TORCH_DDP}
    assert float(optimizer_mib["ours, ddp, optimizer sharded"]) < 0.7 * float(optimizer_mib["ours, ddp"])
