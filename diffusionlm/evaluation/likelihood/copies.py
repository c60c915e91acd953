"""Log-probabilities of the masked tokens in masked copies of texts, and the forwards that compute them.

Copies with the same inputs are computed once: one-token options of a document are read from one output. Copies follow
each other in one row without padding, and each attends to its own text only. In block-causal attention a forward reads
the clean tokens of a text once, for all copies of its blocks.

Shapes: T tokens of a text, M masked tokens of a copy, Q inputs of a text with its copies, N outputs of a forward, V
vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffusionlm.diffusion.layout import InputLayout
from diffusionlm.evaluation.statistics import MAX_LOGITS_BYTES
from diffusionlm.inference.sampling import check_finite, iterate_chunks
from diffusionlm.models.patterns import AttentionPattern, Bidirectional, Causal, CleanAndBlockCopies
from diffusionlm.models.tensors import copy_to_device
from diffusionlm.models.transformer import Transformer
from diffusionlm.models.varlen import SequenceSlice, VarlenBatch
from profiling import nvtx


@dataclass(frozen=True)
class MaskedCopy:
    """A block of a text with some of its tokens masked; with bidirectional attention the whole text is the block."""

    start: int
    """Position of its first token."""
    tokens: NDArray[np.int64]
    """Tokens of the block, the mask token at masked positions; of an autoregressive model the clean tokens."""
    masked_positions: NDArray[np.int64]
    """Positions in the text, ascending, [M]."""

    @property
    def key(self) -> tuple[int, bytes, bytes]:
        return self.start, self.tokens.tobytes(), self.masked_positions.tobytes()


@dataclass
class _Reading:
    """A copy, and the tokens whose probabilities are read from its outputs."""

    copy: MaskedCopy
    log_probabilities: dict[bytes, NDArray[np.float64] | None] = field(default_factory=dict)
    """Tokens at the masked positions, as bytes -> log-probability of each; None: not computed yet."""
    top_2M: NDArray[np.float64] = field(default_factory=lambda: np.zeros((2, 0)))
    """Most probable token at each masked position, and its log-probability; empty unless the table reads them."""

    @property
    def unread_targets(self) -> list[bytes]:
        return [target for target, values in self.log_probabilities.items() if values is None]


@dataclass
class _SharedText:
    """Clean tokens, and the copies that are computed beside them."""

    clean_tokens: NDArray[np.int64]
    num_context: int
    """Tokens of the text that guidance masks."""
    readings: dict[tuple[int, bytes, bytes], _Reading] = field(default_factory=dict)


@dataclass(frozen=True)
class CopyHandle:
    """A copy and tokens in a `MaskedSampleBatcher`."""

    text: _SharedText
    reading: _Reading
    target: bytes

    def read(self) -> NDArray[np.float64]:
        """Log-probability of each token, [M], after the table is computed."""
        values = self.reading.log_probabilities[self.target]
        assert values is not None, "the table is computed first"
        return values

    def read_top(self) -> NDArray[np.float64]:
        """Most probable token at each masked position, the lowest id of equals, and its log-probability, [2, M]."""
        return self.reading.top_2M


def count_forwards(handles: Sequence[CopyHandle]) -> int:
    """Forwards of a single row that compute the copies: a row ``[xt | x0]`` holds one copy of each block of a text."""
    copies = {(id(handle.text), handle.reading.copy.start, id(handle.reading)) for handle in handles}
    num_copies = Counter((text, start) for text, start, _ in copies)
    num_rows: dict[int, int] = {}
    for (text, _), count in num_copies.items():
        num_rows[text] = max(count, num_rows.get(text, 0))
    return sum(num_rows.values())


class MaskedSampleBatcher:
    """Collects masked copies, and computes each of them once."""

    def __init__(self, layout: InputLayout, *, cfg_scale: float = 0.0, reads_top: bool = False) -> None:
        """
        Args:
            cfg_scale: guidance, ``u + (s + 1) (c - u)``. Above 0 each copy is computed again with its context masked.
            reads_top: also read the most probable tokens (`CopyHandle.read_top`).

        Raises:
            ValueError: guidance of a model without a mask token.
        """
        if cfg_scale > 0.0 and layout.mask_token is None:
            raise ValueError(f"cfg_scale = {cfg_scale} needs a model with a mask token: set it to 0")
        self._layout, self._cfg_scale, self._reads_top = layout, cfg_scale, reads_top
        self._texts: dict[tuple[bytes, int], _SharedText] = {}

    def add(
        self, clean_tokens: NDArray[np.int64], copy: MaskedCopy, targets: NDArray[np.int64], num_context: int
    ) -> CopyHandle:
        """Add a copy and the tokens to be predicted at its masked positions, [M].

        Args:
            clean_tokens: the text up to the last block of which there is a copy; empty if attention is bidirectional or
                causal.
            num_context: tokens of the text before the answer.
        """
        masked_context = num_context if self._cfg_scale > 0.0 else 0
        key = clean_tokens.tobytes(), masked_context
        text = self._texts.setdefault(key, _SharedText(clean_tokens, masked_context))
        reading = text.readings.setdefault(copy.key, _Reading(copy))
        target = targets.tobytes()
        reading.log_probabilities.setdefault(target, None)
        return CopyHandle(text, reading, target)

    @torch.no_grad()
    def compute(self, model: Transformer, batch_tokens: int) -> None:
        """Compute what has been added since the last call.

        Raises:
            ValueError: the model's probabilities are not finite, or a text is longer than its context.
        """
        sequences = [part for text in self._texts.values() for part in self._split(text, batch_tokens)]
        num_texts = 2 if self._cfg_scale > 0.0 else 1
        for batch in _split_into_batches(sequences, batch_tokens // num_texts, num_texts * model.config.vocab_size):
            self._read_batch(model, batch)

    def _read_batch(self, model: Transformer, batch: Sequence[_CopySequence]) -> None:
        """Run one forward, and read the log-probabilities with one host-device synchronization."""
        logits_NV = self._compute_logits(model, batch)
        readings = [reading for part in batch for reading in part.readings]
        firsts = np.cumsum([0, *(len(part.outputs_N) for part in batch[:-1])]).tolist()
        rows = [first + rows_M for first, part in zip(firsts, batch, strict=True) for rows_M in part.output_indices]
        uses = [(index, target) for index, reading in enumerate(readings) for target in reading.unread_targets]
        tokens = [np.frombuffer(target, dtype=np.int64) for _, target in uses]
        pairs_2U = np.stack([np.concatenate([rows[index] for index, _ in uses]), np.concatenate(tokens)])
        values_U, top_2N = self._read_logits(logits_NV, pairs_2U)
        check_finite(~np.isnan(values_U))
        parts = np.split(values_U, np.cumsum([len(token_ids) for token_ids in tokens])[:-1])
        for (index, target), part_M in zip(uses, parts, strict=True):
            readings[index].log_probabilities[target] = part_M
            if self._reads_top:
                readings[index].top_2M = top_2N[:, rows[index]]

    def _compute_logits(self, model: Transformer, batch: Sequence[_CopySequence]) -> Tensor:
        """Logits of the outputs of all sequences, [N, V]; with guidance in fp64."""
        device, slices = model.lm_head.weight.device, [part.slice for part in batch]
        tokens = [part.tokens_Q for part in batch]
        if self._cfg_scale > 0.0:
            assert self._layout.mask_token is not None
            tokens += [part.mask_context(self._layout.mask_token) for part in batch]
            slices += [replace(part) for part in slices]
        tokens_1Q = copy_to_device(torch.from_numpy(np.concatenate(tokens))[None], device)
        with nvtx.annotate("likelihood: forward"):
            logits_NV = model(tokens_1Q, pattern=VarlenBatch(slices))
        if self._cfg_scale == 0.0:
            return logits_NV
        conditional_NV, unconditional_NV = logits_NV.double().chunk(2)
        return unconditional_NV + (self._cfg_scale + 1.0) * (conditional_NV - unconditional_NV)

    def _read_logits(
        self, logits_NV: Tensor, pairs_2U: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Log-probabilities of pairs of a row and a token, [U], and the most probable tokens of all rows with their
        log-probabilities, [2, N], or [2, 0]; in fp64. The mask token has probability zero."""
        normalizers, tops = [], []
        for chunk in iterate_chunks(logits_NV):
            chunk_NV = logits_NV[chunk].to(torch.float64, copy=True)
            if self._layout.mask_token is not None:
                chunk_NV[:, self._layout.mask_token] = float("-inf")
            normalizers.append(chunk_NV.logsumexp(dim=1))
            if self._reads_top:
                values_N, tokens_N = chunk_NV.max(dim=1)
                tops.append(torch.stack([tokens_N.double(), values_N - normalizers[-1]]))
        pairs = copy_to_device(torch.from_numpy(pairs_2U), logits_NV.device)
        values_U = logits_NV[pairs[0], pairs[1]].double() - torch.cat(normalizers)[pairs[0]]
        num_rows = len(logits_NV) if self._reads_top else 0
        flat = torch.cat([values_U, *(top_2N.T.flatten() for top_2N in tops)]).cpu().numpy()
        return flat[: len(values_U)], flat[len(values_U) :].reshape(num_rows, 2).T

    def _split(self, text: _SharedText, batch_tokens: int) -> Iterator[_CopySequence]:
        """Sequences of copies, each of at most ``batch_tokens`` inputs, or one copy if that is longer."""
        shift = int(self._layout.alignment == "shifted")
        readings = [reading for reading in text.readings.values() if reading.unread_targets]
        if not readings:
            return
        if self._layout.block_length is None or self._layout.is_autoregressive:
            pattern = CAUSAL if self._layout.is_autoregressive else BIDIRECTIONAL
            yield from (
                _CopySequence(text, [reading], reading.copy.tokens, None, pattern, shift) for reading in readings
            )
            return
        start, num_inputs = 0, len(text.clean_tokens)
        for index, reading in enumerate(readings):
            num_inputs += len(reading.copy.tokens)
            if index > start and num_inputs > batch_tokens:
                yield _build_block_sequence(text, readings[start:index], self._layout.block_length, shift)
                start, num_inputs = index, len(text.clean_tokens) + len(reading.copy.tokens)
        yield _build_block_sequence(text, readings[start:], self._layout.block_length, shift)


BIDIRECTIONAL, CAUSAL = Bidirectional(), Causal()
"""One object each: on a GPU sequences of one pattern share their kernels."""


class _CopySequence:
    """One sequence of a forward: copies, after the clean tokens that they attend to."""

    def __init__(
        self,
        text: _SharedText,
        readings: Sequence[_Reading],
        tokens_Q: NDArray[np.int64],
        position_ids_Q: NDArray[np.int64] | None,
        pattern: AttentionPattern,
        shift: int,
    ) -> None:
        """``shift``: 1 if output i - 1 predicts token i. The output before a block is a clean one."""
        self.readings, self.tokens_Q, self._num_context = readings, tokens_Q, text.num_context
        outputs = []
        first = len(tokens_Q) - sum(len(reading.copy.tokens) for reading in readings)
        for reading in readings:
            offsets = reading.copy.masked_positions - reading.copy.start - shift
            outputs.append(np.where(offsets < 0, reading.copy.start - shift, first + offsets))
            first += len(reading.copy.tokens)
        self.outputs_N, indices = np.unique(np.concatenate(outputs), return_inverse=True)
        self.output_indices = np.split(indices, np.cumsum([len(part) for part in outputs])[:-1])
        """Output of each masked position of each copy, among `outputs_N`."""
        length = len(tokens_Q)
        self.slice = SequenceSlice(0, length, length, pattern, outputs=self.outputs_N, position_ids=position_ids_Q)

    def mask_context(self, mask_token: int) -> NDArray[np.int64]:
        """The tokens without the context."""
        return np.where(self.slice.input_positions < self._num_context, mask_token, self.tokens_Q)


def _build_block_sequence(
    text: _SharedText, readings: Sequence[_Reading], block_length: int, shift: int
) -> _CopySequence:
    copies, clean_tokens = [reading.copy for reading in readings], text.clean_tokens
    ids_Q = np.concatenate(
        [np.arange(len(clean_tokens)), *(copy.start + np.arange(len(copy.tokens)) for copy in copies)]
    )
    ends = len(clean_tokens) + np.cumsum([len(copy.tokens) for copy in copies])
    bounds = tuple((int(end) - len(copy.tokens), int(end)) for end, copy in zip(ends, copies, strict=True))
    pattern = CleanAndBlockCopies(block_length, tuple(ids_Q.tolist()), bounds)
    tokens_Q = np.concatenate([clean_tokens, *(copy.tokens for copy in copies)])
    return _CopySequence(text, readings, tokens_Q, ids_Q, pattern, shift)


def _split_into_batches(
    sequences: Sequence[_CopySequence], batch_tokens: int, vocab_size: int
) -> Iterator[list[_CopySequence]]:
    """Split into forwards of at most ``batch_tokens`` inputs and `MAX_LOGITS_BYTES` of logits, in order; at least one
    sequence each."""
    max_outputs = MAX_LOGITS_BYTES // (4 * vocab_size)
    batch: list[_CopySequence] = []
    num_inputs = num_outputs = 0
    for sequence in sequences:
        num_inputs += len(sequence.tokens_Q)
        num_outputs += len(sequence.outputs_N)
        if batch and (num_inputs > batch_tokens or num_outputs > max_outputs):
            yield batch
            batch, num_inputs, num_outputs = [], len(sequence.tokens_Q), len(sequence.outputs_N)
        batch.append(sequence)
    if batch:
        yield batch
