"""Rows of tokens before noise, and what chance made of them.

Shapes: B rows, L positions, R scored positions of the flat B * L.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diffusionlm.models.patterns import AttentionPattern


@dataclass(frozen=True)
class Batch:
    """Clean rows, on the CPU."""

    tokens_BL: Tensor
    """Token ids, int64."""
    is_target_BL: Tensor
    """May be noised and scored; false for prompts and padding."""
    document_BL: Tensor | None = None
    """Document number of each position, for packing. None: one document a row."""


@dataclass(frozen=True)
class DrawKey:
    """Chance is a function of this and of the row's place in the step: never of rank, micro-batch or worker."""

    seed: int
    step: int
    first_row: int
    """Place of the batch's first row among the rows of the optimizer step, over all ranks and micro-batches."""
    rows_in_step: int
    """All rows of the optimizer step."""


@dataclass(frozen=True)
class Draw:
    """Everything that chance decided for a batch, ready for one forward."""

    inputs_BL: Tensor
    """Noised tokens."""
    pattern: AttentionPattern
    """Who sees whom."""
    rows_R: Tensor
    """Scored positions, flat indices, ascending."""
    targets_R: Tensor
    """Clean tokens at these positions."""
    weights_R: Tensor
    """Factors of their negative log-likelihoods, fp32."""
    num_targets: int
    """Target tokens of the batch: what the weighted sum is divided by, summed over the step."""

    def to(self, device: torch.device) -> Draw:
        """The same on another device."""
        if device.type == "cpu":
            return self
        documents = self.pattern.documents_BL
        return Draw(
            inputs_BL=self.inputs_BL.to(device, non_blocking=True),
            pattern=self.pattern if documents is None else self.pattern.with_documents(documents.to(device)),
            rows_R=self.rows_R.to(device, non_blocking=True),
            targets_R=self.targets_R.to(device, non_blocking=True),
            weights_R=self.weights_R.to(device, non_blocking=True),
            num_targets=self.num_targets,
        )
