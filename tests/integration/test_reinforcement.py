"""Runs with rollouts: micro-batches, ranks, resuming, what is left out, adapters."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from benchmarking.bench_train import bench_train
from config.bench.training import BenchTrainConfig
from config.dump import to_toml
from config.train import TrainConfig
from ddp.process_group import World
from diffusionlm.data.loader import LoadedStep
from diffusionlm.rl import run as policy_run
from diffusionlm.rl.graded import GradedTask
from diffusionlm.rl.loader import RolloutLoader
from diffusionlm.rl.rollouts import PromptSet, Rollout
from diffusionlm.training import loop
from tests.distributed.forked import run_ranks
from tests.reinforcement_run import QUESTIONS, Configure, build, grade_by_length
from tests.tiny_run import read_losses, read_records, read_steps
from tests.unit.benchmarking.cases import read_tables
from tests.unit.data.chat_cases import chat_tokenizer

WEIGHTS = "checkpoints/latest/model.safetensors"


def train(config: TrainConfig) -> loop.TrainResult:
    return policy_run.reinforce_policy(config)


def record_answers(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, ...]]]:
    """Token ids of the answers of all ranks, by rollout, as they come."""
    original, seen = RolloutLoader.roll_out, list[list[tuple[int, ...]]]()

    def roll_out(self: RolloutLoader, rollout: int) -> list[Rollout]:
        rollouts = original(self, rollout)
        seen.append([tuple(item.answer.trajectory.tokens_L.tolist()) for item in rollouts])
        return rollouts

    monkeypatch.setattr(RolloutLoader, "roll_out", roll_out)
    return seen


# ----------------------------------------------------------------------------------------------------------------------
# The same numbers


def weights_of(config: TrainConfig) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = load_file(config.run.directory / WEIGHTS)
    return weights


def check_close(one: TrainConfig, other: TrainConfig, tolerance: float = 1e-5) -> None:
    assert read_losses(one) == pytest.approx(read_losses(other), abs=tolerance)
    for name in ("grad_l2_norm", "rl/reward"):
        values = [[step[name] for step in read_steps(config) if name in step] for config in (one, other)]
        assert values[0] == pytest.approx(values[1], rel=1e-4), name
    first, second = weights_of(one), weights_of(other)
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=1e-4, atol=tolerance, msg=name)


KL = {"clip": 0.2, "inner_steps": 2, "kl": {"coefficient": 0.1}}


@pytest.mark.parametrize(
    "rl",
    [pytest.param({}, marks=pytest.mark.slow), {**KL, "logprobs": "bound", "ratio": "sequence"}],
    ids=["plain", "bound"],
)
def test_micro_batches_change_nothing(
    rl: dict[str, Any], configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = record_answers(monkeypatch)
    configs = [configure(f"size {size}", training={"micro_batch_size": size}, rl=dict(rl)) for size in (8, 2)]
    for config in configs:
        train(config)
    check_close(configs[0], configs[1])
    half = len(answers) // 2
    assert answers[:half] == answers[half:] and len(set(answers[0])) > 4
    steps = read_steps(configs[0])
    assert all(0.0 < step["rl/reward"] < 1.0 for step in steps if "rl/reward" in step)
    assert max(step["grad_l2_norm"] for step in steps) > 1e-3


def train_on_ranks(config: TrainConfig, tmp_path: Path) -> None:
    """Two ranks, each in a process of its own."""

    def act(world: World) -> int:
        @contextmanager
        def joined(parallel: Any, device_type: str) -> Iterator[World]:
            yield world

        with patch.object(loop, "process_group", joined):
            return train(config).step

    assert run_ranks(act, tmp_path) == [4, 4]


@pytest.mark.parametrize(
    "parallel",
    [
        {"strategy": "ddp", "shard_optimizer": False},
        pytest.param({"strategy": "fsdp"}, marks=pytest.mark.slow),
        pytest.param({"strategy": "ddp", "tensor": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_ranks_change_nothing(parallel: dict[str, Any], configure: Configure, tmp_path: Path) -> None:
    """Whole answers are split over ranks; the draws of masks do not depend on how."""
    sections: dict[str, Any] = {"training": {"micro_batch_size": 2}}
    one = configure("one", **sections, rl={**KL, "logprobs": "bound", "ratio": "sequence"})
    train(one)
    two = configure("two", **sections, parallel=parallel, rl={**KL, "logprobs": "bound", "ratio": "sequence"})
    train_on_ranks(two, tmp_path)
    check_close(two, one)
    samples = [
        [record["text"] for record in read_records(config, "event") if record["event"] == "sample"]
        for config in (one, two)
    ]
    assert samples[0] == samples[1] and len(samples[0]) > 0


# ----------------------------------------------------------------------------------------------------------------------
# Resuming


@pytest.mark.parametrize(
    "rl",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {**KL, "prompts": {"repeats": 2}},
        pytest.param({"value": {"learning_rate": 0.1}}, marks=pytest.mark.slow),
    ],
    ids=["plain", "inner", "value"],
)
def test_a_run_that_was_interrupted_goes_on_with_the_same_bits(rl: dict[str, Any], configure: Configure) -> None:
    """It goes down in the middle of the rollout of its third step."""
    whole, parts = configure("whole", rl=dict(rl)), configure("parts", rl=dict(rl))
    train(whole)
    original = PromptSet.decode

    def decode(self: PromptSet, model: Any, rollout: int, numbers: Any) -> list[Rollout]:
        rollouts = original(self, model, rollout, numbers)
        if rollout == 2 // config_steps:
            raise RuntimeError("the machine goes down")
        return rollouts

    config_steps = rl.get("inner_steps", 1)
    with patch.object(PromptSet, "decode", decode), pytest.raises(RuntimeError, match="goes down"):
        train(parts)
    assert (parts.run.directory / "checkpoints/latest").resolve().name == "step-00000002"
    train(parts)
    assert read_losses(parts) == read_losses(whole)
    first, second = weights_of(parts), weights_of(whole)
    assert all(torch.equal(first[name], second[name]) for name in second)


def test_a_signal_waits_for_the_last_inner_step(configure: Configure) -> None:
    """The answers of a rollout are not saved: a run stops between two of them, and goes on with the same bits."""
    rl = {**KL, "inner_steps": 2}
    whole, parts = configure("whole", rl=dict(rl)), configure("parts", rl=dict(rl))
    train(whole)
    original = RolloutLoader.next_step

    def next_step(self: RolloutLoader, step: int) -> LoadedStep:
        loaded = original(self, step)
        if step == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
        return loaded

    with patch.object(RolloutLoader, "next_step", next_step):
        ended = train(parts)
    assert (ended.step, ended.stop_signal) == (2, signal.SIGUSR1)
    train(parts)
    assert read_losses(parts) == read_losses(whole)
    first, second = weights_of(parts), weights_of(whole)
    assert all(torch.equal(first[name], second[name]) for name in second)


# ----------------------------------------------------------------------------------------------------------------------
# What is left out


def test_prompts_too_long_are_dropped_with_their_rewards(configure: Configure) -> None:
    """They are counted, and all others keep their own rewards."""
    config = configure("run", training={"batch_size": 24})
    with patch.object(GradedTask, "grade_steps", grade_by_length):
        _, loader = build(config)
        loaded = loader.next_step(0)
    assert loaded.metrics["rl/prompts_left_out"] == 1.0
    assert sorted(item.id for item in loader.prompts.items) == sorted(QUESTIONS)
    assert [item.group for item in loader.rollouts] == [number // 4 for number in range(24)]
    for item in loader.rollouts:
        prompt = chat_tokenizer().decode(item.request.token_ids)
        assert prompt == item.item.id
        if item.item.id != "x":
            assert item.reward == len(prompt) / 10.0 + sum(item.answer.text.encode()) % 2


def test_ungraded_answers_are_left_out(configure: Configure) -> None:
    """They have no gradient, and are counted with the reason."""
    config = configure("run", training={"batch_size": 24})
    with patch.object(GradedTask, "grade_steps", grade_by_length):
        _, loader = build(config)
        metrics = loader.next_step(0).metrics
    assert metrics["rl/ungraded"] == 4.0
    errors = {item.item.id: item.error for item in loader.rollouts}
    assert errors.pop("x") == "ValueError: no reward" and set(errors.values()) == {None}
    assert loader.loss.answers is not None
    is_ungraded = np.array([item.item.id == "x" for item in loader.rollouts])[loader.loss.answers.answers_J]
    assert not loader.loss.answers.advantages_J.numpy()[is_ungraded].any()
    assert loader.loss.answers.advantages_J.any()


def test_a_reward_that_always_fails_ends_the_run_with_its_reason(configure: Configure, tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("def reward(sample):\n    return 'good'\n", encoding="utf-8")
    config = configure("run", rl={"prompts": {"rewards": [{"kind": "python", "path": str(path)}]}})
    with pytest.raises(ValueError, match=r"no answer of 8 can be graded: .*broken.py: reward .*'good'"):
        train(config)


def test_other_prompts_or_rewards_are_refused_when_a_run_goes_on(configure: Configure, tmp_path: Path) -> None:
    config = configure("run", training={"max_steps": 2})
    train(config)
    rows = (tmp_path / "questions.jsonl").read_text(encoding="utf-8")
    (tmp_path / "questions.jsonl").write_text(rows.replace("hello", "hullo"), encoding="utf-8")
    longer = configure("run", training={"max_steps": 4}, checkpoint={"config_change": "accept"})
    train(longer)
    (tmp_path / "questions.jsonl").write_text(rows, encoding="utf-8")
    with pytest.raises(ValueError, match=r"rl.prompts: the prompts, or a file of their rewards, are not those"):
        train(configure("run", training={"max_steps": 4}, checkpoint={"resume": "auto"}))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"training": {"batch_size": 6, "micro_batch_size": 6}}, "must be a multiple of rl.prompts.repeats = 4"),
        ({"training": {"neftune_alpha": 5.0}}, "neftune_alpha is noise"),
        ({"validation": {"every_steps": 2, "early_stopping": {}}}, "early_stopping stops when the model has moved"),
        ({"rl": {"preset": "d1"}}, "rl.logprobs.prompt_masking = 0.15 has no effect on the clean blocks"),
        ({"rl": {"inner_steps": 3}}, "training.max_steps = 4 must be a multiple of rl.inner_steps = 3"),
        ({"objective": {"kind": "preference"}}, 'objective.kind = "preference"'),
    ],
    ids=str,
)
def test_sections_that_do_not_fit_are_refused(sections: dict[str, Any], message: str, configure: Configure) -> None:
    with pytest.raises(ValueError, match=message):
        configure("run", **sections)


def test_a_step_without_any_reward_changes_nothing(configure: Configure, tmp_path: Path) -> None:
    config = configure("run", rl={"prompts": {"rewards": [{"kind": "regex", "pattern": "^never$"}]}})
    train(config)
    assert read_losses(config) == [0.0] * 4
    before, after = load_file(tmp_path / "base" / "model.safetensors"), weights_of(config)
    assert all(torch.equal(before[name], after[name]) for name in before)


# ----------------------------------------------------------------------------------------------------------------------
# Adapters


def test_an_adapter_is_compared_with_its_base(configure: Configure) -> None:
    """The penalty is 0 in the first step, and grows as the adapter does."""
    config = configure(
        "run",
        lora={"rank": 2},
        optimizer={"learning_rate": 3e-2},
        rl={"kl": {"coefficient": 0.1}, "clip": 0.2},
    )
    train(config)
    penalties = [step["rl/kl"] for step in read_steps(config)]
    assert penalties[0] == 0.0 and penalties[-1] > 1e-6


# ----------------------------------------------------------------------------------------------------------------------
# A bandit


def test_a_bandit_reaches_its_optimum(configure: Configure) -> None:
    """One token, rewarded if it is a vowel: the share of vowels goes from about 2 % to nearly all."""
    config = configure(
        "run",
        training={"batch_size": 64, "micro_batch_size": 64, "max_steps": 24},
        optimizer={"learning_rate": 3e-2},
        samples={"every_steps": 0},
        checkpoint={"every_steps": 24},
        rl={
            "prompts": {
                "repeats": 32,
                "batch_size": 64,
                "generation": {"max_new_tokens": 1, "remasking_strategy": "entropy"},
                "rewards": [{"kind": "regex", "pattern": "[aeiouAEIOU]"}],
            }
        },
    )
    train(config)
    rewards = [step["rl/reward"] for step in read_steps(config)]
    assert rewards[0] < 0.2 and np.mean(rewards[-3:]) > 0.9


def test_bench_measures_the_parts_of_an_update(configure: Configure, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(to_toml(configure("run")), encoding="utf-8")
    bench = {"rollouts": path, "rounds": 2, "warmup": 0, "threads": 1}
    report = bench_train(BenchTrainConfig.model_validate({"bench": bench}))
    [table] = read_tables(report)
    assert table["part"] == ["update with rollout", "answers together", "one by one", "log-probabilities"]
    assert table["share"][0] == "100%" and all(float(cell) > 0.0 for cell in table["ms"])
    assert not (tmp_path / "run").exists()  # it trains in a temporary directory
    with pytest.raises(ValueError, match="there is nothing to measure"):
        BenchTrainConfig()


def test_prompts_with_images_are_refused(configure: Configure, tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(b"")
    data = tmp_path / "pictures.jsonl"
    data.write_text(json.dumps({"id": "a", "question": "What?", "image": "picture.png"}), encoding="utf-8")
    with pytest.raises(ValueError, match=r"rl\.prompts: item 'a': rollouts read no images"):
        build(configure("images", rl={"prompts": {"data": str(data)}}))
