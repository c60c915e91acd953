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
_SIZE, _SMALL_SIZE = 768, 192
"""Rows and columns of the matrices; the small ones are for bfloat16 where a processor without instructions for it takes
a second for a product of large ones."""
_BYTES = 1 << 27
"""Bytes of a copy: more than the caches hold."""
_SYNCS = 9


@dataclass(frozen=True)
class Work:
    """A call whose speed is measured, and the FLOPs or bytes of one call."""

    call: Callable[[], object]
    amount: float


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
        float32 = _matrix_product(torch, torch.float32, _SIZE)
        single = measure_rates([float32, _bfloat16_product(torch)])
        torch.set_num_threads(threads)
        [together] = measure_rates([float32])
        [bandwidth] = measure_rates([_copy(torch)])
    finally:
        torch.set_num_threads(before)
    return MeasuredSpeeds(single[0], single[1], together, threads, bandwidth, fsync)


def measure_rates(works: Sequence[Work], clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """Return the amount of each work divided by its median time. They alternate, so other load affects all alike."""
    for work in works:
        work.call()
    times: list[list[float]] = [[] for _ in works]
    end = clock() + SECONDS * len(works)
    while not times[0] or clock() < end:
        for work, durations in zip(works, times, strict=True):
            begin = clock()
            work.call()
            durations.append(clock() - begin)
    return [work.amount / max(1e-9, statistics.median(durations)) for work, durations in zip(works, times, strict=True)]


def _matrix_product(torch: Any, dtype: Any, size: int) -> Work:
    left, right = (torch.ones(size, size, dtype=dtype) for _ in range(2))
    return Work(lambda: torch.mm(left, right), 2.0 * size**3)


def _bfloat16_product(torch: Any, clock: Callable[[], float] = time.perf_counter) -> Work:
    """A product of large matrices, or of small ones if a large product would take longer than a measurement."""
    small = _matrix_product(torch, torch.bfloat16, _SMALL_SIZE)
    small.call()  # the first call also initializes
    begin = clock()
    small.call()
    is_slow = (clock() - begin) * (_SIZE / _SMALL_SIZE) ** 3 > SECONDS
    return small if is_slow else _matrix_product(torch, torch.bfloat16, _SIZE)


def _copy(torch: Any) -> Work:
    source = torch.zeros(_BYTES, dtype=torch.uint8)
    target = torch.ones_like(source)
    return Work(lambda: target.copy_(source), 2.0 * _BYTES)


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
