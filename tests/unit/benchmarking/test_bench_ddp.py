"""The benchmark of ranks: all contestants take the same steps, and what is counted is what travels."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarking.bench_ddp import (
    OURS,
    TORCH_DDP,
    DistributedBenchOptions,
    build_all,
    loopback_bytes,
    measure,
    minimum_bytes,
)
from ddp.process_group import World
from tests.distributed.forked import run_ranks

OPTIONS = DistributedBenchOptions(
    hidden_size=16, layers=2, vocab_size=32, length=8, rows=2, bucket_mib=0.01, rounds=2, warmup=0, steps=1
)
DEV = """Inter-|   Receive                                        |  Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier compressed
  eth0:    1       2    0    0    0     0          0         0     3       4    0    0    0     0       0          0
    lo: 50000    100    0    0    0     0          0         0 60000     100    0    0    0     0       0          0
"""


def test_counters() -> None:
    assert loopback_bytes(DEV) == 60_000
    with pytest.raises(ValueError, match="no interface lo"):
        loopback_bytes("eth0: 1 2")
    assert minimum_bytes(100, 2) == 400 and minimum_bytes(100, 4) == 600


@pytest.mark.slow  # three contestants, each of two ranks
def test_contestants_agree_and_the_report_has_them_all(tmp_path: Path) -> None:
    def act(ranks: World) -> tuple[list[float], str]:
        implementations = build_all(OPTIONS, ranks)
        losses = [ranks.sum(float(each.turn(3)))[0] for each in implementations.values()]
        return losses, measure(OPTIONS, ranks, tmp_path)

    (losses, report), (others, _) = run_ranks(act, tmp_path)
    assert losses == others
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-5)
    lines = [line.strip("| ").split(" | ") for line in report.splitlines() if line.startswith("| ")]
    first = {line[0]: line for line in lines[:7]}
    assert first.keys() >= {*OURS, TORCH_DDP}
    held = {name: float(first[name][3]) for name in OURS}
    assert held["ours, ddp, optimizer sharded"] < 0.7 * held["ours, ddp"]
    assert [line[0] for line in lines[-3:]] == list(OURS)
