"""FSDP does what one process does, and each rank has its rows of everything."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from config.training.optimizer import AdamWConfig, LionConfig, MuonConfig
from config.training.parallel import FSDP
from ddp import fully_sharded
from ddp.all_to_all_rows import AllToAllRows, row_range_of_rank
from ddp.fully_sharded import FullySharded
from ddp.mesh import Axis
from ddp.process_group import World
from diffusionlm.models.transformer import Transformer
from diffusionlm.optim.build import Optimizers, build_optimizers
from diffusionlm.training.block_wrapping import checkpoint_activations, compile_blocks
from diffusionlm.training.setup import parameter_units
from tests.conftest import MakeModel
from tests.distributed.forked import run_ranks
from tests.distributed.toys import Batch, batches, loss_of, recorded, row_range

CPU = torch.device("cpu")
DENOMINATOR = 30.0
VOCABULARY = 19
MIXTURE = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 5}
Kind = AdamWConfig | LionConfig | MuonConfig


def cut(model: Transformer, world: World, reshard: bool = True, dtype: torch.dtype = torch.float32) -> FullySharded:
    parallel = FSDP(reshard_after_forward=reshard)
    return FullySharded(model, parallel, world, CPU, parameter_units(model), dtype=dtype)


def of_rank(step: int, rank: int) -> list[Batch]:
    """Three micro-batches, whose counts differ from rank to rank."""
    return batches([1 + 3 * rank, 4, 2 - rank % 2], seed=10 * step + rank, vocabulary=VOCABULARY)


def train_parts(parts: FullySharded, optimizers: Optimizers, steps: int, max_norm: float = 0.5) -> list[Tensor]:
    """The norms."""
    norms = []
    for step in range(steps):
        mine = of_rank(step, parts.world.rank)
        for index, batch in enumerate(mine):
            with parts.backward(is_last=index == len(mine) - 1):
                loss_of(parts.model, batch, DENOMINATOR).backward()
        norms.append(parts.clip(max_norm))
        optimizers.step(1.0)
    return norms


def train_whole(model: Transformer, config: Kind, world: World, steps: int, max_norm: float = 0.5) -> list[Tensor]:
    """One process with the batches of all."""
    optimizers = build_optimizers(config, dict(model.named_parameters()))
    norms = []
    for step in range(steps):
        for rank in range(world.size):
            for batch in of_rank(step, rank):
                loss_of(model, batch, DENOMINATOR).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm))
        optimizers.step(1.0)
    return norms


def assert_close(parts: FullySharded, model: Transformer, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """On the first rank, which gets the whole parameters."""
    destinations = {name: torch.empty(shape) for name, shape in parts.whole_shapes.items()}
    parameters = dict(parts.iterate_whole_parameters(None, destinations))
    if not parts.world.is_first:
        assert not parameters
        return
    assert all(whole is destinations[name] for name, whole in parameters.items())
    assert parameters.keys() == dict(model.named_parameters()).keys()
    for name, expected in model.named_parameters():
        torch.testing.assert_close(
            parameters[name], expected.detach(), rtol=rtol, atol=atol, msg=partial("{} {}".format, name)
        )


CASES: dict[str, tuple[Kind, bool, int, dict[str, Any]]] = {
    "adamw": (AdamWConfig(weight_decay=0.1), True, 2, {"tie_word_embeddings": False}),
    "adamw, tied, kept": (AdamWConfig(), False, 2, {"tie_word_embeddings": True, "attention_bias": True}),
    "lion, mixture": (LionConfig(), True, 2, {"tie_word_embeddings": False, **MIXTURE}),
    "muon, tied": (MuonConfig(precision="float32"), True, 2, {"tie_word_embeddings": True}),
    "muon, mixture, kept": (MuonConfig(precision="float32"), False, 3, {"tie_word_embeddings": False, **MIXTURE}),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.slow] if case in ("adamw", "muon, tied", "lion, mixture") else [])
        for case in CASES
    ],
)
def test_steps_match_a_single_process(case: str, tiny_model: MakeModel, tmp_path: Path) -> None:
    """Gradients are sums over three micro-batches and the ranks, whose counts of targets differ."""
    config, reshard, world_size, settings = CASES[case]
    frozen = ["model.layers.0.self_attn.q_proj.weight", "model.layers.1.input_layernorm.weight"]

    def act(world: World) -> None:
        models = tiny_model(**settings), tiny_model(**settings)
        for model in models:
            for name in frozen:
                model.get_parameter(name).requires_grad_(False)
        parts = cut(models[0], world, reshard)
        optimizers = build_optimizers(config, parts.trainable_parameters(), row_exchange=parts.row_exchange)
        assert not parts.trainable_parameters().keys() & set(frozen)
        norms = train_parts(parts, optimizers, 3)
        torch.testing.assert_close(norms, train_whole(models[1], config, world, 3), rtol=1e-4, atol=0)
        assert min(norms) > 0.5  # clipped, and by the norm over all ranks
        assert_close(parts, models[1])
        rows = {name: row_range(parts.shard_of(name)) for name in parts.trainable_parameters()}
        assert all(len(part) == rows[name][1] - rows[name][0] for name, part in parts.trainable_parameters().items())

    run_ranks(act, tmp_path, world_size)


def test_training_follows_a_forward_in_inference_mode(tiny_model: MakeModel, tmp_path: Path) -> None:
    """Decoding before the first step: whole weights get their memory before it."""
    config = AdamWConfig()

    def act(world: World) -> None:
        models = tiny_model(), tiny_model()
        parts = cut(models[0], world)
        parts.wait_for_weights()
        with torch.inference_mode():
            loss_of(parts.model, of_rank(0, world.rank)[0], DENOMINATOR)
        train_parts(parts, build_optimizers(config, parts.trainable_parameters()), 1)
        train_whole(models[1], config, world, 1)
        assert_close(parts, models[1])

    run_ranks(act, tmp_path)


@pytest.mark.slow
def test_compiled_blocks_are_compiled_once_and_train_as_others(tiny_model: MakeModel, tmp_path: Path) -> None:
    """Also when they are recomputed, and after weights were gathered for a validation. The three graphs are the block,
    the last block, and the last block with a single output position, which each rank has once."""

    def act(world: World) -> int:
        num_graphs = 0

        def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            nonlocal num_graphs
            num_graphs += 1
            return graph.forward

        models = [tiny_model(torch.float64, num_hidden_layers=3) for _ in range(2)]
        compile_blocks(models[0], backend)
        checkpoint_activations(models[0], "full")
        sharded = [cut(model, world) for model in models]
        for parts in sharded:
            optimizers = build_optimizers(AdamWConfig(eps=1e-3), parts.trainable_parameters())
            for _ in range(2):
                train_parts(parts, optimizers, 1)
                with torch.no_grad():
                    loss_of(parts.model, of_rank(5, world.rank)[1], DENOMINATOR)
        compiled, plain = (parts.trainable_parameters() for parts in sharded)
        for name, value in plain.items():
            torch.testing.assert_close(compiled[name], value, rtol=1e-9, atol=1e-9)
        return num_graphs

    assert run_ranks(act, tmp_path, timeout=120) == [3, 3]


def test_products_in_bfloat16_are_near_those_of_autocast(tiny_model: MakeModel, tmp_path: Path) -> None:
    """Weights of blocks travel in bfloat16, gradients and updates are float32. The gradient is as near to that of
    float32 as autocast's; single parameters of the tiny model vary by 5 % to 13 % with the order of roundings."""

    def act(world: World) -> None:
        models = tiny_model(), tiny_model(), tiny_model()
        loss_of(models[2], of_rank(0, 0)[1], DENOMINATOR / world.size).backward()
        parts = cut(models[0], world, dtype=torch.bfloat16)
        assert {part.dtype for part in parts.trainable_parameters().values()} == {torch.float32}
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with recorded() as events:
                loss_of(parts.model, of_rank(0, 0)[1], DENOMINATOR).backward()
            loss_of(models[1], of_rank(0, 0)[1], DENOMINATOR / world.size).backward()
        block = sum(parameter.numel() for parameter in models[1].model.layers[0].parameters())
        sizes = {kind: [size for name, size in events if kind in name] for kind in ("gather", "reduce")}
        assert sizes["gather"].count(2 * block) == 4 and sizes["reduce"].count(4 * block) == 2
        parts.clip(1e9)
        own = {name: slice(*row_range(parts.shard_of(name))) for name in parts.trainable_parameters()}
        squares = torch.zeros(3, dtype=torch.float64)  # of the gradient, and of the errors of FSDP and of autocast
        for name, part in parts.trainable_parameters().items():
            autocast, exact = (model.get_parameter(name).grad for model in models[1:])
            assert part.grad is not None and autocast is not None and exact is not None
            assert part.grad.dtype == torch.float32
            exact, errors = exact[own[name]], (part.grad - exact[own[name]], (autocast - exact)[own[name]])
            squares += torch.stack([value.double().square().sum() for value in (exact, *errors)])
            assert float(errors[0].norm()) < 0.15 * float(exact.norm()), name
        size, error, error_of_autocast = squares.sqrt().tolist()
        assert error < 0.05 * size and error < 2 * error_of_autocast

    run_ranks(act, tmp_path)


def test_skipped_step_leaves_state_unchanged(tiny_model: MakeModel, tmp_path: Path) -> None:
    def act(world: World) -> None:
        parts = cut(tiny_model(), world)
        optimizers = build_optimizers(
            MuonConfig(precision="float32"), parts.trainable_parameters(), row_exchange=parts.row_exchange
        )
        train_parts(parts, optimizers, 1)
        before = {name: state.clone() for name, state in optimizers.state_dict().items()}
        before |= {name: parameter.detach().clone() for name, parameter in parts.trainable_parameters().items()}
        assert optimizers.can_skip_on_device
        # Not finite on one rank only; the norm tells it to all.
        factor = float("nan") if world.rank else 1.0
        (factor * loss_of(parts.model, of_rank(1, world.rank)[0], DENOMINATOR)).backward()
        norm = parts.clip(1.0)
        assert not norm.isfinite()
        optimizers.step(1.0, skip=~norm.isfinite())
        after = optimizers.state_dict() | parts.trainable_parameters()
        assert all(torch.equal(after[name], before[name]) for name in before)

    run_ranks(act, tmp_path)


def test_a_rank_that_stops_saving_does_not_keep_the_others_waiting(tiny_model: MakeModel, tmp_path: Path) -> None:
    def act(world: World) -> float:
        parts = cut(tiny_model(), world)

        def write() -> None:
            for _ in parts.iterate_whole_parameters():
                raise OSError("disk full")

        if world.is_first:
            with pytest.raises(OSError, match="disk full"):
                write()
        else:
            write()
        return world.sum(1.0)[0]

    assert run_ranks(act, tmp_path, timeout=20) == [2.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_exchange_makes_matrices_whole_once(tmp_path: Path, dtype: torch.dtype) -> None:
    """Also those that have fewer rows than there are ranks."""
    shapes = [(7, 3), (1, 4), (3, 7), (2, 2), (6, 5)]
    wholes = [torch.arange(1.0, 1 + a * b).view(a, b).to(dtype) * 2**i for i, (a, b) in enumerate(shapes)]

    def act(world: World) -> list[list[float]]:
        ranges = [row_range_of_rank(len(whole), world.size, world.rank) for whole in wholes]
        parts = [nn.Parameter(whole[first:end].clone()) for whole, (first, end) in zip(wholes, ranges, strict=True)]
        ranks = Axis(world.size, world.rank, dist.group.WORLD)
        row_exchange = AllToAllRows(dict(zip(parts, (whole.shape for whole in wholes), strict=True)), ranks)
        matrices_of_rank: list[Tensor] = []

        def reverse(matrices: list[Tensor]) -> list[Tensor]:
            matrices_of_rank.extend(matrices)
            return [matrix.flip(0, 1) for matrix in matrices]

        reversed_rows = row_exchange(list(parts), [part.detach() for part in parts], reverse)
        for whole, (first, end), rows in zip(wholes, ranges, reversed_rows, strict=True):
            assert torch.equal(rows, whole.flip(0, 1)[first:end])
        assert row_exchange([], [], reverse) == []
        return [matrix.flatten().tolist() for matrix in matrices_of_rank]

    flat_matrices = [flat for matrices_of_rank in run_ranks(act, tmp_path, world_size=3) for flat in matrices_of_rank]
    assert sorted(flat_matrices) == sorted(whole.flatten().tolist() for whole in wholes)


def test_gloo_is_refused_on_a_gpu(tiny_model: MakeModel) -> None:
    model = tiny_model()
    with pytest.raises(ValueError, match="cannot reduce-scatter gradients on a GPU"):
        FullySharded(model, FSDP(backend="gloo"), World(), torch.device("cuda"), parameter_units(model))


@pytest.mark.parametrize(("num_rows", "world_size"), [(3, 2), (8, 2), (7, 3), (10, 4), (1, 3), (5, 1)])
def test_a_whole_parameter_is_gathered_a_few_rows_at_a_time(
    num_rows: int, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest one, of gigabytes, is never whole on the GPU of rank 0."""
    value = torch.arange(num_rows * 3.0).view(num_rows, 3)
    parts = [value[slice(*row_range_of_rank(num_rows, world_size, rank))] for rank in range(world_size)]
    sizes: list[int] = []
    monkeypatch.setattr(fully_sharded, "MAX_GATHER_BYTES", 2 * 12 * world_size)  # two rows of each rank

    def gather(padded: torch.Tensor, gathered: list[torch.Tensor], group_dst: int, group: Any) -> None:
        first = sum(sizes)
        sizes.append(len(padded))
        for target, part in zip(gathered, parts, strict=True):
            target.fill_(-1.0)
            target[: len(part[first : first + len(target)])] = part[first : first + len(target)]

    monkeypatch.setattr("ddp.fully_sharded.dist.gather", gather)
    rank: Any = SimpleNamespace(world=SimpleNamespace(size=world_size, is_first=True, group=None))
    whole = FullySharded._gather(rank, parts[0], value.shape)
    assert whole is not None and torch.equal(whole, value)
    assert sum(sizes) == len(parts[0]) and max(sizes) <= 2
