"""A training run: its parts, built in order and visibly."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from config.parallel import FSDP
from config.train import TrainConfig
from ddp.fully_sharded import FullySharded
from ddp.parallelism import Parallelism
from ddp.process_group import SINGLE, Ranks
from diffusionlm.checkpoints.model_card import Bound
from diffusionlm.data.loader import LoaderPlan, StepLoader, count_rows
from diffusionlm.data.pipeline import Part, open_parts
from diffusionlm.data.workers import WorkerLoader
from diffusionlm.diffusion.objectives import Objective, build_objective, why_not_nelbo
from diffusionlm.evaluation.validation import Samples, Validator
from diffusionlm.models.transformer import Transformer
from diffusionlm.optim.build import Optimizers, build_optimizers
from diffusionlm.optim.ema import WeightAverage
from diffusionlm.optim.master_weights import MasterWeights
from diffusionlm.training.checkpointing.async_checkpointer import Saves
from diffusionlm.training.checkpointing.run_directory import RunDirectory
from diffusionlm.training.checkpointing.save_coordinator import SavingRanks
from diffusionlm.training.monitor import StepWatch
from diffusionlm.training.prefetch import Prefetcher
from diffusionlm.training.runtime import prepare_model
from diffusionlm.training.setup import choose_precision, plan_model, prepare_tokenizer, set_up_device
from diffusionlm.training.skipped_batches import SkippedBatches
from diffusionlm.training.spike_guard import SpikeGuard
from diffusionlm.training.spreading import on_first, spread
from diffusionlm.training.step_metrics import NumbersInFlight
from diffusionlm.training.throughput import FlopAccount
from tokenizer import Tokenizer


@dataclass
class Progress:
    """What changes as the run goes and a checkpoint keeps, beside weights and optimizer."""

    step: int = 0
    tokens_seen: int = 0
    """By all ranks."""
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
    """The parts of a run, as one rank has them."""

    config: TrainConfig
    directory: RunDirectory
    device: torch.device
    precision: torch.dtype
    tokenizer: Tokenizer
    model: Transformer
    parallel: Parallelism
    objective: Objective
    optimizers: Optimizers
    average: WeightAverage | None
    loader: StepLoader
    validator: Validator
    samples: Samples
    saves: Saves
    max_steps: int
    parts: list[Part]
    """The sources of its data, read by this process."""
    master: MasterWeights
    """What makes bfloat16 weights exact; of none, where all are float32."""
    flops: FlopAccount
    guard: SpikeGuard
    batches: SkippedBatches
    progress: Progress = field(default_factory=Progress)
    in_flight: NumbersInFlight = field(default_factory=NumbersInFlight)
    validated: Bound | None = None
    """What the last validation came to."""
    watch: StepWatch = field(init=False)

    def __post_init__(self) -> None:
        self.watch = StepWatch(self.config.logging, self.max_steps, self.model, self.parallel, self.master)

    @property
    def ranks(self) -> Ranks:
        """Those that train together."""
        return self.parallel.ranks

    @property
    def waits_each_step(self) -> bool:
        """A CPU is never behind, so its numbers are read at once."""
        return self.device.type == "cpu"

    @contextmanager
    def judged(self) -> Iterator[None]:
        """For forwards that judge the run: the weights are those of the last update, in float32 and so are products;
        under FSDP they are as in training, since blocks are gathered for them, and all ranks make the same forwards."""
        self.parallel.wait_weights()
        is_narrow = isinstance(self.config.parallel, FSDP) and self.precision != torch.float32
        with self.master.full(), torch.autocast(self.device.type, dtype=self.precision, enabled=is_narrow):
            yield

    def say(self, text: str) -> None:
        """For people, once for all ranks."""
        on_first(self.ranks, say)(text)


def build_run(config: TrainConfig, directory: RunDirectory, ranks: Ranks = SINGLE) -> Run:
    """Device, tokenizer, model, parallelism, objective, optimizer, loader: in this order."""
    tell = on_first(ranks, say)
    device = set_up_device(config.run, config.runtime.keep_freed_memory)
    precision = choose_precision(config.training, device)
    parts = open_parts(config.data, "train")
    tokenizer = ranks.from_first(
        lambda: prepare_tokenizer(config.tokenizer, config.model.init_from, parts, directory.tokenizer, say)
    )
    blueprint = plan_model(config, tokenizer)
    is_cut = isinstance(config.parallel, FSDP)
    model = blueprint.build_empty() if is_cut else blueprint.build(device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    master = prepare_model(model, config.runtime, precision, device)
    parallel = spread(model, config, ranks, device, precision)
    if isinstance(parallel, FullySharded):
        parallel.materialise(blueprint.values())
    objective = build_objective(config.objective, model.config)
    exchange = parallel.exchange if isinstance(parallel, FullySharded) else None
    optimizers = build_optimizers(config.optimizer, parallel.trained(), tell, exchange)
    with master.full():
        average = WeightAverage(model, config.training.ema_decay) if config.training.ema_decay else None
    plan = plan_of_loader(config, tokenizer, model, ranks)
    loader: StepLoader = WorkerLoader(plan) if config.data.workers else plan.open(parts)
    if device.type == "cuda" and config.runtime.prefetch:
        loader = Prefetcher(loader, device)
    max_steps = config.training.max_steps or ranks.from_first(lambda: _steps_of_epochs(config, plan, parts))
    takes_samples = ranks.is_first or is_cut
    infills = config.samples.infills if config.samples.every_steps else ()
    several = "" if ranks.is_alone else f", {ranks.world_size} ranks"
    tell(
        f"{parameters:,} parameters on {device} in {str(precision).removeprefix('torch.')}, "
        f"{torch.get_num_threads()} threads{several}; {max_steps:,} steps"
    )
    bias = why_not_nelbo(config.objective)
    if bias is not None:
        tell(f"the training loss is no estimate of the NELBO: {bias}. Validation is one, always")
    timeout = 0.0 if ranks.is_alone else getattr(config.parallel, "timeout_seconds", 0.0)
    return Run(
        config=config,
        directory=directory,
        device=device,
        precision=precision,
        tokenizer=tokenizer,
        model=model,
        parallel=parallel,
        objective=objective,
        optimizers=optimizers,
        average=average,
        loader=loader,
        validator=Validator.open(config, tokenizer, parts, ranks),
        samples=Samples.open(infills, tokenizer, model, takes_samples),
        saves=Saves(directory.store, SavingRanks.join(ranks, timeout), background=config.checkpoint.background),
        max_steps=max_steps,
        parts=parts,
        master=master,
        flops=FlopAccount(model.config, device),
        guard=SpikeGuard(config.training.max_spike_deviations, config.training.spike_window, device),
        batches=SkippedBatches(directory.path / "skipped", tokenizer.decode, config.run.seed, ranks.rank),
    )


def plan_of_loader(config: TrainConfig, tokenizer: Tokenizer, model: Transformer, ranks: Ranks) -> LoaderPlan:
    """Of this rank's part of each step.

    Raises:
        ValueError: the batch cannot be shared by so many ranks.
    """
    own = config.rows_per_rank(ranks.world_size)
    return LoaderPlan(
        config.data,
        tokenizer,
        config.row_length,
        config.objective,
        model.config,
        config.training.batch_size,
        config.training.micro_batch_size or own,
        config.run.seed,
        ranks.rank,
        ranks.world_size,
    )


def _steps_of_epochs(config: TrainConfig, plan: LoaderPlan, parts: list[Part]) -> int:
    say("counting the rows of an epoch ...")
    assert config.training.epochs is not None
    return max(1, config.training.epochs * count_rows(plan.open(parts).rows) // plan.batch_size)


def say(text: str) -> None:
    """For people."""
    print(text, file=sys.stderr, flush=True)
