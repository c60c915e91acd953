"""What low-rank adapters read of the inputs of a forward: all of them, without those that dropout leaves out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from diffusionlm.kernels.low_rank import dropout_mask, hash_tokens


class AdapterDropout:
    """Dropout of the adapters of one model. It is on inside of `dropout_context` only, so never in evaluation.

    Masks are a hash of the key, the token and the module (`dropout_mask`): accumulation, the number of ranks and
    activation checkpointing do not change them.
    """

    def __init__(self, probability: float) -> None:
        self.probability = probability
        self._tokens: Tensor | None = None
        self.output_tokens: Tensor | None = None
        """Hashes of the tokens at the output positions of the current forward, [P]."""

    @contextmanager
    def dropout_context(self, key: int, rows_B: Tensor, length: int, output_positions: Tensor) -> Iterator[None]:
        """Context of a forward and its backward.

        Args:
            key: 32 bits, of the optimizer step.
            rows_B: number of each row in the step.
            length: positions of a row.
            output_positions: as in `Transformer.forward`.
        """
        self._tokens = hash_tokens(key, rows_B, length)
        self.output_tokens = self._tokens[output_positions]
        try:
            yield
        finally:
            self._tokens = self.output_tokens = None

    def mask(self, x: Tensor, key: Tensor) -> Tensor | None:
        """Mask of a module's inputs, all [B, L, D] or those at the output positions [P, D]. None: dropout is off."""
        tokens = self._tokens if x.dim() == 3 else self.output_tokens
        return None if tokens is None else dropout_mask(tokens, key, x.shape[-1], self.probability)
