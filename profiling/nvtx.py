"""Ranges for Nsight Systems. ``DIFFUSIONLM_NVTX`` says how many: ``coarse`` (the parts of a training step, and forwards
that decode or judge), ``fine`` (in training each block as well) or ``verbose`` (attention and feed-forward of each
block, too).

Without the variable or without CUDA nothing happens, but for the coarse ranges while torch's profiler records: then
they are rows of its table.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

Level = Literal["coarse", "fine", "verbose"]
NVTX_VARIABLE = "DIFFUSIONLM_NVTX"


def requested_level() -> str | None:
    """What the variable says; None: nothing.

    Raises:
        ValueError: it names no level.
    """
    asked = os.environ.get(NVTX_VARIABLE, "")
    levels = get_args(Level)
    if asked and asked not in levels:
        raise ValueError(f"{NVTX_VARIABLE} = {asked!r} is no level: set it to {', '.join(levels)}, or leave it out")
    return asked or None


def enabled(level: Level = "coarse") -> bool:
    """Whether ranges of this level are recorded.

    Raises:
        ValueError: the variable names no level.
    """
    asked = requested_level()
    levels = get_args(Level)
    if asked is None or levels.index(level) > levels.index(asked):
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


@contextlib.contextmanager
def _recorded(name: str) -> Iterator[None]:
    nvtx = _torch_nvtx()
    nvtx.range_push(name)
    try:
        yield
    finally:
        nvtx.range_pop()


def add_module_ranges(modules: dict[str, Any], level: Level) -> None:
    """Let each call of a module be a range of its name, with hooks; none where the level is off."""
    if not enabled(level):
        return
    nvtx = _torch_nvtx()

    def begin(name: str) -> Callable[[Any, Any], None]:
        def push(module: Any, inputs: Any) -> None:
            nvtx.range_push(name)  # What it returns would take the place of the inputs.

        return push

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
