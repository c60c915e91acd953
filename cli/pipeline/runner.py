"""Run the stages of a pipeline that are due, one after the other, each in a process of its own."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence

from cli.child_process import build_command, collect_stop_signals, run_child
from cli.pipeline.stamps import CONFIG, StageState, check_files_unchanged, write_stamp
from config.dump import to_toml
from files.atomic import remove_temporary_paths, temporary_path, write_text_atomic
from files.terminal_text import print_message
from logger import format_duration


def run_stages(states: Sequence[StageState], lock: int, on_change: Callable[[], object]) -> tuple[int, str]:
    """Run the stages that are not done.

    Args:
        states: in the order of their execution. Stale ones are begun anew.
        lock: file descriptor of the pipeline's lock, which the processes of stages inherit.
        on_change: called after the end of each stage.

    Returns:
        The exit code of the pipeline, and if it is not 0, why: a signal stopped it, or a stage failed, whose command
        has printed its error. The stages after it were not started.

    Raises:
        ValueError: a file has changed, or the output of a stage is missing.
        OSError: a file cannot be written.
    """
    with collect_stop_signals() as signals:
        for number, state in enumerate(states, 1):
            stage, label = state.stage, f"stage {number} of {len(states)}, {state.stage.name}"
            if state.action == "skip":
                print_message(f"{label}: done before")
                continue
            print_message(f"{label}: {stage.settings.kind}, {'resume' if state.action == 'resume' else 'run'}")
            check_files_unchanged(state)
            _prepare_directory(state)
            started = time.monotonic()
            command = build_command(stage.command, stage.directory / CONFIG)
            code = run_child(command, signals, handles_all_signals=stage.is_training, lock=lock)
            seconds = time.monotonic() - started
            if code == 0 and not signals:
                check_files_unchanged(state)
                write_stamp(state, seconds)
            on_change()
            if signals:
                return 128 + signals[0], "stopped"
            if code != 0:
                reason = f"signal {-code}" if code < 0 else f"exit code {code}"
                return 1, f'stage "{stage.name}" failed with {reason} after {format_duration(seconds)}'
            print_message(f"{label}: done after {format_duration(seconds)}")
    return 0, ""


def _prepare_directory(state: StageState) -> None:
    """Write the config of a stage. Without a run to resume, remove what an earlier process left."""
    stage, directory = state.stage, state.stage.directory
    for path in directory.parent.glob(f"{directory.name}.tmp-*"):
        shutil.rmtree(path)
    if state.action == "stale":
        # Renamed first: of a directory that is removed in part, nothing would say what it was.
        removed = directory.rename(temporary_path(directory))
        shutil.rmtree(removed)
    directory.mkdir(parents=True, exist_ok=True)
    remove_temporary_paths(directory)
    write_stamp(state)
    write_text_atomic(directory / CONFIG, to_toml(stage.config))
    for path in () if stage.is_training else stage.output_paths:
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
