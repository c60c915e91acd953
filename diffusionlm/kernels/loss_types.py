"""Inputs, outputs and options of the fused loss.

Shapes: N positions.
"""

from __future__ import annotations

from collections.abc import Callable
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
class VocabularyShard:
    """The rows of an embedding or a head that this rank has: those of consecutive tokens, and zeros behind them.

    All ranks have equally many rows.
    """

    first_token: int
    num_tokens: int
    """Rows of tokens; those behind them are padding."""
    vocab_size: int
    """Tokens of all ranks."""
    all_reduce_max: Callable[[Tensor], object]
    """Replaces a tensor by its maximum over the ranks, in place."""
    all_reduce_sum: Callable[[Tensor], object]
    """Replaces a tensor by its sum over the ranks, in place."""
    all_gather: Callable[[Tensor], Tensor]
    """The tensors of all ranks, stacked in their order."""

    def find_rows(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's row of each token, and whether it has one.

        A token of another rank gets row 0. One outside the vocabulary gets row -1 on all ranks, so that each of them
        raises an error.
        """
        rows = tokens - self.first_token
        is_own = (rows >= 0) & (rows < self.num_tokens)
        is_valid = (tokens >= 0) & (tokens < self.vocab_size)
        return torch.where(is_own, rows, is_valid.long() - 1), is_own


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
    shard: VocabularyShard | None = None
    """Rows of the head. None: all."""

    @property
    def excluded_row(self) -> int | None:
        """Row of the excluded token in the head. None: there is none, or another rank has it."""
        if self.shard is None or self.excluded_token is None:
            return self.excluded_token
        row = self.excluded_token - self.shard.first_token
        return row if 0 <= row < self.shard.num_tokens else None

    @property
    def accumulation_dtype(self) -> torch.dtype:
        """Dtype of softmax, loss and head gradient: at least fp32."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def is_unregularized(self) -> bool:
        """True if the loss is the negative log-likelihood itself."""
        return self.label_smoothing == self.z_loss == 0.0

    def num_smoothed_tokens(self, num_rows: int) -> int:
        """Tokens that share the smoothed probability, of a head with so many rows on this rank."""
        vocab_size = num_rows if self.shard is None else self.shard.vocab_size
        return vocab_size - (self.excluded_token is not None)

    def smoothing_per_token(self, num_rows: int) -> float:
        """Target probability that label smoothing gives each token but the excluded one."""
        if self.label_smoothing == 0.0:
            return 0.0
        return self.label_smoothing / self.num_smoothed_tokens(num_rows)
