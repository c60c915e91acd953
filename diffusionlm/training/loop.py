"""Training: everything in order, visibly; then one step after the other."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from config.runtime import ProfilerConfig
from config.train import TrainConfig
from ddp.process_group import process_group
from diffusionlm.diffusion.noised_batch import NoisedBatch
from diffusionlm.optim.lr_schedule import lr_factor
from diffusionlm.training.checkpointing.run_directory import open_run_directory
from diffusionlm.training.garbage import GarbageCollection
from diffusionlm.training.prefetch import Prefetcher
from diffusionlm.training.reporting import (
    build_logger,
    collect_monitor_metrics,
    collect_step_metrics,
    log_data_sources,
    run_final_evaluation,
    run_validation,
)
from diffusionlm.training.run import Run, build_run
from diffusionlm.training.run_checkpoint import log_failed_saves, resume_run, save_checkpoint
from diffusionlm.training.run_events import record_run_events
from diffusionlm.training.runtime import describe_memory, find_device_skip
from diffusionlm.training.setup import set_up_device
from diffusionlm.training.signals import StoppedError, StopRequest
from diffusionlm.training.spike_guard import count_step
from diffusionlm.training.summary import Summary, format_summary
from logger import RunLogger
from profiling import memory, nvtx
from profiling.estimate import estimate_run
from profiling.trace import StepProfiler


@dataclass(frozen=True)
class TrainResult:
    """How a run ended."""

    step: int
    summary: Summary | None
    """None where a signal ended it before its last step."""
    stop_signal: int | None
    """Number of that signal."""


def train(config: TrainConfig) -> TrainResult:
    """Train as the config says, or go on with what its run directory holds; with the other ranks, if it has any.

    Raises:
        ValueError: anything that the user can mend; names the key or file.
    """
    nvtx.requested_level()  # No run begins with a level that there is not.
    with (
        process_group(config.parallel, set_up_device(config.run, config.runtime.keep_freed_memory).type) as world,
        open_run_directory(config, world) as directory,
        StopRequest(is_distributed=not world.is_single_process) as stop,
    ):
        run = build_run(config, directory, world)
        resume_run(run)
        complete = run.progress.step >= run.max_steps
        if complete and world.run_on_first(directory.summary.is_file):
            run.log(f"{directory.path} is complete; its summary again:")
            summary = Summary.read(directory.summary)
        else:
            if world.is_first:
                directory.summary.unlink(missing_ok=True)  # of fewer steps: its numbers are in the record as well
            logger = build_logger(run)
            log_data_sources(run, logger)
            with record_run_events(run, logger):
                exit_code = 1
                try:
                    train_to_the_end(run, logger, stop)
                    if stop.signal is not None and run.progress.step < run.max_steps:
                        exit_code, at = 128 + stop.signal, run.progress.step
                        run.log(f"stopped after step {at} and saved; the same command goes on from there")
                        return TrainResult(run.progress.step, None, stop.signal)
                    summary = run_final_evaluation(run, logger, stop)
                    exit_code = 0
                except StoppedError:
                    assert stop.signal is not None
                    exit_code = 128 + stop.signal
                    run.log("all steps are done and saved; the same command makes the final evaluation")
                    return TrainResult(run.progress.step, None, stop.signal)
                finally:
                    run.checkpointer.close()
                    logger.close(exit_code)
                    run.loader.close()
        if world.is_first:
            out = sys.stderr if config.logging.console == "json" else sys.stdout
            print(
                format_summary(summary, directory.path, next(iter(config.samples.infills), None)), file=out, flush=True
            )
        return TrainResult(run.progress.step, summary, None)


def train_to_the_end(run: Run, logger: RunLogger, stop: StopRequest) -> None:
    """All steps, or those before a signal, with what goes on around them."""
    config = run.config

    def tell(text: str) -> None:
        logger.event(run.progress.step, "profile", text)

    section = config.profiler if run.world.is_first else ProfilerConfig()
    folder = run.directory.path / "profile"
    with (
        GarbageCollection(config.runtime.garbage_collection) as garbage,
        StepProfiler(section, folder, run.device.type, run.progress.step, tell) as profiler,
    ):

        def after_step(step: int) -> None:
            profiler.step()
            garbage.after_step(step)

        train_steps(run, logger, stop, after_step)
    if device_peak := memory.peak_memory(run.device.type).get("peak_allocated"):
        planned = estimate_run(config, run.world.size).bytes_activations
        text = describe_memory(run.model, run.optimizers, device_peak, planned)
        logger.event(run.progress.step, "memory", text)


def train_steps(run: Run, logger: RunLogger, stop: StopRequest, after_step: Callable[[int], None]) -> None:
    """Step until the end or a signal; log, validate, sample and save in between."""
    config, progress = run.config, run.progress
    while progress.step < run.max_steps:
        started = time.perf_counter()
        with nvtx.range("step"):
            with nvtx.range("data"):
                noised_batches = run.loader.next_step(progress.step)
                denominator, num_targets = reduce_step_totals(run, noised_batches, stop)
            with run.monitor.step(progress.step + 1):
                numbers = train_step(run, noised_batches, denominator)
        progress.step += 1
        progress.tokens_seen += num_targets
        run.pending_metrics.put(progress.step, numbers)
        run.skipped_batches.hold(progress.step, noised_batches, run.loader.state_dict())
        step, last = progress.step, progress.step == run.max_steps
        ends = last or stop.signal is not None
        due = {name: every > 0 and step % every == 0 for name, every in action_intervals(config).items()}
        taken = run.pending_metrics.pop_all() if run.reads_metrics_each_step or ends or any(due.values()) else []
        progress.seconds += time.perf_counter() - started
        for each in taken:
            count_step(progress, logger, each, run.skipped_batches, config.training.max_nonfinite_steps)
        if taken:
            values = collect_step_metrics(run, taken[-1], noised_batches)
            logger.progress(step, values)
            if due["logging"] or due["norms"] or last:
                logger.metrics(step, {**values, **collect_monitor_metrics(run, taken[-1])})
        if due["validation"] and not last:
            run_validation(run, logger)
        if due["samples"] or (last and config.samples.every_steps):
            with run.evaluation_mode():
                run.samples.log_samples(run.model, step, logger)
        log_failed_saves(run, logger)
        if due["checkpoint"] or ends:
            save_checkpoint(run, logger, must_succeed=ends)
        after_step(step)
        if stop.signal is not None:
            return


def action_intervals(config: TrainConfig) -> dict[str, int]:
    """Steps between what is done now and then; 0: never. Before each of them the numbers of all steps are read."""
    return {
        "logging": config.logging.every_steps,
        "norms": config.logging.norms_every_steps,
        "validation": config.validation.every_steps,
        "samples": config.samples.every_steps,
        "checkpoint": config.checkpoint.every_steps,
    }


def reduce_step_totals(run: Run, noised_batches: list[NoisedBatch], stop: StopRequest) -> tuple[float, int]:
    """What the ranks have to know of each other before a step: what the loss is divided by, the number of target
    tokens, and whether a signal reached one of them, so that all stop behind this step."""
    num_targets = sum(noised_batch.num_targets for noised_batch in noised_batches)
    denominator, targets, *flags = run.world.sum(sum_denominators(noised_batches), num_targets, *stop.flags())
    stop.stop_for_any_rank(flags)
    return denominator, round(targets)


def sum_denominators(noised_batches: list[NoisedBatch]) -> float:
    """What the loss of these draws is divided by, as far as this rank knows."""
    return sum(noised_batch.denominator for noised_batch in noised_batches)


def train_step(run: Run, noised_batches: list[NoisedBatch], denominator: float) -> Tensor:
    """One optimizer step. Returns loss, gradient norm, balance loss and whether the step was good, [4], where they were
    computed.

    The loss is in nats per target token, unless the objective divides otherwise, over all micro-batches of all ranks. A
    step whose loss or gradient is not finite or a spike changes nothing. On a GPU that is decided there, if the
    optimizers can do it; else it is waited for.

    The routers' balance loss of a step is the mean of those of its micro-batches, which are of one size. It is added
    to what is minimised, never to the loss that is returned. Unlike the loss it depends on the cut into micro-batches:
    how often an expert was chosen is counted in each of them.
    """
    denominator = denominator or 1.0  # a step in which chance masked nothing has no loss
    load_balancing_weight = run.model.config.router_aux_loss_coef / (len(noised_batches) * run.world.size)
    sums = torch.zeros(2, device=run.device)
    loss, balance_loss = sums
    for index, noised_batch in enumerate(noised_batches):
        noised_batch = noised_batch.to(run.device)
        loss_inputs = replace(
            run.objective.build_loss_inputs(noised_batch, denominator), load_balancing_weight=load_balancing_weight
        )
        with run.parallel.backward(is_last=index == len(noised_batches) - 1):
            with (
                nvtx.range("forward"),
                torch.autocast(run.device.type, dtype=run.precision, enabled=run.precision != torch.float32),
            ):
                scored = run.model(
                    noised_batch.inputs_BS,
                    pattern=noised_batch.pattern,
                    output_positions=noised_batch.positions_N,
                    loss_inputs=loss_inputs,
                )
            with nvtx.range("backward"):
                scored.total_loss.backward()  # type: ignore[no-untyped-call]
        run.monitor.scored(noised_batch, scored.nll_N)
        run.master_weights.accumulate_gradients()
        loss += scored.loss_sum.detach()
        if scored.load_balancing_loss is not None:
            balance_loss += scored.load_balancing_loss.detach()
    run.world.all_reduce_on_device(sums)
    if isinstance(run.loader, Prefetcher) and run.progress.step + 1 < run.max_steps:
        run.loader.prefetch(run.progress.step + 1)
    with nvtx.range("optimizer"), run.master_weights.as_float32():
        grad_norm = run.parallel.clip(run.config.training.max_grad_norm)
        is_accepted = run.guard.is_accepted(loss, grad_norm)
        run.guard.update_window(loss, grad_norm, is_accepted)
        update(run, is_accepted)
    return torch.stack([loss, grad_norm, balance_loss, is_accepted.to(loss.dtype)])


def update(run: Run, is_accepted: Tensor) -> None:
    """Change the weights, if the step is good; drop the gradients."""
    factor = lr_factor(run.config.schedule, run.progress.step, run.max_steps)
    skipping = find_device_skip(run.optimizers) if run.device.type != "cpu" else None
    if skipping is not None:
        with skipping(~is_accepted):
            run.optimizers.step(factor)
    elif is_accepted:
        run.optimizers.step(factor)
    else:
        run.optimizers.zero_grad()
    run.parallel.start_weight_gather()
    if run.average is not None and (skipping is not None or is_accepted):
        run.parallel.wait_for_weights()
        run.average.update(None if skipping is None else ~is_accepted)
