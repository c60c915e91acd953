"""The collectives of a training step on a mesh, on GPUs that compute nothing: all members of a group make the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from config.model import ModelConfig
from config.training.parallel import DDP
from ddp.context_parallel import split_batch
from ddp.mesh_parallel import MeshParallel
from ddp.process_group import World
from ddp.strategies import apply_parallelism
from diffusionlm.diffusion.noised_batch import NoisedBatch
from diffusionlm.kernels import chunked_loss, eager_cross_entropy
from diffusionlm.kernels.loss_types import LossInputs
from diffusionlm.models.patterns import BlockDiffusion
from diffusionlm.models.transformer import Transformer
from diffusionlm.training.setup import parameter_units
from tests.conftest import MakeConfig
from tests.fake_cuda import even_experts, fake_cuda

CUDA, NUM_RANKS = torch.device("cuda"), 8
BATCH, LENGTH, NUM_OUTPUTS = 2, 32, 16
"""Rows, positions of both halves, and positions of the loss."""
COLLECTIVES = (
    "all_reduce", "all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast",
    "all_gather_object",
)  # fmt: skip


class Collective(NamedTuple):
    ranks: tuple[int, ...]
    name: str
    num_bytes: int
    """Of the largest tensor."""


@contextmanager
def recorded_collectives() -> Iterator[list[Collective]]:
    events: list[Collective] = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name, function in ((name, getattr(dist, name)) for name in COLLECTIVES):

            def call(*args: Any, name: str = name, original: Any = function, **kwargs: Any) -> Any:
                tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
                ranks = tuple(dist.get_process_group_ranks(kwargs.get("group")))
                num_bytes = max((value.nbytes for value in tensors), default=0)
                events.append(Collective(ranks, name, 0 if name == "all_to_all_single" else num_bytes))
                return original(*args, **kwargs)

            monkeypatch.setattr(dist, name, call)
        yield events


def list_collectives(rank: int, parallel: DDP, config: ModelConfig) -> list[Collective]:
    """Those of the first rank's view of a step: forward, backward, clipping and the gather of weights."""
    fake_pg = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", rank=rank, world_size=NUM_RANKS, store=fake_pg.FakeStore())
    try:
        world = World(rank, NUM_RANKS, rank).with_mesh(parallel)
        with (
            fake_cuda(),
            even_experts(),
            # The kernel has no form for a head that is divided.
            patch.object(chunked_loss, "load_loss_backend", lambda backend: eager_cross_entropy.compute_chunk_loss),
            recorded_collectives() as events,
        ):
            with torch.device("meta"):
                model = Transformer(config)
            mesh = apply_parallelism(
                model, parallel, world, CUDA, parameter_units(model), requires_whole_matrix=lambda name: False
            )
            assert isinstance(mesh, MeshParallel)
            shapes = dict(mesh.whole_shapes)
            mesh.materialize(lambda: lambda name: torch.zeros(shapes[name]))
            events.clear()
            batch = NoisedBatch(
                torch.zeros(BATCH, LENGTH, dtype=torch.int64),
                BlockDiffusion(4),
                torch.arange(0, BATCH * LENGTH, BATCH * LENGTH // NUM_OUTPUTS),
                torch.zeros(NUM_OUTPUTS, dtype=torch.int64),
                torch.ones(NUM_OUTPUTS, dtype=torch.float64),
            )
            batch = split_batch(batch, world.mesh.context).to(CUDA)
            with mesh.backward(is_last=True):
                output = model(
                    batch.inputs_BS,
                    pattern=batch.pattern,
                    output_positions=batch.positions_N,
                    loss_inputs=LossInputs(batch.targets_N, batch.weights_N, load_balancing_weight=0.1),
                )
                output.total_loss.backward()
            mesh.clip(1.0)
            mesh.start_weight_gather()
            mesh.wait_for_weights()
        return events
    finally:
        dist.destroy_process_group()


@pytest.fixture
def config(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> ModelConfig:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: NUM_RANKS)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    return make_config(num_attention_heads=4, num_key_value_heads=2, router_aux_loss_coef=0.1, **experts)


@pytest.mark.parametrize(
    "parallel",
    [
        DDP(tensor=2, expert=2),
        DDP(tensor=2, context=2, expert=2),
        DDP(tensor=4, expert=2, shard_optimizer=False),
        DDP(context=4),
    ],
    ids=lambda parallel: f"tensor {parallel.tensor}, context {parallel.context}, expert {parallel.expert}",
)
def test_all_ranks_make_the_same_collectives(parallel: DDP, config: ModelConfig) -> None:
    """In one order: what a rank waits for, the other members of the group do as well."""
    by_rank = [list_collectives(rank, parallel, config) for rank in range(NUM_RANKS)]
    kinds = [[(event.name, len(event.ranks)) for event in events] for events in by_rank]
    assert all(kind == kinds[0] for kind in kinds) and len(kinds[0]) >= 10
    for group in {event.ranks for events in by_rank for event in events}:
        sequences = [[event for event in by_rank[rank] if event.ranks == group] for rank in group]
        assert all(sequence == sequences[0] for sequence in sequences), group


def test_bytes_are_those_of_the_formulae(config: ModelConfig) -> None:
    """Of the tensor and the context axis, in a step: docs/distributed.md. The last layer has inputs at all
    positions, and outputs at those of the loss."""
    events = Counter(list_collectives(0, DDP(tensor=2, context=2, expert=2), config))
    rows, outputs, row_bytes = BATCH * LENGTH // 2, NUM_OUTPUTS // 2, 4 * config.hidden_size
    sums = {size: events[Collective((0, 1), "all_reduce", size * row_bytes)] for size in (rows, outputs)}
    num_full = config.num_hidden_layers - 1
    # Embedding, both halves of a layer forward and backward, and the input of the last attention; in the last layer its
    # outputs, those of the feed-forward, their gradients' sum, and the head's.
    assert sums == {rows: 1 + 4 * num_full + 1, outputs: 4}
    assert sum(sums.values()) == 4 * config.num_hidden_layers + 2
    key_bytes = 4 * 2 * BATCH * LENGTH * config.num_key_value_heads // 2 * config.head_dim
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        assert events[Collective((0, 2), name, key_bytes)] == config.num_hidden_layers
