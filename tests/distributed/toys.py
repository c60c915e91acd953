"""Small models in units, batches of unequal counts, and a record of what travels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp.buckets import ParameterUnit
from ddp.mesh import Shard
from ddp.parallelism import Parallelism
from diffusionlm.kernels.cross_entropy import LossInputs
from diffusionlm.models.patterns import Bidirectional
from diffusionlm.models.transformer import Transformer
from diffusionlm.training.setup import parameter_units

VOCABULARY, WIDTH = 11, 6


class Tower(nn.Module):
    """Embedding, layers, norm and a head, which may be the embedding."""

    def __init__(self, layers: int = 3, is_tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.skips = set[int]()
        """Layers that are left out."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        x = self.embed(tokens) * self.scale
        for index, layer in enumerate(self.layers):
            x = x if index in self.skips else x + torch.tanh(layer(x))
        return nn.functional.linear(self.norm(x), self.head.weight)


def tower(seed: int = 0, **kwargs: Any) -> Tower:
    torch.manual_seed(seed)
    return Tower(**kwargs)


def units_of_tower(model: Tower) -> list[ParameterUnit]:
    layers = [(layer, [f"layers.{i}.weight", f"layers.{i}.bias"]) for i, layer in enumerate(model.layers)]
    last = ["norm.weight", "norm.bias", "head.weight"]
    return [(model, ["embed.weight", "scale"]), *layers, (model.norm, last)]


def units_of(model: nn.Module) -> list[ParameterUnit]:
    """The units of a tower or of a transformer."""
    return units_of_tower(model) if isinstance(model, Tower) else parameter_units(model)  # type: ignore[arg-type]


def row_range(shard: Shard) -> tuple[int, int]:
    """First row of a part and the one after its last; a 0-d tensor has one."""
    return (shard.offsets[0], shard.offsets[0] + shard.shape[0]) if shard.shape else (0, 1)


Batch = tuple[Tensor, Tensor, Tensor]
"""Tokens [B, L], rows that are scored, and their targets."""


def batches(counts: list[int], seed: int, vocabulary: int = VOCABULARY) -> list[Batch]:
    """One for each count of targets."""
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> Batch:
        tokens = torch.randint(vocabulary, (2, 8), generator=generator)
        rows = torch.randperm(16, generator=generator)[:count].sort().values
        return tokens, rows, torch.randint(vocabulary, (count,), generator=generator)

    return [draw(count) for count in counts]


def loss_of(model: nn.Module, batch: Batch, denominator: float) -> Tensor:
    """Sum of nats over the batch's targets, divided by the count of the whole step."""
    tokens, rows, targets = batch
    if isinstance(model, Transformer):
        weights = torch.full((len(rows),), 1.0 / denominator)
        loss_inputs = LossInputs(targets_N=targets, weights_N=weights)
        return model(tokens, pattern=Bidirectional(), output_positions=rows, loss_inputs=loss_inputs).loss_sum
    logits = model(tokens).flatten(0, 1)[rows]
    return nn.functional.cross_entropy(logits, targets, reduction="sum") / denominator


def backward(parallelism: Parallelism, model: nn.Module, batches: list[Batch], denominator: float) -> None:
    """All micro-batches of a step."""
    for index, batch in enumerate(batches):
        with parallelism.backward(is_last=index == len(batches) - 1):
            loss_of(model, batch, denominator).backward()


@contextmanager
def recorded(events: list[Any] | None = None) -> Iterator[list[Any]]:
    """Each collective over floats, as (name, bytes of its largest tensor), in the order in which they
    start; torch renamed those of FSDP."""
    events = [] if events is None else events
    names = ["all_reduce", "all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast"]
    names += ["all_gather_single", "reduce_scatter_single"]
    originals = {name: getattr(dist, name) for name in names if hasattr(dist, name)}

    def recording(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = [tensor for tensor in (*args, *kwargs.values()) if isinstance(tensor, Tensor)]
            if tensors[0].is_floating_point() and tensors[0].numel() > 1:
                events.append((name, max(tensor.nbytes for tensor in tensors)))
            return originals[name](*args, **kwargs)

        return call

    for name in originals:
        setattr(dist, name, recording(name))
    try:
        yield events
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
