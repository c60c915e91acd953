"""Who may see whom: descriptions of attention, apart from how it is computed.

A pattern is a small frozen record. ``dense`` is its reference meaning, which every lowering in `attention.py` agrees
with by test.

Shapes: B rows, L positions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor


class AttentionPattern(Protocol):
    """What attention needs to know of a pattern."""

    @property
    def documents_BL(self) -> Tensor | None:
        """Document number of each position, a run of equal numbers for each; positions see only their own document.
        None: one document a row."""

    @property
    def is_unrestricted(self) -> bool:
        """Every position sees every position, so that no mask is needed."""

    def with_documents(self, documents_BL: Tensor) -> AttentionPattern:
        """The same for other documents."""

    def dense(self, length: int, device: torch.device | str = "cpu") -> Tensor:
        """Boolean mask [B or 1, L, L]: True where the query (second dimension) may see the key (third)."""


@dataclass(frozen=True)
class Bidirectional:
    """Every position sees its whole document."""

    documents_BL: Tensor | None = None

    @property
    def is_unrestricted(self) -> bool:
        return self.documents_BL is None

    def with_documents(self, documents_BL: Tensor) -> Bidirectional:
        return replace(self, documents_BL=documents_BL)

    def dense(self, length: int, device: torch.device | str = "cpu") -> Tensor:
        return _within_documents(torch.ones(1, length, length, dtype=torch.bool, device=device), self.documents_BL)


@dataclass(frozen=True)
class Causal:
    """Every position sees itself and what is before it in its document."""

    documents_BL: Tensor | None = None

    @property
    def is_unrestricted(self) -> bool:
        return False

    def with_documents(self, documents_BL: Tensor) -> Causal:
        return replace(self, documents_BL=documents_BL)

    def dense(self, length: int, device: torch.device | str = "cpu") -> Tensor:
        mask_1LL = torch.ones(1, length, length, dtype=torch.bool, device=device).tril()
        return _within_documents(mask_1LL, self.documents_BL)


@dataclass(frozen=True)
class BlockCausal:
    """Every position sees its own block whole, and the blocks before it. Blocks start with the document."""

    block_length: int
    documents_BL: Tensor | None = None

    def __post_init__(self) -> None:
        if self.block_length < 1:
            raise ValueError(f"block_length = {self.block_length} must be at least 1")

    @property
    def is_unrestricted(self) -> bool:
        return False

    def with_documents(self, documents_BL: Tensor) -> BlockCausal:
        return replace(self, documents_BL=documents_BL)

    def dense(self, length: int, device: torch.device | str = "cpu") -> Tensor:
        if self.documents_BL is None:
            offsets_BL = torch.arange(length, device=device)[None]
        else:
            offsets_BL = document_offsets(self.documents_BL.to(device))
        blocks_BL = offsets_BL // self.block_length
        return _within_documents(blocks_BL[:, :, None] >= blocks_BL[:, None, :], self.documents_BL)


def document_offsets(documents_BL: Tensor) -> Tensor:
    """Distance of each position from the start of its document, [B, L]; a document is a run of equal numbers."""
    length = documents_BL.shape[1]
    index_L = torch.arange(length, device=documents_BL.device)
    starts_BL = torch.ones_like(documents_BL, dtype=torch.bool)
    starts_BL[:, 1:] = documents_BL[:, 1:] != documents_BL[:, :-1]
    return index_L - torch.where(starts_BL, index_L, 0).cummax(dim=1).values


def _within_documents(mask: Tensor, documents_BL: Tensor | None) -> Tensor:
    if documents_BL is None:
        return mask
    documents_BL = documents_BL.to(mask.device)
    return mask & (documents_BL[:, :, None] == documents_BL[:, None, :])
