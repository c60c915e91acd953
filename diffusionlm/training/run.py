"""A training run: its parts, built in order and visibly."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch

from config.parallel import FSDP
from config.train import TrainConfig
from ddp.fully_sharded import FullySharded
from ddp.parallelism import Parallelism
from ddp.process_group import SINGLE_PROCESS, World
from diffusionlm.checkpoints.model_card import ValidationBound
from diffusionlm.data.loader import LoaderSpec, StepLoader, WorkerLoader, count_rows
from diffusionlm.data.pipeline import MixtureComponent, open_components
from diffusionlm.diffusion.objectives import Objective, build_objective, why_not_nelbo
from diffusionlm.evaluation.validation import Validator
from diffusionlm.models.transformer import Transformer
from diffusionlm.optim.build import Optimizers, build_optimizers
from diffusionlm.optim.ema import WeightAverage
from diffusionlm.optim.master_weights import MasterWeights
from diffusionlm.training.checkpointing.async_checkpointer import AsyncCheckpointer
from diffusionlm.training.checkpointing.run_directory import RunDirectory
from diffusionlm.training.checkpointing.save_coordinator import SaveCoordinator
from diffusionlm.training.monitor import StepMonitor
from diffusionlm.training.prefetch import Prefetcher
from diffusionlm.training.runtime import prepare_model
from diffusionlm.training.samples import SampleInfills
from diffusionlm.training.setup import choose_precision, create_model_builder, prepare_tokenizer, set_up_device
from diffusionlm.training.skipped_batches import SkippedBatches
from diffusionlm.training.spike_guard import SpikeGuard
from diffusionlm.training.spreading import only_on_first_rank, parallelize
from diffusionlm.training.step_metrics import StepMetricsQueue
from diffusionlm.training.throughput import ThroughputMeter
from tokenizer import Tokenizer


@dataclass
class TrainingProgress:
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
    samples: SampleInfills
    checkpointer: AsyncCheckpointer
    max_steps: int
    parts: list[MixtureComponent]
    """The sources of its data, read by this process."""
    master_weights: MasterWeights
    """What makes bfloat16 weights exact; of none, where all are float32."""
    flops: ThroughputMeter
    guard: SpikeGuard
    skipped_batches: SkippedBatches
    progress: TrainingProgress = field(default_factory=TrainingProgress)
    pending_metrics: StepMetricsQueue = field(default_factory=StepMetricsQueue)
    last_validation: ValidationBound | None = None
    """What the last validation came to."""
    monitor: StepMonitor = field(init=False)

    def __post_init__(self) -> None:
        self.monitor = StepMonitor(self.config.logging, self.max_steps, self.model, self.parallel, self.master_weights)

    @property
    def world(self) -> World:
        """Those that train together."""
        return self.parallel.world

    @property
    def reads_metrics_each_step(self) -> bool:
        """A CPU is never behind, so its numbers are read at once."""
        return self.device.type == "cpu"

    @contextmanager
    def evaluation_mode(self) -> Iterator[None]:
        """Context for evaluation: the weights of the last update, averaged if EMA is on, in float32, without gradients.

        FSDP keeps the precision of training, since it gathers blocks; then all ranks make the same forwards.
        """
        self.parallel.wait_for_weights()
        is_narrow = isinstance(self.config.parallel, FSDP) and self.precision != torch.float32
        averages = nullcontext() if self.average is None else self.average.use_averages()
        autocast = torch.autocast(self.device.type, dtype=self.precision, enabled=is_narrow)
        with self.master_weights.as_float32(), autocast, torch.no_grad(), averages:
            yield

    def log(self, text: str) -> None:
        """For people, once for all ranks."""
        only_on_first_rank(self.world, log)(text)


def build_run(config: TrainConfig, directory: RunDirectory, world: World = SINGLE_PROCESS) -> Run:
    """Device, tokenizer, model, parallelism, objective, optimizer, loader: in this order."""
    tell = only_on_first_rank(world, log)
    device = set_up_device(config.run, config.runtime.keep_freed_memory)
    precision = choose_precision(config.training, device)
    parts = open_components(config.data, "train")
    tokenizer = world.run_on_first(
        lambda: prepare_tokenizer(config.tokenizer, config.model.init_from, parts, directory.tokenizer, log)
    )
    blueprint = create_model_builder(config, tokenizer)
    is_sharded = isinstance(config.parallel, FSDP)
    model = blueprint.build_on_meta() if is_sharded else blueprint.build(device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    master_weights = prepare_model(model, config.runtime, precision, device)
    parallel = parallelize(model, config, world, device, precision)
    if isinstance(parallel, FullySharded):
        parallel.materialize(blueprint.values())
    row_exchange = parallel.row_exchange if isinstance(parallel, FullySharded) else None
    optimizers = build_optimizers(config.optimizer, parallel.trainable_parameters(), tell, row_exchange)
    with master_weights.as_float32():
        average = WeightAverage(model, config.training.ema_decay) if config.training.ema_decay else None
    plan = build_loader_spec(config, tokenizer, model, world)
    loader: StepLoader = WorkerLoader(plan) if config.data.workers else plan.open(parts)
    if device.type == "cuda" and config.runtime.prefetch:
        loader = Prefetcher(loader, device)
    max_steps = config.training.max_steps or world.run_on_first(lambda: _count_epoch_steps(config, plan, parts))
    infills = config.samples.infills if config.samples.every_steps else ()
    several = "" if world.is_single_process else f", {world.size} ranks"
    tell(
        f"{parameters:,} parameters on {device} in {str(precision).removeprefix('torch.')}, "
        f"{torch.get_num_threads()} threads{several}; {max_steps:,} steps"
    )
    bias = why_not_nelbo(config.objective)
    if bias is not None:
        tell(f"the training loss is no estimate of the NELBO: {bias}. Validation is one, always")
    timeout = 0.0 if world.is_single_process else getattr(config.parallel, "timeout_seconds", 0.0)
    return Run(
        config=config,
        directory=directory,
        device=device,
        precision=precision,
        tokenizer=tokenizer,
        model=model,
        parallel=parallel,
        objective=build_objective(config.objective, model.config),
        optimizers=optimizers,
        average=average,
        loader=loader,
        validator=Validator.open(config, tokenizer, parts, world),
        samples=SampleInfills.open(infills, tokenizer, model, world.is_first or is_sharded),
        checkpointer=AsyncCheckpointer(
            directory.store, SaveCoordinator.join(world, timeout), background=config.checkpoint.background
        ),
        max_steps=max_steps,
        parts=parts,
        master_weights=master_weights,
        flops=ThroughputMeter(model.config, device),
        guard=SpikeGuard(config.training.max_spike_deviations, config.training.spike_window, device),
        skipped_batches=SkippedBatches(directory.path / "skipped", tokenizer.decode, config.run.seed, world.rank),
    )


def build_loader_spec(config: TrainConfig, tokenizer: Tokenizer, model: Transformer, world: World) -> LoaderSpec:
    """Of this rank's part of each step.

    Raises:
        ValueError: the batch cannot be shared by so many ranks.
    """
    own = config.rows_per_rank(world.size)
    return LoaderSpec(
        config.data,
        tokenizer,
        config.row_length,
        config.objective,
        model.config,
        config.training.batch_size,
        config.training.micro_batch_size or own,
        config.run.seed,
        world.rank,
        world.size,
    )


def _count_epoch_steps(config: TrainConfig, plan: LoaderSpec, parts: list[MixtureComponent]) -> int:
    log("counting the rows of an epoch ...")
    assert config.training.epochs is not None
    return max(1, config.training.epochs * count_rows(plan.open(parts).rows) // plan.batch_size)


def log(text: str) -> None:
    """For people."""
    print(text, file=sys.stderr, flush=True)
