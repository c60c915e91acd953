"""What low-rank adapters read of the inputs of a forward: all, those that dropout keeps, or masked positions alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
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


class MaskedRows:
    """The masked positions of a model's current forward, on which adapters with ``positions = "masks"`` act.

    Each forward sets them. They stay until the next one, because activation checkpointing reads them in the backward.
    """

    inputs_T1: Tensor | None = None
    """True at masked inputs, flat. None: there are none."""
    outputs_P1: Tensor | None = None
    """The same at the output positions."""

    def set(self, masked_BL: Tensor | None, output_positions: Tensor | None, device: torch.device) -> None:
        """Set them on a device; the other arguments are those of `Transformer.forward`, the first one also on the
        CPU."""
        self.inputs_T1 = self.outputs_P1 = None
        if masked_BL is not None:
            self.inputs_T1 = masked_BL.to(device, non_blocking=True).reshape(-1, 1)
            self.outputs_P1 = self.inputs_T1 if output_positions is None else self.inputs_T1[output_positions]

    def of(self, x: Tensor) -> Tensor | None:
        """Those of a module's inputs, all [B, L, D] or those at the output positions [P, D]. None: there are none."""
        return self.inputs_T1 if x.dim() == 3 else self.outputs_P1
