"""Extra metrics of logged steps: loss by masked fraction, weight and activation norms. Other steps pay nothing.

Shapes: B sequences, L tokens, S input positions, N output positions of the flat B * S, K bins of the masked fraction,
M modules.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from config.training.logging import LoggingConfig
from ddp.parallelism import Parallelism, local_values
from ddp.process_group import World
from diffusionlm.diffusion.layout import LogitAlignment, target_positions
from diffusionlm.diffusion.noised_batch import NoisedBatch
from diffusionlm.models.patterns import BlockDiffusion, Causal, document_offsets
from diffusionlm.models.tensors import copy_to_device
from diffusionlm.models.transformer import Transformer
from diffusionlm.optim.master_weights import MasterWeights
from diffusionlm.training.metrics import NUM_LOSS_BINS, AsyncHostCopy, MonitorResults

NormsByName = dict[str, Tensor]
"""Norms over all ranks, 0-d on the device."""


@dataclass
class StepMonitor:
    """Computes the loss by masked fraction in logged steps, and norms every ``logging.norms_every_steps``.

    Sums over ranks are computed on the devices. The host reads them when the step is logged.
    """

    config: LoggingConfig
    max_steps: int
    model: Transformer
    parallel: Parallelism
    master_weights: MasterWeights
    _sums: Tensor | None = None
    """[2 K + 1], fp64: negative log-likelihoods by bin, masked tokens by bin, target tokens. None: not a logged
    step."""
    _part_sums: Tensor | None = None
    """[2, 3], fp64: see `sum_loss_parts`. None: not a logged step."""
    _pair_sums: Tensor | None = None
    """[3], fp64: preferences, those with a positive margin, sum of the margins. None: not a logged step."""
    results: MonitorResults | None = None
    """Of the last step. None: it is not logged."""

    def should_record_norms(self, step: int) -> bool:
        """Return whether norms are recorded in a step; steps count from 1."""
        every = self.config.norms_every_steps
        return every > 0 and step % every == 0

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Context of the forwards, backwards and update of a step, from 1. All ranks enter it."""
        self._sums, self._part_sums, self._pair_sums, self.results = None, None, None, None
        should_record_norms = self.should_record_norms(step)
        if step % self.config.every_steps and step != self.max_steps and not should_record_norms:
            yield
            return
        device = self.model.model.norm.weight.device
        sums = torch.zeros(2 * NUM_LOSS_BINS + 1 + 6 + 3, dtype=torch.float64, device=device)
        self._sums, part_sums, self._pair_sums = torch.split(sums, [2 * NUM_LOSS_BINS + 1, 6, 3])
        self._part_sums = part_sums.view(2, 3)
        activations = ActivationNorms(self.model) if should_record_norms else None
        with activations.record_forwards() if activations is not None else contextlib.nullcontext():
            yield
        self.parallel.world.all_reduce_on_device(sums)
        norms: NormsByName = {}
        if activations is not None:
            self.parallel.wait_for_weights()
            with self.master_weights.as_float32():
                weight_norms = compute_weight_norms(self.model, self.parallel.world)
            norms |= {f"weight_norms/{name}": norm for name, norm in weight_norms.items()}
            activation_norms = activations.result(self.parallel.world)
            norms |= {f"activation_norms/{name}": norm for name, norm in activation_norms.items()}
        values = torch.cat([sums, torch.stack(list(norms.values()))]) if norms else sums
        self.results = MonitorResults(AsyncHostCopy(values), tuple(norms))

    def add_micro_batch(self, noised_batch: NoisedBatch, nll_N: Tensor) -> None:
        """Add the losses of a micro-batch, both on the device. Next-token prediction masks nothing and has no masked
        fractions."""
        if self._part_sums is not None and (noised_batch.is_eos_padding_N is not None or noised_batch.is_auxiliary):
            self._part_sums += sum_loss_parts(noised_batch, nll_N.detach())
        if self._sums is None or isinstance(noised_batch.pattern, Causal):
            return
        sums_2K = sum_losses_by_masked_fraction(noised_batch, nll_N.detach(), self.model.config.logit_alignment)
        self._sums[:-1] += sums_2K.flatten()
        self._sums[-1] += noised_batch.num_targets

    def add_pairs(self, margins_P: Tensor) -> None:
        """Add the margins of the preferences of a micro-batch, on the device."""
        if self._pair_sums is not None:
            values_3P = torch.stack([torch.ones_like(margins_P), (margins_P > 0).double(), margins_P])
            self._pair_sums += values_3P.sum(dim=1)


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


class ActivationNorms:
    """Mean L2 norms of the output vectors of the embedding, the blocks and the last norm, over all positions that they
    compute. The last block and the norm compute output positions only."""

    def __init__(self, model: Transformer) -> None:
        blocks = {f"layers.{index}": block for index, block in enumerate(model.model.layers)}
        self.modules: dict[str, nn.Module] = {
            "embed_tokens": model.model.embed_tokens,
            **blocks,
            "norm": model.model.norm,
        }
        device = model.model.norm.weight.device
        self._sums_M2 = torch.zeros(len(self.modules), 2, dtype=torch.float64, device=device)

    @contextlib.contextmanager
    def record_forwards(self) -> Iterator[None]:
        """Record forwards inside by hooks, which are removed afterwards."""
        with contextlib.ExitStack() as stack:
            for index, module in enumerate(self.modules.values()):
                handle = module.register_forward_hook(self._create_hook(index))
                stack.callback(handle.remove)
            yield

    def result(self, world: World) -> NormsByName:
        """Mean norms over all ranks, without a host sync."""
        world.all_reduce_on_device(self._sums_M2)
        means_M = self._sums_M2[:, 0] / self._sums_M2[:, 1].clamp(min=1.0)
        return dict(zip(self.modules, means_M, strict=True))

    def _create_hook(self, index: int) -> Callable[[nn.Module, Any, Tensor], None]:
        @torch.no_grad()
        def add_output(module: nn.Module, inputs: Any, output: Tensor) -> None:
            norms = torch.linalg.vector_norm(output.detach(), dim=-1, dtype=torch.float32)
            self._sums_M2[index, 0] += norms.sum(dtype=torch.float64)
            self._sums_M2[index, 1] += norms.numel()

        return add_output


@torch.no_grad()
def compute_weight_norms(model: Transformer, world: World) -> NormsByName:
    """L2 norm of every parameter, a tied one once. All ranks call this; there is no host sync.

    A replicated parameter is counted on the first rank only. Of a sharded one every rank adds its rows.
    """
    squares = []
    for parameter in model.parameters():
        is_sharded = hasattr(parameter, "to_local")
        square = torch.linalg.vector_norm(local_values(parameter), dtype=torch.float32).double().square()
        squares.append(square if is_sharded or world.is_first else torch.zeros_like(square))
    norms = world.all_reduce_on_device(torch.stack(squares)).sqrt()
    return dict(zip((name for name, _ in model.named_parameters()), norms, strict=True))
