"""A model and its optimizers, spread over the ranks of a run."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from config.train import TrainConfig
from ddp.buckets import Unit
from ddp.parallelism import Parallelism, apply_parallelism
from ddp.process_group import Ranks
from diffusionlm.models.transformer import Transformer
from diffusionlm.optim.build import must_be_whole


def spread(
    model: Transformer, config: TrainConfig, ranks: Ranks, device: torch.device, precision: torch.dtype
) -> Parallelism:
    """The model as the ranks train it, with products of this precision.

    Raises:
        ValueError: the strategy cannot be had here.
    """
    shapes = dict(model.named_parameters())

    def is_whole(name: str) -> bool:
        return must_be_whole(config.optimizer, name, shapes[name])

    units = units_of(model)
    return apply_parallelism(model, config.parallel, ranks, device, units, must_be_whole=is_whole, dtype=precision)


def units_of(model: Transformer) -> list[Unit]:
    """Modules in the order in which a forward runs them, each with the parameters that it is the first to read: the
    embedding, which is the head too where they are tied; the blocks; the last norm, with a head of its own."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    stages: list[tuple[nn.Module, list[nn.Parameter]]] = [
        (model, list(model.model.embed_tokens.parameters())),
        *((block, list(block.parameters())) for block in model.model.layers),
        (model.model.norm, [*model.model.norm.parameters(), *model.lm_head.parameters()]),
    ]
    units: list[Unit] = []
    seen: set[nn.Parameter] = set()
    for module, parameters in stages:
        units.append((module, [names[each] for each in parameters if each not in seen]))
        seen.update(parameters)
    return units


def on_first(ranks: Ranks, say: Callable[[str], None]) -> Callable[[str], None]:
    """What says something once, whatever the number of ranks that say it."""
    return say if ranks.is_first else _nothing


def _nothing(text: str) -> None:
    pass
