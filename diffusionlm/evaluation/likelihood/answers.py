"""An answer after its context: what a model and settings make of it, its blocks, and their masked copies.

Shapes: T tokens of context and answer, n answer tokens of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from config.evaluation.likelihood import AnswerLikelihoodConfig
from config.model import ModelConfig
from diffusionlm.diffusion.layout import InputLayout
from diffusionlm.evaluation.likelihood.copies import MaskedCopy
from diffusionlm.evaluation.likelihood.masks import count_masks
from diffusionlm.inference.images import FeatureReader, TextImages, check_images
from diffusionlm.inference.requests import DEFAULT_OPTIONS, RequestOptions
from diffusionlm.inference.settings import check_token_ids
from diffusionlm.vision.images import compute_mrope_positions
from files.usage_error import prefix_errors


@dataclass(frozen=True)
class AnswerBlock:
    """The answer tokens of one block of a text; if attention is bidirectional or causal, the text is one block."""

    start: int
    end: int
    positions: NDArray[np.int64]
    """Positions of the answer tokens in the text, [n]."""


class BlockedAnswer:
    """An answer after its context, of ``num_tokens`` tokens that are scored; what follows these is only read."""

    def __init__(
        self,
        layout: InputLayout,
        tokens: Sequence[int],
        num_context: int,
        num_tokens: int,
        images: TextImages | None = None,
    ) -> None:
        self.layout, self.num_context, self.num_tokens, self.images = layout, num_context, num_tokens, images
        self.tokens_T = np.array(tokens, dtype=np.int64)
        length, size = len(self.tokens_T), layout.block_length
        self.positions = positions = num_context + np.arange(num_tokens)
        if size is None or layout.is_autoregressive:
            self.blocks = [AnswerBlock(0, length, positions)]
        else:
            starts = range(num_context - num_context % size, num_context + num_tokens, size)
            self.blocks = [
                AnswerBlock(start, min(start + size, length), positions[positions // size == start // size])
                for start in starts
            ]
        self.clean_tokens = self.tokens_T[: self.blocks[-1].start]
        """What the copies of blocks attend to."""

    @property
    def num_masks(self) -> int:
        """Masks that enumeration takes: those of the longest block, since all blocks are masked at once."""
        if self.layout.is_autoregressive:
            return 1
        return count_masks(max(len(block.positions) for block in self.blocks))

    def mask_block(self, block: AnswerBlock, is_masked_n: NDArray[np.bool_]) -> MaskedCopy:
        positions = block.positions[is_masked_n]
        if self.layout.is_autoregressive:
            tokens = self.tokens_T[:-1]
        else:
            assert self.layout.mask_token is not None, "checked by InputLayout.from_config"
            tokens = self.tokens_T[block.start : block.end].copy()
            tokens[positions - block.start] = self.layout.mask_token
        targets = self.tokens_T[positions]
        return MaskedCopy(self.clean_tokens, self.num_context, block.start, tokens, positions, targets, self.images)


class AnswerBuilder:
    """Builds the answers of a model and of settings."""

    def __init__(
        self, model: ModelConfig, config: AnswerLikelihoodConfig, read_features: FeatureReader | None = None
    ) -> None:
        """Resolve the block length, and the end-of-text token.

        Args:
            read_features: of images in contexts. None: answers are checked, not computed.

        Raises:
            ValueError: the model has no mask token, and is not autoregressive; or it has no end-of-text token, and the
                settings need one.
        """
        self.model, self._read_features = model, read_features
        block_length = None if config.bidirectional else config.block_length or model.block_length
        self.layout = InputLayout.from_config(model, block_length)
        if self.layout.clean_attention == "token" and not config.bidirectional:
            if config.block_length is None:
                self.layout = self.layout.next_token
            elif self.layout.alignment == "shifted":
                raise ValueError(
                    f"block_length = {config.block_length}: with these outputs the masks of a block predict the first "
                    "token of the next one, and an answer has no bound of its own; remove block_length for the exact "
                    "next-token likelihood"
                )
        if config.end_of_text != "none" and model.eos_token_id is None:
            raise ValueError(
                f'end_of_text = "{config.end_of_text}" needs a token, and the model\'s config.json names no '
                'eos_token_id: set end_of_text = "none"'
            )
        self._suffix = () if config.end_of_text == "none" else (model.eos_token_id,)
        self._is_suffix_scored = config.end_of_text == "scored"

    def build(
        self,
        context: Sequence[int],
        continuation: Sequence[int],
        name: str,
        context_options: RequestOptions = DEFAULT_OPTIONS,
    ) -> BlockedAnswer:
        """Build an answer; an error calls it ``name``.

        Raises:
            ValueError: it is empty, too long for the model's context, has a token that the model cannot predict, or
                image placeholders that are not those of the context's images.
        """
        check_token_ids((*context, *continuation), self.model, name)
        if not len(continuation):
            raise ValueError(f"{name} is empty, and has no likelihood: give at least one token")
        if self.layout.alignment == "shifted" and not len(context):
            raise ValueError(
                f"{name} has no context, and with shifted outputs the model cannot predict the first token of a text: "
                "put a token before it, such as the end-of-text token"
            )
        mask_token, limit = self.layout.mask_token, self.model.max_position_embeddings
        if mask_token is not None and mask_token in continuation:
            raise ValueError(
                f"{name} has the mask token {mask_token} at index {list(continuation).index(mask_token)}, which has "
                "probability zero: remove it"
            )
        tokens = (*context, *continuation, *self._suffix)
        if len(tokens) > limit:
            raise ValueError(
                f"{name} has {len(tokens)} tokens with its context, more than max_position_embeddings = {limit} of the "
                "model: remove the first tokens of the context"
            )
        with prefix_errors(name):
            check_images(self.model, tokens, context_options)
        num_scored = len(continuation) + len(self._suffix) * self._is_suffix_scored
        images = self._read_images(len(tokens), context_options) if context_options.images else None
        return BlockedAnswer(self.layout, tokens, len(context), num_scored, images)

    def _read_images(self, length: int, options: RequestOptions) -> TextImages:
        # A copy of another answer's block after the same context may be longer.
        positions_3L = compute_mrope_positions(length + (self.layout.block_length or 0), options.images)
        if self._read_features is None:
            return TextImages(positions_3L)
        assert options.processor is not None, "check_images has checked it"
        features = [(placed.start, self._read_features(placed.image, options.processor)) for placed in options.images]
        return TextImages(positions_3L, tuple(features))
