"""Who takes part in the training benchmark: this project's own training step, and peers that train the same shapes.

Shapes: B rows, L tokens, S positions that the model reads (L, or 2 L of two streams), V vocabulary.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config.bench_train import BenchShape, Precision
from config.data import DataConfig, PythonStdlib
from config.model_section import ModelSection
from config.objective import BlockDiffusionConfig, MaskedDiffusionConfig, NextTokenConfig, ObjectiveConfig
from config.optimizer import AdamWConfig, LRScheduleConfig
from config.runtime import RuntimeConfig
from config.train import TrainConfig
from config.training import RunConfig, TrainingConfig
from ddp.parallelism import NoParallel
from diffusionlm.data.loader import Loader, StepLoader
from diffusionlm.data.packing import Row
from diffusionlm.data.reader import ReaderPosition
from diffusionlm.models.init import init_weights
from diffusionlm.models.patterns import BlockDiffusion as BlockDiffusionPattern
from diffusionlm.models.transformer import Transformer
from diffusionlm.optim.build import build_optimizers
from diffusionlm.training.block_wrapping import prepare_model
from diffusionlm.training.monitor import StepMonitor
from diffusionlm.training.prefetch import Prefetcher
from diffusionlm.training.run import build_step_settings
from diffusionlm.training.signals import StopRequest
from diffusionlm.training.spike_guard import SpikeGuard
from diffusionlm.training.step import TrainState, load_step_batch, train_step
from diffusionlm.training.step_metrics import compute_batch_flops

OURS = "diffusionlm"
PRECISIONS: Mapping[Precision, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MAX_GRAD_NORM = 1.0
LEARNING_RATE = 1e-4
MIN_MASK_PROBABILITY = 1e-3
"""Of masking, in the peers' draws (LLaDA's epsilon)."""
IGNORE_INDEX = -100
"""The label of tokens that are not scored, in the peers' losses."""
UNBOUNDED_STEPS = 1_000_000
"""Of the run that the measured steps belong to: it has no end."""

METHODS = {
    OURS: "`train_step` of diffusionlm.training and the draws of its loader, over rows that are in memory: masked "
    "counts; the last block's queries and feed-forward, the head and the loss on scored positions only; AdamW, fused; "
    "`[runtime]` at its defaults",
    "transformers": "Qwen3ForCausalLM (sdpa attention, no cache); bidirectional by a 4-D additive mask of zeros, block "
    "diffusion as [noisy | clean] with such a mask and logits of the noisy half, next token causal; else logits of all "
    "positions; cross-entropy of `logits.float()` with `ignore_index`, LLaDA's draws and weights; `torch.optim.AdamW` "
    "at its defaults (neither foreach nor fused on a CPU)",
    "liger": "that model with `apply_liger_kernel_to_qwen3`; head and loss in its fused kernel, which "
    "weights no tokens at its full speed: the mean over the scored ones; `torch.optim.AdamW`, fused",
}


@dataclass(frozen=True)
class TrainCase:
    """A shape in a precision with an objective, on a device."""

    shape: BenchShape
    precision: Precision
    device: str
    threads: int
    seed: int
    objective: ObjectiveConfig = field(default_factory=MaskedDiffusionConfig)

    @property
    def objective_label(self) -> str:
        """The objective in words."""
        length = f", {self.objective.block_length}" if isinstance(self.objective, BlockDiffusionConfig) else ""
        return self.objective.kind.replace("_", " ") + length

    @property
    def label(self) -> str:
        """The case in words."""
        return f"{self.shape.name}, {self.objective_label}, {self.precision}"

    def tokens(self) -> Tensor:
        """Random tokens [B, L] without the mask token, on the CPU; the same for all contestants."""
        size = (self.shape.batch_size, self.shape.max_position_embeddings)
        return torch.randint(self.shape.mask_token, size, generator=torch.Generator().manual_seed(self.seed))

    def autocast(self) -> torch.autocast:
        """The context of a peer's forward."""
        return torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.precision == "bfloat16")


@dataclass(frozen=True)
class TrainImplementation:
    """A model, its optimizers, and one optimizer step: done when it returns, with the loss."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    step: Callable[[], Tensor]
    flops: float | None = None
    """Of the matrix products of a step that the shape and the draw ask for; None: not counted."""


@dataclass(frozen=True)
class FixedRowReader:
    """A reader of the same rows in every epoch, and of nothing else."""

    tokens_BL: Tensor

    def read(self, epoch: int, position: ReaderPosition, limit: int) -> tuple[list[Row], ReaderPosition]:
        """All of them; fewer than asked for never occur, as steps have so many."""
        assert limit == len(self.tokens_BL) and position is None
        length = self.tokens_BL.shape[1]
        everything = np.ones(length, dtype=np.bool_)
        one_document = np.zeros(length, dtype=np.int32)
        return [Row(row.numpy().astype(np.int32), one_document, everything) for row in self.tokens_BL], None


def train_config(case: TrainCase, runtime: RuntimeConfig) -> TrainConfig:
    """The training run that the steps of a case belong to; its data and its directory are never touched."""
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
        runtime=runtime,
    )


def build_train_state(case: TrainCase, config: TrainConfig) -> TrainState:
    """Model and optimizer of a training run on one device."""
    device = torch.device(case.device)
    model_config = case.shape.to_model_config().model_copy(update={"logit_alignment": config.model.logit_alignment})
    model = Transformer(model_config, attention_backend=config.runtime.attention_backend)
    init_weights(model, case.seed)
    model.to(device)
    master_weights = prepare_model(model, config.runtime, PRECISIONS[case.precision], device)
    parallel = NoParallel(model)
    optimizers = build_optimizers(config.optimizer, parallel.trainable_parameters())
    guard = SpikeGuard(None, config.training.spike_window, device)
    return TrainState(model, parallel, optimizers, master_weights, None, guard)


def build_ours(
    case: TrainCase, objective: ObjectiveConfig | None = None, runtime: RuntimeConfig | None = None
) -> TrainImplementation:
    """This project's training step; the objective of the case unless ``objective`` is passed."""
    if objective is not None:
        case = replace(case, objective=objective)
    config, device = train_config(case, runtime or RuntimeConfig()), torch.device(case.device)
    state = build_train_state(case, config)
    settings = build_step_settings(config, state.model, device, PRECISIONS[case.precision], UNBOUNDED_STEPS)
    monitor = StepMonitor(config.logging, UNBOUNDED_STEPS, state.model, state.parallel, state.master_weights)
    size = case.shape.batch_size

    def build_loader() -> Loader:
        return Loader(FixedRowReader(case.tokens()), settings.objective, size, size, case.seed)

    loader: StepLoader = build_loader()
    if device.type == "cuda" and config.runtime.prefetch:
        loader = Prefetcher(loader, device)
    stop, steps = StopRequest(), itertools.count()

    def step() -> Tensor:
        batch = load_step_batch(loader, next(steps), state.parallel.world, stop)
        return _synchronize(train_step(state, loader, batch, settings, monitor).loss)

    # The FLOPs are those of another batch: batches differ by a few masked positions at most.
    [noised_batch] = build_loader().next_step(0)
    flops = compute_batch_flops(state.model.config, noised_batch)
    return TrainImplementation(state.model, state.optimizers.optimizers, step, flops)


PeerInputs = tuple[dict[str, Any], Tensor, Tensor, int | None]
"""Of a peer's step: arguments of the model, labels, weights, and how many outputs of a row are scored, the first ones
(None: all)."""


def _build_peer_inputs(case: TrainCase, tokens_BL: Tensor) -> Callable[[], PeerInputs]:
    """What draws a step of the objective."""
    B, L = tokens_BL.shape
    device, objective = tokens_BL.device, case.objective
    if isinstance(objective, NextTokenConfig):
        labels_BL = F.pad(tokens_BL[:, 1:], (0, 1), value=IGNORE_INDEX)
        even_BL = torch.full((B, L), 1 / (B * (L - 1)), device=device)
        return lambda: ({"input_ids": tokens_BL}, labels_BL, even_BL, None)
    length = objective.block_length if isinstance(objective, BlockDiffusionConfig) else L
    assert isinstance(length, int)
    blocks = -(-L // length)
    S = L if length == L and isinstance(objective, MaskedDiffusionConfig) else 2 * L
    mask_11SS = torch.zeros(1, 1, S, S, device=device)
    if S > L:
        seen_1SS = BlockDiffusionPattern(length).dense_mask(S, device)
        mask_11SS.masked_fill_(~seen_1SS, torch.finfo(torch.float32).min)
    mask = mask_11SS.expand(B, 1, S, S)
    positions_1S = (torch.arange(S, device=device) % L)[None]

    def draw() -> PeerInputs:
        probability = (1 - MIN_MASK_PROBABILITY) * torch.rand(B, blocks, device=device) + MIN_MASK_PROBABILITY
        probability_BL = probability.repeat_interleave(length, dim=1)[:, :L]
        masked_BL = torch.rand(B, L, device=device) < probability_BL
        labels_BL = tokens_BL.masked_fill(~masked_BL, IGNORE_INDEX)
        inputs = tokens_BL.masked_fill(masked_BL, case.shape.mask_token)
        if S > L:
            inputs = torch.cat([inputs, tokens_BL], dim=1)
        given = {"input_ids": inputs, "attention_mask": mask, "position_ids": positions_1S}
        return given, labels_BL, 1 / (B * L * probability_BL), L if S > L else None

    return draw


def _build_qwen3(case: TrainCase) -> Any:
    # By name and untyped: the group `bench` need not be installed to run or to check this file.
    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(case.seed)
    settings = case.shape.model_dump(exclude={"shape", "name", "batch_size", "qk_norm", "logit_alignment"})
    config = transformers.Qwen3Config(**settings, attn_implementation="sdpa")
    return transformers.Qwen3ForCausalLM(config).to(case.device).train()


def build_transformers(case: TrainCase) -> TrainImplementation:
    """A Qwen3 of the same shape, trained the usual way."""
    model = _build_qwen3(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    draw = _build_peer_inputs(case, case.tokens().to(case.device))

    def compute_loss() -> Tensor:
        given, labels_BL, weights_BL, scored = draw()
        keep = slice(scored) if scored else 0
        with case.autocast():
            logits_BLV = model(**given, use_cache=False, logits_to_keep=keep).logits
        logits = logits_BLV.float().flatten(0, 1)
        nll = F.cross_entropy(logits, labels_BL.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
        return (nll.view_as(weights_BL) * weights_BL).sum()

    return TrainImplementation(model, [optimizer], _peer_step(model, optimizer, compute_loss))


def build_liger(case: TrainCase) -> TrainImplementation:
    """The Qwen3 of transformers with Liger's kernels."""
    liger: Any = importlib.import_module("liger_kernel.transformers")
    modeling: Any = importlib.import_module("transformers.models.qwen3.modeling_qwen3")
    model = _build_qwen3(case)
    before = dict(vars(modeling))
    liger.apply_liger_kernel_to_qwen3(model=model)
    changed = {name: value for name, value in vars(modeling).items() if before.get(name) is not value}
    vars(modeling).update({name: before[name] for name in changed})
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    draw = _build_peer_inputs(case, case.tokens().to(case.device))
    fused_loss = liger.LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORE_INDEX)

    def compute_loss() -> Tensor:
        given, labels_BL, _, scored = draw()
        with case.autocast(), _patched_names(modeling, changed):
            hidden_BSD = model.model(**given, use_cache=False).last_hidden_state
            hidden = hidden_BSD[:, :scored].flatten(0, 1)
            loss: Tensor = fused_loss(model.lm_head.weight, hidden, labels_BL.flatten())
        return loss

    return TrainImplementation(model, [optimizer], _peer_step(model, optimizer, compute_loss))


@contextlib.contextmanager
def _patched_names(module: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Names of a module have other values meanwhile: Liger puts its rotary function in the place of transformers' own
    for all models of the process, the other contestant's too."""
    before = {name: vars(module)[name] for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(before)


def _peer_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, compute_loss: Callable[[], Tensor]
) -> Callable[[], Tensor]:
    def step() -> Tensor:
        loss = compute_loss()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return _synchronize(loss)

    return step


BUILDERS: Mapping[str, Callable[[TrainCase], TrainImplementation]] = {
    OURS: build_ours,
    "transformers": build_transformers,
    "liger": build_liger,
}


def count_parameters(parameters: Iterable[Tensor]) -> int:
    """Numbers that are trained; tied ones once."""
    return sum(parameter.numel() for parameter in parameters)


def _synchronize(loss: Tensor) -> Tensor:
    """The loss, once the device has done all of its work."""
    if loss.device.type == "cuda":
        torch.cuda.synchronize()
    return loss.detach()
