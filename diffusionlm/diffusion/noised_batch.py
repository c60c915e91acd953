"""Rows of tokens before noise, and what chance made of them.

Shapes: B rows, L tokens, S positions that the model reads (L, or 2 L of two streams), R scored of the flat B * S.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from diffusionlm.models.patterns import AttentionPattern


@dataclass(frozen=True)
class CleanBatch:
    """Clean rows, on the CPU."""

    tokens_BL: Tensor
    """Token ids, int64."""
    loss_mask_BL: Tensor
    """May be noised and scored; false for prompts and padding."""
    document_BL: Tensor | None = None
    """Document number of each position, for packing. None: one document a row."""

    def select(self, sequences: slice) -> CleanBatch:
        """The batch of a slice of the sequences."""
        documents = None if self.document_BL is None else self.document_BL[sequences]
        return CleanBatch(self.tokens_BL[sequences], self.loss_mask_BL[sequences], documents)


@dataclass(frozen=True)
class NoiseKey:
    """Chance is a function of this and of the row's place in the step: never of rank, micro-batch or worker."""

    seed: int
    step: int
    first_sequence: int
    """Place of the batch's first row among the rows of the optimizer step, over all ranks and micro-batches."""
    num_sequences_in_step: int
    """All rows of the optimizer step."""


@dataclass(frozen=True)
class NoisedBatch:
    """Everything that chance decided for a batch, ready for one forward."""

    inputs_BS: Tensor
    """What the model reads: noised tokens, S = L; of two streams ``[xt | x0]``, S = 2 L; or, to predict the next
    token, clean ones."""
    pattern: AttentionPattern
    """Who sees whom."""
    positions_N: Tensor
    """Scored outputs, flat indices into B * S, ascending."""
    targets_N: Tensor
    """The clean token that each of them predicts."""
    weights_N: Tensor
    """Factors of their negative log-likelihoods, fp64."""
    num_targets: int
    """Target tokens of the batch."""
    denominator: float
    """This batch's part of what the weighted sum of the step is divided by: target tokens, rows or masked tokens, as
    the objective says."""
    loss_mask_BL: Tensor | None = None
    """Which tokens of the rows might have been scored, on the CPU; None: all."""

    def to(self, device: torch.device) -> NoisedBatch:
        """The same on another device."""
        if device.type == "cpu":
            return self
        return replace(
            self,
            inputs_BS=self.inputs_BS.to(device, non_blocking=True),
            pattern=self.pattern.to(device),
            positions_N=self.positions_N.to(device, non_blocking=True),
            targets_N=self.targets_N.to(device, non_blocking=True),
            weights_N=self.weights_N.to(device, non_blocking=True),
        )
