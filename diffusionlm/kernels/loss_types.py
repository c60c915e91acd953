"""What is asked of the head and the loss, and what comes back.

Shapes: R rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LossInputs:
    """What the model is asked to score, row for row.

    Weights are known before the forward, so the gradient is made in it, exactly. Rows that only fill a bucket have
    weight 0.
    """

    targets_N: Tensor
    """The right token of each row, int64."""
    weights_N: Tensor
    """Factor of each row's loss in the sum; the denominator may be folded in."""
    excluded_token: int | None = None
    """A token of probability zero, as the mask token is (SUBS, Sahoo et al. 2024); None: the plain softmax."""
    label_smoothing: float = 0.0
    """Share of the target distribution that is uniform over all tokens but the excluded one (Szegedy et al. 2016)."""
    z_loss: float = 0.0
    """Factor of the squared log of the softmax's denominator, added to the loss (Chowdhery et al. 2022, PaLM)."""
    load_balancing_weight: float = 0.0
    """Factor of the routers' balance loss of this forward, in a model with experts; 0: it is not made."""


@dataclass(frozen=True)
class LossOutput:
    """What a scored forward returns: sums, never means."""

    loss_sum: Tensor
    """Weighted sum of the rows' losses, at least fp32, with gradient: negative log-likelihoods, smoothed and with a
    z-loss where the score says so."""
    nll_N: Tensor
    """Negative log-likelihood of each row in nats, at least fp32, without gradient."""
    load_balancing_loss: Tensor | None = None
    """Weighted balance loss of the routers, at least fp32, with gradient; beside ``loss_sum``, never in it. None: none
    was asked for, or the model has no experts."""
    logsumexp_N: Tensor | None = None
    """Log of each row's softmax denominator, without the excluded token, at least fp32, without gradient. None: what
    scored does not tell."""
    is_hit_N: Tensor | None = None
    """Whether the likeliest token of the row, the excluded one left out and the lowest id among equals, is the target,
    bool. None: what scored does not tell."""

    @property
    def total_loss(self) -> Tensor:
        """All that training minimises."""
        return self.loss_sum if self.load_balancing_loss is None else self.loss_sum + self.load_balancing_loss


@dataclass(frozen=True)
class LossOptions:
    """How the logits of a row become its loss; the fields are those of `LossInputs`."""

    excluded_token: int | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    """Logits z are taken as ``softcap * tanh(z / softcap)`` before all else (Gemma 2). None: as they are."""

    @property
    def is_unregularized(self) -> bool:
        """Whether the loss is the negative log-likelihood itself."""
        return self.label_smoothing == self.z_loss == 0.0

    def smoothing_per_token(self, vocab_size: int) -> float:
        """What the uniform part of the target distribution gives each token but the excluded one."""
        if self.label_smoothing == 0.0:
            return 0.0
        return self.label_smoothing / (vocab_size - (self.excluded_token is not None))


@dataclass(frozen=True)
class RowScores:
    """What becomes known of each row: buffers that a backend fills, at least fp32."""

    nll_N: Tensor
    loss_R: Tensor
    """The same buffer as ``nll_N`` where the rule is plain."""
    logsumexp_N: Tensor
    is_hit_N: Tensor

    def part(self, rows: slice) -> RowScores:
        """Views of some rows."""
        return RowScores(self.nll_N[rows], self.loss_R[rows], self.logsumexp_N[rows], self.is_hit_N[rows])
