"""Training: everything in order, visibly; then one step after the other."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from config.dump import to_toml
from config.train import TrainConfig
from diffusionlm.checkpoints.huggingface import save_model
from diffusionlm.checkpoints.manifest import replace_text
from diffusionlm.data.loader import LoaderPlan, StepLoader, count_rows
from diffusionlm.data.parts import Part, identity_of, open_parts
from diffusionlm.data.workers import WorkerLoader
from diffusionlm.diffusion.batch import Draw
from diffusionlm.diffusion.objectives import Objective, build_objective, why_not_nelbo
from diffusionlm.models.transformer import Transformer
from diffusionlm.training.accounting import FlopAccount
from diffusionlm.training.checkpoint import restore_weights
from diffusionlm.training.ema import WeightAverage
from diffusionlm.training.garbage import GarbageCollection
from diffusionlm.training.lr_schedule import lr_factor
from diffusionlm.training.master_weights import MasterWeights
from diffusionlm.training.numbers import NumbersInFlight, StepNumbers
from diffusionlm.training.optim import Optimizers, build_optimizers
from diffusionlm.training.prefetch import Prefetcher
from diffusionlm.training.run_directory import RunDirectory, open_run_directory
from diffusionlm.training.runtime import memory_by_part, prepare_model, skips_on_device
from diffusionlm.training.setup import build_model, choose_precision, prepare_tokenizer, set_up_device
from diffusionlm.training.signals import StopRequest
from diffusionlm.training.summary import Summary, render_summary
from diffusionlm.training.validation import Samples, Validator, inference_weights
from logger import ConsoleLogger, JsonLinesLogger, LoggerGroup, RunLogger, console_style
from profiling import memory, nvtx
from profiling.plan import planned_run
from profiling.trace import StepProfiler
from tokenizer import Tokenizer, save_tokenizer


@dataclass(frozen=True)
class TrainResult:
    """How a run ended."""

    step: int
    summary: Summary | None
    """None where a signal ended it before its last step."""
    stopped_by: int | None
    """Number of that signal."""


@dataclass
class Progress:
    """What changes as the run goes and a checkpoint keeps, beside weights and optimizer."""

    step: int = 0
    tokens_seen: int = 0
    seconds: float = 0.0
    """Of training steps, over all parts of the run."""
    loss_average: float = 0.0
    """Exponential average of the loss, decay 0.98, not yet corrected for its start."""
    skipped_in_a_row: int = 0
    skipped: int = 0

    @property
    def smooth_loss(self) -> float:
        """The average, corrected."""
        return self.loss_average / (1.0 - 0.98 ** max(1, self.step - self.skipped))


@dataclass
class Run:
    """The parts of a run."""

    config: TrainConfig
    directory: RunDirectory
    device: torch.device
    precision: torch.dtype
    tokenizer: Tokenizer
    model: Transformer
    objective: Objective
    optimizers: Optimizers
    average: WeightAverage | None
    loader: StepLoader
    validator: Validator
    samples: Samples
    max_steps: int
    parts: list[Part]
    """The sources of its data, read by this process."""
    master: MasterWeights
    """What makes bfloat16 weights exact; of none, where all are float32."""
    flops: FlopAccount
    progress: Progress = field(default_factory=Progress)
    in_flight: NumbersInFlight = field(default_factory=NumbersInFlight)

    @property
    def waits_each_step(self) -> bool:
        """A CPU is never behind, so its numbers are read at once."""
        return self.device.type == "cpu"


def train(config: TrainConfig) -> TrainResult:
    """Train as the config says, or go on with what its run directory holds.

    Raises:
        ValueError: anything that the user can mend; names the key or file.
    """
    with open_run_directory(config) as directory, StopRequest() as stop:
        run = build_run(config, directory)
        resume(run)
        complete = run.progress.step >= run.max_steps
        if complete and directory.summary.is_file():
            _say(f"{directory.path} is complete; its summary again:")
            summary = Summary.from_json(json.loads(directory.summary.read_text(encoding="utf-8")))
        else:
            logger = build_logger(run)
            tell_of_data(run, logger)
            try:
                with (
                    GarbageCollection(config.runtime.garbage_collection) as garbage,
                    StepProfiler(config.profiler, directory.path / "profile", run.device.type) as profiler,
                ):

                    def after_step(step: int) -> None:
                        profiler.step()
                        garbage.after_step(step)

                    train_steps(run, logger, stop, after_step)
                if device_peak := memory.peaks(run.device.type).get("peak_allocated"):
                    planned = planned_run(config).bytes_activations
                    text = memory_by_part(run.model, run.optimizers, device_peak, planned)
                    logger.event(run.progress.step, "memory", text)
                if stop.signal is not None and run.progress.step < run.max_steps:
                    _say(f"stopped after step {run.progress.step} and saved; the same command goes on from there")
                    return TrainResult(run.progress.step, None, stop.signal)
            finally:
                logger.close()
                run.loader.close()
            summary = summarise(run)
        print(render_summary(summary, directory.path, next(iter(config.samples.infills), None)), flush=True)
        return TrainResult(run.progress.step, summary, None)


def build_run(config: TrainConfig, directory: RunDirectory) -> Run:
    """Devices, tokenizer, model, objective, optimizer, loader: in this order."""
    device = set_up_device(config.run, config.runtime.keep_freed_memory)
    precision = choose_precision(config.training, device)
    parts = open_parts(config.data, "train")
    tokenizer = prepare_tokenizer(config.tokenizer, config.model.init_from, parts, directory.tokenizer, _say)
    model = build_model(config, tokenizer, device)
    master = prepare_model(model, config.runtime, precision, device)
    objective = build_objective(config.objective, model.config)
    optimizers = build_optimizers(config.optimizer, model)
    with master.full():
        average = WeightAverage(model, config.training.ema_decay) if config.training.ema_decay else None
    batch_size = config.training.batch_size
    plan = LoaderPlan(
        config.data,
        tokenizer,
        config.row_length,
        config.objective,
        model.config,
        batch_size,
        config.training.micro_batch_size or batch_size,
        config.run.seed,
    )
    loader: StepLoader = WorkerLoader(plan) if config.data.workers else plan.open(parts)
    if device.type == "cuda" and config.runtime.prefetch:
        loader = Prefetcher(loader, device)
    max_steps = config.training.max_steps or _steps_of_epochs(plan, parts, config.training.epochs)
    validator = Validator.open(config, tokenizer, parts)
    samples = Samples.open(config.samples.infills if config.samples.every_steps else (), tokenizer, model)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    _say(
        f"{parameters:,} parameters on {device} in {str(precision).removeprefix('torch.')}, "
        f"{torch.get_num_threads()} threads; {max_steps:,} steps"
    )
    bias = why_not_nelbo(config.objective)
    if bias is not None:
        _say(f"the training loss is no estimate of the NELBO: {bias}. Validation is one, always")
    return Run(
        config=config,
        directory=directory,
        device=device,
        precision=precision,
        tokenizer=tokenizer,
        model=model,
        objective=objective,
        optimizers=optimizers,
        average=average,
        loader=loader,
        validator=validator,
        samples=samples,
        max_steps=max_steps,
        parts=parts,
        master=master,
        flops=FlopAccount(model.config, device),
    )


def tell_of_data(run: Run, logger: RunLogger) -> None:
    """Where the text comes from, for the record and for people."""
    for part in run.parts:
        reasons = "".join(f"; {count:,} {reason}" for reason, count in part.skipped.items())
        text = f"data: {part.name}, {part.source.provenance} ({part.source.identity}){reasons}"
        logger.event(run.progress.step, "data", text)


def train_steps(run: Run, logger: RunLogger, stop: StopRequest, after_step: Callable[[int], None]) -> None:
    """Step until the end or a signal; log, validate, sample and save in between."""
    config, progress = run.config, run.progress
    while progress.step < run.max_steps:
        started = time.perf_counter()
        with nvtx.range("step"):
            with nvtx.range("data"):
                draws = run.loader.next_step(progress.step)
            numbers = train_step(run, draws)
        progress.step += 1
        progress.tokens_seen += sum(draw.num_targets for draw in draws)
        run.in_flight.put(progress.step, numbers)
        step, last = progress.step, progress.step == run.max_steps
        ends = last or stop.signal is not None
        due = {name: every > 0 and step % every == 0 for name, every in intervals(config).items()}
        taken = run.in_flight.take() if run.waits_each_step or ends or any(due.values()) else []
        progress.seconds += time.perf_counter() - started
        for each in taken:
            account(run, logger, each)
        if taken:
            values = step_metrics(run, taken[-1], draws)
            logger.progress(step, values)
            if due["logging"] or last:
                logger.metrics(step, values)
        if due["validation"] and not last:
            validate(run, logger)
        if due["samples"] or (last and config.samples.every_steps):
            with run.master.full(), inference_weights(run.model, run.average):
                run.samples.show(run.model, step, logger)
        if due["checkpoint"] or ends:
            save(run, logger, must_succeed=ends)
        after_step(step)
        if stop.signal is not None:
            return


def intervals(config: TrainConfig) -> dict[str, int]:
    """Steps between what is done now and then; 0: never. Before each of them the numbers of all steps are read."""
    return {
        "logging": config.logging.every_steps,
        "validation": config.validation.every_steps,
        "samples": config.samples.every_steps,
        "checkpoint": config.checkpoint.every_steps,
    }


def train_step(run: Run, draws: list[Draw]) -> Tensor:
    """One optimizer step. Returns loss, gradient norm and balance loss, [3], where they were computed.

    The loss is in nats per target token, unless the objective divides otherwise. A step whose loss or gradient is not
    finite changes nothing. On a GPU that is decided there, if the optimizers can do it; else it is waited for.

    The routers' balance loss of a step is the mean of those of its micro-batches, which are of one size. It is added
    to what is minimised, never to the loss that is returned. Unlike the loss it depends on the cut into micro-batches:
    how often an expert was chosen is counted in each of them.
    """
    # A step in which chance masked nothing has no loss.
    denominator = sum(draw.denominator for draw in draws) or 1.0
    balance_weight = run.model.config.router_aux_loss_coef / len(draws)
    loss, balance_loss = torch.zeros(2, device=run.device)
    for draw in draws:
        draw = draw.to(run.device)
        score = replace(run.objective.score(draw, denominator), balance_weight=balance_weight)
        with (
            nvtx.range("forward"),
            torch.autocast(run.device.type, dtype=run.precision, enabled=run.precision != torch.float32),
        ):
            scored = run.model(draw.inputs_BS, pattern=draw.pattern, rows=draw.rows_R, score=score)
        with nvtx.range("backward"):
            scored.trained_sum.backward()  # type: ignore[no-untyped-call]
        run.master.collect_gradients()
        loss += scored.loss_sum.detach()
        if scored.balance_sum is not None:
            balance_loss += scored.balance_sum.detach()
    if isinstance(run.loader, Prefetcher) and run.progress.step + 1 < run.max_steps:
        run.loader.look_ahead(run.progress.step + 1)
    with nvtx.range("optimizer"), run.master.full():
        grad_norm = clip_grad_norm_(run.model.parameters(), run.config.training.max_grad_norm)
        update(run, torch.isfinite(loss) & torch.isfinite(grad_norm))
    return torch.stack([loss, grad_norm, balance_loss])


def update(run: Run, is_finite: Tensor) -> None:
    """Change the weights, if the step is finite; drop the gradients."""
    factor = lr_factor(run.config.schedule, run.progress.step, run.max_steps)
    if run.device.type != "cpu" and run.average is None and (skipping := skips_on_device(run.optimizers)):
        with skipping(~is_finite):
            run.optimizers.step(factor)
    elif is_finite:
        run.optimizers.step(factor)
        if run.average is not None:
            run.average.update()
    else:
        run.optimizers.zero_grad()


def account(run: Run, logger: RunLogger, numbers: StepNumbers) -> None:
    """Count a step by its numbers; a skipped one is said.

    Raises:
        ValueError: `training.max_nonfinite_steps` steps in a row were not finite.
    """
    progress = run.progress
    if numbers.is_finite:
        progress.skipped_in_a_row = 0
        progress.loss_average = 0.98 * progress.loss_average + 0.02 * numbers.loss
    else:
        progress.skipped_in_a_row += 1
        progress.skipped += 1
        guard(run, logger, numbers)


def guard(run: Run, logger: RunLogger, numbers: StepNumbers) -> None:
    """Say that a step was skipped; give up after several in a row.

    Raises:
        ValueError: `training.max_nonfinite_steps` steps in a row were not finite.
    """
    progress, most = run.progress, run.config.training.max_nonfinite_steps
    text = f"step {numbers.step}: skipped, loss {numbers.loss}, gradient norm {numbers.grad_norm}"
    logger.event(numbers.step, "skipped", text)
    if progress.skipped_in_a_row >= most:
        raise ValueError(
            f"{text}; {most} steps in a row were not finite (training.max_nonfinite_steps). The last checkpoint "
            'stands; try a lower optimizer.learning_rate or training.precision = "float32"'
        )


def step_metrics(run: Run, numbers: StepNumbers, draws: list[Draw]) -> dict[str, Any]:
    """What is logged of a step, the last one so far; times are means over the steps since this was last asked."""
    progress = run.progress
    per_step = progress.seconds / progress.step
    seconds = run.flops.seconds_of_step(progress.step, progress.seconds)
    rates = run.optimizers.learning_rates()
    return {
        "loss": numbers.loss,
        "loss_smooth": progress.smooth_loss,
        **({"balance_loss": numbers.balance_loss} if run.model.config.router_aux_loss_coef else {}),
        "grad_l2_norm": numbers.grad_norm,
        "lr": max(rates.values()),
        **{f"lr/{name}": rate for name, rate in rates.items()},
        "tokens_seen": progress.tokens_seen,
        "tokens_per_second": progress.tokens_seen / progress.seconds,
        "step_seconds": seconds,
        **run.flops.metrics(draws, seconds),
        "seconds_left": per_step * (run.max_steps - progress.step),
        "skipped_steps": progress.skipped,
        **{f"data/{name}": value for name, value in vars(run.loader.metrics()).items()},
        **(
            {f"memory/{name}": value for name, value in memory.peaks("cuda").items()} if not run.waits_each_step else {}
        ),
    }


def validate(run: Run, logger: RunLogger) -> None:
    """Evaluate on the fixed grid and log it."""
    with run.master.full():
        result = run.validator.quick(run.model, run.average)
    step = run.progress.step
    values = {
        "val_nats_per_token": result.nats_per_token,
        "val_standard_error": result.standard_error,
        "val_bits_per_byte": result.bits_per_byte,
        **{f"val_first_guess/{fill.fraction}": fill.first_guess for fill in result.fills},
    }
    logger.metrics(step, values)
    logger.event(
        step,
        "validation",
        f"step {step}: validation {result.nats_per_token:.3f} +- {result.standard_error:.3f} nats per token"
        + "".join(f", {fill.first_guess:.1%} right at {fill.fraction:.0%} masked" for fill in result.fills),
    )


def save(run: Run, logger: RunLogger, *, must_succeed: bool) -> None:
    """Write a checkpoint. A failure during the run is said and the run goes on: the older ones stand.

    Raises:
        ValueError: it could not be written and there will be no later one.
    """
    progress = run.progress
    live: dict[str, Tensor] = dict(run.model.named_parameters())
    state = {
        "step": progress.step,
        "progress": vars(progress),
        "loader": run.loader.state_dict(),
        "max_steps": run.max_steps,
        "data_identity": identity_of(run.parts),
        "tokenizer_fingerprint": run.tokenizer.fingerprint,
        "average_updates": run.average.updates if run.average else 0,
        "torch": torch.__version__,
    }

    def write_model(folder: Path) -> None:
        save_model(run.model, folder, run.average.average if run.average else None)
        save_tokenizer(run.tokenizer, folder)
        (folder / "config.toml").write_text(to_toml(run.config), encoding="utf-8")

    try:
        with run.master.full():
            run.directory.store.save(
                progress.step, write_model, state, run.optimizers.state_dict(), live if run.average else None
            )
    except ValueError as error:
        if must_succeed:
            raise
        logger.event(progress.step, "checkpoint", f"step {progress.step}: {error}; going on without it")


def resume(run: Run) -> None:
    """Take up the newest checkpoint of the run directory that verifies, if there is one.

    Raises:
        ValueError: it was made from other data or with another tokenizer.
    """
    saved = run.directory.store.load_newest(_say)
    if saved is None:
        return
    made = {"data_identity": identity_of(run.parts), "tokenizer_fingerprint": run.tokenizer.fingerprint}
    for key, now in made.items():
        if saved.state[key] != now and run.config.checkpoint.config_change == "refuse":
            raise ValueError(
                f"{saved.path} was made with {key} {saved.state[key]}, now it is {now}: going on would mix them. "
                'Name another run.directory, or set checkpoint.config_change = "accept"'
            )
    weights = saved.weights()
    if run.average is not None and saved.live_weights is not None:
        run.average.restore(weights, saved.state["average_updates"])
    with run.master.full():
        restore_weights(dict(run.model.named_parameters()), saved.live_weights or weights)
    run.optimizers.load_state_dict(saved.optimizer)
    run.loader.load_state_dict(saved.state["loader"])
    run.progress = Progress(**saved.state["progress"])
    run.flops.start_at(run.progress.step, run.progress.seconds)
    _say(f"going on from {saved.path}")


def summarise(run: Run) -> Summary:
    """The final evaluation, kept in summary.json."""
    with run.master.full():
        evaluations, ngrams = run.validator.final(run.model, run.average)
    loaded = run.loader.state_dict()
    summary = Summary(
        evaluation=evaluations[0],
        other_block_lengths=tuple(evaluations[1:]),
        source_entropy=run.validator.source_entropy,
        ngrams=ngrams,
        parameters=sum(parameter.numel() for parameter in run.model.parameters()),
        step=run.progress.step,
        tokens_seen=run.progress.tokens_seen,
        seconds=run.progress.seconds,
        padding_share=loaded["padding"] / max(1, loaded["places"]),
    )
    replace_text(run.directory.summary, json.dumps(summary.to_json(), indent=1) + "\n")
    return summary


def build_logger(run: Run) -> RunLogger:
    """The record on disk, and a bar or lines for people."""
    style = console_style(run.config.logging.progress, sys.stderr)
    return LoggerGroup(
        JsonLinesLogger(run.directory.metrics, run.progress.step),
        ConsoleLogger(run.max_steps, run.progress.step, style, sys.stderr),
    )


def _steps_of_epochs(plan: LoaderPlan, parts: list[Part], epochs: int | None) -> int:
    _say("counting the rows of an epoch ...")
    assert epochs is not None
    return max(1, epochs * count_rows(plan.open(parts).rows) // plan.batch_size)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
