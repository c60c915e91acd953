"""How well the masks of a block draft its next tokens: acceptance at each offset, over given texts.

A block's first token is exact, by the clean output before it; the drafts after it come from one forward in which the
rest of the block is masked (Nemotron-Labs-Diffusion), or all of it where masks predict one token further (I-DLM).
Offset j is the j-th draft. The text before a draft is the given one, as if all drafts before it had been accepted.

Shapes: B rows, L tokens, N drafts of a batch, K offsets, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from ddp.map_over_ranks import SINGLE_PROCESS_MAP, MapOverRanks
from diffusionlm.diffusion.layout import InputLayout, target_positions
from diffusionlm.diffusion.noised_batch import CleanBatch
from diffusionlm.evaluation.statistics import MAX_LOGITS_BYTES
from diffusionlm.inference.sampling.distributions import iterate_chunks
from diffusionlm.models.patterns import BlockDiffusion
from diffusionlm.models.transformer import Transformer
from profiling import nvtx

Acceptance = tuple[tuple[float, float], ...]
"""For each offset from 1: mean of sum min(p, q), with which a draft from q is accepted by rejection sampling at
temperature 1, and share of drafts whose most probable token is that of p, which greedy decoding accepts."""


@torch.no_grad()
def measure_draft_acceptance(
    model: Transformer,
    layout: InputLayout,
    batch: CleanBatch,
    batch_size: int,
    map_forwards: MapOverRanks = SINGLE_PROCESS_MAP,
) -> Acceptance:
    """Measure the drafts of all target tokens, by forwards of two halves.

    Args:
        layout: if its clean half is not token-causal, or a block has no drafts, the result is empty.
    """
    L, shift = batch.tokens_BL.shape[1], int(layout.alignment == "shifted")
    batch_size = max(1, min(batch_size, MAX_LOGITS_BYTES // (8 * model.config.vocab_size * L)))
    num_offsets = min(layout.block_length or L, L) - 1 + shift
    if layout.clean_attention == "block" or num_offsets == 0:
        return ()
    drafts = _Drafts.from_batch(layout, batch)

    def measure(index: int) -> NDArray[np.float64]:
        """Sums of min(p, q) and of agreements, and number of drafts, at each offset, [3, K]."""
        rows = slice(index * batch_size, (index + 1) * batch_size)
        own, is_draft, sums_3K = batch.select(rows), drafts.is_draft_BL[rows], np.zeros((3, num_offsets))
        noised = layout.build_noised_batch(own, drafts.is_masked_BL[rows], np.ones(is_draft.shape))
        is_own_N = torch.from_numpy(is_draft).flatten()[target_positions(noised, layout.alignment)]
        both = layout.add_clean_outputs(noised, own, is_draft.astype(np.float64)).to(model.lm_head.weight.device)
        with nvtx.annotate("draft acceptance: forward"):
            logits = both.run(model).float()
        logits[:, model.config.required_mask_token_id] = -torch.inf
        is_clean = (both.on_host or both).is_next_token_N
        assert is_clean is not None
        p_rows, q_rows = is_clean.nonzero()[:, 0], (~is_clean).nonzero()[:, 0][is_own_N]
        offsets_N = drafts.offsets_BL[rows][is_draft] - 1
        for chunk in iterate_chunks(logits[: len(p_rows)]):
            p_NV, q_NV = (logits[indices[chunk].to(logits.device)].softmax(-1) for indices in (p_rows, q_rows))
            agrees_N = p_NV.argmax(-1) == q_NV.argmax(-1)
            accepted_N = torch.minimum(p_NV, q_NV).sum(-1)
            values_3N = torch.stack([accepted_N.double(), agrees_N.double(), torch.ones_like(accepted_N).double()])
            for sums_K, values_N in zip(sums_3K, values_3N.cpu().numpy(), strict=True):
                sums_K += np.bincount(offsets_N[chunk], values_N, num_offsets)
        return sums_3K

    sums_3K = np.sum(map_forwards(-(-len(batch.tokens_BL) // batch_size), measure), axis=0)
    means_2K = sums_3K[:2] / np.maximum(sums_3K[2], 1.0)
    return tuple((float(accepted), float(agrees)) for accepted, agrees in means_2K.T)


@dataclass(frozen=True)
class _Drafts:
    """The drafts of a batch, by token."""

    is_masked_BL: NDArray[np.bool_]
    """Masks of the forward that drafts all blocks."""
    is_draft_BL: NDArray[np.bool_]
    """Tokens that it drafts after their block's exact token, with nothing but masks between."""
    offsets_BL: NDArray[np.int64]
    """Number of the draft in its block, from 1."""

    @classmethod
    def from_batch(cls, layout: InputLayout, batch: CleanBatch) -> Self:
        assert layout.block_length is not None
        L, shift = batch.tokens_BL.shape[1], int(layout.alignment == "shifted")

        def shift_right(values_BL: NDArray[np.int64]) -> NDArray[np.int64]:
            """Values of the mask that drafts each token, which is `shift` positions before it."""
            return np.pad(values_BL, ((0, 0), (shift, 0)))[:, :L]

        blocks = BlockDiffusion(layout.block_length, batch.document_BL, batch.segment_BL)
        starts_BL = shift_right(blocks.block_bounds(L)[0].expand(batch.tokens_BL.shape).numpy())
        offsets_BL = np.arange(L) - starts_BL
        maskable_BL = layout.maskable(batch) & layout.next_token.maskable(batch)
        counts_BL = shift_right(maskable_BL.cumsum(axis=1))
        num_masks_BL = counts_BL - np.take_along_axis(counts_BL, starts_BL, axis=1)
        is_draft_BL = maskable_BL & (offsets_BL > 0) & (num_masks_BL == offsets_BL)
        return cls(maskable_BL & ((offsets_BL > 0) | (shift == 1)), is_draft_BL, offsets_BL)
