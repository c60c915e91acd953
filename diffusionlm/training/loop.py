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
from ddp.reductions import sum_on_device
from diffusionlm.diffusion.noised_batch import Draw
from diffusionlm.evaluation.validation import inference_weights
from diffusionlm.optim.lr_schedule import lr_factor
from diffusionlm.training.checkpointing.run_directory import open_run_directory
from diffusionlm.training.garbage import GarbageCollection
from diffusionlm.training.prefetch import Prefetcher
from diffusionlm.training.reporting import (
    build_logger,
    step_metrics,
    summarise,
    tell_of_data,
    validate,
    watched_metrics,
)
from diffusionlm.training.run import Run, build_run
from diffusionlm.training.run_checkpoint import resume, save, tell_failures
from diffusionlm.training.run_events import reported
from diffusionlm.training.runtime import memory_by_part, skips_on_device
from diffusionlm.training.setup import set_up_device
from diffusionlm.training.signals import StoppedError, StopRequest
from diffusionlm.training.spike_guard import account
from diffusionlm.training.summary import Summary, render_summary
from logger import RunLogger
from profiling import memory, nvtx
from profiling.estimate import planned_run
from profiling.trace import StepProfiler


@dataclass(frozen=True)
class TrainResult:
    """How a run ended."""

    step: int
    summary: Summary | None
    """None where a signal ended it before its last step."""
    stopped_by: int | None
    """Number of that signal."""


def train(config: TrainConfig) -> TrainResult:
    """Train as the config says, or go on with what its run directory holds; with the other ranks, if it has any.

    Raises:
        ValueError: anything that the user can mend; names the key or file.
    """
    nvtx.asked_level()  # No run begins with a level that there is not.
    with (
        process_group(config.parallel, set_up_device(config.run, config.runtime.keep_freed_memory).type) as ranks,
        open_run_directory(config, ranks) as directory,
        StopRequest(is_shared=not ranks.is_alone) as stop,
    ):
        run = build_run(config, directory, ranks)
        resume(run)
        complete = run.progress.step >= run.max_steps
        if complete and ranks.from_first(directory.summary.is_file):
            run.say(f"{directory.path} is complete; its summary again:")
            summary = Summary.read(directory.summary)
        else:
            if ranks.is_first:
                directory.summary.unlink(missing_ok=True)  # of fewer steps: its numbers are in the record as well
            logger = build_logger(run)
            tell_of_data(run, logger)
            with reported(run, logger):
                exit_code = 1
                try:
                    train_to_the_end(run, logger, stop)
                    if stop.signal is not None and run.progress.step < run.max_steps:
                        exit_code, at = 128 + stop.signal, run.progress.step
                        run.say(f"stopped after step {at} and saved; the same command goes on from there")
                        return TrainResult(run.progress.step, None, stop.signal)
                    summary = summarise(run, logger, stop)
                    exit_code = 0
                except StoppedError:
                    assert stop.signal is not None
                    exit_code = 128 + stop.signal
                    run.say("all steps are done and saved; the same command makes the final evaluation")
                    return TrainResult(run.progress.step, None, stop.signal)
                finally:
                    run.saves.close()
                    logger.close(exit_code)
                    run.loader.close()
        if ranks.is_first:
            out = sys.stderr if config.logging.console == "json" else sys.stdout
            print(
                render_summary(summary, directory.path, next(iter(config.samples.infills), None)), file=out, flush=True
            )
        return TrainResult(run.progress.step, summary, None)


def train_to_the_end(run: Run, logger: RunLogger, stop: StopRequest) -> None:
    """All steps, or those before a signal, with what goes on around them."""
    config = run.config

    def tell(text: str) -> None:
        logger.event(run.progress.step, "profile", text)

    section = config.profiler if run.ranks.is_first else ProfilerConfig()
    folder = run.directory.path / "profile"
    with (
        GarbageCollection(config.runtime.garbage_collection) as garbage,
        StepProfiler(section, folder, run.device.type, run.progress.step, tell) as profiler,
    ):

        def after_step(step: int) -> None:
            profiler.step()
            garbage.after_step(step)

        train_steps(run, logger, stop, after_step)
    if device_peak := memory.peaks(run.device.type).get("peak_allocated"):
        planned = planned_run(config, run.ranks.world_size).bytes_activations
        text = memory_by_part(run.model, run.optimizers, device_peak, planned)
        logger.event(run.progress.step, "memory", text)


def train_steps(run: Run, logger: RunLogger, stop: StopRequest, after_step: Callable[[int], None]) -> None:
    """Step until the end or a signal; log, validate, sample and save in between."""
    config, progress = run.config, run.progress
    while progress.step < run.max_steps:
        started = time.perf_counter()
        with nvtx.range("step"):
            with nvtx.range("data"):
                draws = run.loader.next_step(progress.step)
                denominator, num_targets = agree_on_step(run, draws, stop)
            with run.watch.step(progress.step + 1):
                numbers = train_step(run, draws, denominator)
        progress.step += 1
        progress.tokens_seen += num_targets
        run.in_flight.put(progress.step, numbers)
        run.batches.hold(progress.step, draws, run.loader.state_dict())
        step, last = progress.step, progress.step == run.max_steps
        ends = last or stop.signal is not None
        due = {name: every > 0 and step % every == 0 for name, every in intervals(config).items()}
        taken = run.in_flight.take() if run.waits_each_step or ends or any(due.values()) else []
        progress.seconds += time.perf_counter() - started
        for each in taken:
            account(progress, logger, each, run.batches, config.training.max_nonfinite_steps)
        if taken:
            values = step_metrics(run, taken[-1], draws)
            logger.progress(step, values)
            if due["logging"] or due["norms"] or last:
                logger.metrics(step, {**values, **watched_metrics(run, taken[-1])})
        if due["validation"] and not last:
            validate(run, logger)
        if due["samples"] or (last and config.samples.every_steps):
            with run.judged(), inference_weights(run.model, run.average):
                run.samples.show(run.model, step, logger)
        tell_failures(run, logger)
        if due["checkpoint"] or ends:
            save(run, logger, must_succeed=ends)
        after_step(step)
        if stop.signal is not None:
            return


def intervals(config: TrainConfig) -> dict[str, int]:
    """Steps between what is done now and then; 0: never. Before each of them the numbers of all steps are read."""
    return {
        "logging": config.logging.every_steps,
        "norms": config.logging.norms_every_steps,
        "validation": config.validation.every_steps,
        "samples": config.samples.every_steps,
        "checkpoint": config.checkpoint.every_steps,
    }


def agree_on_step(run: Run, draws: list[Draw], stop: StopRequest) -> tuple[float, int]:
    """What the ranks have to know of each other before a step: what the loss is divided by, the number of target
    tokens, and whether a signal reached one of them, so that all stop behind this step."""
    num_targets = sum(draw.num_targets for draw in draws)
    denominator, targets, *flags = run.ranks.sum(denominator_of(draws), num_targets, *stop.flags())
    stop.agree(flags)
    return denominator, round(targets)


def denominator_of(draws: list[Draw]) -> float:
    """What the loss of these draws is divided by, as far as this rank knows."""
    return sum(draw.denominator for draw in draws)


def train_step(run: Run, draws: list[Draw], denominator: float) -> Tensor:
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
    balance_weight = run.model.config.router_aux_loss_coef / (len(draws) * run.ranks.world_size)
    sums = torch.zeros(2, device=run.device)
    loss, balance_loss = sums
    for index, draw in enumerate(draws):
        draw = draw.to(run.device)
        score = replace(run.objective.score(draw, denominator), balance_weight=balance_weight)
        with run.parallel.backward(is_last=index == len(draws) - 1):
            with (
                nvtx.range("forward"),
                torch.autocast(run.device.type, dtype=run.precision, enabled=run.precision != torch.float32),
            ):
                scored = run.model(draw.inputs_BS, pattern=draw.pattern, rows=draw.rows_R, score=score)
            with nvtx.range("backward"):
                scored.trained_sum.backward()  # type: ignore[no-untyped-call]
        run.watch.scored(draw, scored.nll_R)
        run.master.collect_gradients()
        loss += scored.loss_sum.detach()
        if scored.balance_sum is not None:
            balance_loss += scored.balance_sum.detach()
    sum_on_device(sums, run.ranks)
    if isinstance(run.loader, Prefetcher) and run.progress.step + 1 < run.max_steps:
        run.loader.look_ahead(run.progress.step + 1)
    with nvtx.range("optimizer"), run.master.full():
        grad_norm = run.parallel.clip(run.config.training.max_grad_norm)
        is_good = run.guard.is_good(loss, grad_norm)
        run.guard.accept(loss, grad_norm, is_good)
        update(run, is_good)
    return torch.stack([loss, grad_norm, balance_loss, is_good.to(loss.dtype)])


def update(run: Run, is_good: Tensor) -> None:
    """Change the weights, if the step is good; drop the gradients."""
    factor = lr_factor(run.config.schedule, run.progress.step, run.max_steps)
    skipping = skips_on_device(run.optimizers) if run.device.type != "cpu" else None
    if skipping is not None:
        with skipping(~is_good):
            run.optimizers.step(factor)
    elif is_good:
        run.optimizers.step(factor)
    else:
        run.optimizers.zero_grad()
    run.parallel.start_gather()
    if run.average is not None and (skipping is not None or is_good):
        run.parallel.wait_weights()
        run.average.update(None if skipping is None else ~is_good)
