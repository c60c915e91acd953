"""Python's garbage collector, at times of the loop's choosing."""

from __future__ import annotations

import gc
from types import TracebackType


class GarbageCollection:
    """While open, the collector runs only after every so many steps; what lives at its start is not looked at again."""

    def __init__(self, every_steps: int) -> None:
        self.every_steps = every_steps
        self._was_enabled = False

    def __enter__(self) -> GarbageCollection:
        self._was_enabled = gc.isenabled()
        if self.every_steps:
            gc.collect()
            gc.freeze()
            gc.disable()
        return self

    def after_step(self, step: int) -> None:
        """Collect, if it is time."""
        if self.every_steps and step % self.every_steps == 0:
            gc.collect()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.every_steps:
            gc.unfreeze()
            if self._was_enabled:
                gc.enable()
