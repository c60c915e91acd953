"""Make the runs of a study, one or several at a time, until all are done or a signal arrives."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO

from cli.sweep.commands import ANSWERS_FILE
from cli.sweep.plan import objective
from cli.sweep.processes import RunProcess, SignalQueue, build_command, visible_gpus
from cli.sweep.results import EVALUATION_KEYS, TRAIN_COLUMNS, format_measurement, read_result
from cli.sweep.study import ClaimedRun, SweepStudy
from config.dump import to_toml
from files.atomic import write_text_atomic
from files.stop_signals import STOP_SIGNALS
from logger import format_duration
from logger.jsonl import RecordReader
from logger.progress import ProgressMeter
from profiling.cores import usable_cores

POLL_SECONDS = 0.2
SAVE_TIMEOUT_SECONDS = 120.0
"""Time for the runs to save after an error in the sweep itself."""
STOPPED_EXIT_CODES = (*(128 + number for number in STOP_SIGNALS), *(-number for number in STOP_SIGNALS))
"""Exit codes of runs that a signal ended."""
ERROR_LINES = 5


@dataclass
class ActiveRun:
    """A run with its process."""

    claimed: ClaimedRun
    process: RunProcess
    earlier_seconds: float
    """Of earlier processes of the run."""
    records: RecordReader
    reported: dict[int, float] = field(default_factory=dict)
    """Validation bounds by step."""
    is_pruned: bool = False
    progress: str = ""

    @property
    def seconds(self) -> float:
        return self.earlier_seconds + self.process.elapsed


class SweepRunner:
    """Makes the runs of a study.

    Args:
        study: of the sweep.
        stream: receives progress.
        on_change: called after the end of each run.
    """

    def __init__(self, study: SweepStudy, stream: TextIO, on_change: Callable[[], object]) -> None:
        self._study, self._plan, self._on_change = study, study.plan, on_change
        self._objective = objective([axis.key for axis in self._plan.axes])
        self._active: list[ActiveRun] = []
        self._gpus = visible_gpus() if self._plan.jobs > 1 else []
        self._progress = ProgressMeter(stream, leave=False)

    def run(self, wanted: Collection[str], total: int, done: int) -> int | None:
        """Make the runs of these digests, or draw runs. Returns the signal that ended the sweep, or None.

        Raises:
            OSError: a log or a result cannot be written; active runs were stopped.
            Exception: the study cannot be written; active runs were stopped.
        """
        self._progress.begin("sweep", "runs", total, done)
        has_more = True
        with SignalQueue() as signals:
            try:
                while self._active or (has_more and signals.first is None):
                    number = signals.take()
                    if number is not None:
                        self._forward_signal(number)
                    while has_more and len(self._active) < self._plan.jobs and signals.first is None:
                        claimed = self._study.claim(wanted, self._progress.log)
                        has_more = claimed is not None
                        if claimed is not None:
                            self._active.append(self._start(claimed))
                    for active in [*self._active]:
                        code = active.process.poll()
                        self._read_records(active)
                        if code is not None:
                            self._active.remove(active)
                            self._record_end(active, code, is_stopping=signals.first is not None)
                            done += 1
                    self._progress.set_postfix("; ".join(active.progress for active in self._active))
                    self._progress.set(done)
                    time.sleep(POLL_SECONDS if self._active else 0.0)
            finally:
                self._stop_all()
                self._progress.close()
        return signals.first

    def _start(self, claimed: ClaimedRun) -> ActiveRun:
        run, plan = claimed.run, self._plan
        directory, log = plan.run_path(run.name), plan.log_path(run.name)
        for parent in (directory.parent, log.parent, plan.config_path(run.name).parent):
            parent.mkdir(parents=True, exist_ok=True)
        if plan.sweep_command.name == "infer":  # it cannot resume, and rejects an existing file of answers
            directory.mkdir(exist_ok=True)
            (directory / ANSWERS_FILE).unlink(missing_ok=True)
        write_text_atomic(plan.config_path(run.name), to_toml(claimed.config))
        module = plan.sweep_command.module(claimed.config)
        command = build_command(module, plan.config_path(run.name), self._overrides(claimed.config))
        # A run with several ranks uses all GPUs.
        gpu = None
        if len(self._gpus) > 1 and module != "cli.train_ddp":
            gpu = min(self._gpus, key=[active.process.gpu for active in self._active].count)
        is_resumed = (directory / "checkpoints").is_dir()
        self._progress.log(f"{run.name} {'continues' if is_resumed else 'starts'}")
        process = RunProcess(command, log, self._study.lock, gpu)
        return ActiveRun(claimed, process, run.seconds * is_resumed, RecordReader(directory / "metrics.jsonl"))

    def _overrides(self, config: Any) -> list[str]:
        """Divide the cores among concurrent runs, unless the config sets the number of threads."""
        section, _, key = self._plan.sweep_command.threads_key.partition(".")
        values: Mapping[str, Any] = config.model_dump()
        if self._plan.jobs == 1 or values[section][key] is not None:
            return []
        return [f"{section}.{key}={max(1, usable_cores() // self._plan.jobs)}"]

    def _read_records(self, active: ActiveRun) -> None:
        """Read what a run has logged: report its validations, and stop it if it is pruned."""
        for record in active.records.read_new():
            step, metrics = record["step"], record.get("metrics") or {}
            loss, bound = metrics.get("loss"), metrics.get(f"val_{EVALUATION_KEYS[self._objective][0]}")
            if loss is not None:
                active.progress = f"{active.claimed.run.name} step {step:,} loss {loss:.3f}"
            if bound is None or step in active.reported or active.is_pruned:
                continue
            active.reported[step] = bound
            if active.claimed.report(step, bound):
                active.is_pruned = True
                active.process.send_signal(signal.SIGTERM)

    def _record_end(self, active: ActiveRun, code: int, is_stopping: bool) -> None:
        claimed, seconds = active.claimed, active.seconds
        name, duration = claimed.run.name, format_duration(seconds)
        result = read_result(self._plan.sweep_command.name, self._plan.run_path(name))
        # A run that an earlier process finished is done, even if this one was stopped before it noticed.
        if result.is_final and code in (0, *STOPPED_EXIT_CODES):
            measured = result.numbers.get(self._objective)
            value = None if measured is None else measured.value
            claimed.finish("done", seconds, (), value)
            bound = measured and f", {TRAIN_COLUMNS[self._objective]} {format_measurement(self._objective, measured)}"
            outcome = f"is done after {duration}{bound or ''}"
        elif active.is_pruned and code in (0, *STOPPED_EXIT_CODES):
            claimed.finish("pruned", seconds, (), None)
            outcome = f"is pruned at step {max(active.reported):,} after {duration}"
        elif code in STOPPED_EXIT_CODES or (is_stopping and code != 0):
            claimed.finish("interrupted", seconds, (), None)
            outcome = f"was interrupted after {duration}; the same command continues it"
        else:
            error = active.process.last_lines(ERROR_LINES) or ["no output"]
            claimed.finish("failed", seconds, error, None)
            reason = f"signal {-code}" if code < 0 else f"exit code {code}"
            log = "".join(f"\n    {line}" for line in error)
            outcome = f"FAILED with {reason} after {duration}; {self._plan.log_path(name)} ends with:{log}"
        self._on_change()
        self._progress.log(f"{name} {outcome}")

    def _forward_signal(self, number: int) -> None:
        is_training = self._plan.sweep_command.name == "train"
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
            active.process.wait_or_kill(SAVE_TIMEOUT_SECONDS)
