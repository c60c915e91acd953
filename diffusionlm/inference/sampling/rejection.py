"""Rejection sampling of drafts (Leviathan et al. 2023, arXiv 2211.17192): tokens of a distribution p from drafts of q.

p and q are what tokens are sampled from: with the temperature, the filters and what requests change in logits. The
draft, its acceptance and the token of the residual each have a random number of their own, keyed by the position, so
the text is one of next-token decoding, whatever q is.

Shapes: N positions of a chunk, V vocabulary, R drafts that are verified.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from diffusionlm.diffusion.rng import RngStream
from diffusionlm.inference.requests import ActiveRequest, Predictions
from diffusionlm.inference.sampling.distributions import choose_tokens
from diffusionlm.models.tensors import copy_to_device


class RejectionSampling:
    """Verifies the drafts of requests in a forward, and keeps the distributions of those that it drafts."""

    def __init__(self, requests: Sequence[ActiveRequest]) -> None:
        self._verified_rows: list[int] = []
        """Rows of the logits, ascending, as are the others."""
        self._drafted_rows: list[int] = []
        self._draft_probs: list[Tensor] = []
        """Of the drafts that are verified."""
        self._new_probs: list[Tensor] = []
        self._num_drafted: list[int] = []
        drafts, uniforms, start = [], [], 0
        for request in requests:
            state = request.speculation
            assert state is not None, "only speculation has drafts"
            positions, end = request.output_positions[: len(state.tokens)], start + len(request.output_positions)
            self._verified_rows += range(start, start + len(state.tokens))
            self._drafted_rows += range(start + state.num_verified, end)
            self._num_drafted.append(state.num_drafted)
            self._draft_probs += state.probs
            drafts.append(state.tokens)
            streams = RngStream.DRAFT_ACCEPTANCE, RngStream.DRAFT_RESIDUAL
            uniforms.append(np.stack([request.draw_uniforms(stream, positions) for stream in streams]))
            start = end
        self._drafts_R, self._uniforms_2R = np.concatenate(drafts), np.concatenate(uniforms, axis=1)

    def choose_tokens(self, probs_NV: Tensor, uniforms_N: Tensor | None, *, first_row: int) -> Tensor:
        """Choose one token per position, [N], like `distributions.choose_tokens`; in the place of a draft the draft
        itself, if it is accepted, or a token of the residual.

        Args:
            first_row: of the chunk in the logits of all requests. Each chunk is chosen once, in order.
        """
        tokens_N, device = choose_tokens(probs_NV, uniforms_N), probs_NV.device
        part = self._find_part(self._verified_rows, first_row, len(probs_NV))
        if draft_probs := self._draft_probs[part]:
            rows_R = copy_to_device(torch.tensor(self._verified_rows[part]) - first_row, device)
            drafts_R = copy_to_device(torch.from_numpy(self._drafts_R[part]), device)
            uniforms_2R = copy_to_device(torch.from_numpy(self._uniforms_2R[:, part]), device)
            verified_R = verify_drafts(drafts_R, probs_NV[rows_R], torch.stack(draft_probs), uniforms_2R)
            tokens_N = tokens_N.index_copy(0, rows_R, verified_R)
        part = self._find_part(self._drafted_rows, first_row, len(probs_NV))
        if drafted_rows := self._drafted_rows[part]:
            rows = copy_to_device(torch.tensor(drafted_rows) - first_row, device)
            self._new_probs += probs_NV[rows].unbind()
        return tokens_N

    @staticmethod
    def _find_part(rows: Sequence[int], first_row: int, num_rows: int) -> slice:
        return slice(bisect_left(rows, first_row), bisect_left(rows, first_row + num_rows))

    def add_draft_probs(self, predictions: Sequence[Predictions | ValueError]) -> list[Predictions | ValueError]:
        """Add the distributions of the tokens that the forward has drafted to the predictions for each request."""
        probs = iter(self._new_probs)
        own_probs = [tuple(next(probs) for _ in range(count)) for count in self._num_drafted]
        return [
            replace(prediction, draft_probs=own) if isinstance(prediction, Predictions) else prediction
            for prediction, own in zip(predictions, own_probs, strict=True)
        ]


def verify_drafts(drafts_R: Tensor, probs_RV: Tensor, draft_probs_RV: Tensor, uniforms_2R: Tensor) -> Tensor:
    """Accept each draft d with probability min(1, p(d) / q(d)), else replace it by another token, a sample of
    max(0, p - q) / sum; the tokens, [R].

    Args:
        probs_RV: p.
        draft_probs_RV: q, from which the drafts were sampled.
        uniforms_2R: numbers in [0, 1) for the acceptance and for the residual, independent of each other and of the
            drafts.
    """
    own_R, draft_own_R = (all_RV.gather(1, drafts_R[:, None])[:, 0] for all_RV in (probs_RV, draft_probs_RV))
    residual_RV = (probs_RV - draft_probs_RV).clamp_min(0.0)
    # Distributions that differ by rounding alone may have no residual.
    is_accepted_R = (uniforms_2R[0] * draft_own_R < own_R) | (residual_RV.sum(dim=1) == 0.0)
    return torch.where(is_accepted_R, drafts_R, choose_tokens(residual_RV, uniforms_2R[1]))
