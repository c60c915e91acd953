"""Profile some steps of a run with torch.profiler: a trace for a viewer, and a table of where the time goes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from config.training.runtime import ProfilerConfig
from profiling import nvtx

ROWS = 40
"""Operators in a table."""
STEP_PARTS = ("data", "forward", "backward", "optimizer")
"""Ranges of a training step (`profiling.nvtx.annotate`)."""


class StepProfiler:
    """Profiles cycles of steps: wait, warm-up, active. Without active steps it does nothing.

    A file that cannot be written is logged, once, and never ends a run.
    """

    def __init__(
        self,
        config: ProfilerConfig,
        directory: Path,
        device: str = "cpu",
        first_step: int = 0,
        *,
        log: Callable[[str], None],
    ) -> None:
        """
        Args:
            directory: where tables and traces are written; created with the first of them.
            first_step: steps that the run had made before.
            log: receives the paths of written files, write errors, and a note if nothing was recorded.
        """
        self.config = config
        self.directory = directory
        self.device = device
        self.first_step = first_step
        self.log = log
        self._profile: Any = None
        self._recorded_steps: list[int] = []
        """The last step of each cycle that was written."""
        self._has_logged_failure = False

    def __enter__(self) -> StepProfiler:
        if self.config.active:
            from torch import profiler

            activities = [profiler.ProfilerActivity.CPU]
            if self.device == "cuda":
                activities.append(profiler.ProfilerActivity.CUDA)
            config = self.config
            # Both are intended: steps without a warm-up, and events per cycle.
            for message in ("Profiler won't be using warmup", "(Warning: )?Profiler clears events"):
                warnings.filterwarnings("ignore", message)
            schedule = profiler.schedule(
                wait=config.wait, warmup=config.warmup, active=config.active, repeat=config.repeat
            )
            self._profile = profiler.profile(
                activities=activities, schedule=schedule, on_trace_ready=self._write, profile_memory=True
            )
            self._profile.start()
            nvtx.active_profilers.add(self)
        return self

    def step(self) -> None:
        """Advance the profiler at the end of a step."""
        if self._profile is not None:
            self._profile.step()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._profile is None:
            return
        nvtx.active_profilers.discard(self)
        try:
            self._profile.stop()
            if not self._recorded_steps and error is None:
                begin = self.first_step + self.config.wait + self.config.warmup + 1
                self.log(f"the profiler recorded nothing: the run ended before step {begin}, its first")
        except Exception:
            if error is None:  # else the run's own error matters more
                raise

    def _write(self, profile: Any) -> None:
        """Write ``trace-N.json`` (for Perfetto or chrome://tracing) and ``table-N.txt`` after the cycle that ends at
        step N."""
        number = self.first_step + profile.step_num
        averages = profile.key_averages()
        if number in self._recorded_steps or all(row.key != "step" for row in averages):
            return  # the run ended before the cycle had a whole step
        self._recorded_steps.append(number)
        trace, table = (self.directory / name for name in (f"trace-{number}.json", f"table-{number}.txt"))
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            trace.unlink(missing_ok=True)
            profile.export_chrome_trace(str(trace))
            if not trace.is_file():  # torch does not raise
                raise FileNotFoundError(f"{trace} was not written")
            sort_by = "self_cuda_time_total" if self.device == "cuda" else "self_cpu_time_total"
            operators = averages.table(sort_by=sort_by, row_limit=ROWS, max_name_column_width=60)
            table.write_text(f"{part_table(averages)}{operators}\n", encoding="utf-8")
        except OSError as error:
            if not self._has_logged_failure:
                self._has_logged_failure = True
                self.log(f"a profile could not be written: {error}; going on without")
        else:
            self.log(f"profiled up to step {number}: {table} has the table, {trace.name} beside it the trace")


def part_table(averages: Iterable[Any]) -> str:
    """Format the share of each part of a step, by the host's clock; empty if no whole step was recorded.

    On a GPU the host only launches kernels, so the parts show where it waits.

    Args:
        averages: rows with ``key``, ``count`` and ``cpu_time_total`` in microseconds.
    """
    rows = {row.key: row for row in averages if row.key in (*STEP_PARTS, "step")}
    if "step" not in rows or not rows["step"].cpu_time_total:
        return ""
    steps, whole = rows["step"].count, rows["step"].cpu_time_total
    times = {name: rows[name].cpu_time_total if name in rows else 0.0 for name in STEP_PARTS}
    times["the rest"] = max(0.0, whole - sum(times.values()))
    times["step"] = whole
    lines = [f"{name:<10}{time / steps / 1e3:>12,.2f} ms{time / whole:>8.1%}" for name, time in times.items()]
    return "\n".join([f"Where a step goes, by the host's clock (mean of {steps}):", *lines]) + "\n\n"
