"""Run the points of a sweep, one or several at a time, until all are done or a signal arrives."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from cli.sweep.commands import ANSWERS_FILE
from cli.sweep.grid import GridError, GridPoint
from cli.sweep.processes import VISIBLE_DEVICES_VARIABLE, RunProcess, SignalQueue, build_command, start, visible_gpus
from cli.sweep.record import SweepDirectory, SweepRun
from cli.sweep.results import last_metrics, read_result
from files.lock import is_locked
from logger import format_duration
from profiling.cores import usable_cores

POLL_SECONDS = 0.2
PROGRESS_LINE_SECONDS = 60.0
"""Interval of progress lines outside of a terminal."""
SAVE_TIMEOUT_SECONDS = 120.0
"""Time for the runs to save after an error in the sweep itself."""
STOPPED_EXIT_CODES = (130, 138, 143, -2, -10, -15)
"""Exit codes of runs that a signal ended."""


class SweepRunner:
    """Runs the unfinished points of a sweep."""

    def __init__(
        self,
        sweep: SweepDirectory,
        points: Sequence[GridPoint],
        jobs: int,
        stream: TextIO,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            sweep: directory and record of the sweep.
            points: the points to run, in order.
            jobs: number of concurrent runs.
            stream: receives progress.
            on_change: called after the end of each run.
        """
        self._sweep, self._points, self._jobs = sweep, points, jobs
        self._stream, self._on_change = stream, on_change
        self._running: dict[str, RunProcess] = {}
        self._gpus = visible_gpus() if jobs > 1 else []
        self._waiting = [point for point in points if not self._is_done(point)]
        self._last_progress_time = time.monotonic()
        self._line_length = 0

    def run(self) -> int | None:
        """Run all points. Returns the signal that ended the sweep, or None.

        Raises:
            GridError: a process of an earlier sweep still uses the directory of a run.
            OSError: the record or a log cannot be written; active runs were stopped.
        """
        for point in self._waiting:
            if is_locked(self._sweep.run_path(point.name)):
                raise GridError(
                    f"{self._sweep.run_path(point.name)} is in use by a process of an earlier sweep; wait for it or "
                    "stop it"
                )
        done = len(self._points) - len(self._waiting)
        if done:
            self._print_message(f"{done} of {len(self._points)} runs are done already")
        with SignalQueue() as signals:
            try:
                while self._running or (self._waiting and signals.first is None):
                    self._step(signals)
            finally:
                self._stop_all()
        return signals.first

    def _step(self, signals: SignalQueue) -> None:
        number = signals.take()
        if number is not None:
            self._forward_signal(number)
        while self._waiting and len(self._running) < self._jobs and signals.first is None:
            self._start(self._waiting.pop(0))
        for process in [*self._running.values()]:
            if process.popen.poll() is not None:
                self._record_end(process, is_stopping=signals.first is not None)
        if self._running:
            self._print_progress()
            time.sleep(POLL_SECONDS)

    def _is_done(self, point: GridPoint) -> bool:
        run = self._sweep.runs[point.name]
        return (
            run.status == "done"
            and read_result(self._sweep.sweep_command.name, self._sweep.run_path(point.name)).is_final
        )

    def _start(self, point: GridPoint) -> None:
        run, sweep = self._sweep.runs[point.name], self._sweep
        directory = sweep.run_path(point.name)
        if sweep.sweep_command.name == "infer":  # it cannot resume, and rejects an existing file of answers
            directory.mkdir(parents=True, exist_ok=True)
            (directory / ANSWERS_FILE).unlink(missing_ok=True)
        if not (directory / "checkpoints").is_dir():  # it starts from the beginning
            run.seconds = 0.0
        command = build_command(
            sweep.sweep_command.module(point.config), sweep.config_path(point.name), self._overrides(point)
        )
        run.status, run.exit_code, run.error, run.jobs = "running", None, [], self._jobs
        sweep.save()
        self._running[point.name] = start(point.name, command, sweep.log_path(point.name), self._select_gpu(point))
        self._print_message(f"{self._run_label(point.name)}: {point.label}")

    def _overrides(self, point: GridPoint) -> list[str]:
        """Divide the cores among concurrent runs, unless the config sets the number of threads."""
        section, _, key = self._sweep.sweep_command.threads_key.partition(".")
        values: Mapping[str, Any] = point.config.model_dump()
        if self._jobs == 1 or values[section][key] is not None:
            return []
        return [f"{section}.{key}={max(1, usable_cores() // self._jobs)}"]

    def _select_gpu(self, point: GridPoint) -> dict[str, str]:
        """Select the least used GPU for a run of several; a run with several ranks gets all GPUs."""
        if len(self._gpus) < 2 or self._sweep.sweep_command.module(point.config) == "cli.train_ddp":
            return {}
        used_gpus = [process.gpu for process in self._running.values()]
        return {VISIBLE_DEVICES_VARIABLE: min(self._gpus, key=used_gpus.count)}

    def _record_end(self, process: RunProcess, is_stopping: bool) -> None:
        del self._running[process.name]
        run, code = self._sweep.runs[process.name], process.popen.returncode
        run.seconds += process.elapsed
        run.exit_code = code
        is_final = read_result(self._sweep.sweep_command.name, self._sweep.run_path(run.name)).is_final
        if code == 0 and is_final:
            run.status = "done"
        elif code in STOPPED_EXIT_CODES or (is_stopping and code != 0):
            run.status = "interrupted"
        else:
            run.status = "failed"
            run.error = process.last_lines() or ["no output"]
        self._sweep.save()
        self._on_change()
        self._print_message(f"{self._run_label(run.name)} {self._describe_outcome(run)}")

    def _describe_outcome(self, run: SweepRun) -> str:
        duration = format_duration(run.seconds)
        if run.status == "done":
            result = read_result(self._sweep.sweep_command.name, self._sweep.run_path(run.name))
            bound = result.numbers.get("bound")
            loss = "" if bound is None else f", bound {bound.value:.3f} +- {bound.error or 0.0:.3f} nats per token"
            return f"is done after {duration}{loss}"
        if run.status == "interrupted":
            return f"was interrupted after {duration}; the same command continues it"
        code = run.exit_code or 0
        reason = f"signal {-code}" if code < 0 else f"exit code {code}"
        lines = "".join(f"\n    {line}" for line in run.error)
        return f"FAILED with {reason} after {duration}; {self._sweep.log_path(run.name)} ends with:{lines}"

    def _forward_signal(self, number: int) -> None:
        is_training = self._sweep.sweep_command.name == "train"
        action = "finish their step and save" if is_training else "stop"
        self._print_message(f"stopping: active runs {action}; a second signal ends them immediately")
        # Training handles the other signals itself. After SIGINT, inference writes the page of its answers so far.
        handles_signal = is_training and number != signal.SIGHUP
        for process in self._running.values():
            process.send_signal(number if handles_signal else signal.SIGINT)

    def _stop_all(self) -> None:
        """Stop all active runs, and wait until they have saved."""
        for process in self._running.values():
            process.send_signal()
        for process in self._running.values():
            process.wait_or_kill(SAVE_TIMEOUT_SECONDS)

    def _run_label(self, name: str) -> str:
        number = next(index for index, point in enumerate(self._points, 1) if point.name == name)
        return f"run {number} of {len(self._points)}"

    def _print_progress(self) -> None:
        """Update the progress line in a terminal; elsewhere print a line every `PROGRESS_LINE_SECONDS`."""
        is_terminal = self._stream.isatty()
        if time.monotonic() < self._last_progress_time + (1.0 if is_terminal else PROGRESS_LINE_SECONDS):
            return
        self._last_progress_time = time.monotonic()
        parts = [self._format_progress(process) for process in self._running.values()]
        seconds_left = self._seconds_left() if self._waiting or len(self._running) > 1 else None
        parts += [f"{format_duration(seconds_left)} left in the sweep"] if seconds_left is not None else []
        line = "; ".join(parts)
        if is_terminal:
            line = line[: max(20, shutil.get_terminal_size().columns - 1)]
            self._stream.write("\r" + line.ljust(self._line_length))
            self._line_length = len(line)
            self._stream.flush()
        else:
            self._print_message(line)

    def _format_progress(self, process: RunProcess) -> str:
        metrics = last_metrics(self._sweep.run_path(process.name) / "metrics.jsonl")
        label = f"{self._run_label(process.name)}, {format_duration(process.elapsed)}"
        if metrics is None:
            return label
        step, values = metrics
        return f"{label}, step {step:,}, loss {values['loss'] if values['loss'] is not None else float('nan'):.3f}"

    def _seconds_left(self) -> float | None:
        """Estimate the remaining time from the mean duration of finished runs and the estimates of active runs."""
        done = [run.seconds for run in map(self._record, self._points) if run.status == "done" and run.seconds]
        estimates = {}
        for process in self._running.values():
            metrics = last_metrics(self._sweep.run_path(process.name) / "metrics.jsonl")
            seconds = None if metrics is None else metrics[1].get("seconds_left")
            if isinstance(seconds, int | float):
                estimates[process.name] = float(seconds)
        if not done and len(estimates) < len(self._running):
            return None
        totals = [self._record_seconds(name) + seconds for name, seconds in estimates.items()]
        mean = sum(done) / len(done) if done else sum(totals) / len(totals)
        active = [estimates.get(name, max(0.0, mean - process.elapsed)) for name, process in self._running.items()]
        return (sum(active) + mean * len(self._waiting)) / min(self._jobs, len(active) + len(self._waiting))

    def _record(self, point: GridPoint) -> SweepRun:
        return self._sweep.runs[point.name]

    def _record_seconds(self, name: str) -> float:
        return self._sweep.runs[name].seconds + self._running[name].elapsed

    def _print_message(self, text: str) -> None:
        if self._line_length:
            self._stream.write("\r" + " " * self._line_length + "\r")
            self._line_length = 0
        self._stream.write(f"{text}\n")
        self._stream.flush()
