"""Attention patterns: which keys each query attends to. The backend decides how attention is computed.

A pattern is a small frozen record. ``dense_mask`` is its definition; ``intervals`` is the same in O(length), from which
the tiled and flex backends skip hidden keys. Tests compare the two.

Shapes: B sequences, L tokens, S positions (L, or 2 L of the noisy and clean halves), N query heads, R ranges of keys
(1 or 2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor

from config.model import BlockAttention, NoisyAttention
from diffusionlm.models.tensors import copy_to_device

Intervals = tuple[Tensor, Tensor]
"""Starts and ends of half-open key ranges, each int64 [B or 1, S, R]."""
GatherKeys = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Called with the keys and values of a forward's inputs; returns those of all positions, with gradient."""


class AttentionPattern(Protocol):
    """Interface of an attention pattern."""

    @property
    def documents_BL(self) -> Tensor | None:
        """Document number of each token; a document is a run of equal numbers, and tokens attend to their own document
        only. None: each sequence is one document."""

    @property
    def positions_per_token(self) -> int:
        """Positions of the sequence per token: 2 for noisy and clean halves, else 1."""

    @property
    def is_unrestricted(self) -> bool:
        """True if every position attends to every position, so that no mask is needed."""

    @property
    def gather_keys(self) -> GatherKeys | None:
        """Collects the keys and values of positions that are not inputs of this forward. None: all positions are."""

    def num_keys(self, length: int) -> int:
        """Number of positions that have keys, for ``length`` inputs; it is larger if keys are gathered."""

    def default_positions(self, length: int, device: torch.device | str) -> Tensor:
        """Position of each input in its sequence, [length] or [B, length]: 0, 1, 2 ..., again in a second half."""

    def with_documents(self, documents_BL: Tensor) -> AttentionPattern:
        """Copy with other documents."""

    def to(self, device: torch.device | str) -> AttentionPattern:
        """Copy with its tensors on a device."""

    def pin_memory(self) -> AttentionPattern:
        """Copy with its tensors in pinned memory, from which a GPU copies asynchronously."""

    def dense_mask(self, length: int, device: torch.device | str = "cpu", window: int | None = None) -> Tensor:
        """Boolean mask [B or 1, S, S]: True where the query (second dimension) attends to the key (third).

        Args:
            length: number of positions, S.
            device: device of the mask.
            window: keys must be less than this many tokens away. None: no limit.

        Raises:
            ValueError: the length is odd for two halves or does not fit the documents, or the window is below 1.
        """

    def intervals(self, length: int, device: torch.device | str = "cpu", window: int | None = None) -> Intervals | None:
        """`dense_mask` in closed form: each query attends to R half-open ranges of keys.

        The ranges of a query are disjoint; an empty range has equal start and end. Arguments and errors are those of
        `dense_mask`. None: the pattern has no such form.
        """


class _PatternBase:
    """Methods that most patterns share."""

    positions_per_token: ClassVar[int] = 1

    @property
    def documents_BL(self) -> Tensor | None:
        return None

    @property
    def is_unrestricted(self) -> bool:
        return False

    @property
    def gather_keys(self) -> GatherKeys | None:
        return None

    def num_keys(self, length: int) -> int:
        return length

    def default_positions(self, length: int, device: torch.device | str) -> Tensor:
        return torch.arange(length // self.positions_per_token, device=device).repeat(self.positions_per_token)

    def with_documents(self, documents_BL: Tensor) -> Self:
        return replace(self, documents_BL=documents_BL)  # type: ignore[type-var]

    def to(self, device: torch.device | str) -> Self:
        is_gpu = torch.device(device).type == "cuda"  # to a CPU, an asynchronous copy would be read too early
        return self._map_tensors(lambda tensor: tensor.to(device, non_blocking=is_gpu))

    def pin_memory(self) -> Self:
        return self._map_tensors(Tensor.pin_memory)

    def _map_tensors(self, function: Callable[[Tensor], Tensor]) -> Self:
        tensors = {name: function(value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **tensors)  # type: ignore[type-var]


@dataclass(frozen=True)
class Bidirectional(_PatternBase):
    """Every position attends to its whole document."""

    documents_BL: Tensor | None = None

    @property
    def is_unrestricted(self) -> bool:
        return self.documents_BL is None

    def dense_mask(self, length: int, device: torch.device | str = "cpu", window: int | None = None) -> Tensor:
        return _DocumentBounds.from_documents(self.documents_BL, length, device).same_document_mask(window)

    def intervals(self, length: int, device: torch.device | str = "cpu", window: int | None = None) -> Intervals:
        bounds = _DocumentBounds.from_documents(self.documents_BL, length, device)
        return _stack_ranges(bounds.clip_to_window(bounds.document_starts_BL, bounds.document_ends_BL, window))

    def key_limit(self, positions_BQ: Tensor) -> Tensor:
        """Last visible key of a query at each position, plus one: no limit."""
        return torch.full_like(positions_BQ, torch.iinfo(positions_BQ.dtype).max)


@dataclass(frozen=True)
class Causal(_PatternBase):
    """Every position attends to itself and the positions before it in its document."""

    documents_BL: Tensor | None = None

    def dense_mask(self, length: int, device: torch.device | str = "cpu", window: int | None = None) -> Tensor:
        return _DocumentBounds.from_documents(self.documents_BL, length, device).same_document_mask(window).tril()

    def intervals(self, length: int, device: torch.device | str = "cpu", window: int | None = None) -> Intervals:
        bounds = _DocumentBounds.from_documents(self.documents_BL, length, device)
        return _stack_ranges(bounds.clip_to_window(bounds.document_starts_BL, bounds.positions_1L + 1, window))

    def key_limit(self, positions_BQ: Tensor) -> Tensor:
        """Last visible key of a query at each position, plus one, without documents."""
        return positions_BQ + 1


@dataclass(frozen=True)
class _BlockPattern(_PatternBase):
    """Base of patterns of blocks. Blocks are counted from the start of the document, or of the segment; the
    last one of a document or segment may be shorter."""

    block_length: int
    documents_BL: Tensor | None = None
    segments_BL: Tensor | None = None
    """Segment number of each token; a segment is a run of equal numbers within a document, where blocks are counted
    anew. None: each document is one segment."""

    def __post_init__(self) -> None:
        _check_block_length(self.block_length)

    def block_bounds(self, num_tokens: int, device: torch.device | str = "cpu") -> Intervals:
        """Start and end of each token's block, each [B or 1, L]."""
        segments_BL = self.documents_BL if self.segments_BL is None else self.segments_BL
        segments = _DocumentBounds.from_documents(segments_BL, num_tokens, device)
        return segments.block_bounds(segments.document_starts_BL, self.block_length)


@dataclass(frozen=True)
class BlockCausal(_BlockPattern):
    """Every position attends to its whole block and the blocks before it in its document."""

    def dense_mask(self, length: int, device: torch.device | str = "cpu", window: int | None = None) -> Tensor:
        bounds = _DocumentBounds.from_documents(self.documents_BL, length, device)
        starts_BL, _ = self.block_bounds(length, device)
        return bounds.same_document_mask(window) & (starts_BL[:, :, None] >= starts_BL[:, None, :])

    def intervals(self, length: int, device: torch.device | str = "cpu", window: int | None = None) -> Intervals:
        bounds = _DocumentBounds.from_documents(self.documents_BL, length, device)
        _, ends_BL = self.block_bounds(length, device)
        return _stack_ranges(bounds.clip_to_window(bounds.document_starts_BL, ends_BL, window))

    def key_limit(self, positions_BQ: Tensor) -> Tensor:
        """Last visible key of a query at each position, plus one, without documents: the end of its block."""
        if self.segments_BL is None:
            return (positions_BQ // self.block_length + 1) * self.block_length
        _, ends_BL = self.block_bounds(self.segments_BL.shape[1], self.segments_BL.device)
        return ends_BL.expand(len(positions_BQ), -1).gather(1, positions_BQ)


@dataclass(frozen=True)
class CausalThenBlock(_PatternBase):
    """Decoding of a block after causal text, in one forward: a position below ``start`` attends to itself and those
    before it, a position of the block, ``start`` to ``end`` - 1, to all positions before ``end``."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise ValueError(f"a block from {self.start} to {self.end} must start at 0 or later and have a token")

    def dense_mask(self, length: int, device: torch.device | str = "cpu", window: int | None = None) -> Tensor:
        bounds = _DocumentBounds.from_documents(None, length, device)
        ends_1L1 = self.key_limit(bounds.positions_1L)[..., None]
        return bounds.same_document_mask(window) & (bounds.positions_1L < ends_1L1)

    def intervals(self, length: int, device: torch.device | str = "cpu", window: int | None = None) -> Intervals:
        bounds = _DocumentBounds.from_documents(None, length, device)
        ends_1L = self.key_limit(bounds.positions_1L)
        return _stack_ranges(bounds.clip_to_window(bounds.document_starts_BL, ends_1L.clamp(max=length), window))

    def key_limit(self, positions_BQ: Tensor) -> Tensor:
        """Last visible key of a query at each position, plus one."""
        return torch.where(positions_BQ < self.start, positions_BQ + 1, self.end)


@dataclass(frozen=True)
class BlockDiffusion(_BlockPattern):
    """Block diffusion in one training forward over noisy and clean halves ``[xt | x0]`` (BD3-LM, Arriola et al. 2025,
    section 3.1 and appendix B).

    The sequence has 2 L positions for L tokens. A noisy query attends to its own noisy block and to the clean blocks
    before it. A clean query attends to its own clean block and to the clean blocks before it. Clean queries never
    attend to noisy keys. A half whose attention is "token" is causal inside of its blocks, too (clean:
    Nemotron-Labs-Diffusion; both: I-DLM, arXiv 2604.11035), with "visible_first" in the order of its inputs (WeDLM).
    """

    positions_per_token: ClassVar[int] = 2
    clean: BlockAttention = "block"
    noisy: NoisyAttention = "block"
    noisy_positions_BL: Tensor | None = None
    """Position of each noisy input, [B, L]: of "visible_first". None: ascending."""

    def default_positions(self, length: int, device: torch.device | str) -> Tensor:
        positions_S, noisy_BL = super().default_positions(length, device), self.noisy_positions_BL
        return positions_S if noisy_BL is None else torch.cat([noisy_BL, noisy_BL.sort(dim=1).values], dim=1)

    def dense_mask(self, length: int, device: torch.device | str = "cpu", window: int | None = None) -> Tensor:
        bounds = _DocumentBounds.from_documents(self.documents_BL, half := _half_length(length), device)
        starts_BL, _ = self.block_bounds(half, device)
        same_document_BLL = bounds.same_document_mask(window)
        same_block_BLL = same_document_BLL & (starts_BL[:, :, None] == starts_BL[:, None, :])
        earlier_block_BLL = same_document_BLL & (starts_BL[:, :, None] > starts_BL[:, None, :])
        own_noisy_BLL = same_block_BLL if self.noisy == "block" else same_block_BLL.tril()
        own_clean_BLL = same_block_BLL if self.clean == "block" else same_block_BLL.tril()
        noisy = torch.cat([own_noisy_BLL, earlier_block_BLL], dim=2)
        clean = torch.cat([torch.zeros_like(same_block_BLL), own_clean_BLL | earlier_block_BLL], dim=2)
        return torch.cat([noisy, clean], dim=1)

    def intervals(self, length: int, device: torch.device | str = "cpu", window: int | None = None) -> Intervals:
        bounds = _DocumentBounds.from_documents(self.documents_BL, half := _half_length(length), device)
        starts_BL, ends_BL = self.block_bounds(half, device)
        own_ends_BL = (bounds.positions_1L + 1).expand_as(ends_BL)
        noisy_ends_BL = ends_BL if self.noisy == "block" else own_ends_BL
        clean_ends_BL = ends_BL if self.clean == "block" else own_ends_BL
        # For the queries of both halves the first range has noisy keys, the second clean ones.
        noisy = _stack_ranges(
            bounds.clip_to_window(starts_BL, noisy_ends_BL, window),
            bounds.clip_to_window(bounds.document_starts_BL, starts_BL, window, shift=half),
        )
        clean = _stack_ranges(
            bounds.clip_to_window(ends_BL, ends_BL, window),
            bounds.clip_to_window(bounds.document_starts_BL, clean_ends_BL, window, shift=half),
        )
        return torch.cat([noisy[0], clean[0]], dim=1), torch.cat([noisy[1], clean[1]], dim=1)


@dataclass(frozen=True)
class CleanAndBlockCopies(_PatternBase):
    """Clean tokens of a text, then noisy copies of its blocks: rows of `BlockDiffusion` with the same clean half, as
    one row. The model is given the positions in the text (`position_ids`).

    A query of a copy attends to the copy and to the clean blocks before it. A clean query attends to its own clean
    block and to the clean blocks before it. ``clean`` and ``noisy`` are those of `BlockDiffusion`.
    """

    block_length: int
    position_ids: tuple[int, ...]
    """Position of each query in the text."""
    copy_bounds: tuple[tuple[int, int], ...]
    """First query of each copy and the one after its last, at least one copy; queries before the first are clean."""
    clean: BlockAttention = "block"
    noisy: NoisyAttention = "block"

    def dense_mask(self, length: int, device: torch.device | str = "cpu", window: int | None = None) -> Tensor:
        starts_1SR, ends_1SR = self.intervals(length, device, window)
        keys_S1 = torch.arange(length, device=device)[:, None]
        return ((keys_S1 >= starts_1SR[:, :, None]) & (keys_S1 < ends_1SR[:, :, None])).any(dim=-1)

    def intervals(self, length: int, device: torch.device | str = "cpu", window: int | None = None) -> Intervals:
        _check_window(window)
        positions_S = torch.tensor(self.position_ids)
        if length != len(positions_S):
            raise ValueError(f"position_ids are for {len(positions_S)} positions, the sequence has {length}")
        num_clean = self.copy_bounds[0][0]
        block_starts_S = positions_S - positions_S % self.block_length
        clean_ends_S = block_starts_S.clone()
        ends_S = block_starts_S + self.block_length if self.clean == "block" else positions_S + 1
        clean_ends_S[:num_clean] = ends_S[:num_clean].clamp(max=num_clean)
        bounds_C2 = torch.tensor(self.copy_bounds)
        own_S2 = torch.zeros(length, 2, dtype=torch.int64)
        own_S2[num_clean:] = bounds_C2.repeat_interleave(bounds_C2.diff(dim=1)[:, 0], dim=0)
        if self.noisy != "block":
            own_S2[num_clean:, 1] = torch.arange(num_clean, length) + 1
        clean_S2 = torch.stack([torch.zeros_like(clean_ends_S), clean_ends_S], dim=-1)
        if window is not None:
            # A clean key is its position; a key of a copy is as far from the query as in the text.
            clean_S2 = _clip_to_reach(clean_S2, positions_S, window)
            own_S2 = _clip_to_reach(own_S2, torch.arange(length), window)
        # Computed on the CPU: the copies are of different lengths, for which the host would wait.
        ranges_1SR2 = copy_to_device(torch.stack([clean_S2, own_S2], dim=1)[None], torch.device(device))
        return ranges_1SR2[..., 0], ranges_1SR2[..., 1]


@dataclass(frozen=True)
class PromptAndOwnBlock(_PatternBase):
    """Independent answer blocks: a prompt token attends to the whole prompt of its document, an answer token to that
    prompt and its own block. Answer blocks are counted from the end of the prompt."""

    block_length: int
    is_prompt_BL: Tensor
    """Boolean [B or 1, L]: True for the prompt, a prefix (possibly empty) of each document."""
    documents_BL: Tensor | None = None

    def __post_init__(self) -> None:
        _check_block_length(self.block_length)
        if self.is_prompt_BL.dtype != torch.bool or self.is_prompt_BL.dim() != 2:
            own = f"{self.is_prompt_BL.dtype} {list(self.is_prompt_BL.shape)}"
            raise ValueError(f"is_prompt_BL must be boolean [B or 1, L], not {own}")

    def dense_mask(self, length: int, device: torch.device | str = "cpu", window: int | None = None) -> Tensor:
        bounds, prompt_ends_BL = self._bounds_and_prompt_ends(length, device)
        is_prompt_BL = bounds.positions_1L < prompt_ends_BL
        blocks_BL = (bounds.positions_1L - prompt_ends_BL) // self.block_length
        same_block_BLL = ~is_prompt_BL[:, :, None] & (blocks_BL[:, :, None] == blocks_BL[:, None, :])
        return bounds.same_document_mask(window) & (is_prompt_BL[:, None, :] | same_block_BLL)

    def intervals(self, length: int, device: torch.device | str = "cpu", window: int | None = None) -> Intervals:
        bounds, prompt_ends_BL = self._bounds_and_prompt_ends(length, device)
        starts_BL, ends_BL = bounds.block_bounds(prompt_ends_BL, self.block_length)
        is_prompt_BL = bounds.positions_1L < prompt_ends_BL
        return _stack_ranges(
            bounds.clip_to_window(bounds.document_starts_BL, prompt_ends_BL, window),
            bounds.clip_to_window(
                torch.maximum(starts_BL, prompt_ends_BL), ends_BL.where(~is_prompt_BL, prompt_ends_BL), window
            ),
        )

    def _bounds_and_prompt_ends(self, length: int, device: torch.device | str) -> tuple[_DocumentBounds, Tensor]:
        """Bounds of the documents, and the end of the prompt of each position's document, [B or 1, L]."""
        bounds = _DocumentBounds.from_documents(self.documents_BL, length, device)
        is_prompt_BL = self.is_prompt_BL.to(device)
        if is_prompt_BL.shape[1] != length:
            raise ValueError(f"is_prompt_BL is for {is_prompt_BL.shape[1]} tokens, the sequence has {length}")
        before = torch.nn.functional.pad(is_prompt_BL.cumsum(dim=1), (1, 0))
        batch = max(before.shape[0], bounds.document_starts_BL.shape[0])
        document_starts_BL, document_ends_BL, before = (
            tensor.expand(batch, -1) for tensor in (bounds.document_starts_BL, bounds.document_ends_BL, before)
        )
        prompt_ends_BL = document_starts_BL + before.gather(1, document_ends_BL) - before.gather(1, document_starts_BL)
        # Checked on a CPU only: on a GPU it would be a sync.
        if is_prompt_BL.device.type == "cpu" and not (is_prompt_BL == (bounds.positions_1L < prompt_ends_BL)).all():
            raise ValueError("is_prompt_BL: the prompt must be a prefix of each document; give documents_BL if packed")
        return bounds, prompt_ends_BL


@dataclass(frozen=True)
class DenseBias(_PatternBase):
    """An arbitrary mask or bias: ``model(tokens, pattern=DenseBias(mask))``.

    Only the dense backends (eager, sdpa) compute it. Every query must attend to at least one key: a softmax over
    nothing is not defined.
    """

    bias: Tensor
    """[L, L], [B or 1, L, L] or [B or 1, N, L, L], queries before keys. Float: added to the scores; -inf hides a key.
    Boolean: False hides a key."""
    documents_BL: Tensor | None = None
    """Restricts attention further to the own document, if set."""

    def __post_init__(self) -> None:
        shape = list(self.bias.shape)
        if self.bias.dim() not in (2, 3, 4) or shape[-1] != shape[-2]:
            raise ValueError(f"bias must be [L, L], [B or 1, L, L] or [B or 1, heads, L, L], not {shape}")
        if self.bias.dtype != torch.bool and not self.bias.is_floating_point():
            raise ValueError(f"bias must be floating point (added to the scores) or boolean, not {self.bias.dtype}")

    def dense_mask(self, length: int, device: torch.device | str = "cpu", window: int | None = None) -> Tensor:
        """The bias, [B or 1, L, L] or [B or 1, N, L, L], with -inf or False where documents or window hide a key."""
        if self.bias.shape[-1] != length:
            raise ValueError(f"bias is for {self.bias.shape[-1]} positions, the sequence has {length}")
        bias = self.bias.to(device)
        bias = bias[None] if bias.dim() == 2 else bias
        if self.documents_BL is None and window is None:
            return bias
        mask = _DocumentBounds.from_documents(self.documents_BL, length, device).same_document_mask(window)
        mask = mask[:, None] if bias.dim() == 4 else mask
        return bias & mask if bias.dtype == torch.bool else torch.where(mask, bias, float("-inf"))

    def intervals(self, length: int, device: torch.device | str = "cpu", window: int | None = None) -> None:
        """None: an arbitrary mask has no closed form."""
        return None


@dataclass(frozen=True)
class _DocumentBounds:
    """Positions of the tokens of one half, and starts and ends of their documents."""

    positions_1L: Tensor
    document_starts_BL: Tensor
    """First position of each token's document, [B or 1, L]."""
    document_ends_BL: Tensor
    """Last position of each token's document plus one, [B or 1, L]."""

    @classmethod
    def from_documents(cls, documents_BL: Tensor | None, length: int, device: torch.device | str) -> Self:
        positions_1L = torch.arange(length, device=device)[None]
        if documents_BL is None:
            return cls(positions_1L, torch.zeros_like(positions_1L), torch.full_like(positions_1L, length))
        if documents_BL.shape[1] != length:
            raise ValueError(f"documents_BL is for {documents_BL.shape[1]} tokens, the sequence has {length}")
        documents_BL = documents_BL.to(device)
        is_first_BL = torch.ones_like(documents_BL, dtype=torch.bool)
        is_first_BL[:, 1:] = documents_BL[:, 1:] != documents_BL[:, :-1]
        document_starts_BL = torch.where(is_first_BL, positions_1L, 0).cummax(dim=1).values
        following_BL = torch.full_like(document_starts_BL, length)
        following_BL[:, :-1] = torch.where(is_first_BL, positions_1L, length)[:, 1:]
        return cls(positions_1L, document_starts_BL, following_BL.flip(1).cummin(dim=1).values.flip(1))

    def same_document_mask(self, window: int | None) -> Tensor:
        """Boolean [B or 1, L, L]: True for pairs of one document that are less than the window apart."""
        _check_window(window)
        same_document_BLL = self.document_starts_BL[:, :, None] == self.document_starts_BL[:, None, :]
        if window is None:
            return same_document_BLL
        return same_document_BLL & ((self.positions_1L[:, :, None] - self.positions_1L[:, None, :]).abs() < window)

    def block_bounds(self, origin_BL: Tensor, block_length: int) -> Intervals:
        """Start and end of each token's block, each [B or 1, L].

        Blocks are counted from ``origin_BL``; the last one ends with the document.
        """
        starts_BL = self.positions_1L - (self.positions_1L - origin_BL) % block_length
        return starts_BL, torch.minimum(starts_BL + block_length, self.document_ends_BL)

    def clip_to_window(self, starts_BL: Tensor, ends_BL: Tensor, window: int | None, *, shift: int = 0) -> Intervals:
        """Restrict ranges to the window around each position, then add ``shift``."""
        _check_window(window)
        if window is not None:
            starts_BL = torch.maximum(starts_BL, self.positions_1L - window + 1)
            ends_BL = torch.minimum(ends_BL, self.positions_1L + window)
        ends_BL = torch.maximum(starts_BL, ends_BL)
        return starts_BL.expand_as(ends_BL) + shift, ends_BL + shift


def document_offsets(documents_BL: Tensor) -> Tensor:
    """Distance of each position from the start of its document, [B, L]; a document is a run of equal numbers."""
    bounds = _DocumentBounds.from_documents(documents_BL, documents_BL.shape[1], documents_BL.device)
    return bounds.positions_1L - bounds.document_starts_BL


def _clip_to_reach(ranges_S2: Tensor, origins_S: Tensor, window: int) -> Tensor:
    """Restrict a range of keys of each query to less than ``window`` from its origin."""
    starts_S = torch.maximum(ranges_S2[:, 0], origins_S - window + 1)
    return torch.stack([starts_S, torch.maximum(starts_S, torch.minimum(ranges_S2[:, 1], origins_S + window))], dim=-1)


def _stack_ranges(*ranges: Intervals) -> Intervals:
    starts, ends = zip(*ranges, strict=True)
    return torch.stack(starts, dim=-1), torch.stack(ends, dim=-1)


def _half_length(length: int) -> int:
    if length % 2:
        raise ValueError(f"a sequence of {length} positions cannot be [xt | x0], two halves of equal length")
    return length // 2


def _check_block_length(block_length: int) -> None:
    if block_length < 1:
        raise ValueError(f"block_length = {block_length} must be at least 1")


def _check_window(window: int | None) -> None:
    if window is not None and window < 1:
        raise ValueError(f"window = {window} must be at least 1: a position attends to itself")
