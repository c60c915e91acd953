"""Ranges for Nsight Systems. ``DIFFUSIONLM_NVTX`` says how many: ``coarse`` (the parts of a step), ``fine`` (each block
as well) or ``verbose`` (attention and feed-forward of each block, too).

Without the variable or without CUDA nothing happens, but for the coarse ranges while torch's profiler records: then
they are rows of its table.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, Literal, get_args

Level = Literal["coarse", "fine", "verbose"]
VARIABLE = "DIFFUSIONLM_NVTX"


def enabled(level: Level = "coarse") -> bool:
    """Whether ranges of this level are recorded.

    Raises:
        ValueError: the variable names no level.
    """
    asked = os.environ.get(VARIABLE, "")
    if not asked:
        return False
    levels = get_args(Level)
    if asked not in levels:
        raise ValueError(f"{VARIABLE} = {asked!r} is no level: set it to {', '.join(levels)}, or leave it out")
    if levels.index(level) > levels.index(asked):
        return False
    import torch

    return torch.cuda.is_available()


def range(name: str, level: Level = "coarse") -> contextlib.AbstractContextManager[Any]:
    """A named range, for a ``with``."""
    if enabled(level):
        return _recorded(name)
    if level == "coarse" and _is_profiled():
        return _record_function(name)
    return contextlib.nullcontext()


def mark(name: str, level: Level = "coarse") -> None:
    """A named moment."""
    if enabled(level):
        _torch_nvtx().mark(name)


@contextlib.contextmanager
def _recorded(name: str) -> Iterator[None]:
    nvtx = _torch_nvtx()
    nvtx.range_push(name)
    try:
        yield
    finally:
        nvtx.range_pop()


def watch_modules(modules: dict[str, Any], level: Level) -> None:
    """Let each call of a module be a range of its name, with hooks; none where the level is off."""
    if not enabled(level):
        return
    nvtx = _torch_nvtx()

    def begin(name: str) -> Any:
        return lambda module, inputs: nvtx.range_push(name)

    def end(module: Any, inputs: Any, output: Any) -> None:
        nvtx.range_pop()

    for name, module in modules.items():
        module.register_forward_pre_hook(begin(name))
        module.register_forward_hook(end, always_call=True)


def _is_profiled() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch._C._autograd._profiler_enabled())


def _record_function(name: str) -> contextlib.AbstractContextManager[Any]:
    import torch

    recording: contextlib.AbstractContextManager[Any] = torch.profiler.record_function(name)
    return recording


def _torch_nvtx() -> Any:
    import torch

    return torch.cuda.nvtx
