"""Train a model: build or resume a run, make its steps, and evaluate the result."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from config.train import TrainConfig
from config.training.runtime import ProfilerConfig
from ddp.process_group import World, process_group
from diffusionlm.data.loader import LoadedStep
from diffusionlm.families.model_directory import resolve_model_directory
from diffusionlm.training.checkpointing.run_directory import RunDirectory, open_run_directory
from diffusionlm.training.metrics import StepMetrics, TrainingProgress
from diffusionlm.training.reporting import (
    RunSummary,
    build_logger,
    collect_launch_metrics,
    collect_monitor_metrics,
    collect_step_metrics,
    describe_left_out_records,
    log_data_sources,
    log_early_stop,
    log_skipped_records,
    record_run_events,
    run_final_evaluation,
    run_tasks,
    run_validation,
)
from diffusionlm.training.run import Run, build_run
from diffusionlm.training.run_checkpoint import log_failed_saves, resume_run, save_checkpoint
from diffusionlm.training.setup import set_up_device
from diffusionlm.training.signals import StoppedError, StopRequest
from diffusionlm.training.skipped_batches import SkippedBatches
from diffusionlm.training.step import load_step_batch, train_step
from logger import RunLogger
from profiling import nvtx
from profiling.trace import StepProfiler


@dataclass(frozen=True)
class TrainResult:
    """The last step of a run, its summary and the signal that stopped it."""

    step: int
    summary: RunSummary | None
    """None if a signal stopped the run before its final evaluation was done."""
    stop_signal: int | None
    """Number of that signal."""
    example_input: str = ""
    """Input to try the model with: a text with a masked span, a prompt, or a question."""


def train(config: TrainConfig, build: Callable[[TrainConfig, RunDirectory, World], Run] = build_run) -> TrainResult:
    """Train as the config says, or resume the run in ``run.directory``. Under torchrun every rank calls this.

    Raises:
        ValueError: the user can fix it; the text names the config key or the file.
    """
    nvtx.requested_level()  # raises for an unknown level before anything is created
    device_type = set_up_device(config.run, config.runtime.keep_freed_memory).type
    if config.model.init_from is not None:
        resolve_model_directory(config.model.init_from)  # a download now, where no rank waits for another one
    with (
        process_group(config.parallel, device_type) as world,
        open_run_directory(config, world) as directory,
        StopRequest(is_distributed=not world.is_single_process) as stop,
    ):
        run = build(config, directory, world.with_mesh(config.parallel))
        resume_run(run)
        if run.is_complete and world.run_on_first(directory.summary.is_file):
            reason = f": {run.early_stopping.describe()}" if run.early_stopping.is_due else ""
            run.log(f"{directory.path} is complete{reason}; its summary again:")
            return TrainResult(run.progress.step, RunSummary.read(directory.summary), None, run.example_input)
        if world.is_first:
            directory.summary.unlink(missing_ok=True)  # it is of fewer steps
        return run_to_end(run, stop)


def run_to_end(run: Run, stop: StopRequest) -> TrainResult:
    """Make the remaining steps and the final evaluation, and record how the run ended."""
    logger = build_logger(run)
    log_data_sources(run, logger)
    with record_run_events(run, logger), contextlib.ExitStack() as closing:  # each is closed, even if another fails
        exit_code = 1
        closing.callback(run.loader.close)
        closing.callback(lambda: logger.close(exit_code))
        closing.callback(run.checkpointer.close)
        summary = train_and_evaluate(run, logger, stop)
        exit_code = 0 if summary is not None else 128 + (stop.signal or 0)
    stop_signal = None if summary is not None else stop.signal
    return TrainResult(run.progress.step, summary, stop_signal, run.example_input)


def train_and_evaluate(run: Run, logger: RunLogger, stop: StopRequest) -> RunSummary | None:
    """Make the remaining steps and the final evaluation. Returns None if a signal stopped it."""
    train_remaining_steps(run, logger, stop)
    log_skipped_records(run, logger)
    log_early_stop(run, logger)
    if stop.signal is not None and not run.is_complete:
        run.log(f"stopped after step {run.progress.step} and saved; the same command goes on from there")
        return None
    try:
        return run_final_evaluation(run, logger, stop)
    except StoppedError:
        run.log("all steps are done and saved; the same command makes the final evaluation")
        return None


def train_remaining_steps(run: Run, logger: RunLogger, stop: StopRequest) -> None:
    """Make steps until the last one or a signal; log, validate, sample and save when due."""
    progress, settings, tracker = run.progress, run.settings, MetricsTracker(run, logger)
    every_steps = run.config.runtime.garbage_collection
    with pause_garbage_collection(every_steps), build_profiler(run, logger) as profiler:
        while not run.is_complete:
            tracker.start_clock()
            with tracker.log_on_error(), nvtx.annotate("step"):
                with nvtx.annotate("data"):
                    batch = load_step_batch(run.loader, progress.step, run.world, stop)
                with run.monitor.step(progress.step + 1):
                    metrics = train_step(run.state, run.loader, batch, settings, run.monitor)
            progress.step += 1
            progress.tokens_seen += batch.num_target_tokens
            run.skipped_batches.hold(progress.step, batch.noised_batches, run.loader_state)
            run.loader_state = batch.loaded.state
            due = find_due_actions(run, stop)
            tracker.add_step(metrics, batch.loaded, due)
            if "validate" in due:
                run_validation(run, logger)
                due = find_due_actions(run, stop)  # early stopping may have made this step the last one
            if "evaluate" in due:
                run_tasks(run, logger)
            if "sample" in due:
                with run.evaluation_mode():
                    run.samples.log_samples(run.state.model, progress.step, logger)
            log_failed_saves(run, logger)
            if "save" in due:
                save_checkpoint(run, logger, must_succeed="end" in due)
            profiler.step()
            collect_garbage(progress.step, every_steps)
            if "end" in due:  # not the signal itself: one that came after the save ends the next step
                return


def build_profiler(run: Run, logger: RunLogger) -> StepProfiler:
    """The profiler of the config, on the first rank only: ranks would write the same files."""
    config = run.config.profiler if run.world.is_first else ProfilerConfig()

    def log_profile(text: str) -> None:
        logger.event(run.progress.step, "profile", text)

    device_type = run.settings.device.type
    return StepProfiler(config, run.directory.path / "profile", device_type, run.progress.step, log=log_profile)


Action = Literal["log", "validate", "evaluate", "sample", "save", "end"]
"""What follows a step. ``evaluate``: the tasks of ``[evaluation]`` are due. ``end``: it is the last step, or the one
after which a signal stops the run. Before any action but ``log`` the host reads the metrics of all steps so far."""


def find_due_actions(run: Run, stop: StopRequest) -> set[Action]:
    """Return the actions that follow the completed step. Intervals are in steps; 0 means never."""
    config, step = run.config, run.progress.step
    is_last = run.is_complete
    is_end = is_last or (stop.signal is not None and run.loader.can_resume)
    is_best = config.checkpoint.keep_best and run.early_stopping.best_step == step

    def is_multiple(interval: int) -> bool:
        return interval > 0 and step % interval == 0

    may_be_last = config.validation.early_stopping is not None and is_multiple(config.validation.every_steps)
    intervals = config.logging.every_steps, config.logging.norms_every_steps
    is_due: dict[Action, bool] = {
        "log": any(map(is_multiple, intervals)) or is_last or may_be_last,
        "validate": is_multiple(config.validation.every_steps) and not is_last,  # the final evaluation follows
        "evaluate": bool(config.evaluation.tasks) and (is_last or is_multiple(config.evaluation.every_steps)),
        "sample": is_multiple(config.samples.every_steps) or (is_last and config.samples.every_steps > 0),
        "save": is_multiple(config.checkpoint.every_steps) or is_end or is_best,
        "end": is_end,
    }
    return {action for action in is_due if is_due[action]}


MAX_UNREAD_STEPS = 16
"""Steps whose metrics are not read: their batches are held, in case that they were skipped."""


class MetricsTracker:
    """Reads the metrics of steps, counts them in the run's progress, and logs those of some steps.

    On a GPU a step that is only logged is read when the next one is launched, so that the device never lacks work. The
    log has the same numbers under the same steps.
    """

    def __init__(self, run: Run, logger: RunLogger) -> None:
        self.run, self.logger = run, logger
        self._unread: list[StepMetrics] = []
        """In order; the device may still be computing them."""
        self._waiting: StepMetrics | None = None
        """The step that is logged when the next one is launched."""
        self._clock_start = 0.0
        self._last_log = (run.progress.step, run.progress.seconds)
        """Step and seconds of the run when it was logged last."""
        self._has_warned = False
        """Of records that are left out."""

    def start_clock(self) -> None:
        """Begin to measure a step. Logging is not part of its duration, waiting for the device is."""
        self._clock_start = time.perf_counter()

    @contextlib.contextmanager
    def log_on_error(self) -> Iterator[None]:
        """Context of the launch of a step. If it fails, the step before is logged all the same, if it is to be."""
        try:
            yield
        except Exception:
            with contextlib.suppress(RuntimeError, ValueError):  # of a device that failed; the first error is raised
                self._log_waiting()
            raise

    def add_step(self, metrics: StepMetrics, loaded: LoadedStep, due: set[Action]) -> None:
        """Add the step that was launched last, and read, count and log what is due."""
        metrics.start_copy()
        self._unread.append(metrics)
        self._log_waiting()
        is_read_now = bool(due - {"log"}) or self.run.settings.reads_metrics_each_step
        if is_read_now or "log" in due:
            collect_launch_metrics(self.run, metrics, loaded)
        if is_read_now:
            self._count(len(self._unread))
            self._log(metrics, with_metrics="log" in due)
        elif "log" in due:
            self._waiting = metrics
            self._count(0)
        else:  # the older half, which a device has long computed
            self._count(MAX_UNREAD_STEPS // 2 if len(self._unread) >= MAX_UNREAD_STEPS else 0)

    def _log_waiting(self) -> None:
        metrics, self._waiting = self._waiting, None
        if metrics is not None:
            self._count(self._unread.index(metrics) + 1)
            self._log(metrics, with_metrics=True)
            self.start_clock()

    def _count(self, num_steps: int) -> None:
        """Read and count the oldest steps, and add the time since the clock was started, with that of waiting."""
        run, steps = self.run, self._unread[:num_steps]
        del self._unread[:num_steps]
        for metrics in steps:
            metrics.wait()
        run.progress.seconds += time.perf_counter() - self._clock_start
        for metrics in steps:
            update_progress(
                metrics, run.progress, run.skipped_batches, self.logger, run.config.training.max_nonfinite_steps
            )

    def _log(self, metrics: StepMetrics, *, with_metrics: bool) -> None:
        """Log the progress of the run; with metrics, also those of this step."""
        (last_step, last_seconds), seconds = self._last_log, self.run.progress.seconds
        self._last_log = (metrics.step, seconds)
        values = collect_step_metrics(self.run, metrics, (seconds - last_seconds) / max(1, metrics.step - last_step))
        self.logger.progress(metrics.step, values)
        if with_metrics:
            self.logger.metrics(metrics.step, {**values, **collect_monitor_metrics(self.run, metrics)})
            left_out = None if self._has_warned else describe_left_out_records(self.run)
            if left_out is not None:
                self.logger.event(metrics.step, "data", f"warning: {left_out}")
                self._has_warned = True


def update_progress(
    metrics: StepMetrics,
    progress: TrainingProgress,
    skipped_batches: SkippedBatches,
    logger: RunLogger,
    max_consecutive_skips: int,
) -> None:
    """Count a step in ``progress``. If it was skipped, record its batch and log an event.

    Raises:
        ValueError: ``max_consecutive_skips`` (``training.max_nonfinite_steps``) steps in a row were skipped.
    """
    progress.count(metrics)
    if metrics.is_accepted:
        skipped_batches.release(metrics.step)
        return
    text = f"step {metrics.step}: skipped, loss {metrics.loss}, gradient norm {metrics.grad_norm}"
    if metrics.is_finite:
        text += ", a spike (training.max_spike_deviations)"
    logger.event(metrics.step, "skipped", f"{text}; {skipped_batches.record(metrics)}")
    if progress.skipped_in_a_row < max_consecutive_skips:
        return
    if metrics.is_finite:
        reason = "spikes or not finite"
        remedy = (
            "if the loss rose for good, lower optimizer.learning_rate; otherwise raise training.max_spike_deviations"
        )
    else:
        reason, remedy = "not finite", 'lower optimizer.learning_rate or set training.precision = "float32"'
    raise ValueError(
        f"{text}; the last {max_consecutive_skips} steps were {reason} (training.max_nonfinite_steps). The last "
        f"checkpoint is intact; {remedy}"
    )


@contextlib.contextmanager
def pause_garbage_collection(every_steps: int) -> Iterator[None]:
    """Context in which `collect_garbage` alone runs the collector; 0: as Python does it.

    Objects that exist at its start are frozen: the collector does not traverse them.
    """
    was_enabled = gc.isenabled()
    if every_steps:
        gc.collect()
        gc.freeze()
        gc.disable()
    try:
        yield
    finally:
        if every_steps:
            gc.unfreeze()
            if was_enabled:
                gc.enable()


def collect_garbage(step: int, every_steps: int) -> None:
    if every_steps and step % every_steps == 0:
        gc.collect()
