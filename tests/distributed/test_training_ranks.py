"""Whole runs, and validations, of several ranks: the numbers of one process."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from config.train import TrainConfig
from ddp.map_over_ranks import SINGLE_PROCESS_MAP, MapOverRanks
from ddp.process_group import SINGLE_PROCESS, World
from diffusionlm.data.loader import StepLoader, collate_rows
from diffusionlm.data.packing import Row
from diffusionlm.diffusion.layout import InputLayout
from diffusionlm.evaluation.validation import EvaluationResult, Validator, evaluate
from diffusionlm.models.transformer import Transformer
from diffusionlm.training import loop
from diffusionlm.training import run as run_module
from diffusionlm.training.metrics import StepMetrics
from diffusionlm.training.run import Run
from diffusionlm.training.signals import StopRequest
from diffusionlm.training.step import StepBatch, TrainState, load_step_batch, train_step
from tests.conftest import MakeModel
from tests.distributed.forked import end_ranks, run_ranks
from tests.preference_run import configure_preferences, write_preferences
from tests.tiny_run import change_config, read_losses, read_records, read_steps
from tokenizer import Tokenizer, train_bpe

REPLACEABLE: Any = loop
"""The module of the training loop, untyped: tests assign other functions to names that it imports."""
DDP = {"strategy": "ddp", "bucket_mib": 0.002}
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": DDP | {"shard_optimizer": False},
    "ddp, sharded": DDP,
    "fsdp": {"strategy": "fsdp"},
}
WHOLE = {"targets": ["q_proj", "lm_head"], "modules_to_save": ["embed_tokens", "norm", "mlp"], "bias": "all"}
MASKS = {"positions": "masks", "dropout": 0.25}
ADAMW = {"kind": "adamw", "learning_rate": 1e-2}
WEIGHTS, ADAPTER = (f"checkpoints/latest/{name}.safetensors" for name in ("model", "adapter_model"))
COMPARED = ("loss", "grad_l2_norm", "mask_ratio", "weight_norms/", "activation_norms/", "preference_")
"""Prefixes of the metrics that are those of one process."""
MUON = {"kind": "muon", "learning_rate": 1e-2, "precision": "float32"}


def training(config: TrainConfig) -> Callable[[World], int]:
    """What a rank does, which has joined the others already; returns the steps that it made."""

    def act(world: World) -> int:
        @contextlib.contextmanager
        def joined(parallel: Any, device_type: str) -> Iterator[World]:
            yield world

        REPLACEABLE.process_group = joined
        torch.set_num_threads(1)
        return loop.train(config).step

    return act


def train_on(config: TrainConfig, tmp_path: Path, world_size: int = 2) -> list[int]:
    """Train, each rank in a process of its own; returns the steps that they made."""
    return run_ranks(training(config), tmp_path, world_size)


def check_equal(
    one: TrainConfig, other: TrainConfig, tolerance: float, weights: str = WEIGHTS, norm_tolerance: float | None = None
) -> None:
    """Metrics of steps but for times and the loader's, weights, and the final evaluation.

    Args:
        norm_tolerance: of the gradient norm; None: as for all others.
    """
    tolerances = {"grad_l2_norm": norm_tolerance or tolerance}
    steps = [
        {key: value for key, value in step.items() if key.startswith(COMPARED)}
        for config in (one, other)
        for step in read_steps(config)
    ]
    for expected, actual in zip(steps[: len(steps) // 2], steps[len(steps) // 2 :], strict=True):
        assert actual.keys() == expected.keys()
        for key, value in expected.items():
            assert actual[key] == pytest.approx(value, rel=tolerances.get(key, tolerance)), key
    first, second = (load_file(config.run.directory / weights) for config in (one, other))
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=tolerance, atol=tolerance, msg=name)
    bounds = [
        json.loads((config.run.directory / "summary.json").read_text(encoding="utf-8"))["evaluation"]["nats_per_token"]
        for config in (one, other)
    ]
    assert bounds[0] == pytest.approx(bounds[1], rel=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [ADAMW, MUON], ids=["adamw", "muon"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_match_a_single_process(
    strategy: str, optimizer: dict[str, Any], config: TrainConfig, tmp_path: Path
) -> None:
    """With micro-batches of one row on each rank, so that target counts differ; norms are over all ranks."""
    sections: dict[str, Any] = {
        "optimizer": optimizer,
        "training": {"micro_batch_size": 1},
        "logging": {"norms_every_steps": 2},
    }
    one = change_config(config, tmp_path / "one", **sections)
    loop.train(one)
    assert len(read_steps(one)[1].keys() & {"weight_norms/mean", "activation_norms/norm", "mask_ratio"}) == 3
    two = change_config(config, tmp_path / "two", **sections, parallel=STRATEGIES[strategy])
    assert train_on(two, tmp_path) == [8, 8]
    check_equal(two, one, 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "lora"),
    [
        ("ddp, sharded", {"dropout": 0.25, "lr_ratio_b": 2.0}),
        ("fsdp", {"dropout": 0.25, "lr_ratio_b": 2.0}),
        ("fsdp", {"init": "pissa", "dora": True}),
        ("ddp, sharded", WHOLE),
        ("fsdp", WHOLE),
        ("ddp, sharded", MASKS),
        ("fsdp", MASKS),
    ],
)
def test_two_ranks_train_an_adapter_as_one(
    strategy: str, lora: dict[str, Any], config: TrainConfig, tmp_path: Path
) -> None:
    untied: dict[str, Any] = {"tie_word_embeddings": False, "attention_bias": True}
    if lora is MASKS:
        untied["clean_alignment"] = "shifted"
        objective = {"kind": "block_diffusion", "block_length": 4, "clean_attention": "token"}
        config = change_config(config, objective=objective, model=untied)
    loop.train(change_config(config, tmp_path / "base", training={"max_steps": 2}, model=untied))
    sections: dict[str, Any] = {
        "model": untied | {"init_from": str(tmp_path / "base")},
        "training": {"max_steps": 4, "micro_batch_size": 1, "ema_decay": 0.5, "neftune_alpha": 5.0},
        "lora": {"rank": 3, "trainable_tokens": [3, 7] if lora not in (WHOLE, MASKS) else [], **lora},
        # A large eps answers rounding with rounding: near zero, the sign of a gradient decides the step.
        "optimizer": ADAMW | {"eps": 1e-5},
    }
    one = change_config(config, tmp_path / "one", **sections)
    loop.train(one)
    two = change_config(config, tmp_path / "two", **sections, parallel=STRATEGIES[strategy])
    assert train_on(two, tmp_path) == [4, 4]
    check_equal(two, one, 2e-5, ADAPTER)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "loss"), [*((strategy, "dpo") for strategy in STRATEGIES), ("ddp", "kto")])
def test_two_ranks_train_on_preferences_as_one(strategy: str, loss: str, tiny_model: MakeModel, tmp_path: Path) -> None:
    """With micro-batches of one row on each rank. FSDP divides the reference like the model; KTO's reference point is a
    mean over all ranks."""
    write_preferences(tmp_path, tiny_model)
    sections: dict[str, Any] = {"training": {"micro_batch_size": 1, "max_steps": 3}, "objective": {"loss": loss}}
    one = configure_preferences(tmp_path, "one", **sections)
    two = configure_preferences(tmp_path, "two", **sections, parallel=STRATEGIES[strategy])
    build: Any = run_module.build_reference

    def build_divided(*args: Any) -> Any:
        reference = build(*args)
        if strategy == "fsdp":
            assert all(value.to_local().numel() < value.numel() for value in reference.parameters())
        return reference

    loop.train(one)
    with patch.object(run_module, "build_reference", build_divided):
        assert train_on(two, tmp_path) == [3, 3]
    check_equal(two, one, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"trainable_tokens": [3]}, {"modules_to_save": ["lm_head", "norm"]}])
def test_two_ranks_compare_an_adapter_with_its_start(
    options: dict[str, Any], tiny_model: MakeModel, tmp_path: Path
) -> None:
    """Its values are whole on each rank, also of a sharded model."""
    write_preferences(tmp_path, tiny_model)
    lora: dict[str, Any] = {"rank": 2, **options}
    sections: dict[str, Any] = {"training": {"micro_batch_size": 1, "max_steps": 3}, "lora": lora}
    first = configure_preferences(tmp_path, "first", **sections, optimizer={"learning_rate": 2e-2})
    loop.train(first)
    sections["lora"] = lora | {"init_from": str(first.run.directory)}
    one = configure_preferences(tmp_path, "one", **sections)
    loop.train(one)
    two = configure_preferences(tmp_path, "two", **sections, parallel=STRATEGIES["fsdp"])
    assert train_on(two, tmp_path) == [3, 3]
    assert read_losses(one)[0] == pytest.approx(math.log(2), abs=1e-6)
    assert read_losses(two) == pytest.approx(read_losses(one), rel=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp, sharded", "fsdp"])
def test_two_ranks_train_in_bfloat16(strategy: str, config: TrainConfig, tmp_path: Path) -> None:
    """With validation, samples and averages in between."""
    sections: dict[str, Any] = {
        "optimizer": ADAMW,
        "training": {"precision": "bfloat16", "ema_decay": 0.5},
        "validation": {"every_steps": 3},
        "samples": {"every_steps": 4, "infills": ["the cat[MASK:2] sat"]},
    }
    one = change_config(config, tmp_path / "one", **sections)
    loop.train(one)
    two = change_config(config, tmp_path / "two", **sections, parallel=STRATEGIES[strategy])
    assert train_on(two, tmp_path) == [8, 8]
    check_equal(two, one, 2e-2)
    kinds = [record["event"] for record in read_records(two, "event")]
    assert kinds.count("validation") == 2 and kinds.count("sample") == 2


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp, sharded", "fsdp"])
def test_run_resumes_with_another_world_size(strategy: str, config: TrainConfig, tmp_path: Path) -> None:
    """One rank, two, one: each goes on where the last one stopped."""
    sections: dict[str, Any] = {"optimizer": ADAMW, "training": {"ema_decay": 0.5}}
    whole = change_config(config, tmp_path / "whole", **sections)
    loop.train(whole)
    for stop, world_size in ((2, 1), (4, 2), (8, 1)):
        parallel = STRATEGIES[strategy] if world_size > 1 else {"strategy": "single"}
        part = change_config(config, tmp_path / "part", **sections, parallel=parallel)
        with stopping_after(stop) if stop < 8 else contextlib.nullcontext():
            if world_size == 1:
                loop.train(part)
            else:
                train_on(part, tmp_path, world_size)
    check_equal(part, whole, 2e-5)


@pytest.mark.slow
def test_experts_are_balanced_alike_under_fsdp_and_ddp(config: TrainConfig, tmp_path: Path) -> None:
    """FSDP copies lists among the arguments of a block, and the routings are collected in one of them."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "num_hidden_layers": 2}
    sections: dict[str, Any] = {
        "model": {**experts, "qk_norm": True, "router_aux_loss_coef": 0.1},
        "training": {"max_steps": 3},
        "optimizer": ADAMW | {"eps": 1e-5},
    }
    ddp, fsdp = (
        change_config(config, tmp_path / name, **sections, parallel=STRATEGIES[name]) for name in ("ddp", "fsdp")
    )
    train_on(ddp, tmp_path)
    train_on(fsdp, tmp_path)
    check_equal(fsdp, ddp, 2e-5)


def test_nonfinite_step_of_one_rank_is_skipped_by_all_ranks(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def poisoned(state: TrainState, loader: Any, batch: StepBatch, *args: Any) -> StepMetrics:
        if batch.step == 3 and state.parallel.world.rank == 1:
            batch.noised_batches[0].weights_N[0] = float("nan")
        return train_step(state, loader, batch, *args)

    monkeypatch.setattr(loop, "train_step", poisoned)
    two = change_config(config, tmp_path / "two", optimizer=ADAMW, parallel=DDP)
    assert train_on(two, tmp_path) == [8, 8]
    records = sorted(path.name for path in (two.run.directory / "skipped").glob("*.json"))
    assert records == ["step-00000004-rank-0.json", "step-00000004-rank-1.json"]
    assert all(torch.isfinite(weight).all() for weight in load_file(two.run.directory / WEIGHTS).values())
    state = json.loads((two.run.directory / "checkpoints/latest/state.json").read_text(encoding="utf-8"))
    assert state["progress"]["skipped"] == 1


def test_ranks_stop_early_together(config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the bound of the first rank, should another rank have rounded it to a better one."""
    evaluate, calls = Validator.evaluate_quick, itertools.count()

    def evaluate_quick(self: Validator, model: Transformer) -> EvaluationResult:
        bound = 3.0 if self.world.is_first else 3.0 - 1e-9 * next(calls)
        return replace(evaluate(self, model), nats_per_token=bound)

    monkeypatch.setattr(Validator, "evaluate_quick", evaluate_quick)
    validation = {"every_steps": 1, "rows": 2, "early_stopping": {"patience": 2}}
    two = change_config(config, tmp_path / "two", optimizer=ADAMW, parallel=DDP, validation=validation)
    assert train_on(two, tmp_path) == [3, 3]


@pytest.mark.slow
def test_dead_rank_ends_the_run_and_resume_is_exact(config: TrainConfig, tmp_path: Path) -> None:
    whole = change_config(config, tmp_path / "whole", optimizer=ADAMW, parallel=DDP)
    train_on(whole, tmp_path)
    broken = change_config(config, tmp_path / "broken", optimizer=ADAMW, parallel=DDP)

    def dying(world: World) -> int:
        original = loop.find_due_actions

        def find_due_actions(run: Run, stop: StopRequest) -> set[loop.Action]:
            if run.progress.step == 5 and world.rank == 1:
                run.checkpointer.wait()
                os._exit(9)
            return original(run, stop)

        loop.find_due_actions = find_due_actions
        return training(broken)(world)

    assert [ending.exit_code for ending in end_ranks(dying, tmp_path)] == [1, 9]
    train_on(broken, tmp_path)
    assert read_losses(broken) == read_losses(whole)
    first, second = (load_file(config.run.directory / WEIGHTS) for config in (broken, whole))
    assert all(torch.equal(first[name], second[name]) for name in second)


def test_a_batch_that_the_ranks_cannot_share_is_refused(config: TrainConfig, tmp_path: Path) -> None:
    three = change_config(config, tmp_path / "three", parallel=DDP)

    def act(world: World) -> str:
        with pytest.raises(ValueError, match=r"training\.batch_size = 4 .* 3 ranks") as caught:
            training(three)(world)
        return str(caught.value)

    assert "a multiple of 3" in run_ranks(act, tmp_path, 3)[0]


@contextlib.contextmanager
def stopping_after(step: int) -> Iterator[None]:
    """The run gets a signal in this step, on its last rank alone."""

    def load(loader: StepLoader, index: int, world: World, stop: StopRequest) -> StepBatch:
        if index + 1 == step and world.rank == world.size - 1:
            stop._handle_signal(15, None)
        return load_step_batch(loader, index, world, stop)

    REPLACEABLE.load_step_batch = load
    try:
        yield
    finally:
        REPLACEABLE.load_step_batch = load_step_batch


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe(["aaaa bbbb cccc"], vocab_size=262)


def rows(count: int) -> list[Row]:
    rng = np.random.default_rng(0)
    sequences = []
    for index in range(count):
        documents = np.where(np.arange(10) < 10 - index % 3, 0, -1).astype(np.int32)
        sequences.append(Row(rng.integers(0, 200, 10).astype(np.int32), documents, documents >= 0))
    return sequences


@pytest.mark.parametrize("is_collective", [False, True])
def test_distributed_validation_matches_a_single_process(
    tiny_model: Callable[..., Transformer], tokenizer: Tokenizer, tmp_path: Path, is_collective: bool
) -> None:
    model = tiny_model(vocab_size=tokenizer.vocab_size, mask_token_id=tokenizer.mask_token_id)
    forwards: list[int] = []
    model.register_forward_hook(lambda *_: forwards.append(1))

    def judged(world: World) -> tuple[list[EvaluationResult], int]:
        """Of a bidirectional model, and in blocks of 4: 3 batches x 3 draws + 2 x 3 fills, and 3 x 3."""
        forwards.clear()
        results = [
            evaluate(
                model,
                tokenizer,
                collate_rows(rows(7)),
                num_mc_samples=3,
                batch_size=3,
                layout=InputLayout.from_config(model.config, length),
                majority_token=5,
                map_forwards=MapOverRanks(world, is_collective),
            )
            for length in (None, 4)
        ]
        return results, len(forwards)

    alone, count = judged(SINGLE_PROCESS)
    assert count == 9 + 2 * 3 + 9
    done = run_ranks(judged, tmp_path)
    for results, _ in done:
        assert results == alone
    # 9 = 5 + 4 and 3 = 2 + 1 forwards, unless all ranks make equally many.
    expected = [5 + 2 * 2 + 5] * 2 if is_collective else [5 + 2 * 2 + 5, 4 + 2 * 1 + 4]
    assert [number for _, number in done] == expected


def test_validation_error_of_one_rank_is_raised_on_all_ranks(tmp_path: Path) -> None:
    def act(world: World) -> tuple[str, list[int], list[int]]:
        computed: list[int] = []

        def work(index: int) -> int:
            computed.append(index)
            if index in (1, 3):
                raise ValueError(f"forward {index} is not finite")
            return 10 * index

        map_forwards = MapOverRanks(world)
        with pytest.raises(ValueError) as caught:
            map_forwards(5, work)
        return str(caught.value), computed, map_forwards(3, lambda index: index * index)

    first, second = run_ranks(act, tmp_path)
    assert "forward 1 is not finite" in first[0] and first[0] == second[0]
    assert first[1:] == ([0, 2, 4], [0, 1, 4])
    assert second[1:] == ([1], [0, 1, 4])


def test_more_ranks_than_forwards(tmp_path: Path) -> None:
    def act(world: World) -> list[int]:
        indices: list[int] = []

        def work(index: int) -> int:
            indices.append(index)
            return index + 7

        results = MapOverRanks(world, is_collective=True)(1, work)
        return [*results, *indices]

    assert run_ranks(act, tmp_path, world_size=3) == [[7, 0]] * 3
    assert SINGLE_PROCESS_MAP(2, lambda index: index) == [0, 1]
