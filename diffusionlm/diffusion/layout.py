"""Build the model's inputs, attention pattern and output positions from clean tokens and masks.

Shapes: B sequences, L tokens, S positions that the model reads, N output positions out of B * S.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import safetensors
import safetensors.torch
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from config.model import BlockAttention, ModelConfig, NoisyAttention
from diffusionlm.diffusion.corruption import exclude_mask_tokens
from diffusionlm.diffusion.noised_batch import CleanBatch, NoisedBatch, NoiseKey
from diffusionlm.diffusion.rng import RngStream, keyed_rng
from diffusionlm.models.patterns import (
    AttentionPattern,
    Bidirectional,
    BlockDiffusion,
    Causal,
    DenseBias,
    PromptAndOwnBlock,
    document_offsets,
)

LogitAlignment = Literal["same_position", "shifted"]


@dataclass(frozen=True)
class InputLayout:
    """Inputs and attention pattern of a forward that predicts masked tokens.

    | blocks                                | inputs                          | attention pattern |
    |---------------------------------------|---------------------------------|-------------------|
    | none, or every document is one block  | noisy tokens                    | Bidirectional     |
    | yes                                   | noisy and clean halves, 2 L     | BlockDiffusion    |
    | of one token, with shifted outputs    | clean tokens                    | Causal            |
    | independent                           | noisy tokens                    | PromptAndOwnBlock |
    | none, with a bias                     | noisy tokens                    | DenseBias         |

    The second row is BD3-LM (Arriola et al. 2025). The third is autoregression: output i - 1 of the clean half attends
    to exactly the tokens before i, so the noisy half is not needed. A token-causal clean half is always of the second
    row: its outputs predict the next token, and those of masked tokens are all noisy ones.
    """

    block_length: int | None
    """Tokens of a block, counted from the start of each document, or segment. None: the whole document."""
    alignment: LogitAlignment = "same_position"
    """Output that predicts token i: output i, or output i - 1 (of the clean half for the first token of a block)."""
    mask_token: int | None = None
    """None: an autoregressive model without mask token."""
    has_independent_blocks: bool = False
    """An answer token attends to the prompt and its own block only; blocks are counted from the end of the prompt."""
    clean_attention: BlockAttention = "block"
    noisy_attention: NoisyAttention = "block"
    """Attention of the halves inside of a block (`BlockDiffusion`)."""
    bias: Tensor | None = field(default=None, compare=False)
    """Bias of bidirectional attention by positions of the row, [1, L, L] or [1, heads, L, L]; see `DenseBias`."""

    @classmethod
    def from_config(cls, config: ModelConfig, block_length: int | None) -> InputLayout:
        """Layout for a model and a block length.

        Raises:
            ValueError: the model has no mask token, and the layout is not autoregressive.
        """
        layout = cls(
            block_length,
            config.logit_alignment,
            config.mask_token_id,
            clean_attention="block" if config.clean_alignment is None else "token",
            noisy_attention=config.noisy_attention,
        )
        if not layout.is_autoregressive:
            _ = config.required_mask_token_id
        return layout

    @property
    def is_autoregressive(self) -> bool:
        """True for blocks of one token with shifted outputs, where masks predict no further: next-token prediction."""
        return self.block_length == 1 and self.alignment == "shifted" and self.clean_attention == "block"

    @property
    def half_attention(self) -> tuple[BlockAttention, NoisyAttention]:
        """Attention of the clean and of the noisy half inside of a block."""
        return self.clean_attention, self.noisy_attention

    @property
    def next_token(self) -> InputLayout:
        """Layout of next-token prediction on the same tokens."""
        return InputLayout(1, "shifted", self.mask_token)

    def maskable(self, batch: CleanBatch) -> NDArray[np.bool_]:
        """Target tokens that may be masked, [B, L].

        Mask tokens in the data are excluded. With shifted outputs so is the first token of each document, which no
        output predicts.
        """
        maskable_BL = exclude_mask_tokens(batch, self.mask_token)
        if self.alignment == "same_position":
            return maskable_BL
        has_predecessor_BL: NDArray[np.bool_] = (_offsets_in_document(batch) > 0).numpy()
        return maskable_BL & has_predecessor_BL

    def build_noised_batch(
        self,
        batch: CleanBatch,
        masked_BL: NDArray[np.bool_],
        weights_BL: NDArray[np.floating],
        *,
        num_targets: int = 0,
        denominator: float = 0.0,
        replacement_tokens_BL: NDArray[np.int64] | None = None,
    ) -> NoisedBatch:
        """Build the forward that predicts the masked tokens.

        Args:
            batch: clean tokens.
            masked_BL: masked positions.
            weights_BL: loss weights, read at masked positions only.
            num_targets: target tokens of the batch.
            denominator: contribution of the batch to the loss denominator.
            replacement_tokens_BL: tokens in place of masked ones. None: the mask token.
        """
        masked, documents_BL = torch.from_numpy(masked_BL), _document_ids_or_none(batch)
        masked_indices_N = masked.flatten().nonzero()[:, 0]
        is_padding_BL = batch.is_eos_padding_BL
        positions_N = masked_indices_N - int(self.alignment == "shifted")
        inputs, images = batch.tokens_BL, batch.images
        pattern: AttentionPattern = Causal(documents_BL)
        if not self.is_autoregressive:
            assert self.mask_token is not None
            noise = self.mask_token if replacement_tokens_BL is None else torch.from_numpy(replacement_tokens_BL)
            inputs, pattern = torch.where(masked, noise, batch.tokens_BL), Bidirectional(documents_BL)
            if self.bias is not None:
                pattern = DenseBias(self.bias[..., : masked.shape[1], : masked.shape[1]], documents_BL)
            elif self.has_independent_blocks:
                assert self.block_length is not None
                pattern = PromptAndOwnBlock(self.block_length, find_prompts(batch), documents_BL)
            elif self.block_length is not None:
                offsets_BL = _offsets_in_document(batch)
                parts_BL = offsets_BL if batch.segment_BL is None else document_offsets(batch.segment_BL)
                is_block_start_BL = (parts_BL % self.block_length == 0).expand(masked.shape)
                if self.clean_attention == "token" or bool((is_block_start_BL & (offsets_BL > 0)).any()):
                    images = None if images is None else images.double()
                    pattern = BlockDiffusion(self.block_length, documents_BL, batch.segment_BL, *self.half_attention)
                    positions_N, order = self._find_positions_in_halves(is_block_start_BL, masked_indices_N)
                    masked_indices_N = masked_indices_N[order]
                    inputs, pattern, positions_N, masked = self._order_noisy_half(inputs, pattern, positions_N, masked)
                    inputs = torch.cat([inputs, batch.tokens_BL], dim=1)
        return NoisedBatch(
            inputs,
            pattern,
            positions_N,
            batch.tokens_BL.flatten()[masked_indices_N],
            torch.from_numpy(weights_BL).flatten()[masked_indices_N].double(),
            num_targets,
            denominator,
            batch.loss_mask_BL,
            batch.segment_BL,
            is_eos_padding_N=None if is_padding_BL is None else is_padding_BL.flatten()[masked_indices_N],
            images=images,
            masked_BS=None if self.is_autoregressive else F.pad(masked, (0, inputs.shape[1] - masked.shape[1])),
        )

    def add_clean_outputs(
        self, noised_batch: NoisedBatch, batch: CleanBatch, weights_BL: NDArray[np.floating]
    ) -> NoisedBatch:
        """Add the outputs of the clean half that predict the tokens whose weight is not zero.

        ``noised_batch``: noise samples of the batch, in two halves; outputs of the first sample are added.
        """
        weights, L = torch.from_numpy(weights_BL).flatten().double(), weights_BL.shape[1]
        indices_M = weights.nonzero()[:, 0]
        clean_positions_M = indices_M // L * 2 * L + L + indices_M % L - 1
        positions_N, order = torch.cat([noised_batch.positions_N, clean_positions_M]).sort()

        def merge(values: Tensor, clean_values_BL: Tensor) -> Tensor:
            return torch.cat([values, clean_values_BL.flatten()[indices_M]])[order]

        is_eos_padding_N = noised_batch.is_eos_padding_N
        if is_eos_padding_N is not None and batch.is_eos_padding_BL is not None:
            is_eos_padding_N = merge(is_eos_padding_N, batch.is_eos_padding_BL)
        return replace(
            noised_batch,
            positions_N=positions_N,
            targets_N=merge(noised_batch.targets_N, batch.tokens_BL),
            weights_N=merge(noised_batch.weights_N, weights),
            is_eos_padding_N=is_eos_padding_N,
            is_next_token_N=order >= len(noised_batch.positions_N),
        )

    def split_for_noise(self, batch: CleanBatch) -> CleanBatch:
        """The batch with the documents that noise groups are counted in: independent blocks start after the prompt."""
        if not self.has_independent_blocks:
            return batch
        documents_BL = torch.zeros_like(batch.tokens_BL) if batch.document_BL is None else batch.document_BL
        return replace(batch, document_BL=2 * documents_BL + find_prompts(batch))

    def _find_positions_in_halves(self, is_block_start_BL: Tensor, masked_indices_N: Tensor) -> tuple[Tensor, Tensor]:
        """Output positions in the noisy and clean halves, ascending, and the order of the masked tokens for it."""
        L = is_block_start_BL.shape[1]
        positions_N = masked_indices_N // L * 2 * L + masked_indices_N % L
        if self.alignment == "same_position" or self.clean_attention == "token":
            return positions_N - int(self.alignment == "shifted"), torch.arange(len(positions_N))
        is_first_N = is_block_start_BL.flatten()[masked_indices_N]
        # The noisy output before a block belongs to another block; the clean one before it sees all tokens before it.
        return (positions_N - 1 + L * is_first_N).sort()

    def _order_noisy_half(
        self, inputs_BL: Tensor, pattern: BlockDiffusion, positions_N: Tensor, masked_BL: Tensor
    ) -> tuple[Tensor, BlockDiffusion, Tensor, Tensor]:
        """Noisy inputs, pattern, output positions and masked inputs in the order of `NoisyAttention`. The masks of a
        block keep their order, so the targets do."""
        if self.noisy_attention != "visible_first":
            return inputs_BL, pattern, positions_N, masked_BL
        L = masked_BL.shape[1]
        starts_BL, _ = pattern.block_bounds(L)
        order_BL = (2 * starts_BL + masked_BL).argsort(dim=1, stable=True)
        positions_N = positions_N + (order_BL.argsort(dim=1) - torch.arange(L))[masked_BL]
        inputs_BL, masked_BL = inputs_BL.gather(1, order_BL), masked_BL.gather(1, order_BL)
        return inputs_BL, replace(pattern, noisy_positions_BL=order_BL), positions_N, masked_BL


def anneal_attention(pattern: AttentionPattern, length: int, key: NoiseKey, num_steps: int) -> AttentionPattern:
    """Pattern between causal and ``pattern``: keys after the query are visible with probability (step + 1) / num_steps.

    The pairs are sampled once for a step, for all of its sequences and layers (DiffuLLaMA, Gong et al. 2025).
    ``pattern`` is returned when the probability is 1.
    """
    probability = (key.step + 1) / num_steps if num_steps else 1.0
    if probability >= 1.0:
        return pattern
    assert isinstance(pattern, Bidirectional), "other patterns have no annealing"
    rng = keyed_rng(key.seed, RngStream.ATTENTION_ANNEALING, key.step)
    visible_LL = torch.from_numpy(rng.random((length, length)) < probability)
    return DenseBias(visible_LL | torch.ones_like(visible_LL).tril(), pattern.documents_BL)


def target_positions(noised_batch: NoisedBatch, alignment: LogitAlignment) -> Tensor:
    """Flat indices into B * L of the tokens that the output positions predict, [N]."""
    S = noised_batch.inputs_BS.shape[1]
    pattern, positions_N = noised_batch.pattern, noised_batch.positions_N
    L = S // pattern.positions_per_token
    if isinstance(pattern, BlockDiffusion) and pattern.noisy_positions_BL is not None:
        return positions_N // S * L + pattern.default_positions(S, positions_N.device).flatten()[positions_N]
    return positions_N // S * L + positions_N % S % L + int(alignment == "shifted")


def find_prompts(batch: CleanBatch) -> Tensor:
    """True before the first target token of each document, [B, L]."""
    num_targets_BL = batch.loss_mask_BL.long().cumsum(1)
    positions_1L = torch.arange(batch.tokens_BL.shape[1])[None]
    starts_BL = (positions_1L - _offsets_in_document(batch)).expand(num_targets_BL.shape)
    before_BL = (num_targets_BL - batch.loss_mask_BL.long()).gather(1, starts_BL)
    return num_targets_BL == before_BL


def _offsets_in_document(batch: CleanBatch) -> Tensor:
    """Index of each token in its document, [B or 1, L]."""
    if batch.document_BL is None:
        return torch.arange(batch.tokens_BL.shape[1])[None]
    return document_offsets(batch.document_BL)


def _document_ids_or_none(batch: CleanBatch) -> Tensor | None:
    """The documents, or None if every sequence is one document: then attention is faster, because it needs no mask."""
    documents_BL = batch.document_BL
    if documents_BL is None or bool((documents_BL == documents_BL[:, :1]).all()):
        return None
    return documents_BL


def read_attention_bias(path: Path, model: ModelConfig) -> Tensor:
    """Read a user's attention bias [L, L] or [N, L, L], N query heads, from a .npy file or a .safetensors file of one
    tensor.

    Returns:
        [1, L, L] or [1, N, L, L]: float32, which is added to the scores, or boolean, where False hides a key.

    Raises:
        ValueError: the file cannot be read or has another shape, is shorter than the model's context, or a query
            attends to no key.
    """
    try:
        if path.suffix == ".safetensors":
            tensors = list(safetensors.torch.load_file(path).values())
            if len(tensors) != 1:
                raise ValueError(f"it has {len(tensors)} tensors instead of one")
            bias = tensors[0]
        else:
            bias = torch.from_numpy(np.load(path, allow_pickle=False))
    except (OSError, ValueError, TypeError, safetensors.SafetensorError) as error:
        raise ValueError(f"attention_bias = {path} cannot be read: {error}") from error
    num_heads = model.num_attention_heads
    is_square = bias.dim() in (2, 3) and bias.shape[-1] == bias.shape[-2] > 0
    if not is_square or (bias.dim() == 3 and len(bias) != num_heads):
        raise ValueError(
            f"attention_bias = {path} has shape {list(bias.shape)}: give [L, L] or [{num_heads}, L, L], a matrix for "
            "all heads or one for each"
        )
    if bias.shape[-1] < model.max_position_embeddings:
        raise ValueError(
            f"attention_bias = {path} is for {bias.shape[-1]} positions: give as many as the model's context, "
            f"max_position_embeddings = {model.max_position_embeddings}"
        )
    if bias.dtype != torch.bool:
        bias = bias.float()
    is_hidden = ~bias if bias.dtype == torch.bool else bias == -torch.inf
    if is_hidden.all(-1).any() or bias.float().isnan().any() or (bias.float() == torch.inf).any():
        raise ValueError(f"attention_bias = {path}: each query needs a key, and values must be finite or -inf")
    return bias[None]
