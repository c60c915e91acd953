"""Measure the speed of this machine in a second or two each. These are rough values, not benchmarks."""

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
"""Duration of one measurement, the median over rounds."""
_SIZE = 768
_BYTES = 1 << 28
_SYNCS = 9


@dataclass(frozen=True)
class MeasuredSpeeds:
    """Measured speeds; None: not measured."""

    float32: float | None = None
    """Matrix product on one thread, FLOPs per second; so is ``bfloat16``."""
    bfloat16: float | None = None
    float32_all: float | None = None
    """Matrix product on ``threads`` threads, FLOPs per second."""
    threads: int = 1
    bandwidth: float | None = None
    """Bytes per second that a copy reads and writes, on ``threads`` threads."""
    fsync: float | None = None
    """Seconds to write a small file durably."""


def measure_speeds(runs: Path, threads: int, with_torch: bool) -> MeasuredSpeeds:
    """Measure everything; torch's number of threads is restored.

    Args:
        runs: an existing directory on the file system of the runs.
        threads: number of usable cores.
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
    """Return ``amount`` divided by the median time of each function. They alternate, so other load affects all
    alike."""
    for work in works:
        work()
    times: list[list[float]] = [[] for _ in works]
    end = clock() + SECONDS * len(works)
    while not times[0] or clock() < end:
        for work, durations in zip(works, times, strict=True):
            begin = clock()
            work()
            durations.append(clock() - begin)
    return [amount / max(1e-9, statistics.median(durations)) for durations in times]


def _matrix_product(torch: Any, dtype: Any) -> Callable[[], object]:
    left, right = (torch.ones(_SIZE, _SIZE, dtype=dtype) for _ in range(2))
    return lambda: torch.mm(left, right)


def _copy(torch: Any) -> Callable[[], object]:
    source = torch.zeros(_BYTES, dtype=torch.uint8)
    target = torch.ones_like(source)
    return lambda: target.copy_(source)


def fsync_seconds(directory: Path) -> float | None:
    """Return the median seconds to write and sync 4 KiB; None: the directory is not writable."""
    path = directory / f".diffusionlm-doctor-{os.getpid()}"
    durations = []
    try:
        with path.open("wb") as file:
            for _ in range(_SYNCS):
                begin = time.perf_counter()
                file.write(b"\0" * 4096)
                file.flush()
                os.fsync(file.fileno())
                durations.append(time.perf_counter() - begin)
    except OSError:
        return None
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
    return statistics.median(durations)
