"""Metrics of training steps: read from the device late, counted over the run, and related to the device's peak FLOPs.
Logged steps have extra ones: loss by masked fraction, weight and activation norms.

Shapes: B sequences, L tokens, S input positions, N output positions of the flat B * S, K bins of the masked fraction,
M metrics.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from config.model import ModelConfig
from config.training.logging import LoggingConfig
from ddp.parallelism import Parallelism, local_values
from diffusionlm.diffusion.layout import LogitAlignment, target_positions
from diffusionlm.diffusion.noised_batch import NoisedBatch
from diffusionlm.diffusion.preference import PreferenceResults
from diffusionlm.models.patterns import BlockDiffusion, Causal, document_offsets
from diffusionlm.models.tensors import copy_to_device
from diffusionlm.models.transformer import Transformer
from diffusionlm.optim.master_weights import MasterWeights
from profiling.flops import step_flops, tower_flops

LOSS_AVERAGE_DECAY, LOSS_AVERAGE_GAIN = 0.98, 0.02


class AsyncHostCopy:
    """Values on their way to the host: from a GPU they are copied asynchronously, through pinned memory."""

    def __init__(self, values: Tensor) -> None:
        self._values, self._event = values, None
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype).pin_memory()
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def read(self) -> list[float]:
        """Wait until the device has computed the values, which are one-dimensional, and return them. What was launched
        later is not waited for."""
        if self._event is not None:
            self._event.synchronize()
        numbers: list[float] = self._values.tolist()
        return numbers


def read_quotients(names: Sequence[str], copy: AsyncHostCopy) -> dict[str, float]:
    """Read numerators, then denominators, of metrics, and return those whose denominator is not zero.

    ``loss_answer`` is left out if no answer has padding. ``weight_norms/...`` and ``activation_norms/...``: see
    `summarize_norms`.
    """
    sums = copy.read()
    pairs = zip(names, sums[: len(names)], sums[len(names) :], strict=True)
    metrics = {name: numerator / denominator for name, numerator, denominator in pairs if denominator}
    if "loss_eos_padding" not in metrics:
        metrics.pop("loss_answer", None)
    return summarize_norms(metrics)


def summarize_norms(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics with the root of each sum of squares ``weight_norms/...``, and before the norms of each prefix their
    ``prefix/mean``, ``/min`` and ``/max``."""
    norms = {name: value for name, value in metrics.items() if "_norms/" in name}
    summary = {name: value for name, value in metrics.items() if name not in norms}
    for prefix in dict.fromkeys(name.partition("/")[0] for name in norms):
        values = {name: value for name, value in norms.items() if name.partition("/")[0] == prefix}
        if prefix == "weight_norms":
            values = {name: math.sqrt(square) for name, square in values.items()}
        numbers = values.values()
        summary |= {f"{prefix}/mean": sum(numbers) / len(numbers)}
        summary |= {f"{prefix}/min": min(numbers), f"{prefix}/max": max(numbers), **values}
    return summary


class StepMetrics:
    """The metrics of a step. A GPU may still be computing its results: asking for one of them waits for the step."""

    def __init__(
        self, step: int, loss: Tensor, grad_norm: Tensor, load_balancing_loss: Tensor, is_accepted: Tensor
    ) -> None:
        """``step``: from 1. The tensors are 0-d, on the device."""
        self.step = step
        self.tensors = (loss, grad_norm, load_balancing_loss, is_accepted)
        self.at_launch: dict[str, Any] = {}
        """Logged metrics that are known when the step is launched; empty if it is not logged."""
        self.peak_seconds: float | None = None
        """Seconds at the peak of the device: see `count_peak_seconds`."""
        self.read_monitor: Callable[[], dict[str, float]] | None = None
        """See `StepMonitor.read_results`."""

    @cached_property
    def _copy(self) -> AsyncHostCopy:
        loss, *others = self.tensors
        return AsyncHostCopy(torch.stack([loss, *(value.to(loss.dtype) for value in others)]))

    def start_copy(self) -> None:
        """Begin to copy the results to the host, before later steps are launched."""
        _ = self._copy

    def wait(self) -> None:
        """Wait for the device."""
        _ = self._results

    @cached_property
    def _results(self) -> list[float]:
        return self._copy.read()

    @property
    def loss(self) -> float:
        """Nats per target token, unless the objective divides by something else."""
        return self._results[0]

    @property
    def grad_norm(self) -> float:
        """L2 norm before clipping."""
        return self._results[1]

    @property
    def load_balancing_loss(self) -> float:
        """The routers' auxiliary loss with its weight. The gradient contains it, `loss` does not."""
        return self._results[2]

    @property
    def is_accepted(self) -> bool:
        """False if the step was skipped."""
        return bool(self._results[3])

    @property
    def is_finite(self) -> bool:
        """True if loss and gradient norm are finite. Otherwise the step is never accepted."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass
class TrainingProgress:
    """Counters of a run. The field names are keys of state.json."""

    step: int = 0
    tokens_seen: int = 0
    """Target tokens of all ranks."""
    seconds: float = 0.0
    """Duration of training steps, also of those before the run was resumed."""
    loss_average: float = 0.0
    """Exponential average of the loss of accepted steps, without bias correction."""
    skipped_in_a_row: int = 0
    skipped: int = 0

    def smooth_loss(self, last_step: int) -> float:
        """`loss_average` with bias correction; ``last_step`` is the last step that was counted."""
        return self.loss_average / (1.0 - LOSS_AVERAGE_DECAY ** max(1, last_step - self.skipped))

    def count(self, metrics: StepMetrics) -> None:
        """Update the loss average, or the numbers of skipped steps."""
        if metrics.is_accepted:
            self.skipped_in_a_row = 0
            self.loss_average = LOSS_AVERAGE_DECAY * self.loss_average + LOSS_AVERAGE_GAIN * metrics.loss
        else:
            self.skipped_in_a_row += 1
            self.skipped += 1


def compute_batch_flops(
    model: ModelConfig,
    noised_batch: NoisedBatch,
    active_factors: int | None = None,
    *,
    num_measuring_forwards: int = 0,
    trains_tower: bool = False,
) -> float:
    """FLOPs of a batch's forward and backward: only visible keys count, and in the last layer only output positions.
    They are counted on the host, from the batch that was copied to the device.

    ``active_factors``, ``num_measuring_forwards``: see `step_flops`. ``trains_tower``: the vision tower has a backward.
    """
    noised_batch = noised_batch.on_host or noised_batch
    layer_types = model.layer_types or ["full_attention"] * model.num_hidden_layers
    windows = [model.sliding_window if kind == "sliding_attention" else None for kind in layer_types]
    counts = {window: count_visible_keys(noised_batch, window) for window in dict.fromkeys(windows)}
    pairs = [int(counts[window].sum()) for window in windows[:-1]]
    last_counts = counts[windows[-1]]
    pairs.append(int(last_counts.flatten()[noised_batch.positions_N.to(last_counts.device)].sum()))
    grids = () if noised_batch.images is None else noised_batch.images.grids[noised_batch.images.num_stored :]
    flops = step_flops(
        model,
        model.vocab_size,
        positions=noised_batch.inputs_BS.numel(),
        scored=len(noised_batch.positions_N),
        pairs=pairs,
        active_factors=active_factors,
        num_measuring_forwards=num_measuring_forwards,
    )
    if grids:
        flops += tower_flops(model, grids, is_trained=trains_tower, num_measuring_forwards=num_measuring_forwards)
    return flops


def count_visible_keys(noised_batch: NoisedBatch, window: int | None) -> Tensor:
    """Number of keys that each input position attends to, [B, S], on the CPU."""
    shape = noised_batch.inputs_BS.shape
    intervals = noised_batch.pattern.to("cpu").intervals(shape[1], "cpu", window)
    if intervals is None:
        return noised_batch.pattern.dense_mask(shape[1], "cpu", window).sum(dim=-1).expand(shape)
    starts_BSR, ends_BSR = intervals
    return (ends_BSR - starts_BSR).sum(dim=-1).expand(shape)


NUM_LOSS_BINS = 5
"""Bins of equal width for the masked fraction: (0, 0.2], (0.2, 0.4] and so on."""

LOSS_METRICS = (
    "mask_ratio",
    *(f"loss_by_masked_fraction/{i / NUM_LOSS_BINS:g}-{(i + 1) / NUM_LOSS_BINS:g}" for i in range(NUM_LOSS_BINS)),
    "loss_answer",
    "loss_eos_padding",
    "loss_next_token",
    "preference_accuracy",
    "preference_margin",
    "preference_chosen_reward",
    "preference_rejected_reward",
)
"""``mask_ratio``: masked tokens per target token. ``loss_by_masked_fraction/0.2-0.4``: unweighted nats per masked token
where more than 0.2 and at most 0.4 of the sequence, or block, was masked. ``loss_answer``, ``loss_eos_padding``: the
loss of answers and of the padding after them, each divided by its own part of the denominator. ``loss_next_token``: the
auxiliary loss, without its weight. ``preference_accuracy``, ``preference_margin``: share of the pairs with a positive
margin, and its mean; ``preference_chosen_reward``, ``preference_rejected_reward``: mean rewards of chosen or desirable,
and of other answers (`PreferenceResults`)."""
BINS, PARTS, PREFERENCES = slice(1, 1 + NUM_LOSS_BINS), slice(1 + NUM_LOSS_BINS, 4 + NUM_LOSS_BINS), slice(-4, None)


@dataclass
class StepMonitor:
    """Computes the loss by masked fraction in logged steps, and norms every ``logging.norms_every_steps``.

    Each metric is the quotient of two sums over micro-batches and ranks, which the devices compute. The host reads them
    when the step is logged.
    """

    config: LoggingConfig
    max_steps: int
    model: Transformer
    parallel: Parallelism
    master_weights: MasterWeights
    _sums_2M: Tensor | None = None
    """Numerators and denominators of `LOSS_METRICS`, fp64. None: not a logged step."""
    read_results: Callable[[], dict[str, float]] | None = None
    """Waits for the metrics of the last step. None: it is not logged."""

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Context of the forwards, backwards and update of a step, from 1. All ranks enter it."""
        self._sums_2M, self.read_results = None, None
        every_steps, norms_every_steps = self.config.every_steps, self.config.norms_every_steps
        has_norms = norms_every_steps > 0 and step % norms_every_steps == 0
        if step % every_steps and step != self.max_steps and not has_norms:
            yield
            return
        device = self.model.model.norm.weight.device
        self._sums_2M = torch.zeros(2, len(LOSS_METRICS), dtype=torch.float64, device=device)
        norms: dict[str, Tensor] = {}
        with contextlib.ExitStack() as stack:
            if has_norms:
                norms |= stack.enter_context(record_activation_norms(self.model))
            yield
        self._sums_2M[0, 0].copy_(self._sums_2M[1, BINS].sum())  # masked tokens
        if has_norms:
            self.parallel.wait_for_weights()
            with self.master_weights.as_float32():
                norms |= sum_weight_squares(self.model, self.parallel)
        sums_2M = torch.cat([self._sums_2M, *norms.values()], dim=1) if norms else self._sums_2M
        self.parallel.world.all_reduce_on_device(sums_2M)
        self.read_results = partial(read_quotients, (*LOSS_METRICS, *norms), AsyncHostCopy(sums_2M.flatten()))

    @property
    def is_recording(self) -> bool:
        """True in a step whose losses are logged, on all ranks."""
        return self._sums_2M is not None

    def add_micro_batch(self, noised_batch: NoisedBatch, nll_N: Tensor) -> None:
        """Add the losses of a micro-batch, both on the device. Next-token prediction masks nothing and has no masked
        fractions."""
        if self._sums_2M is None:
            return
        for term in noised_batch.split_terms():
            if term.is_eos_padding_N is not None or term.is_auxiliary:
                self._sums_2M[:, PARTS].add_(sum_loss_parts(term, nll_N.detach()))
            if not (isinstance(term.pattern, Causal) or term.is_auxiliary):
                sums_2K = sum_losses_by_masked_fraction(term, nll_N.detach(), self.model.config.logit_alignment)
                self._sums_2M[:, BINS].add_(sums_2K)
                self._sums_2M[1, 0].add_(term.num_targets)

    def add_preferences(self, results: PreferenceResults) -> None:
        """Add the rewards of a micro-batch, on the device."""
        if self._sums_2M is not None:
            self._sums_2M[:, PREFERENCES].add_(results.sum_metrics())


def sum_loss_parts(noised_batch: NoisedBatch, nll_N: Tensor) -> Tensor:
    """Weighted negative log-likelihoods of answers, EOS padding and the auxiliary next-token loss, and their divisors,
    [2, 3], fp64, without a host sync."""
    loss_N, zero = noised_batch.weights_N * nll_N.double(), torch.zeros((), dtype=torch.float64, device=nll_N.device)
    if noised_batch.is_auxiliary:
        return torch.stack([zero, zero, loss_N.sum(), zero, zero, noised_batch.weights_N.sum()]).view(2, 3)
    assert noised_batch.is_eos_padding_N is not None
    eos_padding_loss, num_eos_padding = (
        (loss_N * noised_batch.is_eos_padding_N).sum(),
        zero + noised_batch.eos_padding_denominator,
    )
    answer_loss, num_answer = loss_N.sum() - eos_padding_loss, noised_batch.denominator - num_eos_padding
    return torch.stack([answer_loss, eos_padding_loss, zero, num_answer, num_eos_padding, zero]).view(2, 3)


def sum_losses_by_masked_fraction(noised_batch: NoisedBatch, nll_N: Tensor, alignment: LogitAlignment) -> Tensor:
    """Sum negative log-likelihoods and count masked tokens by the masked fraction of their sequence or block.

    The fraction is over target tokens: padding and prompts do not count. Returns [2, K], fp64, without a host sync.
    """
    B, S = noised_batch.inputs_BS.shape
    L = S // noised_batch.pattern.positions_per_token
    group_BL = _noise_group_starts(noised_batch, B, L)
    group_N = group_BL[target_positions(noised_batch, alignment)]
    is_masked_N = (noised_batch.weights_N != 0.0).double()  # others are filler positions
    zeros_BL = torch.zeros(B * L, dtype=torch.float64, device=nll_N.device)
    num_masked_BL = zeros_BL.index_add(0, group_N, is_masked_N)
    is_target_BL = torch.ones_like(zeros_BL)
    if noised_batch.loss_mask_BL is not None:
        is_target_BL = copy_to_device(noised_batch.loss_mask_BL, zeros_BL.device).flatten().to(zeros_BL.dtype)
    num_targets_BL = zeros_BL.index_add(0, group_BL, is_target_BL)
    fraction_N = num_masked_BL[group_N] / num_targets_BL[group_N]
    bin_N = ((fraction_N * NUM_LOSS_BINS - 1e-9).ceil().long() - 1).clamp(0, NUM_LOSS_BINS - 1)
    nll_N = torch.where(is_masked_N > 0, nll_N.double(), 0.0)
    values_2N = torch.stack([nll_N, is_masked_N])
    return torch.zeros(2, NUM_LOSS_BINS, dtype=torch.float64, device=nll_N.device).index_add(1, bin_N, values_2N)


def _noise_group_starts(noised_batch: NoisedBatch, B: int, L: int) -> Tensor:
    """First position of the sequence, segment or block that each position belongs to; flat indices, [B * L]."""
    device = noised_batch.positions_N.device
    position_BL = torch.arange(B * L, device=device)
    row_starts_BL = position_BL - position_BL % L
    if isinstance(noised_batch.pattern, BlockDiffusion):
        starts_BL, _ = noised_batch.pattern.block_bounds(L, device)
    elif noised_batch.segment_BL is not None:
        starts_BL = torch.arange(L)[None] - document_offsets(noised_batch.segment_BL)
        starts_BL = copy_to_device(starts_BL, device)
    else:
        return row_starts_BL
    return row_starts_BL + starts_BL.expand(B, L).flatten()


@contextlib.contextmanager
def record_activation_norms(model: Transformer) -> Iterator[dict[str, Tensor]]:
    """Context whose forwards are recorded by hooks: the L2 norms of the output vectors of the embedding, the blocks and
    the last norm, over all positions that they compute. The last block and the norm compute output positions only.

    Yields ``activation_norms/<module>`` -> the sum of the norms and their number, [2, 1], fp64.
    """
    blocks = {f"layers.{index}": block for index, block in enumerate(model.model.layers)}
    modules: dict[str, nn.Module] = {"embed_tokens": model.model.embed_tokens, **blocks, "norm": model.model.norm}
    device = model.model.norm.weight.device
    sums = {f"activation_norms/{name}": torch.zeros(2, 1, dtype=torch.float64, device=device) for name in modules}

    @torch.no_grad()
    def add_output(sums_21: Tensor, output: Tensor) -> None:
        norms = torch.linalg.vector_norm(output.detach(), dim=-1, dtype=torch.float32)
        sums_21[0] += norms.sum(dtype=torch.float64)
        sums_21[1] += norms.numel()

    def create_hook(sums_21: Tensor) -> Callable[[nn.Module, Any, Tensor], None]:
        return lambda module, inputs, output: add_output(sums_21, output)

    with contextlib.ExitStack() as stack:
        for module, sums_21 in zip(modules.values(), sums.values(), strict=True):
            stack.callback(module.register_forward_hook(create_hook(sums_21)).remove)
        yield sums


@torch.no_grad()
def sum_weight_squares(model: Transformer, parallel: Parallelism) -> dict[str, Tensor]:
    """``weight_norms/<parameter>`` -> this rank's part of the squared L2 norm, and 1 on the first rank, [2, 1], fp64.

    A tied parameter is counted once; of one that several ranks have, each adds its share.
    """
    sums, parameters = {}, dict(model.named_parameters())
    device = model.model.norm.weight.device
    for name in parallel.whole_shapes:
        square = torch.zeros((), dtype=torch.float64, device=device)
        if name in parameters:  # other experts are on other ranks
            values = local_values(parameters[name])
            square += torch.linalg.vector_norm(values, dtype=torch.float32).double().square()
            square /= parallel.count_copies(name)
        count = torch.full_like(square, float(parallel.world.is_first))
        sums[f"weight_norms/{name}"] = torch.stack([square, count])[:, None]
    return sums
