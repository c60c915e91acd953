"""How many rows of logits exist at once."""

from __future__ import annotations

import torch

CPU_CHUNK_BYTES = 32 << 20
"""Budget for the fp32 logits of one chunk: about what a CPU's last cache level holds."""
CUDA_CHUNK_BYTES = 1 << 30
"""Budget for the logits of one chunk, in the dtype of the product. Each chunk reads and writes the head's whole
gradient once, so that few and large ones are fast."""
CUDA_CHUNK_SIZE_RANGE = (1024, 8192)
"""Rows of a chunk on a GPU, whatever the budget: fewer starve the matrix products, more gain nothing."""
CUDA_TILE_SIZE = 128
"""Rows of a tile of a GPU's matrix products."""


def chunk_size(
    rows: int,
    vocab_size: int,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    chunk_bytes: int | None = None,
) -> int:
    """Rows of a chunk: as few chunks as the budget allows, of equal size; at least 1, for no rows too.

    Args:
        rows: rows in all.
        vocab_size: logits of a row.
        device: type of the device.
        dtype: of the product; on a CPU logits are counted as fp32.
        chunk_bytes: budget in bytes. None: the device's default.
    """
    if device == "cuda":
        fewest, most = CUDA_CHUNK_SIZE_RANGE
        budget = CUDA_CHUNK_BYTES if chunk_bytes is None else chunk_bytes
        fits = min(max(budget // (dtype.itemsize * vocab_size), fewest), most)
        multiple = CUDA_TILE_SIZE
    else:
        budget = CPU_CHUNK_BYTES if chunk_bytes is None else chunk_bytes
        fits = max(64, budget // (4 * vocab_size))
        multiple = 1
    chunks = max(1, -(-rows // fits))
    balanced = max(1, -(-rows // chunks))
    return -(-balanced // multiple) * multiple
