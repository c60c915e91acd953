"""Gradients of many ranks are those of one process with the whole batch, and travel while the backward runs."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from config.training.parallel import DDP, Parallel
from ddp.buckets import lay_out_buckets
from ddp.parallelism import Parallelism
from ddp.process_group import World
from ddp.strategies import apply_parallelism
from tests.distributed.forked import run_ranks
from tests.distributed.toys import (
    Batch,
    Tower,
    backward,
    batches,
    loss_of,
    recorded,
    row_range,
    tower,
    units_of,
)

CPU = torch.device("cpu")
SHARDED, PLAIN = DDP(bucket_mib=0.0004), DDP(bucket_mib=0.0004, shard_optimizer=False)
"""Buckets of 400 bytes: each of these models has several."""

both = pytest.mark.parametrize("config", [PLAIN, SHARDED], ids=["plain", "sharded"])


def parallel(model: nn.Module, config: Parallel, world: World) -> Parallelism:
    return apply_parallelism(
        model, config, world, CPU, units_of(model), requires_whole_matrix=lambda name: "layers.1" in name
    )


def gradients(parallelism: Parallelism) -> dict[str, tuple[int, int, Tensor | None]]:
    """First and last row of what this rank has, and its gradient."""
    return {
        name: (*row_range(parallelism.shard_of(name)), parameter.grad)
        for name, parameter in parallelism.trainable_parameters().items()
    }


def assert_rows_of(expected: nn.Module, all_ranks: list[dict[str, tuple[int, int, Tensor | None]]]) -> None:
    """Every row of every gradient is on some rank, and right wherever it is."""
    for name, parameter in expected.named_parameters():
        rows = set[int]()
        for first, end, gradient in (
            gradients_of_rank[name] for gradients_of_rank in all_ranks if name in gradients_of_rank
        ):
            rows |= set(range(first, end))
            if parameter.grad is None:
                assert gradient is None, name
                continue
            assert gradient is not None, name
            whole = parameter.grad if parameter.dim() else parameter.grad[None]
            torch.testing.assert_close(gradient, whole[first:end].view_as(gradient), rtol=1e-5, atol=1e-7)
        assert len(rows) == (len(parameter) if parameter.dim() else 1) or not parameter.requires_grad, name


def whole_step(model: nn.Module, parts: list[list[Batch]], max_norm: float) -> Tensor:
    """The same in one process."""
    denominator = sum(len(batch[1]) for part in parts for batch in part)
    for part in parts:
        for batch in part:
            loss_of(model, batch, denominator).backward()
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm)


@both
@pytest.mark.parametrize("max_norm", [1e9, 1e-3])
def test_gradients_of_three_ranks_are_those_of_the_whole_batch(tmp_path: Path, config: DDP, max_norm: float) -> None:
    """Unequal counts of targets, three micro-batches, a tied head, a parameter without dimensions, and rows that do not
    divide by three."""
    model = tower(layers=4)
    parts = [batches(counts, seed=rank) for rank, counts in enumerate(([3, 1, 4], [1, 5, 2], [2, 2, 1]))]

    def act(world: World) -> Any:
        parallelism = parallel(model, config, world)
        [count] = world.sum(sum(len(rows) for _, rows, _ in parts[world.rank]))
        backward(parallelism, model, parts[world.rank], count)
        return parallelism.clip(max_norm), gradients(parallelism)

    norms, gradients_of_ranks = zip(*run_ranks(act, tmp_path, world_size=3), strict=True)
    expected = copy.deepcopy(model)
    torch.testing.assert_close(norms[0], whole_step(expected, parts, max_norm))
    assert torch.equal(norms[0], norms[1]) and torch.equal(norms[0], norms[2])
    assert_rows_of(expected, list(gradients_of_ranks))


@both
def test_unused_and_frozen_parameters(tmp_path: Path, config: DDP) -> None:
    """Layer 2 is used by nobody, layer 1 by rank 1 alone and there not in the last micro-batch, layer 0 is frozen."""
    model = tower()
    model.layers[0].requires_grad_(False)
    mine = batches([2, 3], seed=4)
    skips = [[{1, 2}, {1, 2}], [{2}, {1, 2}]]

    def run(model: Tower, rank: int, index: int) -> None:
        model.skips = skips[rank][index]
        loss_of(model, mine[index], 10).backward()

    def act(world: World) -> Any:
        parallelism = parallel(model, config, world)
        results = []
        for _ in range(2):  # the second step must not see what the first one left
            for index in range(2):
                with parallelism.backward(is_last=index == 1):
                    run(model, world.rank, index)
            norm = parallelism.clip(1e9)
            results.append((norm, gradients(parallelism)))
            assert not any(name.startswith("layers.0") for name in parallelism.trainable_parameters())
            for parameter in parallelism.trainable_parameters().values():
                parameter.grad = None
            parallelism.start_weight_gather()
        return results

    first, second = run_ranks(act, tmp_path)
    expected = copy.deepcopy(model)
    for rank in range(2):
        for index in range(2):
            run(expected, rank, index)
    norm = nn.utils.clip_grad_norm_(expected.parameters(), 1e9)
    assert expected.layers[2].weight.grad is None and expected.layers[1].weight.grad is not None
    for step in range(2):
        torch.testing.assert_close(first[step][0], norm)
        assert_rows_of(expected, [first[step][1], second[step][1]])


@both
def test_each_bucket_is_reduced_once_per_step(tmp_path: Path, config: DDP) -> None:
    model = tower()

    def act(world: World) -> Any:
        parallelism = parallel(model, config, world)
        buckets = len(parallelism.reducer.buckets)  # type: ignore[attr-defined]
        event_counts = []
        for index, batch in enumerate(batches([2, 2, 2], seed=world.rank)):
            with recorded() as events, parallelism.backward(is_last=index == 2):
                loss_of(model, batch, 6).backward()
            event_counts.append(len(events))
        with recorded() as events:
            parallelism.clip(1.0)
        return buckets, event_counts, len(events)

    for buckets, event_counts, later in run_ranks(act, tmp_path):
        assert buckets > 2 and later == 0
        assert event_counts == [0, 0, buckets]


@both
def test_the_first_bucket_leaves_before_the_backward_ends(tmp_path: Path, config: DDP) -> None:
    """A trace: the head's gradients are on their way when the gradient of the first layer's input is made."""
    model = tower(is_tied=False)

    def act(world: World) -> list[Any]:
        parallelism = parallel(model, config, world)
        with recorded() as events:
            for index, layer in enumerate(model.layers):
                layer.register_full_backward_hook(lambda *_, index=index: events.append(f"layer {index}"))
            backward(parallelism, model, batches([4], seed=world.rank), 8)
            events.append("end of the backward")
        return [event if isinstance(event, str) else "bucket" for event in events]

    for events in run_ranks(act, tmp_path):
        last_bucket = len(events) - 1 - events[::-1].index("bucket")
        assert events.index("bucket") < events.index("layer 1") < events.index("layer 0") < last_bucket
        assert last_bucket < events.index("end of the backward")


def test_weights_and_buffers_are_broadcast_from_the_first_rank(tmp_path: Path) -> None:
    def act(world: World) -> tuple[dict[str, Tensor], str]:
        model = tower(seed=world.rank)
        model.register_buffer("steps", torch.full((3,), world.rank))
        model.layers[0].requires_grad_(False)  # frozen ones as well
        parallelism = parallel(model, PLAIN, world)
        parallelism.check_replicas_equal()
        state = {name: value.clone() for name, value in model.state_dict().items()}
        with torch.no_grad():
            if world.rank == 1:
                model.get_parameter("layers.1.weight")[2, 3] += 1e-6
                model.norm.bias[0] = 1.0
        with pytest.raises(ValueError) as caught:
            parallelism.check_replicas_equal()
        return state, str(caught.value)

    for state, message in run_ranks(act, tmp_path):
        assert all(torch.equal(value, state[name]) for name, value in tower(seed=0).state_dict().items())
        assert state["steps"].tolist() == [0, 0, 0]
        assert "layers.1.weight of rank 1" in message and "2 parameters of 10" in message


def test_rows_that_were_exchanged_are_another_weight(tmp_path: Path) -> None:
    """A plain sum of bits would not see it."""

    def act(world: World) -> None:
        model = tower()
        parallelism = parallel(model, PLAIN, world)
        with torch.no_grad():
            if world.rank == 1:
                model.embed.weight.copy_(model.embed.weight.flip(0))
        with pytest.raises(ValueError, match=r"embed\.weight of rank 1"):
            parallelism.check_replicas_equal()

    run_ranks(act, tmp_path)


def test_a_gradient_that_comes_too_late_is_an_error(tmp_path: Path) -> None:
    """Its bucket has gone: it would be lost."""

    def act(world: World) -> None:
        model = tower()
        parallelism = parallel(model, PLAIN, world)
        [batch] = batches([2], seed=0)
        with parallelism.backward(is_last=True):
            loss_of(model, batch, 2).backward()
            with pytest.raises(AssertionError, match=r"norm\.weight has a second gradient"):
                loss_of(model, batch, 2).backward()

    run_ranks(act, tmp_path)


def layout(
    shapes: Mapping[str, tuple[int, ...]], max_bytes: int, world_size: int = 1, whole: str = "whole"
) -> list[Any]:
    parameters = {name: torch.empty(shape) for name, shape in shapes.items()}
    return lay_out_buckets(parameters, world_size, max_bytes, lambda name: name.startswith(whole))


def test_buckets_are_bounded_in_bytes() -> None:
    shapes = {"a": (16,), "b": (16,), "c": (32,), "d": (1000,), "e": (16,)}
    assert [list(plan.slices) for plan in layout(shapes, max_bytes=128)] == [["a", "b"], ["c"], ["d"], ["e"]]
    parameters: dict[str, Tensor] = {"a": torch.empty(2), "b": torch.empty(2, dtype=torch.float64)}
    assert [plan.dtype for plan in lay_out_buckets(parameters, 1, 1e9)] == [torch.float32, torch.float64]


def test_whole_parameters_share_a_bucket_that_they_would_pad() -> None:
    """Four matrices that must be whole over four ranks: one bucket of one each, however small a bucket may be."""
    shapes = {f"whole{index}": (16, 16) for index in range(6)}
    plans = layout(shapes, max_bytes=1, world_size=4)
    assert [len(plan.slices) for plan in plans] == [4, 2]
    assert [plan.segment_size for plan in plans] == [256, 256]
    owners = [piece.rank for plan in plans for slices in plan.slices.values() for piece in slices]
    assert owners == [0, 1, 2, 3, 0, 1]
