"""A user's attention bias, read from a file.

Shapes: L positions, N query heads.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from config.model import ModelConfig


def read_attention_bias(path: Path, model: ModelConfig) -> Tensor:
    """Read a bias [L, L] or [N, L, L] from a .npy file, or from a .safetensors file of one tensor.

    Returns:
        [1, L, L] or [1, N, L, L]: float32, which is added to the scores, or boolean, where False hides a key.

    Raises:
        ValueError: the file cannot be read or has another shape, is shorter than the model's context, or a query
            attends to no key.
    """
    try:
        if path.suffix == ".safetensors":
            tensors = list(safetensors.torch.load_file(path).values())
            if len(tensors) != 1:
                raise ValueError(f"it has {len(tensors)} tensors instead of one")
            bias = tensors[0]
        else:
            bias = torch.from_numpy(np.load(path, allow_pickle=False))
    except (OSError, ValueError, TypeError, safetensors.SafetensorError) as error:
        raise ValueError(f"attention_bias = {path} cannot be read: {error}") from error
    num_heads = model.num_attention_heads
    is_square = bias.dim() in (2, 3) and bias.shape[-1] == bias.shape[-2] > 0
    if not is_square or (bias.dim() == 3 and len(bias) != num_heads):
        raise ValueError(
            f"attention_bias = {path} has shape {list(bias.shape)}: give [L, L] or [{num_heads}, L, L], a matrix for "
            "all heads or one for each"
        )
    if bias.shape[-1] < model.max_position_embeddings:
        raise ValueError(
            f"attention_bias = {path} is for {bias.shape[-1]} positions: give as many as the model's context, "
            f"max_position_embeddings = {model.max_position_embeddings}"
        )
    if bias.dtype != torch.bool:
        bias = bias.float()
    is_hidden = ~bias if bias.dtype == torch.bool else bias == -torch.inf
    if is_hidden.all(-1).any() or bias.float().isnan().any() or (bias.float() == torch.inf).any():
        raise ValueError(f"attention_bias = {path}: each query needs a key, and values must be finite or -inf")
    return bias[None]
