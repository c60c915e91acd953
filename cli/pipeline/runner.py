"""Run the stages of a pipeline that are due, one after the other, each in a process of its own."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable, Sequence

from cli.child_process import ChildProcess, SignalQueue, build_command
from cli.pipeline.fingerprint import check_files_unchanged
from cli.pipeline.plan import ANSWERS, MODEL, REPLAY, RESULT, StagePlan
from cli.pipeline.state import CONFIG, StageState, write_done, write_started
from config.dump import to_toml
from files.atomic import remove_temporary_paths, temporary_path, write_text_atomic
from files.terminal_text import print_message
from logger import format_duration

POLL_SECONDS = 0.05


class StageFailedError(Exception):
    """A stage ended with an error, which its command has printed."""


class PipelineStoppedError(Exception):
    """A signal stopped the pipeline.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def run_stages(states: Sequence[StageState], lock: int, on_change: Callable[[], object]) -> None:
    """Run the stages that are not done.

    Args:
        states: in the order of their execution. Stale ones are begun anew.
        lock: file descriptor of the pipeline's lock, which the processes of stages inherit.
        on_change: called after the end of each stage.

    Raises:
        StageFailedError: a stage failed; those before it are done, the others were not started.
        PipelineStoppedError: a signal arrived.
        ValueError: the input of a stage is missing, or a file has changed.
        OSError: a file cannot be written.
    """
    with SignalQueue() as signals:
        for number, state in enumerate(states, 1):
            plan, label = state.plan, f"stage {number} of {len(states)}, {state.plan.name}"
            if state.status == "skip":
                print_message(f"{label}: done before")
                continue
            print_message(f"{label}: {plan.stage.kind}, {'resume' if state.status == 'resume' else 'run'}")
            _check_input(plan)
            check_files_unchanged(plan, state.fingerprint)
            _prepare_directory(state)
            started = time.monotonic()
            code = _run_process(plan, lock, signals)
            seconds = time.monotonic() - started
            if code == 0 and signals.first is None:
                check_files_unchanged(plan, state.fingerprint)
                write_done(state, seconds)
            on_change()
            if signals.first is not None:
                raise PipelineStoppedError(signals.first)
            if code != 0:
                reason = f"signal {-code}" if code < 0 else f"exit code {code}"
                raise StageFailedError(f'stage "{plan.name}" failed with {reason} after {format_duration(seconds)}')
            print_message(f"{label}: done after {format_duration(seconds)}")


def _check_input(plan: StagePlan) -> None:
    if plan.parent is None or plan.model is None:
        return
    path = plan.model.path
    if not path.is_dir():
        remedy = ": no saved step was validated; see validation.every_steps" if path.name == "best" else ""
        raise ValueError(f'stage "{plan.name}": {path}, which it starts from, does not exist{remedy}')


def _prepare_directory(state: StageState) -> None:
    """Write the config of a stage. Without a run to resume, remove what an earlier process left."""
    directory = state.plan.directory
    for path in directory.parent.glob(f"{directory.name}.tmp-*"):
        shutil.rmtree(path)
    if state.status == "stale":
        # Renamed first: of a directory that is removed in part, nothing would say what it was.
        removed = directory.rename(temporary_path(directory))
        shutil.rmtree(removed)
    directory.mkdir(parents=True, exist_ok=True)
    remove_temporary_paths(directory)
    write_started(state)
    write_text_atomic(directory / CONFIG, to_toml(state.plan.config))
    for name in (RESULT, ANSWERS, REPLAY):
        (directory / name).unlink(missing_ok=True)
    if (directory / MODEL).exists():
        shutil.rmtree(directory / MODEL)


def _run_process(plan: StagePlan, lock: int, signals: SignalQueue) -> int:
    """Run the command of a stage, and forward signals to it once. Returns its exit code."""
    process = ChildProcess(build_command(plan.command, plan.directory / CONFIG), lock=lock)
    try:
        while (code := process.poll()) is None:
            number = signals.take()
            if number is not None:
                # Training saves at all of these; the other commands end in order at SIGINT.
                process.send_signal(number if plan.is_training else signal.SIGINT)
            time.sleep(POLL_SECONDS)
        return code
    finally:
        process.close()
