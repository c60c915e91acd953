"""Named ranges for Nsight Systems and torch's profiler.

The environment variable ``DIFFUSIONLM_NVTX`` sets the level of NVTX ranges: ``coarse`` (the parts of a training step,
and the forwards of decoding and evaluation), ``fine`` (also each block in training) or ``verbose`` (also attention and
feed-forward of each block). Without it, or without CUDA, there are none. Coarse ranges are also rows of the table that
`profiling.trace.StepProfiler` writes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

Level = Literal["coarse", "fine", "verbose"]
NVTX_VARIABLE = "DIFFUSIONLM_NVTX"

active_profilers: set[object] = set()
"""Profilers of torch that record now. Without one, a coarse range costs nothing."""


def requested_level() -> str | None:
    """Return the level of the environment variable; None: it is not set.

    Raises:
        ValueError: it is not a level.
    """
    level = os.environ.get(NVTX_VARIABLE, "")
    levels = get_args(Level)
    if level and level not in levels:
        raise ValueError(f"{NVTX_VARIABLE} = {level!r} is not a level: set it to {', '.join(levels)}, or unset it")
    return level or None


def enabled(level: Level = "coarse") -> bool:
    """Return whether NVTX ranges of this level are recorded.

    Raises:
        ValueError: the environment variable is not a level.
    """
    requested = requested_level()
    levels = get_args(Level)
    if requested is None or levels.index(level) > levels.index(requested):
        return False
    import torch

    return torch.cuda.is_available()


def annotate(name: str) -> contextlib.AbstractContextManager[Any]:
    """Return a context manager that names a coarse range, for NVTX or for torch's profiler."""
    if enabled():
        return _recorded(name)
    if active_profilers:
        import torch

        return torch.profiler.record_function(name)
    return contextlib.nullcontext()


@contextlib.contextmanager
def _recorded(name: str) -> Iterator[None]:
    nvtx = _torch_nvtx()
    nvtx.range_push(name)
    try:
        yield
    finally:
        nvtx.range_pop()


def add_module_ranges(modules: dict[str, Any], level: Level) -> None:
    """Register hooks that make each call of a module a range, if ``level`` is recorded."""
    if not enabled(level):
        return
    nvtx = _torch_nvtx()

    def begin(name: str) -> Callable[[Any, Any], None]:
        def push(module: Any, inputs: Any) -> None:
            nvtx.range_push(name)  # returns None: another value would replace the inputs

        return push

    def end(module: Any, inputs: Any, output: Any) -> None:
        nvtx.range_pop()

    for name, module in modules.items():
        module.register_forward_pre_hook(begin(name))
        module.register_forward_hook(end, always_call=True)


def _torch_nvtx() -> Any:
    import torch

    return torch.cuda.nvtx
