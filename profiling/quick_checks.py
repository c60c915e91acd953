"""Short measurements of this machine, a second or two each. They say what to expect, not how fast a run will be."""

from __future__ import annotations

import contextlib
import importlib
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SECONDS = 0.25
"""Of one measurement; each is the median of some rounds that take turns."""
_SIZE = 768
_BYTES = 1 << 28
_SYNCS = 9


@dataclass(frozen=True)
class MeasuredSpeeds:
    """What was measured; None: it was not."""

    float32: float | None = None
    """Of a matrix product on one thread, FLOPs a second."""
    bfloat16: float | None = None
    float32_all: float | None = None
    """With as many threads as cores are granted."""
    threads: int = 1
    """That many."""
    bandwidth: float | None = None
    """Bytes a second that a copy reads and writes, with these threads."""
    fsync: float | None = None
    """Seconds until a small file is on the disk."""


def measure_speeds(runs: Path, threads: int, with_torch: bool) -> MeasuredSpeeds:
    """All of it; torch's number of threads is put back.

    Args:
        runs: an existing directory on the file system of the runs.
        threads: cores that are granted.
        with_torch: whether torch can be imported.
    """
    fsync = fsync_seconds(runs)
    if not with_torch:
        return MeasuredSpeeds(fsync=fsync)
    torch: Any = importlib.import_module("torch")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        single = measure_rates(
            [_matrix_product(torch, torch.float32), _matrix_product(torch, torch.bfloat16)], 2.0 * _SIZE**3
        )
        torch.set_num_threads(threads)
        [together] = measure_rates([_matrix_product(torch, torch.float32)], 2.0 * _SIZE**3)
        [bandwidth] = measure_rates([_copy(torch)], 2.0 * _BYTES)
    finally:
        torch.set_num_threads(before)
    return MeasuredSpeeds(single[0], single[1], together, threads, bandwidth, fsync)


def measure_rates(
    works: Sequence[Callable[[], object]], amount: float, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """``amount`` by the median time of each work; they take turns, so that a busy machine is busy for all."""
    for work in works:
        work()
    times: list[list[float]] = [[] for _ in works]
    end = clock() + SECONDS * len(works)
    while not times[0] or clock() < end:
        for work, taken in zip(works, times, strict=True):
            begin = clock()
            work()
            taken.append(clock() - begin)
    return [amount / max(1e-9, statistics.median(taken)) for taken in times]


def _matrix_product(torch: Any, dtype: Any) -> Callable[[], object]:
    left, right = (torch.ones(_SIZE, _SIZE, dtype=dtype) for _ in range(2))
    return lambda: torch.mm(left, right)


def _copy(torch: Any) -> Callable[[], object]:
    source = torch.zeros(_BYTES, dtype=torch.uint8)
    target = torch.ones_like(source)
    return lambda: target.copy_(source)


def fsync_seconds(directory: Path) -> float | None:
    """Median time to write 4 KiB and wait for the disk; None: nothing can be written there."""
    path = directory / f".diffusionlm-doctor-{os.getpid()}"
    taken = []
    try:
        with path.open("wb") as file:
            for _ in range(_SYNCS):
                begin = time.perf_counter()
                file.write(b"\0" * 4096)
                file.flush()
                os.fsync(file.fileno())
                taken.append(time.perf_counter() - begin)
    except OSError:
        return None
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
    return statistics.median(taken)
