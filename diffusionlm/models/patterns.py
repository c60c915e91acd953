"""Who may see whom: descriptions of attention, apart from how it is computed.

A pattern is a small frozen record. ``dense`` is its reference meaning; ``intervals`` says the same in O(length), and
`lowering.py` builds from it what skips the hidden keys. Tests hold all of them together.

Shapes: B rows, L tokens, S positions of the whole sequence (L, or 2 L of two streams), N query heads, R ranges (1 or 2)
of keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor

Intervals = tuple[Tensor, Tensor]
"""Starts and ends of key ranges, each int64 [B or 1, S, R]."""


class AttentionPattern(Protocol):
    """What attention needs to know of a pattern."""

    @property
    def documents_BL(self) -> Tensor | None:
        """Document number of each token, a run of equal numbers for each; positions see only their own document.
        None: one document a row. Holds for every stream."""

    @property
    def positions_per_token(self) -> int:
        """How many times the tokens are in the sequence, one stream after the other."""

    @property
    def is_unrestricted(self) -> bool:
        """Every position sees every position, so that no mask is needed."""

    def with_documents(self, documents_BL: Tensor) -> AttentionPattern:
        """The same for other documents."""

    def to(self, device: torch.device | str) -> AttentionPattern:
        """The same with its tensors on a device."""

    def dense_mask(self, length: int, device: torch.device | str = "cpu", window: int | None = None) -> Tensor:
        """Boolean mask [B or 1, S, S]: True where the query (second dimension) may see the key (third).

        Args:
            length: S, the positions of the whole sequence.
            device: where the mask is wanted.
            window: a query sees only keys that are less than this many positions away, both counted in their stream.

        Raises:
            ValueError: a length that does not fit the streams or the documents, or a window below 1.
        """

    def intervals(self, length: int, device: torch.device | str = "cpu", window: int | None = None) -> Intervals | None:
        """``dense`` in closed form: a query sees the keys of R half-open ranges.

        The ranges of a query share no key; an empty one starts where it ends. Arguments and errors as for `dense`.
        None: the pattern has no such form.
        """


@dataclass(frozen=True)
class Bidirectional:
    """Every position sees its whole document."""

    documents_BL: Tensor | None = None
    positions_per_token: ClassVar[int] = 1

    @property
    def is_unrestricted(self) -> bool:
        return self.documents_BL is None

    def with_documents(self, documents_BL: Tensor) -> Bidirectional:
        return replace(self, documents_BL=documents_BL)

    def to(self, device: torch.device | str) -> Bidirectional:
        return replace(self, documents_BL=_to_device(self.documents_BL, device))

    def dense_mask(self, length: int, device: torch.device | str = "cpu", window: int | None = None) -> Tensor:
        return _DocumentBounds.of(self.documents_BL, length, device).same_document_mask(window)

    def intervals(self, length: int, device: torch.device | str = "cpu", window: int | None = None) -> Intervals:
        places = _DocumentBounds.of(self.documents_BL, length, device)
        return _stack_ranges(places.clip_to_window(places.document_starts_BL, places.document_ends_BL, window))

    def key_limit(self, places: Tensor) -> Tensor:
        """One behind the last key that a query at each place of a text sees: beyond the end of any text."""
        return torch.full_like(places, torch.iinfo(places.dtype).max)


@dataclass(frozen=True)
class Causal:
    """Every position sees itself and what is before it in its document."""

    documents_BL: Tensor | None = None
    positions_per_token: ClassVar[int] = 1

    @property
    def is_unrestricted(self) -> bool:
        return False

    def with_documents(self, documents_BL: Tensor) -> Causal:
        return replace(self, documents_BL=documents_BL)

    def to(self, device: torch.device | str) -> Causal:
        return replace(self, documents_BL=_to_device(self.documents_BL, device))

    def dense_mask(self, length: int, device: torch.device | str = "cpu", window: int | None = None) -> Tensor:
        return _DocumentBounds.of(self.documents_BL, length, device).same_document_mask(window).tril()

    def intervals(self, length: int, device: torch.device | str = "cpu", window: int | None = None) -> Intervals:
        places = _DocumentBounds.of(self.documents_BL, length, device)
        return _stack_ranges(places.clip_to_window(places.document_starts_BL, places.positions_1L + 1, window))

    def key_limit(self, places: Tensor) -> Tensor:
        """One behind the last key that a query at each place of a text sees, without documents."""
        return places + 1


@dataclass(frozen=True)
class BlockCausal:
    """Every position sees its own block whole, and the blocks before it. Blocks start with the document."""

    block_length: int
    documents_BL: Tensor | None = None
    positions_per_token: ClassVar[int] = 1

    def __post_init__(self) -> None:
        _check_block_length(self.block_length)

    @property
    def is_unrestricted(self) -> bool:
        return False

    def with_documents(self, documents_BL: Tensor) -> BlockCausal:
        return replace(self, documents_BL=documents_BL)

    def to(self, device: torch.device | str) -> BlockCausal:
        return replace(self, documents_BL=_to_device(self.documents_BL, device))

    def dense_mask(self, length: int, device: torch.device | str = "cpu", window: int | None = None) -> Tensor:
        places = _DocumentBounds.of(self.documents_BL, length, device)
        blocks_BL = (places.positions_1L - places.document_starts_BL) // self.block_length
        return places.same_document_mask(window) & (blocks_BL[:, :, None] >= blocks_BL[:, None, :])

    def intervals(self, length: int, device: torch.device | str = "cpu", window: int | None = None) -> Intervals:
        places = _DocumentBounds.of(self.documents_BL, length, device)
        _, ends_BL = places.block_bounds(places.document_starts_BL, self.block_length)
        return _stack_ranges(places.clip_to_window(places.document_starts_BL, ends_BL, window))

    def key_limit(self, places: Tensor) -> Tensor:
        """One behind the last key that a query at each place of a text sees, without documents: its block's end."""
        return (places // self.block_length + 1) * self.block_length


@dataclass(frozen=True)
class BlockDiffusion:
    """Training of block diffusion in one forward: noisy tokens, then the same tokens clean (BD3-LM, Arriola et al.
    2025, section 3.1 and appendix B).

    The sequence is ``[xt | x0]``, 2 L positions for L tokens. Blocks start with the document; the last may be short. A
    noisy query sees its own noisy block and the clean keys of the blocks before it; a clean query sees the clean keys
    of its own block and of those before it. Clean never sees noisy, and noisy never its own clean block.
    """

    block_length: int
    documents_BL: Tensor | None = None
    positions_per_token: ClassVar[int] = 2

    def __post_init__(self) -> None:
        _check_block_length(self.block_length)

    @property
    def is_unrestricted(self) -> bool:
        return False

    def with_documents(self, documents_BL: Tensor) -> BlockDiffusion:
        return replace(self, documents_BL=documents_BL)

    def to(self, device: torch.device | str) -> BlockDiffusion:
        return replace(self, documents_BL=_to_device(self.documents_BL, device))

    def dense_mask(self, length: int, device: torch.device | str = "cpu", window: int | None = None) -> Tensor:
        places = _DocumentBounds.of(self.documents_BL, _half_length(length), device)
        blocks_BL = (places.positions_1L - places.document_starts_BL) // self.block_length
        may_meet_BLL = places.same_document_mask(window)
        own_BLL = may_meet_BLL & (blocks_BL[:, :, None] == blocks_BL[:, None, :])
        before_BLL = may_meet_BLL & (blocks_BL[:, :, None] > blocks_BL[:, None, :])
        noisy = torch.cat([own_BLL, before_BLL], dim=2)
        clean = torch.cat([torch.zeros_like(own_BLL), own_BLL | before_BLL], dim=2)
        return torch.cat([noisy, clean], dim=1)

    def intervals(self, length: int, device: torch.device | str = "cpu", window: int | None = None) -> Intervals:
        places = _DocumentBounds.of(self.documents_BL, half := _half_length(length), device)
        starts_BL, ends_BL = places.block_bounds(places.document_starts_BL, self.block_length)
        # The first range is of noisy keys, the second of clean ones, for the queries of both streams.
        noisy = _stack_ranges(
            places.clip_to_window(starts_BL, ends_BL, window),
            places.clip_to_window(places.document_starts_BL, starts_BL, window, shift=half),
        )
        clean = _stack_ranges(
            places.clip_to_window(ends_BL, ends_BL, window),
            places.clip_to_window(places.document_starts_BL, ends_BL, window, shift=half),
        )
        return torch.cat([noisy[0], clean[0]], dim=1), torch.cat([noisy[1], clean[1]], dim=1)


@dataclass(frozen=True)
class PromptAndOwnBlock:
    """Answer blocks that do not know each other: prompt tokens see their whole prompt, an answer token sees the prompt
    of its document and its own block. Answer blocks are counted from the end of the prompt."""

    block_length: int
    is_prompt_BL: Tensor
    """Boolean [B or 1, L]: True for the prompt, a prefix (maybe empty) of each document."""
    documents_BL: Tensor | None = None
    positions_per_token: ClassVar[int] = 1

    def __post_init__(self) -> None:
        _check_block_length(self.block_length)
        if self.is_prompt_BL.dtype != torch.bool or self.is_prompt_BL.dim() != 2:
            raise ValueError(
                f"is_prompt_BL must be boolean [B or 1, L], not {self.is_prompt_BL.dtype} "
                f"{list(self.is_prompt_BL.shape)}"
            )

    @property
    def is_unrestricted(self) -> bool:
        return False

    def with_documents(self, documents_BL: Tensor) -> PromptAndOwnBlock:
        return replace(self, documents_BL=documents_BL)

    def to(self, device: torch.device | str) -> PromptAndOwnBlock:
        return replace(
            self, documents_BL=_to_device(self.documents_BL, device), is_prompt_BL=self.is_prompt_BL.to(device)
        )

    def dense_mask(self, length: int, device: torch.device | str = "cpu", window: int | None = None) -> Tensor:
        places, prompt_ends_BL = self._bounds_and_prompt_ends(length, device)
        is_prompt_BL = places.positions_1L < prompt_ends_BL
        blocks_BL = (places.positions_1L - prompt_ends_BL) // self.block_length
        own_BLL = ~is_prompt_BL[:, :, None] & (blocks_BL[:, :, None] == blocks_BL[:, None, :])
        return places.same_document_mask(window) & (is_prompt_BL[:, None, :] | own_BLL)

    def intervals(self, length: int, device: torch.device | str = "cpu", window: int | None = None) -> Intervals:
        places, prompt_ends_BL = self._bounds_and_prompt_ends(length, device)
        starts_BL, ends_BL = places.block_bounds(prompt_ends_BL, self.block_length)
        is_prompt_BL = places.positions_1L < prompt_ends_BL
        return _stack_ranges(
            places.clip_to_window(places.document_starts_BL, prompt_ends_BL, window),
            places.clip_to_window(
                torch.maximum(starts_BL, prompt_ends_BL), ends_BL.where(~is_prompt_BL, prompt_ends_BL), window
            ),
        )

    def _bounds_and_prompt_ends(self, length: int, device: torch.device | str) -> tuple[_DocumentBounds, Tensor]:
        """Documents, and where the prompt of each position's document ends, [B or 1, L]."""
        places = _DocumentBounds.of(self.documents_BL, length, device)
        is_prompt_BL = self.is_prompt_BL.to(device)
        if is_prompt_BL.shape[1] != length:
            raise ValueError(f"is_prompt_BL is for {is_prompt_BL.shape[1]} tokens, the sequence has {length}")
        before = torch.nn.functional.pad(is_prompt_BL.cumsum(dim=1), (1, 0))
        rows = max(before.shape[0], places.document_starts_BL.shape[0])
        document_starts_BL, document_ends_BL, before = (
            each.expand(rows, -1) for each in (places.document_starts_BL, places.document_ends_BL, before)
        )
        prompt_ends_BL = document_starts_BL + before.gather(1, document_ends_BL) - before.gather(1, document_starts_BL)
        # Only where looking costs no wait for a device.
        if is_prompt_BL.device.type == "cpu" and not (is_prompt_BL == (places.positions_1L < prompt_ends_BL)).all():
            raise ValueError("is_prompt_BL: the prompt must be a prefix of each document; give documents_BL if packed")
        return places, prompt_ends_BL


@dataclass(frozen=True)
class DenseBias:
    """A mask or bias of the user's own.

    It is what `dense` returns, so that only the lowerings with a dense mask compute it. Each query must see some key:
    the softmax over none is not defined.
    """

    bias: Tensor
    """[L, L], [B or 1, L, L] or [B or 1, N, L, L], queries before keys. Float: added to the scores, -inf hides.
    Boolean: False hides."""
    documents_BL: Tensor | None = None
    """Restricts it further, if given."""
    positions_per_token: ClassVar[int] = 1

    def __post_init__(self) -> None:
        shape = list(self.bias.shape)
        if self.bias.dim() not in (2, 3, 4) or shape[-1] != shape[-2]:
            raise ValueError(f"bias must be [L, L], [B or 1, L, L] or [B or 1, heads, L, L], not {shape}")
        if self.bias.dtype != torch.bool and not self.bias.is_floating_point():
            raise ValueError(f"bias must be floating point (added to the scores) or boolean, not {self.bias.dtype}")

    @property
    def is_unrestricted(self) -> bool:
        return False

    def with_documents(self, documents_BL: Tensor) -> DenseBias:
        return replace(self, documents_BL=documents_BL)

    def to(self, device: torch.device | str) -> DenseBias:
        return replace(self, bias=self.bias.to(device), documents_BL=_to_device(self.documents_BL, device))

    def dense_mask(self, length: int, device: torch.device | str = "cpu", window: int | None = None) -> Tensor:
        """The bias as given, [B or 1, L, L] or [B or 1, N, L, L]; -inf or False where documents or window hide, too."""
        if self.bias.shape[-1] != length:
            raise ValueError(f"bias is for {self.bias.shape[-1]} positions, the sequence has {length}")
        bias = self.bias.to(device)
        bias = bias[None] if bias.dim() == 2 else bias
        if self.documents_BL is None and window is None:
            return bias
        same_document_mask = _DocumentBounds.of(self.documents_BL, length, device).same_document_mask(window)
        same_document_mask = same_document_mask[:, None] if bias.dim() == 4 else same_document_mask
        return (
            bias & same_document_mask
            if bias.dtype == torch.bool
            else torch.where(same_document_mask, bias, float("-inf"))
        )

    def intervals(self, length: int, device: torch.device | str = "cpu", window: int | None = None) -> None:
        """None: any mask may be in it."""
        return None


@dataclass(frozen=True)
class _DocumentBounds:
    """Where the tokens of one stream are, and where their documents start and end."""

    positions_1L: Tensor
    document_starts_BL: Tensor
    """First position of the position's document, [B or 1, L]."""
    document_ends_BL: Tensor
    """One behind its last, [B or 1, L]."""

    @classmethod
    def of(cls, documents_BL: Tensor | None, length: int, device: torch.device | str) -> Self:
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
        """Boolean [B or 1, L, L]: same document, and less than the window apart."""
        _check_window(window)
        may_meet_BLL = self.document_starts_BL[:, :, None] == self.document_starts_BL[:, None, :]
        if window is None:
            return may_meet_BLL
        return may_meet_BLL & ((self.positions_1L[:, :, None] - self.positions_1L[:, None, :]).abs() < window)

    def block_bounds(self, origin_BL: Tensor, block_length: int) -> Intervals:
        """Start and end, each [B or 1, L], of blocks counted from ``origin_BL``; a document's end cuts its last."""
        starts_BL = self.positions_1L - (self.positions_1L - origin_BL) % block_length
        return starts_BL, torch.minimum(starts_BL + block_length, self.document_ends_BL)

    def clip_to_window(self, starts_BL: Tensor, ends_BL: Tensor, window: int | None, *, shift: int = 0) -> Intervals:
        """Ranges cut to the window around each position, then moved by ``shift``."""
        _check_window(window)
        if window is not None:
            starts_BL = torch.maximum(starts_BL, self.positions_1L - window + 1)
            ends_BL = torch.minimum(ends_BL, self.positions_1L + window)
        ends_BL = torch.maximum(starts_BL, ends_BL)
        return starts_BL.expand_as(ends_BL) + shift, ends_BL + shift


def document_offsets(documents_BL: Tensor) -> Tensor:
    """Distance of each position from the start of its document, [B, L]; a document is a run of equal numbers."""
    places = _DocumentBounds.of(documents_BL, documents_BL.shape[1], documents_BL.device)
    return places.positions_1L - places.document_starts_BL


def _stack_ranges(*ranges: Intervals) -> Intervals:
    starts, ends = zip(*ranges, strict=True)
    return torch.stack(starts, dim=-1), torch.stack(ends, dim=-1)


def _half_length(length: int) -> int:
    if length % 2:
        raise ValueError(f"a sequence of {length} positions cannot be [xt | x0], two streams of equal length")
    return length // 2


def _to_device(tensor: Tensor | None, device: torch.device | str) -> Tensor | None:
    return None if tensor is None else tensor.to(device)


def _check_block_length(block_length: int) -> None:
    if block_length < 1:
        raise ValueError(f"block_length = {block_length} must be at least 1")


def _check_window(window: int | None) -> None:
    if window is not None and window < 1:
        raise ValueError(f"window = {window} must be at least 1: a position sees itself")
