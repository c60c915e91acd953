"""torch.profiler over some steps of a run: a trace for a viewer, and a table of where the time goes."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

from config.runtime import ProfilerConfig

ROWS = 40
"""Of a table."""


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
        """``trace-N.json`` (for Perfetto or chrome://tracing) and ``table-N.txt``; N is the step behind the cycle."""
        self.directory.mkdir(parents=True, exist_ok=True)
        number = profile.step_num
        profile.export_chrome_trace(str(self.directory / f"trace-{number}.json"))
        sort_by = "self_cuda_time_total" if self.device == "cuda" else "self_cpu_time_total"
        table = profile.key_averages().table(sort_by=sort_by, row_limit=ROWS, max_name_column_width=60)
        (self.directory / f"table-{number}.txt").write_text(f"{table}\n", encoding="utf-8")
