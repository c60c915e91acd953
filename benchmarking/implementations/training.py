"""The training step of this project, for benchmarks.

Shapes: B sequences, L tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from config.bench.training import BenchShape, Precision
from config.data import DataConfig, PythonStdlib
from config.finetune.lora import LoraConfig
from config.model_section import ModelSection
from config.train import TrainConfig
from config.training.objective import BlockDiffusionConfig, MaskedDiffusionConfig, NextTokenConfig, ObjectiveConfig
from config.training.optimizer import AdamWConfig, LRScheduleConfig
from config.training.training import RunConfig, TrainingConfig
from ddp.parallelism import NoParallel
from diffusionlm.data.loader import Loader, StepLoader
from diffusionlm.data.packing import Row
from diffusionlm.data.reader import ReaderPosition
from diffusionlm.models.init import init_weights
from diffusionlm.models.lora import add_adapter
from diffusionlm.models.transformer import Transformer
from diffusionlm.optim.build import build_optimizers
from diffusionlm.training.block_wrapping import prepare_model
from diffusionlm.training.metrics import StepMonitor, compute_batch_flops
from diffusionlm.training.run import build_step_settings
from diffusionlm.training.signals import StopRequest
from diffusionlm.training.spike_guard import SpikeGuard
from diffusionlm.training.step import Prefetcher, TrainState, load_step_batch, train_step
from profiling.adapter_size import measure_adapter

OURS = "diffusionlm"
PRECISIONS: Mapping[Precision, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MAX_GRAD_NORM = 1.0
LEARNING_RATE = 1e-4
UNBOUNDED_STEPS = 1_000_000
"""max_steps of the run that the measured steps belong to."""

METHOD_OF_OURS = (
    "train_step of diffusionlm.training with the noise of its loader, over sequences in memory: fixed-count masking; "
    "the last block's queries and feed-forward, the head and the loss on masked positions only; AdamW, fused; "
    "[runtime] at its defaults"
)


@dataclass(frozen=True)
class TrainCase:
    """A model shape, an objective and a precision, on a device."""

    shape: BenchShape
    precision: Precision
    device: str
    threads: int
    seed: int
    objective: ObjectiveConfig = field(default_factory=MaskedDiffusionConfig)

    @property
    def objective_label(self) -> str:
        length = f", {self.objective.block_length}" if isinstance(self.objective, BlockDiffusionConfig) else ""
        return self.objective.kind.replace("_", " ") + length

    @property
    def label(self) -> str:
        return f"{self.shape.name}, {self.objective_label}, {self.precision}"

    def tokens(self) -> Tensor:
        """Random tokens ``[B, L]`` without the mask token, on the CPU; the same for all implementations."""
        size = (self.shape.batch_size, self.shape.max_position_embeddings)
        return torch.randint(self.shape.mask_token, size, generator=torch.Generator().manual_seed(self.seed))

    def autocast(self) -> torch.autocast:
        """The autocast context of a peer's forward."""
        return torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.precision == "bfloat16")


@dataclass(frozen=True)
class TrainImplementation:
    """A model and its optimizer step."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    step: Callable[[], Tensor]
    """Takes one optimizer step and returns the loss once the device is done."""
    flops: float | None = None
    """Floating-point operations of the matrix products that a step requires; None: not counted."""


@dataclass(frozen=True)
class FixedRowReader:
    """A reader that returns the same sequences in every epoch."""

    tokens_BL: Tensor
    chats_per_row: int | None = None
    """Conversations in each sequence, whose second halves are learned. None: one document, all of which is learned."""

    def read(self, epoch: int, position: ReaderPosition, limit: int) -> tuple[list[Row], ReaderPosition]:
        """Return all sequences; a step reads exactly that many."""
        assert limit == len(self.tokens_BL) and position is None
        length = self.tokens_BL.shape[1]
        halves_L = np.arange(length) * 2 * (self.chats_per_row or 1) // length
        loss_mask_L = np.ones(length, dtype=np.bool_) if self.chats_per_row is None else halves_L % 2 == 1
        document_ids_L = (halves_L // 2).astype(np.int32)
        return [
            Row(tokens_L.numpy().astype(np.int32), document_ids_L, loss_mask_L) for tokens_L in self.tokens_BL
        ], None


def train_config(case: TrainCase) -> TrainConfig:
    """Build the config of the run that the steps of a case belong to; its data and its directory are not used."""
    shape = case.shape
    model = {name: getattr(shape, name) for name in ModelSection.model_fields if name != "init_from"}
    if isinstance(case.objective, NextTokenConfig):
        model["logit_alignment"] = "shifted"
    return TrainConfig(
        run=RunConfig(directory=Path("unused"), seed=case.seed),
        model=ModelSection(**model),
        data=DataConfig(source=PythonStdlib()),
        training=TrainingConfig(
            batch_size=shape.batch_size,
            max_steps=UNBOUNDED_STEPS,
            max_grad_norm=MAX_GRAD_NORM,
            precision=case.precision,
        ),
        objective=case.objective,
        optimizer=AdamWConfig(learning_rate=LEARNING_RATE),
        schedule=LRScheduleConfig(kind="constant", warmup_steps=0),
    )


def build_lora(case: TrainCase) -> LoraConfig | None:
    """The adapter of a case, on all projections. None: the model is trained."""
    return None if case.shape.lora_rank is None else LoraConfig(rank=case.shape.lora_rank)


def build_train_state(case: TrainCase, config: TrainConfig) -> TrainState:
    """Build the model and the optimizer of a training run on one device."""
    device = torch.device(case.device)
    model_config = case.shape.to_model_config().model_copy(update={"logit_alignment": config.model.logit_alignment})
    model = Transformer(model_config, attention_backend=config.runtime.attention_backend)
    init_weights(model, case.seed)
    if (lora := build_lora(case)) is not None:
        add_adapter(model, lora, seed=case.seed)
    model.to(device)
    master_weights = prepare_model(model, config.runtime, PRECISIONS[case.precision], device)
    parallel = NoParallel(model)
    optimizers = build_optimizers(config.optimizer, parallel.trainable_parameters())
    guard = SpikeGuard(None, config.training.spike_window, device)
    return TrainState(model, parallel, optimizers, master_weights, None, guard)


def build_ours(case: TrainCase) -> TrainImplementation:
    """Build this project's training step."""
    config, device = train_config(case), torch.device(case.device)
    state = build_train_state(case, config)
    settings = build_step_settings(config, state.model, device, PRECISIONS[case.precision], UNBOUNDED_STEPS)
    monitor = StepMonitor(config.logging, UNBOUNDED_STEPS, state.model, state.parallel, state.master_weights)
    size = case.shape.batch_size

    def build_loader() -> Loader:
        return Loader(
            FixedRowReader(case.tokens(), case.shape.chats_per_row), settings.objective, size, size, case.seed
        )

    loader: StepLoader = build_loader()
    if device.type == "cuda" and config.runtime.prefetch:
        loader = Prefetcher(loader, device)
    stop, steps = StopRequest(), itertools.count()

    def step() -> Tensor:
        batch = load_step_batch(loader, next(steps), state.parallel.world, stop)
        return synchronize(train_step(state, loader, batch, settings, monitor).tensors[0])

    # The FLOPs are those of another batch: batches differ by a few masked positions at most.
    [noised_batch] = build_loader().next_step(0).noised_batches
    lora = build_lora(case)
    active_factors = None if lora is None else measure_adapter(lora, state.model.config).active_factors
    flops = compute_batch_flops(state.model.config, noised_batch, active_factors)
    return TrainImplementation(state.model, state.optimizers.optimizers, step, flops)


def synchronize(loss: Tensor) -> Tensor:
    """Return the loss once the device has finished all of its work."""
    if loss.device.type == "cuda":
        torch.cuda.synchronize()
    return loss.detach()
