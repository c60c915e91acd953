"""Idle threads of OpenMP, which slow down those of other threads.

Each thread that computes has a team of its own. When there are more threads than cores, GNU's runtime lets them sleep
between two parallel regions almost at once, and a small forward has hundreds of regions: an idle team of the thread
that has loaded the model makes the rounds of an engine on two cores a third longer.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable
from pathlib import Path

SOFT_PAUSE = 1
"""``omp_pause_soft`` of OpenMP 5.0: threads may be ended, and begin again with the next parallel region."""


def release_team() -> bool:
    """End the idle OpenMP threads of the calling thread. Returns whether the runtime has done it; others than GNU's,
    and other systems than Linux, are left alone."""
    pause = _find_loaded_pause()
    return pause is not None and pause(SOFT_PAUSE) == 0


def find_pause(maps: Path) -> Callable[[int], int] | None:
    """``omp_pause_resource_all`` of the GNU runtime in a list of mapped files; None: there is none."""
    try:
        paths = re.findall(r"\S*/libgomp[^/\s]*\.so[^/\s]*", maps.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    pauses = [getattr(ctypes.CDLL(path), "omp_pause_resource_all", None) for path in dict.fromkeys(paths)]
    return next((pause for pause in pauses if pause is not None), None)


@functools.cache
def _find_loaded_pause() -> Callable[[int], int] | None:
    return find_pause(Path("/proc/self/maps"))
