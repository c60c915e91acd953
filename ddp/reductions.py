"""Sums over the ranks of what is on their devices."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from ddp.process_group import World


def all_reduce_on_device(values: Tensor, world: World) -> Tensor:
    """Add a small tensor up over all ranks, in place; a GPU does it when it comes to it, and the host does not wait."""
    if not world.is_single_process:
        dist.all_reduce(values)
    return values
