"""Log-probabilities of the masked tokens in masked copies of texts, and the forwards that compute them.

Copies with the same inputs are computed once: one-token options of a document are read from one output. Copies follow
each other in one row without padding, and each attends to its own text only. In block-causal attention a forward reads
the clean tokens of a text once, for all copies of its blocks.

Shapes: M masked tokens of a copy, Q inputs of a text with its copies, N outputs of a forward, U tokens that are read
from them, V vocabulary.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import add, gt
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffusionlm.diffusion.layout import InputLayout
from diffusionlm.evaluation.statistics import MAX_LOGITS_BYTES
from diffusionlm.inference.images import TextImages, join_images
from diffusionlm.inference.sampling.distributions import check_finite, iterate_chunks
from diffusionlm.models.patterns import Bidirectional, Causal, CleanAndBlockCopies
from diffusionlm.models.tensors import copy_to_device
from diffusionlm.models.transformer import Transformer
from diffusionlm.models.varlen import SequenceSlice, VarlenBatch
from profiling import nvtx

BIDIRECTIONAL, CAUSAL = Bidirectional(), Causal()
"""One object each: on a GPU sequences of one pattern share their kernels."""
TextKey = tuple[bytes, tuple[tuple[int, int], ...]]
InputKey = tuple[int, bytes, bytes]
T = TypeVar("T")


@dataclass(frozen=True)
class MaskedCopy:
    """A block of a text with some of its tokens masked; with bidirectional attention the whole text is the block."""

    clean_tokens: NDArray[np.int64]
    """The text up to the last block of which there is a copy; empty if attention is bidirectional or causal."""
    num_context: int
    """Tokens of the text before the answer, which guidance masks."""
    start: int
    """Position of the block's first token."""
    tokens: NDArray[np.int64]
    """Tokens of the block, the mask token at masked positions; of an autoregressive model the clean tokens."""
    masked_positions: NDArray[np.int64]
    """Positions in the text, ascending, [M]."""
    targets: NDArray[np.int64]
    """Tokens whose probabilities at the masked positions are read, [M]."""
    images: TextImages | None = None
    """Those of the text. None: it has none."""

    @property
    def text_key(self) -> TextKey:
        """The clean tokens, and the images with their first positions."""
        features = () if self.images is None else self.images.features
        return self.clean_tokens.tobytes(), tuple((first, id(features_EFD)) for first, features_EFD in features)

    def order_inputs(self, layout: InputLayout) -> NDArray[np.int64]:
        """Offsets of its tokens in the order in which a forward reads them (`NoisyAttention`)."""
        if layout.noisy_attention != "visible_first":
            return np.arange(len(self.tokens))
        is_masked = np.isin(self.start + np.arange(len(self.tokens)), self.masked_positions)
        return is_masked.argsort(kind="stable")

    @property
    def input_key(self) -> InputKey:
        """What the outputs depend on, beside the text."""
        return self.start, self.tokens.tobytes(), self.masked_positions.tobytes()


def count_forwards(copies: Sequence[MaskedCopy]) -> int:
    """Forwards of a single row that compute the copies: a row ``[xt | x0]`` holds one copy of each block of a text."""
    num_copies: defaultdict[TextKey, Counter[int]] = defaultdict(Counter)
    """Text -> block -> its different copies."""
    for text, (start, _, _) in {(copy.text_key, copy.input_key) for copy in copies}:
        num_copies[text][start] += 1
    return sum(max(blocks.values()) for blocks in num_copies.values())


@torch.no_grad()
def compute_log_probabilities(
    model: Transformer, layout: InputLayout, copies: Sequence[MaskedCopy], batch_tokens: int, cfg_scale: float = 0.0
) -> list[NDArray[np.float64]]:
    """Compute the log-probability of each target of each copy, [M].

    Args:
        batch_tokens: inputs of a forward, over all texts in it.
        cfg_scale: guidance, ``u + (s + 1) (c - u)``. Above 0 each copy is computed again with its context masked.

    Raises:
        ValueError: the model's probabilities are not finite, a text is longer than its context, or there is guidance
            and no mask token.
    """
    if cfg_scale > 0.0 and layout.mask_token is None:
        raise ValueError(f"cfg_scale = {cfg_scale} needs a model with a mask token: set it to 0")
    num_texts = 2 if cfg_scale > 0.0 else 1
    texts: dict[tuple[TextKey, int], dict[InputKey, list[int]]] = {}
    for index, copy in enumerate(copies):
        inputs = texts.setdefault((copy.text_key, copy.num_context if cfg_scale > 0.0 else 0), {})
        inputs.setdefault(copy.input_key, []).append(index)
    sequences = [
        part for inputs in texts.values() for part in _split(layout, copies, list(inputs.values()), batch_tokens)
    ]
    values: dict[int, NDArray[np.float64]] = {}
    max_outputs = MAX_LOGITS_BYTES // (4 * num_texts * model.config.vocab_size)
    sizes = [(len(part.tokens_Q), len(part.outputs_N)) for part in sequences]
    for batch in split_by_size(sequences, sizes, (batch_tokens // num_texts, max_outputs)):
        logits_NV = _compute_logits(model, layout, batch, cfg_scale)
        firsts = np.cumsum([0, *(len(part.outputs_N) for part in batch[:-1])]).tolist()
        rows = {i: first + rows_M for first, part in zip(firsts, batch, strict=True) for i, rows_M in part.rows.items()}
        targets_U = np.concatenate([copies[index].targets for index in rows])
        values_U = _read_logits(logits_NV, np.concatenate(list(rows.values())), targets_U, layout.mask_token)
        check_finite(~np.isnan(values_U))
        ends = np.cumsum([len(rows_M) for rows_M in rows.values()])[:-1]
        values |= dict(zip(rows, np.split(values_U, ends), strict=True))
    return [values[index] for index in range(len(copies))]


class _CopySequence:
    """One sequence of a forward: copies, after the clean tokens that they attend to."""

    def __init__(self, layout: InputLayout, copies: Sequence[MaskedCopy], readers: Sequence[Sequence[int]]) -> None:
        """``readers``: for each of the copies that are computed, the indices of those that read its outputs."""
        computed = [copies[indices[0]] for indices in readers]
        clean_tokens, lengths = computed[0].clean_tokens, [len(copy.tokens) for copy in computed]
        orders = [copy.order_inputs(layout) for copy in computed]
        copied_tokens = [copy.tokens[order] for copy, order in zip(computed, orders, strict=True)]
        self.tokens_Q = np.concatenate([clean_tokens, *copied_tokens])
        self.masked_Q = np.zeros(len(self.tokens_Q), np.bool_)
        """True at masked positions."""
        self.num_context, self.images = computed[0].num_context, computed[0].images
        # Output i - 1 predicts token i if outputs are shifted. The output before a block is a clean one.
        shift = int(layout.alignment == "shifted")
        outputs = []
        ends = len(clean_tokens) + np.cumsum(lengths)
        for copy, order, end in zip(computed, orders, ends.tolist(), strict=True):
            offsets, rows = copy.masked_positions - copy.start, end - len(order) + order.argsort()
            if not layout.is_autoregressive:
                self.masked_Q[rows[offsets]] = True
            outputs.append(np.where(offsets < shift, copy.start - shift, rows[offsets - shift]))
        self.outputs_N, indices = np.unique(np.concatenate(outputs), return_inverse=True)
        parts = np.split(indices, np.cumsum([len(part) for part in outputs])[:-1])
        self.rows = {index: part for own, part in zip(readers, parts, strict=True) for index in own}
        """Index of a copy -> the output of each of its masked positions, among `outputs_N`."""
        length = len(self.tokens_Q)
        if layout.block_length is None or layout.is_autoregressive:
            pattern = CAUSAL if layout.is_autoregressive else BIDIRECTIONAL
            self.slice = SequenceSlice(0, length, length, pattern, outputs=self.outputs_N)
            return
        ids = [np.arange(len(clean_tokens)), *(copy.start + np.arange(len(copy.tokens)) for copy in computed)]
        ids_Q = np.concatenate(ids)
        bounds = tuple(zip((ends - lengths).tolist(), ends.tolist(), strict=True))
        copies_pattern = CleanAndBlockCopies(layout.block_length, tuple(ids_Q.tolist()), bounds, *layout.half_attention)
        orders = [copy.start + order for copy, order in zip(computed, orders, strict=True)]
        ids_Q = np.concatenate([np.arange(len(clean_tokens)), *orders])
        self.slice = SequenceSlice(0, length, length, copies_pattern, outputs=self.outputs_N, position_ids=ids_Q)


def _split(
    layout: InputLayout, copies: Sequence[MaskedCopy], readers: Sequence[Sequence[int]], batch_tokens: int
) -> Iterator[_CopySequence]:
    """Sequences of the copies of a text, each of at most ``batch_tokens`` inputs, or one copy if that is longer.
    Without blocks a copy is the whole text."""
    computed = [copies[indices[0]] for indices in readers]
    has_blocks = layout.block_length is not None and not layout.is_autoregressive
    limit = batch_tokens - len(computed[0].clean_tokens) if has_blocks else -1
    for part in split_by_size(readers, [(len(copy.tokens),) for copy in computed], (limit,)):
        yield _CopySequence(layout, copies, part)


def _compute_logits(model: Transformer, layout: InputLayout, batch: Sequence[_CopySequence], scale: float) -> Tensor:
    """Logits of the outputs of all sequences, [N, V]; with guidance in fp64."""
    tokens, slices = [part.tokens_Q for part in batch], [part.slice for part in batch]
    images = [part.images for part in batch]
    if scale > 0.0:
        assert layout.mask_token is not None, "checked before"
        for part in batch:
            tokens.append(np.where(part.slice.input_positions < part.num_context, layout.mask_token, part.tokens_Q))
            slices.append(replace(part.slice))
            images.append(None if part.images is None else replace(part.images, features=()))
    masked_Q = np.concatenate([part.masked_Q for part in batch] * (len(tokens) // len(batch)))
    tokens_1Q, masked_1Q = (
        copy_to_device(torch.from_numpy(values_Q)[None], model.lm_head.weight.device)
        for values_Q in (np.concatenate(tokens), masked_Q)
    )
    all_images = join_images(model, slices, images)
    with nvtx.annotate("likelihood: forward"):
        logits_NV = model(tokens_1Q, pattern=VarlenBatch(slices), images=all_images, masked_BL=masked_1Q)
    if scale == 0.0:
        return logits_NV
    conditional_NV, unconditional_NV = logits_NV.double().chunk(2)
    return unconditional_NV + (scale + 1.0) * (conditional_NV - unconditional_NV)


def _read_logits(
    logits_NV: Tensor, rows_U: NDArray[np.int64], tokens_U: NDArray[np.int64], mask_token: int | None
) -> NDArray[np.float64]:
    """Log-probabilities of tokens in rows, [U] in fp64, with one host-device synchronization. The mask token has
    probability zero."""
    normalizers = []
    for chunk in iterate_chunks(logits_NV):
        chunk_NV = logits_NV[chunk].to(torch.float64, copy=True)
        if mask_token is not None:
            chunk_NV[:, mask_token] = float("-inf")
        normalizers.append(chunk_NV.logsumexp(dim=1))
    pairs_2U = copy_to_device(torch.from_numpy(np.stack([rows_U, tokens_U])), logits_NV.device)
    values_U = logits_NV[pairs_2U[0], pairs_2U[1]].double() - torch.cat(normalizers)[pairs_2U[0]]
    result_U: NDArray[np.float64] = values_U.cpu().numpy()
    return result_U


def split_by_size(
    items: Sequence[T], sizes: Sequence[tuple[int, ...]], limits: tuple[int, ...]
) -> Iterator[Sequence[T]]:
    """Split, in order, into parts of which no size exceeds its limit, or of a single item."""
    start, totals = 0, (0,) * len(limits)
    for index, size in enumerate(sizes):
        totals = tuple(map(add, totals, size))
        if index > start and any(map(gt, totals, limits)):
            yield items[start:index]
            start, totals = index, size
    if items:
        yield items[start:]
