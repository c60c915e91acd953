"""The benchmark of ranks: all implementations take the same steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarking.bench_ddp import (
    OURS,
    TORCH_DDP,
    DistributedCase,
    build_all,
    measure,
    minimum_sent_bytes,
    parse_loopback_bytes,
)
from ddp.process_group import World
from logger.pages import Table
from tests.distributed.forked import run_ranks
from tests.unit.benchmarking.cases import read_columns

CASE = DistributedCase(hidden_size=16, layers=2, vocab_size=32, length=8, batch_size=2, bucket_mib=0.01, steps=1)
DEV = """Inter-|   Receive                                        |  Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier compressed
  eth0:    1       2    0    0    0     0          0         0     3       4    0    0    0     0       0          0
    lo: 50000    100    0    0    0     0          0         0 60000     100    0    0    0     0       0          0
"""


def test_counters() -> None:
    assert parse_loopback_bytes(DEV) == 60_000
    with pytest.raises(ValueError, match="/proc/net/dev has no interface lo"):
        parse_loopback_bytes("eth0: 1 2")
    assert minimum_sent_bytes(100, 2) == 400 and minimum_sent_bytes(100, 4) == 600


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
