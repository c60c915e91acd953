"""Sums over the ranks of what is on their devices."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from ddp.process_group import Ranks


def sum_on_device(values: Tensor, ranks: Ranks) -> Tensor:
    """Add a small tensor up over all ranks, in place; a GPU does it when it comes to it, and the host does not wait."""
    if not ranks.is_alone:
        dist.all_reduce(values)
    return values
