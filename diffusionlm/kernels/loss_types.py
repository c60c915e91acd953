"""Inputs, outputs and options of the fused loss.

Shapes: N positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

LossBackend = Literal["auto", "eager", "triton"]
"""``eager``: PyTorch operators. ``triton``: one kernel. ``auto``: see `select_loss_backend`."""


@dataclass(frozen=True)
class LossInputs:
    """Targets, weights and options of the loss at N positions.

    The weights are known before the forward, so the gradient is computed in it. Positions that only pad a bucket have
    weight 0.
    """

    targets_N: Tensor
    """Target token of each position, int64."""
    weights_N: Tensor
    """Factor of each position's loss in the sum; the loss denominator may be folded in."""
    excluded_token: int | None = None
    """Token of probability zero, such as the mask token (SUBS, Sahoo et al. 2024). None: plain softmax."""
    label_smoothing: float = 0.0
    """Share of the target distribution that is uniform over all tokens but the excluded one (Szegedy et al. 2016)."""
    z_loss: float = 0.0
    """Factor of the squared log of the softmax denominator, added to the loss (PaLM, Chowdhery et al. 2022)."""
    load_balancing_weight: float = 0.0
    """Factor of the routers' load-balancing loss, in a model with experts. 0: it is not computed."""


@dataclass(frozen=True)
class HeadRows:
    """Trained rows of a frozen head."""

    indices_K: Tensor
    """Tokens of the rows, int64, distinct."""
    rows_KD: Tensor
    """Values that replace those of the head, with gradient."""


@dataclass(frozen=True)
class LossOutput:
    """Result of a forward with `LossInputs`: sums, never means."""

    loss_sum: Tensor
    """Weighted sum of the losses (cross-entropy with label smoothing and z-loss), at least fp32, with gradient."""
    nll_N: Tensor
    """Negative log-likelihood of each target in nats, at least fp32, without gradient."""
    load_balancing_loss: Tensor | None = None
    """Weighted load-balancing loss, at least fp32, with gradient; not part of ``loss_sum``. None: not requested, or
    the model has no experts."""

    @property
    def total_loss(self) -> Tensor:
        """The quantity that training minimizes."""
        return self.loss_sum if self.load_balancing_loss is None else self.loss_sum + self.load_balancing_loss


@dataclass(frozen=True)
class LossOptions:
    """Everything about the loss that is not a tensor."""

    excluded_token: int | None
    label_smoothing: float
    z_loss: float
    softcap: float | None
    """Logits z are replaced by ``softcap * tanh(z / softcap)`` first (Gemma 2). None: no cap."""
    dtype: torch.dtype
    """Dtype of the matrix products."""
    backend: LossBackend

    @property
    def accumulation_dtype(self) -> torch.dtype:
        """Dtype of softmax, loss and head gradient: at least fp32."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def is_unregularized(self) -> bool:
        """True if the loss is the negative log-likelihood itself."""
        return self.label_smoothing == self.z_loss == 0.0

    def smoothing_per_token(self, vocab_size: int) -> float:
        """Target probability that label smoothing gives each token but the excluded one."""
        if self.label_smoothing == 0.0:
            return 0.0
        return self.label_smoothing / (vocab_size - (self.excluded_token is not None))
