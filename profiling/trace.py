"""torch.profiler over some steps of a run: a trace for a viewer, and a table of where the time goes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from config.runtime import ProfilerConfig

ROWS = 40
"""Of a table."""
PARTS = ("data", "forward", "backward", "optimizer")
"""Of a step, each a range of its own (`profiling.nvtx`)."""


class StepProfiler:
    """Profiles cycles of steps: wait, warm-up, active. Without active steps it does nothing."""

    def __init__(self, config: ProfilerConfig, directory: Path, device: str = "cpu") -> None:
        self.config = config
        self.directory = directory
        self.device = device
        self._profile: Any = None

    def __enter__(self) -> StepProfiler:
        if self.config.active:
            from torch import profiler

            activities = [profiler.ProfilerActivity.CPU]
            if self.device == "cuda":
                activities.append(profiler.ProfilerActivity.CUDA)
            config = self.config
            schedule = profiler.schedule(
                wait=config.wait, warmup=config.warmup, active=config.active, repeat=config.repeat
            )
            self._profile = profiler.profile(
                activities=activities, schedule=schedule, on_trace_ready=self._write, profile_memory=True
            )
            self._profile.start()
        return self

    def step(self) -> None:
        """A step is over."""
        if self._profile is not None:
            self._profile.step()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._profile is not None:
            self._profile.stop()

    def _write(self, profile: Any) -> None:
        """``trace-N.json`` (for Perfetto or chrome://tracing) and ``table-N.txt`` (the parts of a step, then its
        operators); N is the step behind the cycle."""
        self.directory.mkdir(parents=True, exist_ok=True)
        number = profile.step_num
        profile.export_chrome_trace(str(self.directory / f"trace-{number}.json"))
        sort_by = "self_cuda_time_total" if self.device == "cuda" else "self_cpu_time_total"
        table = profile.key_averages().table(sort_by=sort_by, row_limit=ROWS, max_name_column_width=60)
        parts = part_table(profile.key_averages())
        (self.directory / f"table-{number}.txt").write_text(f"{parts}{table}\n", encoding="utf-8")


def part_table(averages: Iterable[Any]) -> str:
    """Where a step goes, by the host's clock; empty if no whole step was recorded.

    On a GPU the host only asks for the work, so the parts there say where it waits.

    Args:
        averages: rows with ``key``, ``count`` and ``cpu_time_total`` in microseconds.
    """
    rows = {row.key: row for row in averages if row.key in (*PARTS, "step")}
    if "step" not in rows or not rows["step"].cpu_time_total:
        return ""
    steps, whole = rows["step"].count, rows["step"].cpu_time_total
    times = {name: rows[name].cpu_time_total if name in rows else 0.0 for name in PARTS}
    times["the rest"] = max(0.0, whole - sum(times.values()))
    times["step"] = whole
    lines = [f"{name:<10}{time / steps / 1e3:>12,.2f} ms{time / whole:>8.1%}" for name, time in times.items()]
    return "\n".join([f"Where a step goes, by the host's clock (mean of {steps}):", *lines]) + "\n\n"
