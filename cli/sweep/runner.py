"""Make the runs of a study, one or several at a time, until all are done or a signal arrives."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import Trial

from cli.child_process import ChildProcess, SignalQueue, build_command
from cli.sweep import study
from cli.sweep.definition import ANSWERS_FILE
from cli.sweep.report import EVALUATION_KEYS, read_result
from cli.sweep.study import Status, SweepStudy
from config.dump import to_toml
from config.train import TrainConfig
from files.atomic import write_text_atomic
from files.stop_signals import STOP_SIGNALS
from logger import format_duration
from logger.console import ProgressMeter
from logger.jsonl import RecordReader
from profiling.cores import usable_cores
from profiling.torch_setup import drivers

POLL_SECONDS = 0.2
CLAIM_SECONDS = 5.0
"""Time until a process asks again for runs, which another one may have left."""
ROUNDING_SECONDS = 2.0
"""Databases may store the times of heartbeats, and compare them, in whole seconds."""
SAVE_TIMEOUT_SECONDS = 120.0
"""Time for the runs to save after an error in the sweep itself."""
STOPPED_EXIT_CODES = (*(128 + number for number in STOP_SIGNALS), *(-number for number in STOP_SIGNALS))
"""Exit codes of runs that a signal ended."""
VISIBLE_DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"
ERROR_LINES = 5


@dataclass
class ActiveRun:
    """A run with its process."""

    trial: Trial
    name: str
    process: ChildProcess
    earlier_seconds: float
    """Of earlier processes of the run."""
    gpu: str | None
    records: RecordReader
    reported: dict[int, float] = field(default_factory=dict)
    """Validation bounds by step."""
    is_pruned: bool = False
    progress: str = ""
    beat_at: float = 0.0


class SweepRunner:
    """Makes the runs of a study.

    Args:
        opened: study of the sweep.
        points: of the sweep; see `SweepStudy.add`.
        on_change: called after the end of each run.
    """

    def __init__(
        self, opened: SweepStudy, points: Mapping[str, Mapping[str, str]], on_change: Callable[[], object]
    ) -> None:
        self._study, self._sweep, self._points, self._on_change = opened, opened.sweep, points, on_change
        self._active: list[ActiveRun] = []
        self._gpus = visible_gpus() if self._sweep.jobs > 1 else []
        self._progress = ProgressMeter(sys.stderr, is_transient=True)
        self._next_claim = 0.0
        self._waits_until: float | None = None

    def run(self, total: int, done: int) -> int | None:
        """Make the runs. Returns the signal that ended the sweep, or None.

        Args:
            total: number of runs of the sweep.
            done: those that need not be made.

        Raises:
            OSError: a log or a result cannot be written; active runs were stopped.
            Exception: the study cannot be written; active runs were stopped.
        """
        self._progress.begin("sweep", "runs", total, done)
        with SignalQueue() as signals:
            try:
                while True:
                    number = signals.take()
                    if number is not None:
                        self._forward_signal(number)
                    for active in [*self._active]:
                        if self._poll(active, is_stopping=signals.first is not None):
                            done, self._next_claim = done + 1, 0.0
                    if not (signals.first is None and self._start_runs()) and not self._active:
                        break
                    self._progress.set_postfix("; ".join(active.progress for active in self._active))
                    self._progress.set(done)
                    time.sleep(POLL_SECONDS)
            finally:
                self._stop_all()
                self._progress.close()
        return signals.first

    def _start_runs(self) -> bool:
        """Start runs in free places. Returns whether there may be more, because another process may be dead."""
        now = time.monotonic()
        while len(self._active) < self._sweep.jobs and now >= self._next_claim:
            trial = self._study.claim(self._points, self._progress.log)
            if trial is not None:
                self._active.append(self._start(trial))
                self._waits_until = None
                continue
            self._next_claim = now + CLAIM_SECONDS
            if self._active:
                continue
            others = self._study.num_running()
            if not others or now >= (self._waits_until or math.inf):
                return False
            if self._waits_until is None:
                self._waits_until = now + study.GRACE_SECONDS + ROUNDING_SECONDS + CLAIM_SECONDS
                self._progress.log(f"{others} runs belong to other processes; they are continued if one is dead")
        return True

    def _start(self, trial: Trial) -> ActiveRun:
        sweep, name = self._sweep, trial.user_attrs["run"]["name"]
        directory, log, toml = sweep.run_path(name), sweep.log_path(name), sweep.toml_path(name)
        for parent in (directory.parent, log.parent, toml.parent):
            parent.mkdir(parents=True, exist_ok=True)
        if sweep.command_name == "infer":  # it cannot resume, and rejects an existing file of answers
            directory.mkdir(exist_ok=True)
            (directory / ANSWERS_FILE).unlink(missing_ok=True)
        config = sweep.load_config(trial.user_attrs["run"]["values"], directory)
        write_text_atomic(toml, to_toml(config))
        has_ranks = isinstance(config, TrainConfig) and config.parallel.strategy != "single"
        command = build_command("train-ddp" if has_ranks else sweep.command_name, toml, self._overrides(config))
        gpu = None
        if len(self._gpus) > 1 and not has_ranks:  # a run with several ranks uses all GPUs
            gpu = min(self._gpus, key=[active.gpu for active in self._active].count)
        is_resumed = (directory / "checkpoints").is_dir()
        self._progress.log(f"{name} {'continues' if is_resumed else 'starts'}")
        process = ChildProcess(command, log, {} if gpu is None else {VISIBLE_DEVICES_VARIABLE: gpu})
        earlier_seconds = trial.user_attrs.get("end", {}).get("seconds", 0.0) if is_resumed else 0.0
        return ActiveRun(trial, name, process, earlier_seconds, gpu, RecordReader(directory / "metrics.jsonl"))

    def _overrides(self, config: Any) -> list[str]:
        """Divide the cores among concurrent runs, unless the config sets the number of threads."""
        section, _, key = self._sweep.command.threads_key.partition(".")
        if self._sweep.jobs == 1 or getattr(getattr(config, section), key) is not None:
            return []
        return [f"{section}.{key}={max(1, usable_cores() // self._sweep.jobs)}"]

    def _poll(self, active: ActiveRun, is_stopping: bool) -> bool:
        """Read the records of a run, and record its heartbeat or its end. Returns whether it has ended."""
        code = active.process.poll()
        try:
            self._read_records(active)
            if code is None and time.monotonic() >= active.beat_at:
                self._study.beat(active.trial)
                active.beat_at = time.monotonic() + study.HEARTBEAT_SECONDS
        except UpdateFinishedTrialError:  # this process was suspended
            self._progress.log(f"{active.name} was taken over by another process, and is ended here")
            active.process.close()
            self._active.remove(active)
            return False
        if code is not None:
            self._active.remove(active)
            self._record_end(active, code, is_stopping)
        return code is not None

    def _read_records(self, active: ActiveRun) -> None:
        """Read what a run has logged: report its validations, and stop it if it is pruned."""
        for record in active.records.read_new():
            step, metrics = record["step"], record.get("metrics") or {}
            loss, bound = metrics.get("loss"), metrics.get(f"val_{EVALUATION_KEYS[self._sweep.objective][0]}")
            if loss is not None:
                active.progress = f"{active.name} step {step:,} loss {loss:.3f}"
            if bound is None or step in active.reported or active.is_pruned:
                continue
            active.reported[step] = bound
            active.trial.report(bound, step)
            if active.trial.should_prune():
                active.is_pruned = True
                active.process.send_signal(signal.SIGTERM)

    def _record_end(self, active: ActiveRun, code: int, is_stopping: bool) -> None:
        active.process.close()
        name, seconds = active.name, active.earlier_seconds + active.process.seconds
        result = read_result(self._sweep.command_name, self._sweep.run_path(name))
        measured = result.numbers.get(self._sweep.objective)
        status: Status
        error: list[str] = []
        # A run that an earlier process finished is done, even if this one was stopped before it noticed.
        if result.is_final and code in (0, *STOPPED_EXIT_CODES):
            status = "done"
            outcome = "is done" if measured is None else f"is done, {self._sweep.objective} {measured.value:.4f},"
        elif active.is_pruned and code in (0, *STOPPED_EXIT_CODES):
            status, outcome = "pruned", f"is pruned at step {max(active.reported):,}"
        elif code in STOPPED_EXIT_CODES or (is_stopping and code != 0):
            status, outcome = "interrupted", "was interrupted; the same command continues it,"
        else:
            status, error = "failed", active.process.last_lines(ERROR_LINES) or ["no output"]
            outcome = f"FAILED with {f'signal {-code}' if code < 0 else f'exit code {code}'}"
        value = measured.value if status == "done" and measured is not None else None
        self._study.finish(active.trial, status, seconds, error, value)
        self._on_change()
        log = "".join(f"\n    {line}" for line in error)
        ending = f"; {self._sweep.log_path(name)} ends with:{log}" if error else ""
        self._progress.log(f"{name} {outcome} after {format_duration(seconds)}{ending}")

    def _forward_signal(self, number: int) -> None:
        is_training = self._sweep.command_name == "train"
        action = "finish their step and save" if is_training else "stop"
        self._progress.log(f"stopping: active runs {action}; a second signal ends them immediately")
        # Training handles all of them itself. After SIGINT, inference writes the page of its answers so far.
        for active in self._active:
            active.process.send_signal(number if is_training else signal.SIGINT)

    def _stop_all(self) -> None:
        """Stop all active runs, and wait until they have saved."""
        for active in self._active:
            active.process.send_signal(signal.SIGINT)
        for active in self._active:
            active.process.close(SAVE_TIMEOUT_SECONDS)


def visible_gpus() -> list[str]:
    """List the GPUs as in CUDA_VISIBLE_DEVICES."""
    devices = os.environ.get(VISIBLE_DEVICES_VARIABLE)
    return [str(index) for index in range(len(drivers()))] if devices is None else [*filter(None, devices.split(","))]
