"""From noise to one forward: what the model reads, who sees whom, and which output predicts which token.

Shapes: B rows, L tokens, S positions that the model reads, R scored outputs of the flat B * S.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from config.model import ModelConfig
from diffusionlm.diffusion.corruption import exclude_mask_tokens
from diffusionlm.diffusion.noised_batch import CleanBatch, NoisedBatch
from diffusionlm.models.patterns import Bidirectional, BlockDiffusion, Causal, document_offsets

LogitAlignment = Literal["same_position", "shifted"]


@dataclass(frozen=True)
class InputLayout:
    """How a model is asked for the tokens that were noised.

    Without blocks: one stream, every position sees its whole document. With blocks: two streams ``[xt | x0]`` (Arriola
    et al. 2025, BD3-LM), or one where no document is longer than a block, which is the same. Blocks of one token with
    shifted outputs are autoregression: one causal stream of clean tokens, since output i - 1 of the clean stream sees
    just the tokens before i.
    """

    block_length: int | None
    """Tokens of a block, counted from each document's start; None: the document is one."""
    alignment: LogitAlignment = "same_position"
    """Which output predicts token i: i, or i - 1 (of the clean stream, where i is the first token of its block)."""
    mask_token: int | None = None
    """None: an autoregressive model, which has none."""

    @classmethod
    def from_config(cls, config: ModelConfig, block_length: int | None) -> InputLayout:
        """For a model and a block length.

        Raises:
            ValueError: the model has no mask token, and this is not next-token prediction.
        """
        layout = cls(block_length, config.logit_alignment, config.mask_token_id)
        if not layout.is_autoregressive:
            _ = config.required_mask_token_id
        return layout

    @property
    def is_autoregressive(self) -> bool:
        """Every token is predicted by the output before it, which sees all clean tokens up to itself."""
        return self.block_length == 1 and self.alignment == "shifted"

    def maskable(self, batch: CleanBatch) -> NDArray[np.bool_]:
        """Tokens that may be noised and scored: targets, but for mask tokens of the data, and, with shifted outputs,
        but for the first token of each document, which no output predicts. [B, L]"""
        maskable_BL = exclude_mask_tokens(batch, self.mask_token)
        if self.alignment == "same_position":
            return maskable_BL
        has_before_BL: NDArray[np.bool_] = (_offsets_in_document(batch) > 0).numpy()
        return maskable_BL & has_before_BL

    def build_noised_batch(
        self,
        batch: CleanBatch,
        masked_BL: NDArray[np.bool_],
        weights_BL: NDArray[np.floating],
        *,
        num_targets: int,
        denominator: float,
        replacement_tokens_BL: NDArray[np.int64] | None = None,
    ) -> NoisedBatch:
        """The forward that scores the masked tokens with these weights.

        Args:
            replacement_tokens_BL: what stands in place of the masked tokens; the mask token if None.
        """
        masked = torch.from_numpy(masked_BL)
        documents_BL = _document_ids_or_none(batch)
        flat = masked.flatten().nonzero()[:, 0]
        targets_N, weights_N = batch.tokens_BL.flatten()[flat], torch.from_numpy(weights_BL).flatten()[flat].double()
        L = masked.shape[1]
        row_R, place_R = flat // L, flat % L
        if self.is_autoregressive:
            inputs, positions_N = batch.tokens_BL, flat - 1
            causal = Causal(documents_BL)
            return NoisedBatch(
                inputs, causal, positions_N, targets_N, weights_N, num_targets, denominator, batch.loss_mask_BL
            )
        assert self.mask_token is not None
        noise = self.mask_token if replacement_tokens_BL is None else torch.from_numpy(replacement_tokens_BL)
        noised = torch.where(masked, noise, batch.tokens_BL)
        if self.block_length is None or self.block_length > int(_offsets_in_document(batch).max()):
            positions_N = flat - int(self.alignment == "shifted")
            pattern = Bidirectional(documents_BL)
            return NoisedBatch(
                noised, pattern, positions_N, targets_N, weights_N, num_targets, denominator, batch.loss_mask_BL
            )
        positions_N = row_R * 2 * L + place_R
        if self.alignment == "shifted":
            is_first_R = (_offsets_in_document(batch) % self.block_length == 0).expand(masked.shape).flatten()[flat]
            positions_N = positions_N - 1 + L * is_first_R
            positions_N, order = positions_N.sort()
            targets_N, weights_N = targets_N[order], weights_N[order]
        return NoisedBatch(
            torch.cat([noised, batch.tokens_BL], dim=1),
            BlockDiffusion(self.block_length, documents_BL),
            positions_N,
            targets_N,
            weights_N,
            num_targets,
            denominator,
            batch.loss_mask_BL,
        )


def target_positions(draw: NoisedBatch, alignment: LogitAlignment) -> Tensor:
    """Flat indices into B * L of the tokens that the scored outputs predict. [R]"""
    S, L = draw.inputs_BS.shape[1], draw.inputs_BS.shape[1] // draw.pattern.positions_per_token
    return draw.positions_N // S * L + draw.positions_N % S % L + int(alignment == "shifted")


def _offsets_in_document(batch: CleanBatch) -> Tensor:
    """Place of each token in its document, [B or 1, L]."""
    if batch.document_BL is None:
        return torch.arange(batch.tokens_BL.shape[1])[None]
    return document_offsets(batch.document_BL)


def _document_ids_or_none(batch: CleanBatch) -> Tensor | None:
    """The documents, or None where every row is a single one: then no mask is needed, which is faster."""
    documents_BL = batch.document_BL
    if documents_BL is None or bool((documents_BL == documents_BL[:, :1]).all()):
        return None
    return documents_BL
