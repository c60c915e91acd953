"""Run Python's garbage collector between steps only, at the same steps on all ranks."""

from __future__ import annotations

import gc
from types import TracebackType


class GarbageCollection:
    """Context in which the collector runs every ``every_steps`` steps only; 0: as Python does it.

    Objects that exist at its start are frozen: the collector does not traverse them.
    """

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

    def collect_after_step(self, step: int) -> None:
        """Collect if ``step`` is a multiple of ``every_steps``."""
        if self.every_steps and step % self.every_steps == 0:
            gc.collect()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.every_steps:
            gc.unfreeze()
            if self._was_enabled:
                gc.enable()
