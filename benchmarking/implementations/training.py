"""Who takes part in the training benchmark: this project's own training step, and peers that train the same shapes.

Shapes: B rows, L tokens, S positions that the model reads (L, or 2 L of two streams), V vocabulary.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config.bench_train import Precision, Shape
from config.data import DataConfig, PythonStdlib
from config.model_section import ModelSection
from config.objective import BlockDiffusion, MaskedDiffusion, NextToken, Objective
from config.optimizer import AdamW, Schedule
from config.runtime import RuntimeConfig
from config.train import TrainConfig
from config.training import RunConfig, TrainingConfig
from ddp.parallelism import Alone
from diffusionlm.data.loader import Loader, StepLoader
from diffusionlm.data.packing import Row
from diffusionlm.data.reader import Position
from diffusionlm.diffusion.objectives import build_objective
from diffusionlm.models.init import init_weights
from diffusionlm.models.patterns import BlockDiffusion as BlockDiffusionPattern
from diffusionlm.models.transformer import Transformer
from diffusionlm.optim.build import build_optimizers
from diffusionlm.training.loop import denominator_of, train_step
from diffusionlm.training.prefetch import Prefetcher
from diffusionlm.training.run import Run
from diffusionlm.training.runtime import prepare_model
from diffusionlm.training.spike_guard import SpikeGuard
from diffusionlm.training.throughput import FlopAccount, draw_flops

OURS = "diffusionlm"
MAX_GRAD_NORM = 1.0
LEARNING_RATE = 1e-4
LEAST_PROBABILITY = 1e-3
"""Of masking, in the peers' draws (LLaDA's epsilon)."""
IGNORED = -100
"""The label of tokens that are not scored, in the peers' losses."""
MANY_STEPS = 1_000_000
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
class Case:
    """A shape in a precision with an objective, on a device."""

    shape: Shape
    precision: Precision
    device: str
    threads: int
    seed: int
    objective: Objective = field(default_factory=MaskedDiffusion)

    @property
    def objective_label(self) -> str:
        """The objective in words."""
        length = f", {self.objective.block_length}" if isinstance(self.objective, BlockDiffusion) else ""
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
class Contestant:
    """A model, its optimizers, and one optimizer step: done when it returns, with the loss."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    step: Callable[[], Tensor]
    flops: float | None = None
    """Of the matrix products of a step that the shape and the draw ask for; None: not counted."""


@dataclass(frozen=True)
class SameRows:
    """A reader of the same rows in every epoch, and of nothing else."""

    tokens_BL: Tensor

    def read(self, epoch: int, position: Position, limit: int) -> tuple[list[Row], Position]:
        """All of them; fewer than asked for never occur, as steps have so many."""
        assert limit == len(self.tokens_BL) and position is None
        length = self.tokens_BL.shape[1]
        everything = np.ones(length, dtype=np.bool_)
        one_document = np.zeros(length, dtype=np.int32)
        return [Row(row.numpy().astype(np.int32), one_document, everything) for row in self.tokens_BL], None


def train_config(case: Case, runtime: RuntimeConfig) -> TrainConfig:
    """The training run that the steps of a case belong to; its data and its directory are never touched."""
    shape = case.shape
    model = {name: getattr(shape, name) for name in ModelSection.model_fields if name != "init_from"}
    if isinstance(case.objective, NextToken):
        model["logit_alignment"] = "shifted"
    return TrainConfig(
        run=RunConfig(directory=Path("unused"), seed=case.seed),
        model=ModelSection(**model),
        data=DataConfig(source=PythonStdlib()),
        training=TrainingConfig(
            batch_size=shape.batch_size,
            max_steps=MANY_STEPS,
            max_grad_norm=MAX_GRAD_NORM,
            precision=case.precision,
        ),
        objective=case.objective,
        optimizer=AdamW(learning_rate=LEARNING_RATE),
        schedule=Schedule(kind="constant", warmup_steps=0),
        runtime=runtime,
    )


def build_run(case: Case, runtime: RuntimeConfig) -> Run:
    """A training run with everything that its steps use, over rows in memory."""
    config, device = train_config(case, runtime), torch.device(case.device)
    precision = {"float32": torch.float32, "bfloat16": torch.bfloat16}[case.precision]
    model_config = case.shape.complete().model_copy(update={"logit_alignment": config.model.logit_alignment})
    model = Transformer(model_config)
    init_weights(model, case.seed)
    model.to(device)
    master = prepare_model(model, config.runtime, precision, device)
    objective = build_objective(config.objective, model.config)
    size = config.training.batch_size
    loader: StepLoader = Loader(SameRows(case.tokens()), objective, size, size, case.seed)
    if device.type == "cuda" and config.runtime.prefetch:
        loader = Prefetcher(loader, device)
    parallel = Alone(model)
    unused: Any = None
    return Run(
        config=config,
        directory=unused,
        device=device,
        precision=precision,
        tokenizer=unused,
        model=model,
        parallel=parallel,
        objective=objective,
        optimizers=build_optimizers(config.optimizer, parallel.trained()),
        average=None,
        loader=loader,
        validator=unused,
        samples=unused,
        saves=unused,
        max_steps=MANY_STEPS,
        parts=[],
        master=master,
        flops=FlopAccount(model.config, device),
        guard=SpikeGuard(None, config.training.spike_window, device),
        batches=unused,
    )


def build_ours(case: Case, objective: Objective | None = None, runtime: RuntimeConfig | None = None) -> Contestant:
    """This project's training step; the objective of the case unless said otherwise."""
    if objective is not None:
        case = replace(case, objective=objective)
    run = build_run(case, runtime or RuntimeConfig())

    def step() -> Tensor:
        draws = run.loader.next_step(run.progress.step)
        numbers = train_step(run, draws, denominator_of(draws))
        run.progress.step += 1
        return _finished(numbers[0])

    # A draw of its own: that of a step is not at hand, and those of all steps differ by some scored rows at most.
    size = case.shape.batch_size
    [draw] = Loader(SameRows(case.tokens()), run.objective, size, size, case.seed).next_step(0)
    flops = draw_flops(run.model.config, draw)
    return Contestant(run.model, run.optimizers.optimizers, step, flops)


Inputs = tuple[dict[str, Any], Tensor, Tensor, int | None]
"""Of a peer's step: arguments of the model, labels, weights, and how many outputs of a row are scored, the first ones
(None: all)."""


def _peer_inputs(case: Case, tokens_BL: Tensor) -> Callable[[], Inputs]:
    """What draws a step of the objective."""
    B, L = tokens_BL.shape
    device, objective = tokens_BL.device, case.objective
    if isinstance(objective, NextToken):
        labels_BL = F.pad(tokens_BL[:, 1:], (0, 1), value=IGNORED)
        even_BL = torch.full((B, L), 1 / (B * (L - 1)), device=device)
        return lambda: ({"input_ids": tokens_BL}, labels_BL, even_BL, None)
    length = objective.block_length if isinstance(objective, BlockDiffusion) else L
    assert isinstance(length, int)
    blocks = -(-L // length)
    S = L if length == L and isinstance(objective, MaskedDiffusion) else 2 * L
    mask_11SS = torch.zeros(1, 1, S, S, device=device)
    if S > L:
        seen_1SS = BlockDiffusionPattern(length).dense(S, device)
        mask_11SS.masked_fill_(~seen_1SS, torch.finfo(torch.float32).min)
    mask = mask_11SS.expand(B, 1, S, S)
    positions_1S = (torch.arange(S, device=device) % L)[None]

    def draw() -> Inputs:
        probability = (1 - LEAST_PROBABILITY) * torch.rand(B, blocks, device=device) + LEAST_PROBABILITY
        probability_BL = probability.repeat_interleave(length, dim=1)[:, :L]
        masked_BL = torch.rand(B, L, device=device) < probability_BL
        labels_BL = tokens_BL.masked_fill(~masked_BL, IGNORED)
        inputs = tokens_BL.masked_fill(masked_BL, case.shape.mask_token)
        if S > L:
            inputs = torch.cat([inputs, tokens_BL], dim=1)
        given = {"input_ids": inputs, "attention_mask": mask, "position_ids": positions_1S}
        return given, labels_BL, 1 / (B * L * probability_BL), L if S > L else None

    return draw


def _build_qwen3(case: Case) -> Any:
    # By name and untyped: the group `bench` need not be installed to run or to check this file.
    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(case.seed)
    settings = case.shape.model_dump(exclude={"shape", "name", "batch_size", "qk_norm", "logit_alignment"})
    config = transformers.Qwen3Config(**settings, attn_implementation="sdpa")
    return transformers.Qwen3ForCausalLM(config).to(case.device).train()


def build_transformers(case: Case) -> Contestant:
    """A Qwen3 of the same shape, trained the usual way."""
    model = _build_qwen3(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    draw = _peer_inputs(case, case.tokens().to(case.device))

    def loss_of() -> Tensor:
        given, labels_BL, weights_BL, scored = draw()
        keep = slice(scored) if scored else 0
        with case.autocast():
            logits_BLV = model(**given, use_cache=False, logits_to_keep=keep).logits
        logits = logits_BLV.float().flatten(0, 1)
        nll = F.cross_entropy(logits, labels_BL.flatten(), ignore_index=IGNORED, reduction="none")
        return (nll.view_as(weights_BL) * weights_BL).sum()

    return Contestant(model, [optimizer], _peer_step(model, optimizer, loss_of))


def build_liger(case: Case) -> Contestant:
    """The Qwen3 of transformers with Liger's kernels."""
    liger: Any = importlib.import_module("liger_kernel.transformers")
    modeling: Any = importlib.import_module("transformers.models.qwen3.modeling_qwen3")
    model = _build_qwen3(case)
    before = dict(vars(modeling))
    liger.apply_liger_kernel_to_qwen3(model=model)
    changed = {name: value for name, value in vars(modeling).items() if before.get(name) is not value}
    vars(modeling).update({name: before[name] for name in changed})
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    draw = _peer_inputs(case, case.tokens().to(case.device))
    fused_loss = liger.LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORED)

    def loss_of() -> Tensor:
        given, labels_BL, _, scored = draw()
        with case.autocast(), _replaced(modeling, changed):
            hidden_BSD = model.model(**given, use_cache=False).last_hidden_state
            hidden = hidden_BSD[:, :scored].flatten(0, 1)
            loss: Tensor = fused_loss(model.lm_head.weight, hidden, labels_BL.flatten())
        return loss

    return Contestant(model, [optimizer], _peer_step(model, optimizer, loss_of))


@contextlib.contextmanager
def _replaced(module: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Names of a module have other values meanwhile: Liger puts its rotary function in the place of transformers' own
    for all models of the process, the other contestant's too."""
    before = {name: vars(module)[name] for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(before)


def _peer_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Callable[[], Tensor]
) -> Callable[[], Tensor]:
    def step() -> Tensor:
        loss = loss_of()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return _finished(loss)

    return step


BUILDERS: Mapping[str, Callable[[Case], Contestant]] = {
    OURS: build_ours,
    "transformers": build_transformers,
    "liger": build_liger,
}


def count_parameters(parameters: Iterable[Tensor]) -> int:
    """Numbers that are trained; tied ones once."""
    return sum(parameter.numel() for parameter in parameters)


def _finished(loss: Tensor) -> Tensor:
    """The loss, once the device has done all of its work."""
    if loss.device.type == "cuda":
        torch.cuda.synchronize()
    return loss.detach()
