"""A model and its optimizers, spread over the ranks of a run."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from config.train import TrainConfig
from ddp.buckets import ParameterUnit
from ddp.parallelism import Parallelism, apply_parallelism
from ddp.process_group import World
from diffusionlm.models.transformer import Transformer
from diffusionlm.optim.build import requires_whole_matrix


def parallelize(
    model: Transformer, config: TrainConfig, world: World, device: torch.device, precision: torch.dtype
) -> Parallelism:
    """The model as the ranks train it, with products of this precision.

    Raises:
        ValueError: the strategy cannot be had here.
    """
    shapes = dict(model.named_parameters())

    def is_whole(name: str) -> bool:
        return requires_whole_matrix(config.optimizer, name, shapes[name])

    units = parameter_units(model)
    return apply_parallelism(
        model, config.parallel, world, device, units, requires_whole_matrix=is_whole, dtype=precision
    )


def parameter_units(model: Transformer) -> list[ParameterUnit]:
    """Modules in the order in which a forward runs them, each with the parameters that it is the first to read: the
    embedding, which is the head too where they are tied; the blocks; the last norm, with a head of its own."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    stages: list[tuple[nn.Module, list[nn.Parameter]]] = [
        (model, list(model.model.embed_tokens.parameters())),
        *((block, list(block.parameters())) for block in model.model.layers),
        (model.model.norm, [*model.model.norm.parameters(), *model.lm_head.parameters()]),
    ]
    units: list[ParameterUnit] = []
    seen: set[nn.Parameter] = set()
    for module, parameters in stages:
        units.append((module, [names[each] for each in parameters if each not in seen]))
        seen.update(parameters)
    return units


def only_on_first_rank(world: World, log: Callable[[str], None]) -> Callable[[str], None]:
    """What says something once, whatever the number of ranks that say it."""
    return log if world.is_first else _discard


def _discard(text: str) -> None:
    pass
