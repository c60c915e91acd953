"""One optimizer step: forward and backward of each micro-batch, clipping, and the update if the spike guard accepts
it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from config.training.optimizer import LRScheduleConfig
from ddp.context_parallel import gather_losses, split_batch
from ddp.parallelism import Parallelism
from ddp.process_group import World
from diffusionlm.data.loader import LoadedStep, StepLoader
from diffusionlm.diffusion.noised_batch import NoisedBatch
from diffusionlm.diffusion.objectives import Objective
from diffusionlm.diffusion.preference import ModelLoss, WeighedLoss
from diffusionlm.models.transformer import Transformer
from diffusionlm.optim.build import Optimizers
from diffusionlm.optim.ema import WeightAverage
from diffusionlm.optim.lr_schedule import lr_factor
from diffusionlm.optim.master_weights import MasterWeights
from diffusionlm.training.metrics import StepMetrics, StepMonitor
from diffusionlm.training.signals import StopRequest
from diffusionlm.training.spike_guard import SpikeGuard
from profiling import nvtx

Perturbation = Callable[[int, NoisedBatch], AbstractContextManager[None]]
"""Called with the step, from 0, and a micro-batch; the context is that of its forward and backward."""


@dataclass
class TrainState:
    """The state that a step changes and a checkpoint stores."""

    model: Transformer
    parallel: Parallelism
    optimizers: Optimizers
    master_weights: MasterWeights
    """Float32 copies of bfloat16 weights; empty if all weights are float32."""
    ema: WeightAverage | None
    spike_guard: SpikeGuard
    perturbations: tuple[Perturbation, ...] = ()
    """Noise that only training has: dropout of adapters, noise on the mask token's embedding."""
    reference: Transformer | None = None
    """Frozen model that the loss compares with. None: it has none, or the trained model without its adapter, or as that
    was at the start, is the reference."""
    model_loss: ModelLoss | None = None
    """The loss, if its weights depend on the model. None: they are those of the noise."""


@dataclass(frozen=True)
class StepSettings:
    """The settings that are constant over all steps of a run."""

    objective: Objective
    device: torch.device
    precision: torch.dtype
    """Dtype of matrix products."""
    max_steps: int
    max_grad_norm: float
    schedule: LRScheduleConfig
    reads_metrics_each_step: bool
    """True on a CPU, which has computed them already; on a GPU reading them waits for the device."""


@dataclass(frozen=True)
class StepBatch:
    """This rank's micro-batches of a step, with totals over all ranks."""

    step: int
    """From 0."""
    loaded: LoadedStep
    loss_denominator: float
    """The sum of weighted losses is divided by it; 1.0 if no position was masked, so that the loss is zero."""
    num_target_tokens: int

    @property
    def noised_batches(self) -> list[NoisedBatch]:
        return self.loaded.noised_batches


class Prefetcher(StepLoader):
    """A loader that is one step ahead: it loads the next step while the device computes the current one.

    Batches are copied to a GPU through pinned memory: the host does not wait for the copies, which follow the work of
    the step. On a CPU nothing is copied.
    """

    def __init__(self, loader: StepLoader, device: torch.device) -> None:
        self.loader, self.device = loader, device
        self._prefetched: tuple[int, LoadedStep] | None = None

    def next_step(self, step: int) -> LoadedStep:
        self.prefetch(step)
        assert self._prefetched is not None
        (prefetched_step, loaded), self._prefetched = self._prefetched, None
        assert prefetched_step == step, "steps come in order"
        return loaded

    def prefetch(self, step: int) -> None:
        """Load the next step, unless it is loaded already, and start its copy to the device."""
        if self._prefetched is not None:
            return
        loaded = self.loader.next_step(step)
        if self.device.type == "cuda":
            copies = [noised_batch.pin_memory().to(self.device) for noised_batch in loaded.noised_batches]
            loaded = replace(loaded, noised_batches=copies)
        self._prefetched = step, loaded

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert self._prefetched is None, "a step was prefetched already"
        self.loader.load_state_dict(state)

    def close(self) -> None:
        self.loader.close()


def load_step_batch(loader: StepLoader, step: int, world: World, stop: StopRequest) -> StepBatch:
    """Load the batch of a step, from 0, and all-reduce the loss denominators, the number of target tokens and the stop
    flags, so that all ranks stop after the same step."""
    loaded, copies = loader.next_step(step), world.mesh.num_data_copies
    denominator, next_token_denominator, num_target_tokens, *stop_flags = world.sum(
        sum(batch.denominator for batch in loaded.noised_batches),
        sum(batch.next_token_denominator or 0.0 for batch in loaded.noised_batches),
        sum(batch.num_targets for batch in loaded.noised_batches),
        *stop.flags(),
    )
    stop.stop_for_any_rank(stop_flags)
    if next_token_denominator:  # the weights of all terms are divided by one denominator
        scale = (denominator or copies) / next_token_denominator
        loaded = replace(loaded, noised_batches=[batch.scale_next_tokens(scale) for batch in loaded.noised_batches])
    return StepBatch(step, loaded, denominator / copies or 1.0, round(num_target_tokens / copies))


def train_step(
    state: TrainState, loader: StepLoader, batch: StepBatch, settings: StepSettings, monitor: StepMonitor
) -> StepMetrics:
    """Make one optimizer step. A step with a spike or a loss or gradient that is not finite changes no weights."""
    loss, load_balancing_loss = backward_micro_batches(state, batch, settings, monitor)
    has_next_step, waits_for_device = batch.step + 1 < settings.max_steps, not state.optimizers.can_skip_on_device
    if has_next_step and waits_for_device:
        loader.prefetch(batch.step + 1)  # while the device computes
    with nvtx.annotate("optimizer"), state.master_weights.as_float32():
        grad_norm = state.parallel.clip(settings.max_grad_norm)
        is_accepted = state.spike_guard.is_accepted(loss, grad_norm)
        state.spike_guard.update_window(loss, grad_norm, is_accepted)
        apply_update(state, is_accepted, lr_factor(settings.schedule, batch.step, settings.max_steps), settings.device)
    if has_next_step and not waits_for_device:
        loader.prefetch(batch.step + 1)  # when the update is launched, so that the device has work
    return StepMetrics(batch.step + 1, loss, grad_norm, load_balancing_loss, is_accepted)


def backward_micro_batches(
    state: TrainState, batch: StepBatch, settings: StepSettings, monitor: StepMonitor
) -> tuple[Tensor, Tensor]:
    """Accumulate the gradients of all micro-batches. Returns the loss and the load-balancing loss over all ranks, 0-d.

    The load-balancing loss of a step is the mean over its micro-batches, which have one size. Unlike the loss it
    depends on the micro-batch size: each micro-batch counts for itself how often an expert was selected, over all ranks
    of a mesh, else on its rank.
    """
    num_micro_batches, world = len(batch.noised_batches), state.parallel.world
    context = world.mesh.context
    num_means = 1 if world.mesh.is_divided else world.size  # a mesh computes one mean over all ranks
    load_balancing_weight = state.model.config.router_aux_loss_coef / (num_micro_batches * num_means)
    weighed_losses = weigh_micro_batches(state, batch, settings)
    sums = torch.zeros(2, device=settings.device)  # one tensor, so that one all-reduce is enough
    loss, load_balancing_loss = sums
    for index, noised_batch in enumerate(batch.noised_batches):
        noised_batch, weighed = noised_batch.to(settings.device), weighed_losses[index] if weighed_losses else None
        own_batch = noised_batch
        if context.size > 1:
            own_batch = split_batch(noised_batch.on_host or noised_batch, context)
            if settings.device.type == "cuda":
                own_batch = own_batch.pin_memory().to(settings.device)
        if weighed is None:
            loss_inputs = settings.objective.build_loss_inputs(own_batch, batch.loss_denominator)
        else:
            loss_inputs = weighed.loss_inputs
        with ExitStack() as contexts:
            contexts.enter_context(state.parallel.backward(is_last=index == num_micro_batches - 1))
            for perturb in state.perturbations:
                contexts.enter_context(perturb(batch.step, noised_batch))
            with nvtx.annotate("forward"), autocast(settings):
                output = state.model(
                    own_batch.inputs_BS,
                    pattern=own_batch.pattern,
                    images=own_batch.images,
                    masked_BL=own_batch.masked_BS,
                    output_positions=own_batch.positions_N,
                    loss_inputs=replace(loss_inputs, load_balancing_weight=load_balancing_weight),
                )
            with nvtx.annotate("backward"):
                output.total_loss.backward()  # type: ignore[no-untyped-call]
        nll_N = output.nll_N
        if context.size > 1 and monitor.is_recording:
            nll_N = gather_losses(nll_N.detach(), noised_batch, context)
        monitor.add_micro_batch(noised_batch, nll_N)
        if weighed is not None and weighed.preferences is not None:
            monitor.add_preferences(weighed.preferences)
        if weighed is not None and weighed.observe is not None:
            weighed.observe(output.nll_N.detach())
        state.master_weights.accumulate_gradients()
        loss += output.loss_sum.detach() if weighed is None else weighed.loss
        if output.load_balancing_loss is not None:
            load_balancing_loss += output.load_balancing_loss.detach()
    world.all_reduce_on_device(sums)
    if world.mesh.tensor.size > 1:  # these ranks compute the same losses
        sums.div_(world.mesh.tensor.size)
    return loss, load_balancing_loss


def weigh_micro_batches(state: TrainState, batch: StepBatch, settings: StepSettings) -> list[WeighedLoss]:
    """Compute the losses of all micro-batches before the first backward, where they depend on the model; else none."""
    if state.model_loss is None:
        return []
    noised_batches = [noised_batch.to(settings.device) for noised_batch in batch.noised_batches]
    loss_inputs = [
        settings.objective.build_loss_inputs(noised_batch, batch.loss_denominator) for noised_batch in noised_batches
    ]
    measured = []
    for noised_batch, inputs in zip(noised_batches, loss_inputs, strict=True):
        with ExitStack() as contexts:
            for perturb in state.perturbations:
                contexts.enter_context(perturb(batch.step, noised_batch))
            with nvtx.annotate("reference"), autocast(settings):
                measured.append(state.model_loss.measure(state.model, noised_batch, inputs))
    world = state.parallel.world

    def all_reduce(values: Tensor) -> Tensor:
        """Sum over ranks with different sequences."""
        return world.all_reduce_on_device(values).div_(world.mesh.num_data_copies)

    return state.model_loss.weigh(noised_batches, loss_inputs, measured, batch.loss_denominator, all_reduce)


def autocast(settings: StepSettings) -> torch.autocast:
    """Matrix products in the run's precision."""
    is_enabled = settings.precision != torch.float32
    return torch.autocast(settings.device.type, dtype=settings.precision, enabled=is_enabled)


def apply_update(state: TrainState, is_accepted: Tensor, lr_factor: float, device: torch.device) -> None:
    """Update weights and their average if the step is accepted, and drop the gradients.

    A GPU decides without the host if the optimizers support it. Otherwise the host waits for ``is_accepted``.
    """
    skip = ~is_accepted if device.type != "cpu" and state.optimizers.can_skip_on_device else None
    if skip is not None or is_accepted:
        state.optimizers.step(lr_factor, skip)
    else:
        state.optimizers.zero_grad()
    state.parallel.start_weight_gather()
    if state.ema is not None and (skip is not None or is_accepted):
        state.parallel.wait_for_weights()
        state.ema.update(skip)
