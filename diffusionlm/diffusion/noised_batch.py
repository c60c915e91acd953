"""Clean and noised batches: the input of corruption and its result.

Shapes: B sequences, L tokens, S positions that the model reads (L, or 2 L of the noisy and clean halves), N output
positions out of B * S.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from diffusionlm.models.patterns import AttentionPattern
from diffusionlm.models.vision.inputs import ImageInputs

FORWARD_TENSORS = (
    "inputs_BS", "positions_N", "targets_N", "weights_N", "is_eos_padding_N", "answers_N", "answer_lengths_Q",
    "is_desirable_P1", "is_next_token_N",
)  # fmt: skip
"""Tensors of a `NoisedBatch` that a forward and its loss read on the device."""


MAX_STEP_ROWS_LOG2 = 24
"""Row numbers of the second noise sample begin at 2 to this power."""


@dataclass(frozen=True)
class CleanBatch:
    """Token sequences before noise, on the CPU."""

    tokens_BL: Tensor
    """Token ids, int64."""
    loss_mask_BL: Tensor
    """Target tokens: True where a token may be masked and counts in the loss; False for prompts and padding."""
    document_BL: Tensor | None = None
    """Document number of each token, for packing. None: each sequence is one document."""
    segment_BL: Tensor | None = None
    """Segment number of each token, int64; -1 for padding. A segment is an answer with its context since the answer
    before it: the part of a conversation that is noised as a sequence of its own. Each segment is a run of its own
    number in the row, inside of one document. None: each sequence is one segment."""
    is_eos_padding_BL: Tensor | None = None
    """True for target tokens that are padding after an answer. None: there are none."""
    is_desirable_B1: Tensor | None = None
    """Label of each row's answer. None: the answers have no labels."""
    images: ImageInputs | None = None
    """Images in the sequences. None: there are none."""

    def __post_init__(self) -> None:
        """Check that no image position is a target.

        Raises:
            ValueError: the loss mask includes positions of images.
        """
        if self.images is None:
            return
        num_targets = int(self.loss_mask_BL.flatten()[self.images.indices_M].sum())
        if num_targets:
            raise ValueError(
                f"loss_mask_BL is True at {num_targets} of {len(self.images.indices_M)} image positions, which have "
                "features and no token to predict: set it to False there"
            )

    def select(self, sequences: slice) -> CleanBatch:
        """Some of the sequences."""
        return self._map(lambda tensor: tensor[sequences], lambda images: images.select(sequences))

    def repeat(self, num_copies: int) -> CleanBatch:
        """Copies of the batch, one after the other."""
        if num_copies == 1:
            return self
        return self._map(lambda tensor: tensor.repeat(num_copies, 1), lambda images: images.repeat(num_copies))

    def _map(
        self, function: Callable[[Tensor], Tensor], map_images: Callable[[ImageInputs], ImageInputs | None]
    ) -> CleanBatch:
        tensors: dict[str, Any] = {
            name: function(value) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **tensors, images=None if self.images is None else map_images(self.images))


@dataclass(frozen=True)
class NoiseKey:
    """Key of all random numbers of a batch.

    They depend on seed, step and the index of the sequence in the step, never on rank, micro-batch or worker. The
    segments of conversations count as sequences (`CleanBatch.segment_BL`), so that packing changes nothing.
    """

    seed: int
    step: int
    first_sequence: int
    """Index of the batch's first sequence, or segment, among those of the optimizer step, over all ranks and
    micro-batches."""
    num_sequences_in_step: int
    """Sequences, or segments, of the whole optimizer step."""


@dataclass(frozen=True)
class NoisedBatch:
    """A corrupted batch, ready for one forward."""

    inputs_BS: Tensor
    """Input tokens of the model: noisy tokens, S = L; noisy and clean halves ``[xt | x0]``, S = 2 L; clean tokens for
    next-token prediction."""
    pattern: AttentionPattern
    """Attention pattern of the forward."""
    positions_N: Tensor
    """Output positions of the loss, flat indices into B * S, ascending."""
    targets_N: Tensor
    """Clean token that each output position predicts."""
    weights_N: Tensor
    """Loss weights, fp64."""
    num_targets: int = 0
    """Target tokens of the batch."""
    denominator: float = 0.0
    """Contribution of this batch to the denominator of the step: target tokens, sequences or masked tokens, depending
    on the objective."""
    loss_mask_BL: Tensor | None = None
    """Loss mask of the clean batch, on the CPU. None: all tokens."""
    segment_BL: Tensor | None = None
    """Segments of the clean batch, on the CPU. None: each sequence is one segment."""
    first_row: int = 0
    """Index of the first row among those of the optimizer step, over all ranks and micro-batches."""
    num_rows: int | None = None
    """Rows of the clean batch; with several noise samples of each, the inputs have a multiple. None: as the inputs."""
    is_eos_padding_N: Tensor | None = None
    """True for targets that are padding after an answer. None: there are none."""
    answers_N: Tensor | None = None
    """For preferences: number of the answer that each target belongs to, 2 p and 2 p + 1 for the two answers of row p.
    None: another objective, as in the next two."""
    answer_lengths_Q: Tensor | None = None
    """Target tokens of each answer, without EOS padding, at least 1."""
    is_desirable_P1: Tensor | None = None
    """Labels of the rows. None: they are pairs."""
    is_next_token_N: Tensor | None = None
    """True for outputs of the clean half, which predict the next token. None: there are none."""
    next_token_denominator: float | None = None
    """Contribution to the divisor of the next-token loss. None: it is `denominator`."""
    eos_padding_denominator: float = 0.0
    """Part of `denominator` that EOS padding contributes."""
    is_auxiliary: bool = False
    """True for the forward of an auxiliary loss, which is not counted: no targets, no denominator."""
    images: ImageInputs | None = None
    """Images at positions of the inputs. None: there are none."""
    masked_BS: Tensor | None = None
    """True at masked positions of the inputs, on the CPU: few forwards read it. None: the inputs are clean tokens."""
    on_host: NoisedBatch | None = None
    """The batch on the CPU that this one is a copy of. None: this one is on the CPU."""

    def number_rows(self, device: torch.device | str | None = None) -> Tensor:
        """Number of each row of the inputs, [B], int64: unique in the step, whatever its division into batches.

        ``device``: of the result. None: that of the inputs.
        """
        indices_B = torch.arange(len(self.inputs_BS), device=self.inputs_BS.device if device is None else device)
        num_rows = self.num_rows or len(indices_B)
        return self.first_row + indices_B % num_rows + (indices_B // num_rows << MAX_STEP_ROWS_LOG2)

    def run(self, model: Callable[..., Any], **options: Any) -> Any:
        """Run the model on the batch: its logits at the output positions, [N, V]; with ``loss_inputs`` their losses."""
        options |= {"images": self.images, "masked_BL": self.masked_BS, "output_positions": self.positions_N}
        return model(self.inputs_BS, pattern=self.pattern, **options)

    def split_terms(self) -> list[NoisedBatch]:
        """The batch with the weights of masked tokens alone, and with those of the next-token loss, if it has both."""
        if self.is_next_token_N is None:
            return [self]
        masked_N, next_token_N = self.weights_N * ~self.is_next_token_N, self.weights_N * self.is_next_token_N
        return [replace(self, weights_N=masked_N), replace(self, weights_N=next_token_N, is_auxiliary=True)]

    def scale_next_tokens(self, factor: float) -> NoisedBatch:
        """Copy whose weights of the next-token loss are multiplied by a factor."""
        weights_N = self.weights_N * factor if self.is_auxiliary else self.weights_N
        if self.is_next_token_N is not None:
            weights_N = torch.where(self.is_next_token_N, weights_N * factor, weights_N)
        on_host = None if self.on_host is None else self.on_host.scale_next_tokens(factor)
        return replace(self, weights_N=weights_N, on_host=on_host)

    def to(self, device: torch.device) -> NoisedBatch:
        """Copy to a device; what belongs to the clean batch stays on the CPU."""
        if device.type == "cpu":
            return self
        tensors = self._map_forward_tensors(lambda tensor: tensor.to(device, non_blocking=True))
        return replace(self, pattern=self.pattern.to(device), **tensors, on_host=self.on_host or self)

    def pin_memory(self) -> NoisedBatch:
        """Copy to pinned memory, from which a GPU copies asynchronously."""
        return replace(self, pattern=self.pattern.pin_memory(), **self._map_forward_tensors(Tensor.pin_memory))

    def _map_forward_tensors(self, function: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        tensors = {name: getattr(self, name) for name in FORWARD_TENSORS}
        mapped: dict[str, Any] = {name: function(tensor) for name, tensor in tensors.items() if tensor is not None}
        return mapped if self.images is None else {**mapped, "images": self.images.map_tensors(function)}
