"""Make the runs of a study, one or several at a time, until all are done or a signal arrives."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from subprocess import Popen
from threading import RLock
from typing import Any

from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import Trial

from cli import child_process
from cli.child_process import build_command, collect_stop_signals, read_last_lines, run_child
from cli.sweep import study
from cli.sweep.results import EVALUATION_KEYS, Status, read_files
from cli.sweep.study import SweepStudy
from config.dump import to_toml
from files.atomic import write_text_atomic
from files.stop_signals import STOP_SIGNALS
from logger import format_duration
from logger.console import ProgressMeter
from logger.jsonl import RecordReader
from profiling.cores import usable_cores
from profiling.torch_setup import drivers

CLAIM_SECONDS = 5.0
"""Time until a process asks again for runs, which another one may have left."""
STOPPED_EXIT_CODES = (*(128 + number for number in STOP_SIGNALS), *(-number for number in STOP_SIGNALS))
"""Exit codes of runs that a signal ended."""
VISIBLE_DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"
ERROR_LINES = 5


class SweepRunner:
    """Makes the runs of a study: each of ``--jobs`` threads makes one after the other, and calls ``on_change`` then."""

    def __init__(self, opened: SweepStudy, on_change: Callable[[], object]) -> None:
        self._study, self._sweep, self._on_change = opened, opened.sweep, on_change
        self._gpus = visible_gpus() if self._sweep.jobs > 1 else []
        self._signals: list[int] = []
        self._lock = RLock()
        """Of the terminal, the report and what follows."""
        self._progress = ProgressMeter(sys.stderr, is_transient=True)
        self._num_ended = 0

    def run(self) -> int | None:
        """Make the runs. Returns the signal that ended the sweep, or None.

        Raises:
            OSError: a log or a result cannot be written; active runs were stopped.
            Exception: the study cannot be written; active runs were stopped.
        """
        runs = self._study.runs(only_own=True)
        num_done = sum(run.status in ("done", "pruned") for run in runs)
        self._progress.begin("sweep", "runs", self._sweep.num_trials or len(runs), num_done)
        try:
            with collect_stop_signals() as self._signals, ThreadPoolExecutor(self._sweep.jobs) as pool:
                is_waiting = False
                while True:
                    self._wait([pool.submit(self._make_runs, place) for place in range(self._sweep.jobs)], num_done)
                    if self._signals or not self._study.is_running():
                        break
                    if not is_waiting:
                        self._log("waiting for the runs of other processes; those of dead ones are continued")
                    is_waiting = True
                    time.sleep(CLAIM_SECONDS)
        finally:
            self._progress.close()
        return self._signals[0] if self._signals else None

    def _log(self, text: str) -> None:
        with self._lock:
            self._progress.log(text)

    def _wait(self, threads: Sequence[Future[None]], num_done: int) -> None:
        """Show the progress of the runs until the threads have ended."""
        is_announced = False
        while wait(threads, child_process.POLL_SECONDS).not_done:
            if self._signals and not is_announced:
                is_announced = True
                self._log("stopping: active runs finish their step and save; a second signal ends them immediately")
            with self._lock:
                self._progress.set(num_done + self._num_ended)
        for thread in threads:
            thread.result()

    def _make_runs(self, place: int) -> None:
        """Make one run after the other, as the ``place``-th of those at the same time. An error stops all of them."""
        try:
            while not self._signals and (trial := self._study.claim(self._log)) is not None:
                self._make_run(trial, trial.user_attrs["run"]["name"], place)
        except BaseException:
            self._signals.append(signal.SIGINT)
            raise

    def _make_run(self, trial: Trial, name: str, place: int) -> None:
        sweep = self._sweep
        directory, log, toml = sweep.run_path(name), sweep.log_path(name), sweep.toml_path(name)
        for parent in (directory.parent, log.parent, toml.parent):
            parent.mkdir(parents=True, exist_ok=True)
        config = sweep.load_config(trial.user_attrs["run"]["values"], directory)
        write_text_atomic(toml, to_toml(config))
        has_ranks = config.parallel.strategy != "single"
        # Concurrent runs share the cores, unless the config sets the number of threads.
        divides = sweep.jobs > 1 and config.run.threads is None
        threads = [f"run.threads={max(1, usable_cores() // sweep.jobs)}"] if divides else []
        command = build_command("train-ddp" if has_ranks else "train", toml, threads)
        variables = {}
        if len(self._gpus) > 1 and not has_ranks:  # a run with several ranks uses all GPUs
            variables[VISIBLE_DEVICES_VARIABLE] = self._gpus[place % len(self._gpus)]
        is_resumed = (directory / "checkpoints").is_dir()
        self._log(f"{name} {'continues' if is_resumed else 'starts'}")
        observer, started = RunObserver(self._study, trial, directory), time.monotonic()
        try:
            code = run_child(
                command,
                self._signals,
                handles_all_signals=True,
                log=log,
                variables=variables,
                on_poll=observer.observe,
            )
        except UpdateFinishedTrialError:  # this process was suspended
            self._log(f"{name} was taken over by another process, and is ended here")
            return
        earlier_seconds = trial.user_attrs.get("end", {}).get("seconds", 0.0) if is_resumed else 0.0
        self._record_end(trial, name, code, earlier_seconds + time.monotonic() - started, observer.is_pruned)

    def _record_end(self, trial: Trial, name: str, code: int, seconds: float, is_pruned: bool) -> None:
        logged, numbers = read_files(self._sweep.run_path(name))
        measured, is_final = numbers.get(self._sweep.objective), logged is not None and bool(logged.summary)
        status: Status = "failed"
        error: list[str] = []
        # A run that an earlier process finished is done, even if this one was stopped before it noticed.
        if is_final and code in (0, *STOPPED_EXIT_CODES):
            status = "done"
        elif is_pruned and code in (0, *STOPPED_EXIT_CODES):
            status = "pruned"
        elif code in STOPPED_EXIT_CODES or (self._signals and code != 0):
            status = "interrupted"
        else:
            error = read_last_lines(self._sweep.log_path(name), ERROR_LINES) or ["no output"]
        value = measured.value if status == "done" and measured is not None else None
        self._study.finish(trial, status, seconds, error, value)
        with self._lock:
            self._num_ended += 1
            self._on_change()
            self._log("\n    ".join([f"{name} is {status} after {format_duration(seconds)}", *error]))


class RunObserver:
    """Records the heartbeat of a run and reports its validations, and stops it if it is pruned."""

    def __init__(self, opened: SweepStudy, trial: Trial, directory: Path) -> None:
        self._study, self._trial, self._records = opened, trial, RecordReader(directory / "metrics.jsonl")
        self._metric = f"val_{EVALUATION_KEYS[opened.sweep.objective][0]}"
        self._reported_steps: set[int] = set()
        self._beats_at = 0.0
        self.is_pruned = False

    def observe(self, process: Popen[bytes]) -> None:
        """Read what the run has logged since the last call.

        Raises:
            UpdateFinishedTrialError: another process makes the run now; this one was killed.
        """
        try:
            for record in self._records.read_new():
                self._read(record, process)
            if process.poll() is None and time.monotonic() >= self._beats_at:
                self._study.beat(self._trial)
                self._beats_at = time.monotonic() + study.HEARTBEAT_SECONDS
        except UpdateFinishedTrialError:
            process.kill()  # two processes would write into one directory
            raise

    def _read(self, record: dict[str, Any], process: Popen[bytes]) -> None:
        step, bound = record["step"], (record.get("metrics") or {}).get(self._metric)
        if bound is None or step in self._reported_steps or self.is_pruned:
            return
        self._reported_steps.add(step)
        self._trial.report(bound, step)
        if self._trial.should_prune():
            self.is_pruned = True
            process.send_signal(signal.SIGTERM)


def visible_gpus() -> list[str]:
    """List the GPUs as in CUDA_VISIBLE_DEVICES."""
    devices = os.environ.get(VISIBLE_DEVICES_VARIABLE)
    return [str(index) for index in range(len(drivers()))] if devices is None else [*filter(None, devices.split(","))]
