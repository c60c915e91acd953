"""Speculation of a request: what a forward verifies, and what it drafts.

Committed text is token-causal, so a row of it predicts the next token exactly. A *verified* position is predicted by
the row before it, a committed token or a draft; a *drafted* position by a noisy block of masks. With ``two_forwards``
(Nemotron-Labs-Diffusion) a forward drafts by ``[last token, masks]``, or verifies by ``[last token, drafts]``. With
``one_forward`` (introspective strided decoding, I-DLM, arXiv 2604.11035) it verifies and drafts by ``[last token,
drafts, masks]``; the new drafts continue a text in which all earlier ones are right, so they are dropped if one was
wrong. ``auto`` is the latter with numbers of drafts that a `DraftPolicy` chooses.

A token is committed only if it was predicted after committed text. With ``acceptance = "keyed"`` tokens of both kinds
are sampled with the same random number for a position, so the text does not depend on the drafts ("drafter-invariant",
arXiv 2408.07978). With ``rejection`` a verified token is the draft itself or a sample of the residual distribution
(`sampling.rejection`), so drafts are kept with the probabilities that they were sampled from.

Keys and values of drafts and masks that do not become text are written again, by the forward that reads their
positions next.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from diffusionlm.inference.settings import DecodingSettings
from diffusionlm.inference.speculation.adaptive import DraftPolicy


class SpeculationState:
    """Drafted tokens of a request, and the plan of its next forward.

    Shapes: V verified positions, D drafted ones, both consecutive and V first; N = V + D; L positions of the text.
    """

    start = 0
    """First position without a committed token."""
    num_verified = 0
    """V: the drafts and the token behind them; 0: the forward only drafts."""
    num_drafted = 0
    """D; 0: the forward only verifies."""
    policy: DraftPolicy | None = None
    """Chooses D after the first forward. None: D is as large as possible."""

    def __init__(self, settings: DecodingSettings) -> None:
        assert settings.config.draft_length is not None
        self._is_fused, self._max_length = settings.config.speculation != "two_forwards", settings.config.draft_length
        self._noisy_shift = settings.noisy_output_shift
        self.tokens: NDArray[np.int64] = np.zeros(0, np.int64)
        """Drafts of the positions from ``start`` on."""
        self.probs: Sequence[Tensor] = ()
        """Distribution over the vocabulary that each was sampled from, on the model's device; empty without
        rejection."""

    def plan_forward(self, start: int, end: int) -> NDArray[np.int64]:
        """Plan the next forward; returns the positions that it predicts, [N].

        Args:
            start: first position without a committed token.
            end: of the text. Its last token is never drafted, because it is verified together with the drafts.
        """
        max_length = self._max_length
        if self.policy is not None and self.start:
            max_length = self.policy.choose_length(
                self._max_length, 1 - self._noisy_shift, verifies=len(self.tokens) > 0
            )
        self.start, num_free = start, end - 1 - start
        verifies = self._is_fused or len(self.tokens) > 0 or num_free == 0
        self.num_verified = len(self.tokens) + 1 if verifies else 0
        self.num_drafted = 0
        if self._is_fused or not verifies:
            self.num_drafted = max(0, min(max_length, num_free - self.num_verified))
        return start + np.arange(self.num_verified + self.num_drafted)

    @property
    def num_final(self) -> int:
        """Positions whose keys and values are those of committed text after the forward."""
        return self.start if self.num_verified else self.start - 1

    @property
    def block_start(self) -> int:
        """First input of the noisy block. A forward that drafts alone has the last token in it."""
        return self.start + self.num_verified - 1

    @property
    def block_end(self) -> int:
        """After its last input; `block_start`, if nothing is drafted."""
        if not self.num_drafted:
            return self.block_start
        return self.start + self.num_verified + self.num_drafted - self._noisy_shift

    def output_rows(self) -> NDArray[np.int64]:
        """Inputs whose outputs predict the positions of `plan_forward`, [N]."""
        shifts_N = np.repeat([1, self._noisy_shift], [self.num_verified, self.num_drafted])
        rows_N: NDArray[np.int64] = self.start + np.arange(len(shifts_N)) - shifts_N
        return rows_N

    @property
    def first_mask(self) -> int:
        """First position with neither a committed token nor a draft."""
        return self.start + len(self.tokens)

    def place(self, tokens_L: NDArray[np.int64]) -> NDArray[np.int64]:
        """The text with the drafts in place of masks, [L]."""
        drafted_L = tokens_L.copy()
        drafted_L[self.start : self.start + len(self.tokens)] = self.tokens
        return drafted_L

    def accept(
        self, tokens_N: NDArray[np.int64], stop_token_ids: Collection[int], draft_probs: Sequence[Tensor] = ()
    ) -> int:
        """Compare the drafts with the tokens that the forward has predicted, and keep its new drafts if all were right;
        returns the number of tokens to commit: those up to the first one that differs, or up to a stop token.

        Args:
            draft_probs: of the new drafts (`Predictions.draft_probs`).
        """
        verified_V, drafted_D = np.split(tokens_N, [self.num_verified])
        num_right = int((verified_V[:-1] == self.tokens).cumprod().sum()) if self.num_verified else 0
        if self.policy is not None:
            self.policy.record_drafts(len(self.tokens), num_right)
        self.tokens, self.probs = (drafted_D, draft_probs) if num_right == len(self.tokens) else (drafted_D[:0], ())
        committed = verified_V[: num_right + 1].tolist()
        return next((count for count, token in enumerate(committed, 1) if token in stop_token_ids), len(committed))
