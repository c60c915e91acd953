"""A training run: its parts, and how they are built."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from config.finetune.preference import PreferenceConfig
from config.model import VISION_PREFIX
from config.train import TrainConfig
from config.training.objective import BlockDiffusionConfig
from config.training.parallel import FSDP
from config.training.validation import EarlyStoppingConfig
from ddp.process_group import SINGLE_PROCESS, World
from diffusionlm.checkpoints.base_fingerprint import BaseFingerprint, TensorDigest
from diffusionlm.checkpoints.model_card import ValidationBound
from diffusionlm.data.loader import LoaderSpec, StepLoader, WorkerLoader, count_rows
from diffusionlm.data.pipeline import MixtureComponent, open_components
from diffusionlm.diffusion.objectives import BalancedLoss, build_objective, find_nelbo_deviation
from diffusionlm.diffusion.preference import ModelLoss, PreferenceLoss
from diffusionlm.evaluation.tasks.evaluation import LiveEvaluation
from diffusionlm.evaluation.validation import Validator
from diffusionlm.families.model_directory import read_model_config, resolve_model_directory
from diffusionlm.models.lora import start_values
from diffusionlm.models.transformer import Transformer
from diffusionlm.optim.build import build_optimizers
from diffusionlm.optim.ema import WeightAverage
from diffusionlm.optim.master_weights import select_block_matrices
from diffusionlm.training.adapters import ModelFiles
from diffusionlm.training.block_wrapping import prepare_model
from diffusionlm.training.checkpointing.run_directory import RunDirectory
from diffusionlm.training.checkpointing.store import AsyncCheckpointer
from diffusionlm.training.metrics import StepMonitor, TrainingProgress
from diffusionlm.training.samples import Samples, choose_example_input, choose_infills
from diffusionlm.training.setup import (
    ModelBuilder,
    build_perturbations,
    check_triton,
    choose_precision,
    create_model_builder,
    only_on_first_rank,
    open_processor,
    parallelize,
    prepare_tokenizer,
    set_up_device,
)
from diffusionlm.training.skipped_batches import SkippedBatches
from diffusionlm.training.spike_guard import SpikeGuard
from diffusionlm.training.step import Prefetcher, StepSettings, TrainState, autocast
from diffusionlm.vision.features import FeatureStore
from diffusionlm.vision.processor import ImageProcessor
from files.terminal_text import print_message
from files.usage_error import prefix_errors
from tokenizer import Tokenizer


@dataclass
class EarlyStopping:
    """Ends a run whose validation bound no longer falls (``validation.early_stopping``): compares each validation with
    the best one so far. All ranks have the same state."""

    config: EarlyStoppingConfig | None
    """None: the run makes all its steps."""
    best_bound: float | None = None
    """Lowest bound so far, in nats per token; a bound that is lower by no more than ``min_delta`` does not count."""
    best_step: int | None = None
    num_worse: int = 0
    """Validations since the best one."""

    def add(self, bound: float, step: int) -> None:
        """Record the bound of the validation after a step."""
        assert self.config is not None
        if self.best_bound is None or bound < self.best_bound - self.config.min_delta:
            self.best_bound, self.best_step, self.num_worse = bound, step, 0
        else:
            self.num_worse += 1

    @property
    def is_due(self) -> bool:
        """True if the last step was the last one of the run."""
        return self.config is not None and self.num_worse >= self.config.patience

    def describe(self) -> str:
        """Say why the run ended before `training.max_steps`."""
        assert self.config is not None
        margin = f" by more than {self.config.min_delta:g}" if self.config.min_delta else ""
        return (
            f"{self.num_worse} validations did not improve on the {self.best_bound:.3f} nats per token of step "
            f"{self.best_step}{margin} (validation.early_stopping)"
        )

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "config"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


@dataclass
class Run:
    """The parts of a run, as one rank has them."""

    config: TrainConfig
    directory: RunDirectory
    tokenizer: Tokenizer
    components: list[MixtureComponent]
    """Data sources, opened by this process."""
    state: TrainState
    settings: StepSettings
    loader: StepLoader
    monitor: StepMonitor
    validator: Validator
    samples: Samples
    tasks: LiveEvaluation
    example_input: str
    """Input to try the model with: a text with a masked span, a prompt, or a question."""
    checkpointer: AsyncCheckpointer
    model_files: ModelFiles
    reference_fingerprint: BaseFingerprint | None
    """Of the frozen copy, or start of the adapter, that preferences are compared with. None: there is none."""
    skipped_batches: SkippedBatches
    early_stopping: EarlyStopping
    loader_state: dict[str, Any] | None = None
    """Of the loader after the last step. None: the run is at its start."""
    progress: TrainingProgress = field(default_factory=TrainingProgress)
    last_validation: ValidationBound | None = None
    last_tasks: tuple[int, dict[str, float]] | None = None
    """Step and result of the last evaluation on tasks: task and rule, such as gsm8k/flexible -> accuracy."""

    @property
    def world(self) -> World:
        """All ranks of the run."""
        return self.state.parallel.world

    @property
    def is_complete(self) -> bool:
        """True after the last step, or the one after which early stopping ends the run."""
        return self.progress.step >= self.settings.max_steps or self.early_stopping.is_due

    @contextmanager
    def evaluation_mode(self) -> Iterator[None]:
        """Context for evaluation: the weights of the last update, averaged if EMA is on, without gradients.

        Matrix products are float32 on a CPU. On a GPU they have the precision of training: its float32 products do not
        use the tensor cores. So they have under FSDP, which gathers the weights in it.
        """
        state = self.state
        state.parallel.wait_for_weights()
        has_training_precision = self.settings.device.type == "cuda" or isinstance(self.config.parallel, FSDP)
        with (
            state.master_weights.as_float32(),
            autocast(self.settings) if has_training_precision else nullcontext(),
            torch.no_grad(),
            state.ema.use_averages() if state.ema is not None else nullcontext(),
        ):
            yield

    def log(self, text: str) -> None:
        """Print a message on the first rank."""
        only_on_first_rank(self.world, print_message)(text)


def build_run(config: TrainConfig, directory: RunDirectory, world: World = SINGLE_PROCESS) -> Run:
    """Build tokenizer, model, parallelism, optimizers and loader, in this order, and what observes them."""
    log_once = only_on_first_rank(world, print_message)
    device = set_up_device(config.run, config.runtime.keep_freed_memory)
    warning = check_triton(config.runtime, device)
    if warning is not None:
        log_once(f"warning: {warning}")
    processor = open_processor(config)
    components = open_components(config.data, "train", processor=processor)
    tokenizer = world.run_on_first(
        lambda: prepare_tokenizer(config.tokenizer, config.model, components, directory.tokenizer, print_message)
    )
    precision = choose_precision(config.training, device)
    model_builder = create_model_builder(config, tokenizer, precision)
    state = build_train_state(config, model_builder, world, device, precision)
    features = _open_feature_store(config, model_builder, state.model, world, precision)
    spec = replace(build_loader_spec(config, tokenizer, state.model, world, processor), features=features)
    max_steps = config.training.max_steps or world.run_on_first(lambda: _count_epoch_steps(config, spec, components))
    settings = build_step_settings(config, state.model, device, precision, max_steps)
    log_once(_describe_run(state, settings, world))
    reason = find_nelbo_deviation(config.objective)
    if reason is not None:
        log_once(f"the training loss is no estimate of the NELBO: {reason}. Validation always is")
    loader: StepLoader = WorkerLoader(spec) if config.data.workers else spec.open(components)
    if device.type == "cuda" and config.runtime.prefetch:
        loader = Prefetcher(loader, device)
    validator = Validator(config, tokenizer, components, world, processor, features)
    infills = choose_infills(config, state.model.config, tokenizer, validator.rows)
    is_sampling = world.data_rank == 0 or config.parallel.decodes_together
    return Run(
        config=config,
        directory=directory,
        tokenizer=tokenizer,
        components=components,
        state=state,
        settings=settings,
        loader=loader,
        monitor=StepMonitor(config.logging, max_steps, state.model, state.parallel, state.master_weights),
        validator=validator,
        samples=Samples.open(config, infills, tokenizer, state.model, is_sampling, processor),
        tasks=LiveEvaluation(
            config.evaluation,
            tokenizer,
            state.model.config,
            world,
            is_collective=config.parallel.decodes_together,
            processor=processor,
        ),
        example_input=choose_example_input(config, infills, state.model.config, tokenizer, validator.rows),
        checkpointer=AsyncCheckpointer(
            directory.store, world.with_own_group(), background=config.checkpoint.background
        ),
        model_files=_describe_files(state, model_builder, config, world, processor),
        reference_fingerprint=world.run_on_first(
            lambda: _fingerprint_reference(state, find_reference(config, model_builder))
        ),
        skipped_batches=SkippedBatches(directory.path / "skipped", tokenizer.decode, config.run.seed, world.rank),
        early_stopping=EarlyStopping(config.validation.early_stopping),
    )


def build_train_state(
    config: TrainConfig, builder: ModelBuilder, world: World, device: torch.device, precision: torch.dtype
) -> TrainState:
    """Build the model, distribute it over the ranks, and build what updates it."""
    model = builder.build_on_meta() if config.parallel.has_collective_forwards else builder.build(device)
    num_tokens = (config.training.max_steps or 0) * config.training.batch_size * config.row_length
    runtime = config.runtime
    if world.mesh.is_divided:  # the compiler would trace collectives
        runtime = runtime.model_copy(update={"compile": "none"})
    master_weights = prepare_model(model, runtime, precision, device, num_tokens)
    parallel = parallelize(model, config, world, device, precision)
    parallel.materialize(builder.values)
    optimizers = build_optimizers(
        config.optimizer,
        parallel.trainable_parameters(),
        only_on_first_rank(world, print_message),
        parallel.row_exchange,
        1.0 if config.lora is None else config.lora.lr_ratio_b,
    )
    with master_weights.as_float32():
        ema = WeightAverage(model, config.training.ema_decay) if config.training.ema_decay else None
    guard = SpikeGuard(config.training.max_spike_deviations, config.training.spike_window, device)
    reference = build_reference(config, builder, world, device, precision)
    loss: ModelLoss | None = None
    if isinstance(config.objective, PreferenceConfig):
        loss = PreferenceLoss(config.objective.loss, reference)
    elif isinstance(config.objective, BlockDiffusionConfig) and config.objective.balance:
        loss = BalancedLoss(config.objective.next_token_weight)
    perturbations = build_perturbations(config, model)
    return TrainState(model, parallel, optimizers, master_weights, ema, guard, perturbations, reference, loss)


def find_reference(config: TrainConfig, builder: ModelBuilder) -> ModelBuilder:
    """The builder of the reference: that of the model before training, or of `rl.kl.model`.

    Raises:
        ValueError: `rl.kl.model` is of another architecture.
    """
    if config.reference_model is None:
        return builder
    with prefix_errors(f"rl.kl.model = {config.reference_model}"):
        directory = resolve_model_directory(config.reference_model)
        config.model.check_same_architecture(read_model_config(directory))
    return replace(builder, directory=directory, adapter=None)


def build_reference(
    config: TrainConfig, builder: ModelBuilder, world: World, device: torch.device, precision: torch.dtype
) -> Transformer | None:
    """A frozen copy of the model before training, or of `rl.kl.model`, that the loss compares with; its matrices have
    the dtype of their products, in which it computes what the float32 model does. Under FSDP it is divided like the
    model. None: the loss compares with nothing, or with the trained model itself without its adapter, if that is all
    that is trained.
    """
    is_base = config.lora is not None and not config.lora.trains_base
    if not config.has_reference or (is_base and config.reference_model is None):
        return None
    builder = find_reference(config, builder)
    if config.parallel.has_collective_forwards:
        model = builder.build_on_meta().requires_grad_(requires_grad=False)
        parallelize(model, config, world, device, precision).materialize(builder.values)
        return model
    model = builder.build(torch.device("cpu") if config.lora is None else device)
    for matrix in select_block_matrices(model).values() if config.lora is None else ():
        matrix.data = matrix.data.to(precision)
    return model.requires_grad_(requires_grad=False).to(device)


def _open_feature_store(
    config: TrainConfig, builder: ModelBuilder, model: Transformer, world: World, precision: torch.dtype
) -> FeatureStore | None:
    """Open `data.images.cache_features`, and let the model store the features that it computes. None: it is not set."""
    directory = config.data.images.cache_features
    if directory is None:
        return None
    store = FeatureStore.open(directory, world.run_on_first(lambda: _hash_tower(builder)), precision)
    model.store_features = store.write
    return store


def _hash_tower(builder: ModelBuilder) -> str:
    """SHA-256 of the config and the initial weights of a vision tower, in hex."""
    vision, value = builder.config.vision, replace(builder, adapter=None).values()
    assert vision is not None, "the config refuses to store features without a tower"
    digest = hashlib.sha256(vision.model_dump_json().encode())
    for name, _ in builder.build_on_meta().named_parameters():
        if name.startswith(VISION_PREFIX):
            digest.update(f"{name} {TensorDigest.from_tensor(value(name)).exact}".encode())
    return digest.hexdigest()


def _describe_files(
    state: TrainState, builder: ModelBuilder, config: TrainConfig, world: World, processor: ImageProcessor | None
) -> ModelFiles:
    whole_model = builder.build_on_meta() if world.mesh.is_divided else state.model
    fingerprint = None if builder.adapter is None else world.run_on_first(builder.fingerprint_directory)
    return ModelFiles(state.model, whole_model, config, fingerprint, processor)


def _fingerprint_reference(state: TrainState, builder: ModelBuilder) -> BaseFingerprint | None:
    digests = {name: TensorDigest.from_tensor(value) for name, value in start_values(state.model).items()}
    if digests:
        return BaseFingerprint("", digests)
    return builder.fingerprint_directory() if state.reference is not None else None


def build_step_settings(
    config: TrainConfig, model: Transformer, device: torch.device, precision: torch.dtype, max_steps: int
) -> StepSettings:
    """The settings of ``train_step`` from the run's config."""
    return StepSettings(
        objective=build_objective(config.objective, model.config),
        device=device,
        precision=precision,
        max_steps=max_steps,
        max_grad_norm=config.training.max_grad_norm,
        schedule=config.schedule,
        reads_metrics_each_step=device.type == "cpu",
    )


def build_loader_spec(
    config: TrainConfig,
    tokenizer: Tokenizer,
    model: Transformer,
    world: World,
    processor: ImageProcessor | None = None,
) -> LoaderSpec:
    """The loader of this rank's part of each step."""
    sequences_per_rank = config.sequences_per_rank(world.data_size)
    return LoaderSpec(
        config.data,
        tokenizer,
        config.row_length,
        config.objective,
        model.config,
        config.training.batch_size,
        config.training.micro_batch_size or sequences_per_rank,
        config.run.seed,
        world.data_rank,
        world.data_size,
        processor,
    )


def _count_epoch_steps(config: TrainConfig, spec: LoaderSpec, components: list[MixtureComponent]) -> int:
    print_message("counting the rows of an epoch ...")
    assert config.training.epochs is not None
    return max(1, config.training.epochs * count_rows(spec.open(components).rows) // spec.batch_size)


def _describe_run(state: TrainState, settings: StepSettings, world: World) -> str:
    def any_expert(name: str) -> str:
        """The name for all experts of a layer: those of other ranks are trained or frozen like the own ones."""
        return re.sub(r"\.experts\.\d+\.", ".experts.", name)

    shapes = state.parallel.whole_shapes
    frozen = {any_expert(name) for name, value in state.model.named_parameters() if not value.requires_grad}
    num_parameters = sum(shape.numel() for shape in shapes.values())
    num_trained = sum(shape.numel() for name, shape in shapes.items() if any_expert(name) not in frozen)
    trained = "" if num_trained == num_parameters else f", {num_trained:,} trained ({num_trained / num_parameters:.2%})"
    ranks = "" if world.is_single_process else f", {world.size} ranks"
    precision = str(settings.precision).removeprefix("torch.")
    return (
        f"{num_parameters:,} parameters{trained} on {settings.device} in {precision}, "
        f"{torch.get_num_threads()} threads{ranks}; {settings.max_steps:,} steps"
    )
