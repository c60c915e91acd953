"""Sharded updates are those of one optimizer, at a part of its memory and with the least that can travel."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from config.training.parallel import DDP
from ddp import sharded_data_parallel
from ddp.buckets import Bucket, ParameterUnit
from ddp.parallelism import Parallelism
from ddp.process_group import World
from ddp.sharded_data_parallel import BucketShard, ShardedDataParallel
from ddp.strategies import DataParallel
from tests.conftest import MakeModel
from tests.distributed.forked import run_ranks
from tests.distributed.toys import (
    backward,
    batches,
    loss_of,
    recorded,
    tower,
    units_of,
)

CPU = torch.device("cpu")
DENOMINATOR = 10.0


def never(name: str) -> bool:
    return False


def is_matrix_of_block(name: str) -> bool:
    return ".layers." in name and name.endswith("proj.weight")


def sharded(model: nn.Module, world: World, whole: Any = never, mib: float = 0.004) -> ShardedDataParallel:
    return ShardedDataParallel(model, DDP(bucket_mib=mib), world, CPU, units_of(model), requires_whole_matrix=whole)


def unsharded(model: nn.Module, world: World) -> DataParallel:
    return DataParallel(model, DDP(bucket_mib=0.004, shard_optimizer=False), world, CPU, units_of(model))


Optimizers = list[torch.optim.Optimizer]


def adamw(parallelism: Parallelism) -> Optimizers:
    return [torch.optim.AdamW(parallelism.trainable_parameters().values(), lr=0.01, weight_decay=0.1, fused=True)]


def train(
    parallelism: Any, optimizers: Optimizers, steps: int, max_norm: float = 1e9, vocabulary: int = 19
) -> list[Tensor]:
    """Steps of two micro-batches with unequal counts; the norms."""
    norms = []
    rank = parallelism.world.rank
    for step in range(steps):
        mine = batches([2 + rank, 3], seed=2 * step + rank, vocabulary=vocabulary)
        backward(parallelism, parallelism.model, mine, DENOMINATOR)
        norms.append(parallelism.clip(max_norm))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        parallelism.start_weight_gather()
    return norms


def weights(parallelism: Any) -> dict[str, Tensor]:
    parallelism.wait_for_weights()
    return {name: parameter.detach() for name, parameter in parallelism.model.named_parameters()}


class Wide(nn.Module):
    """Layers that are large beside the padding of buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def units_of_wide(model: Wide) -> list[ParameterUnit]:
    return [(layer, [f"layers.{index}.weight", f"layers.{index}.bias"]) for index, layer in enumerate(model.layers)]


def step_of_wide(parallelism: Any, optimizer: torch.optim.Optimizer) -> None:
    for is_last in (False, True):
        with parallelism.backward(is_last):
            parallelism.model(torch.randn(3, 64)).sum().backward()
    parallelism.clip(1e9)
    optimizer.step()
    optimizer.zero_grad()
    parallelism.start_weight_gather()


def test_ten_steps_are_bit_equal_where_parts_fill_vectors(tmp_path: Path) -> None:
    """At two ranks a sum has one order, and what AdamW does to an element depends on no other; but a processor may
    round otherwise in a vector that is not full."""

    def act(world: World) -> None:
        config, weights_of_runs = DDP(bucket_mib=0.04), []
        for is_sharded in (True, False):
            torch.manual_seed(0)
            model = Wide()
            build: Any = partial(ShardedDataParallel, requires_whole_matrix=never) if is_sharded else DataParallel
            parallelism = build(model, config, world, CPU, units_of_wide(model))
            [optimizer] = adamw(parallelism)
            torch.manual_seed(world.rank)
            for _ in range(10):
                step_of_wide(parallelism, optimizer)
            weights_of_runs.append(weights(parallelism))
        for name, expected in weights_of_runs[1].items():
            assert torch.equal(weights_of_runs[0][name], expected), name

    run_ranks(act, tmp_path)


def test_each_rank_has_its_part_of_the_state(tiny_model: MakeModel, tmp_path: Path) -> None:
    def act(world: World) -> tuple[int, int]:
        model = tiny_model()
        parts = sharded(model, world, is_matrix_of_block, mib=0.01)
        [optimizer] = adamw(parts)
        train(parts, [optimizer], 1)
        state = sum(state_of_parameter["exp_avg"].numel() for state_of_parameter in optimizer.state.values())
        return state, sum(parameter.numel() for parameter in model.parameters())

    sizes_of_ranks = run_ranks(act, tmp_path, world_size=3)
    total = sizes_of_ranks[0][1]
    assert sum(state for state, _ in sizes_of_ranks) == total
    assert max(state for state, _ in sizes_of_ranks) < 1.15 * total / 3


@pytest.mark.parametrize("requires_whole_matrix", [False, True])
def test_communication_volume_is_minimal(tmp_path: Path, requires_whole_matrix: bool) -> None:
    """Gradients once, weights once. A collective of n bytes over W ranks moves (W - 1) / W of them each way."""

    def act(world: World) -> Any:
        model, config = Wide(), DDP(bucket_mib=0.04)
        units = units_of_wide(model)
        parts = ShardedDataParallel(
            model, config, world, CPU, units, requires_whole_matrix=lambda name: requires_whole_matrix
        )
        [optimizer] = adamw(parts)
        with recorded() as events:
            step_of_wide(parts, optimizer)
            parts.wait_for_weights()
        return len(parts.shards), events, sum(parameter.nbytes for parameter in model.parameters())

    for buckets, events, least in run_ranks(act, tmp_path):
        assert [name for name, _ in events] == ["all_to_all_single"] * buckets + ["all_gather_into_tensor"] * buckets
        assert buckets >= 3
        assert 2 * least <= sum(sent for _, sent in events) < 1.02 * 2 * least


def test_the_collective_of_gpus_gives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's reduce-scatter in place of exchanged parts; gloo has one as well, only a dear one."""

    def act(world: World) -> None:
        exchanged = sharded(tower(), world)
        monkeypatch.setattr(
            sharded_data_parallel,
            "BucketShard",
            lambda bucket, rank, use_all_to_all: BucketShard(bucket, rank, use_all_to_all=False),
        )
        scattered = sharded(tower(), world)
        expected = train(exchanged, adamw(exchanged), 2, vocabulary=11)
        with recorded() as events:
            weights_after = train(scattered, adamw(scattered), 2, vocabulary=11)
        assert {name for name, _ in events} == {"reduce_scatter_tensor", "all_gather_into_tensor"}
        torch.testing.assert_close(weights_after, expected)
        torch.testing.assert_close(weights(scattered), weights(exchanged))

    run_ranks(act, tmp_path)


def test_a_forward_waits_for_the_weights_that_it_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace: when the first layers run, the gather of the last ones has not been waited for."""

    def act(world: World) -> tuple[list[str], int]:
        model = tower(layers=4, is_tied=False)
        parts = sharded(model, world, mib=0.0004)
        train(parts, adamw(parts), 1, vocabulary=11)
        events = []
        order = {id(part.bucket): index for index, part in enumerate(reversed(parts.shards))}
        original = Bucket.wait

        def wait(bucket: Bucket) -> None:
            events.append(f"bucket {order[id(bucket)]}")
            original(bucket)

        monkeypatch.setattr(Bucket, "wait", wait)
        for index, layer in enumerate(model.layers):
            layer.register_forward_hook(lambda *_, index=index: events.append(f"layer {index}"))
        [batch] = batches([4], seed=0)
        early = loss_of(model, batch, 1)
        parts.wait_for_weights()
        assert torch.equal(early, loss_of(model, batch, 1))
        return events, len(order)

    for events, buckets in run_ranks(act, tmp_path):
        events = events[: buckets + 4]  # nothing is waited for twice, and the second forward waits for nothing
        waits = [event for event in events if event.startswith("bucket")]
        assert waits == [f"bucket {index}" for index in range(buckets)] and buckets >= 4
        assert events[0] == "bucket 0"
        assert events.index("layer 0") < events.index(f"bucket {buckets - 2}")
        assert events.index("layer 3") < events.index(f"bucket {buckets - 1}")


def test_a_unit_that_does_not_run_has_its_weights_all_the_same(tmp_path: Path) -> None:
    """Its bucket is needed for gradients, while its gather was waited for by no forward."""

    def act(world: World) -> None:
        parts, whole = sharded(tower(), world, mib=1e-6), unsharded(tower(), world)
        optimizers, expected = adamw(parts), adamw(whole)
        for skips in (set[int](), {2}, set[int]()):
            model: Any
            for model in (parts.model, whole.model):
                model.skips = skips
            train(parts, optimizers, 2, vocabulary=11)
            train(whole, expected, 2, vocabulary=11)
        weights_after = weights(parts)
        torch.testing.assert_close(weights_after, weights(whole), rtol=1e-5, atol=1e-6)

    run_ranks(act, tmp_path)
