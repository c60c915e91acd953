"""What is looked at in the steps that are logged, and costs the others nothing.

Shapes: B rows, L tokens of a row, S positions that the model reads, R scored of the flat B * S, K shares.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from config.logging import LoggingConfig
from ddp.parallelism import Parallelism
from diffusionlm.diffusion.layout import LogitAlignment, target_positions
from diffusionlm.diffusion.noised_batch import NoisedBatch
from diffusionlm.models.patterns import BlockDiffusion, Causal, document_offsets
from diffusionlm.models.transformer import Transformer
from diffusionlm.optim.master_weights import MasterWeights
from diffusionlm.training.norms import ActivationNorms, NormsByName, compute_weight_norms, summarize_norms

NUM_LOSS_BINS = 5
"""Parts of equal width that masked shares are sorted into: (0, 0.2], (0.2, 0.4] and so on."""


@dataclass
class StepMonitor:
    """Looks at some steps more closely: the loss by the share that was masked at each that is logged, norms on request.

    Sums over ranks are made on the devices; the host reads them when the step is logged.
    """

    config: LoggingConfig
    max_steps: int
    model: Transformer
    parallel: Parallelism
    master_weights: MasterWeights
    _sums: Tensor | None = None
    """Of negative log-likelihoods by share; of masked tokens by share; of target tokens. [2 K + 1]; None: this step is
    not looked at."""
    _activations: NormsByName = field(default_factory=dict)
    _weights: NormsByName = field(default_factory=dict)

    def should_record_norms(self, step: int) -> bool:
        """Whether norms are looked at in a step, from 1."""
        every = self.config.norms_every_steps
        return every > 0 and step % every == 0

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around forwards, backwards and update of a step, from 1; all ranks make it."""
        self._sums, self._activations, self._weights = None, {}, {}
        should_record_norms = self.should_record_norms(step)
        if step % self.config.every_steps and step != self.max_steps and not should_record_norms:
            yield
            return
        self._sums = torch.zeros(2 * NUM_LOSS_BINS + 1, dtype=torch.float64, device=self.model.model.norm.weight.device)
        activations = ActivationNorms(self.model) if should_record_norms else None
        with activations.record_forwards() if activations is not None else contextlib.nullcontext():
            yield
        self.parallel.world.all_reduce_on_device(self._sums)
        if activations is not None:
            self._activations = activations.result(self.parallel.world)
            self.parallel.wait_for_weights()
            with self.master_weights.as_float32():
                self._weights = compute_weight_norms(self.model, self.parallel.world)

    def scored(self, noised_batch: NoisedBatch, nll_N: Tensor) -> None:
        """A micro-batch of the step, on the device, and the negative log-likelihoods of its rows.

        In next-token prediction nothing is masked, so nothing is looked at.
        """
        if self._sums is None or isinstance(noised_batch.pattern, Causal):
            return
        sums = sum_losses_by_masked_fraction(noised_batch, nll_N.detach(), self.model.config.logit_alignment)
        self._sums[:-1] += sums.flatten()
        self._sums[-1] += noised_batch.num_targets

    def metrics(self) -> dict[str, float]:
        """What was seen of the step; waits for the device.

        ``mask_ratio``: masked tokens for each target token; ``loss_by_masked_fraction/0.2-0.4``: nats per masked token
        where more than 0.2 and at most 0.4 of the row, or of the block, was masked, without weights, and left out
        where there is none; ``weight_norms/...`` and ``activation_norms/...``.
        """
        if self._sums is None:
            return {}
        sums = self._sums.tolist()
        nll_K, count_K, targets = sums[:NUM_LOSS_BINS], sums[NUM_LOSS_BINS:-1], sums[-1]
        values = {"mask_ratio": sum(count_K) / targets} if targets else {}
        for index, (nll, count) in enumerate(zip(nll_K, count_K, strict=True)):
            if count:
                values[f"loss_by_masked_fraction/{index / NUM_LOSS_BINS:g}-{(index + 1) / NUM_LOSS_BINS:g}"] = (
                    nll / count
                )
        for kind, named in (("weight_norms", self._weights), ("activation_norms", self._activations)):
            values |= summarize_norms(kind, named) if named else {}
        return values


def sum_losses_by_masked_fraction(noised_batch: NoisedBatch, nll_N: Tensor, alignment: LogitAlignment) -> Tensor:
    """Negative log-likelihoods and numbers of masked tokens by the share that was masked of the targets of their row,
    or of their block where there are blocks: not of padding and prompts. [2, K], fp64. Nothing waits for the device."""
    B, L = noised_batch.inputs_BS.shape[0], noised_batch.inputs_BS.shape[1] // noised_batch.pattern.positions_per_token
    first_N = _noise_group_starts(noised_batch, B, L)
    first_R = first_N[target_positions(noised_batch, alignment)]
    is_scored_R = (noised_batch.weights_N != 0.0).double()  # the others only fill up
    zeros_N = torch.zeros(B * L, dtype=torch.float64, device=nll_N.device)
    masked_N = zeros_N.index_add(0, first_R, is_scored_R)
    is_target_N = torch.ones_like(zeros_N)
    if noised_batch.loss_mask_BL is not None:
        is_target_N = noised_batch.loss_mask_BL.flatten().to(zeros_N.device, zeros_N.dtype, non_blocking=True)
    places_N = zeros_N.index_add(0, first_N, is_target_N)
    share_R = masked_N[first_R] / places_N[first_R]
    part_R = ((share_R * NUM_LOSS_BINS - 1e-9).ceil().long() - 1).clamp(0, NUM_LOSS_BINS - 1)
    nll_N = torch.where(is_scored_R > 0, nll_N.double(), 0.0)
    both_2R = torch.stack([nll_N, is_scored_R])
    return torch.zeros(2, NUM_LOSS_BINS, dtype=torch.float64, device=nll_N.device).index_add(1, part_R, both_2R)


def _noise_group_starts(noised_batch: NoisedBatch, B: int, L: int) -> Tensor:
    """The first place of each place's row, or block, both counted over the batch. [B * L]"""
    device = noised_batch.positions_N.device
    place_N = torch.arange(B * L, device=device)
    pattern = noised_batch.pattern
    if not isinstance(pattern, BlockDiffusion):
        return place_N - place_N % L
    documents_BL = pattern.documents_BL
    offset_N = place_N % L if documents_BL is None else document_offsets(documents_BL).to(device).expand(B, L).flatten()
    return place_N - offset_N % pattern.block_length
