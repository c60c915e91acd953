"""Runs with rollouts: micro-batches, ranks, resuming, what is left out, adapters; and defects of published trainers,
each with the check that finds it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from config.load import load_config
from config.train import TrainConfig
from ddp.process_group import SINGLE_PROCESS, World
from diffusionlm.checkpoints.huggingface import save_model_directory
from diffusionlm.data.loader import LoadedStep
from diffusionlm.diffusion.preference import WeighedLoss
from diffusionlm.evaluation.tasks.item_task import TaskItem
from diffusionlm.evaluation.tasks.results import Verdict
from diffusionlm.inference.generate import Trajectory
from diffusionlm.inference.requests import PreparedRequest
from diffusionlm.models.transformer import Transformer
from diffusionlm.rl import run as policy_run
from diffusionlm.rl.graded import GradedTask
from diffusionlm.rl.loader import RolloutLoader
from diffusionlm.rl.policy import PolicyLoss
from diffusionlm.rl.rollouts import PromptSet, Rollout
from diffusionlm.training import loop
from diffusionlm.training.checkpointing.run_directory import open_run_directory
from diffusionlm.training.run import Run
from tests.conftest import MakeModel
from tests.distributed.forked import run_ranks
from tests.policy_answers import UNGROUPED, Answers, FixedAnswers, rl_config, sample_answers, token_logprobs
from tests.reference.enumeration import PlainModel, log_probabilities
from tests.reference.policy_estimates import ONE_BY_ONE, PROMPT, TOKENS, small_model
from tests.tiny_run import read_losses, read_records, read_steps, write_train_config
from tests.unit.data.chat_cases import chat_tokenizer

WEIGHTS = "checkpoints/latest/model.safetensors"
Configure = Callable[..., TrainConfig]
QUESTIONS = ("ab", "abc", "hello", "x", "how?", "12345")
PATTERN = "[A-Za-z]"
"""What a random model writes into about half of its answers."""


@pytest.fixture
def configure(tmp_path: Path, tiny_model: MakeModel) -> Configure:
    """``configure(name, **sections)``: four steps of 8 answers, 4 to each prompt, in blocks of 4, of a random model."""
    tokenizer = chat_tokenizer()
    vocabulary = {"vocab_size": tokenizer.vocab_size, "mask_token_id": tokenizer.mask_token_id}
    ends = dict.fromkeys(("eos_token_id", "pad_token_id"), tokenizer.eos_token_id)
    model = tiny_model(scale=0.3, max_position_embeddings=32, block_length=4, **vocabulary, **ends)
    save_model_directory(model, tokenizer, tmp_path / "base")
    rows = [{"question": text, "id": text} for text in ("too long " * 4, *QUESTIONS)]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return partial(write_config, tmp_path)


def write_config(folder: Path, name: str, **sections: dict[str, Any]) -> TrainConfig:
    rl = sections.pop("rl", {})
    prompts = {
        "kind": "graded",
        "data": str(folder / "questions.jsonl"),
        "repeats": 4,
        "batch_size": 8,
        "generation": {"max_new_tokens": 6, "remasking_strategy": "entropy"},
        "rewards": [{"kind": "regex", "pattern": PATTERN}],
    } | rl.pop("prompts", {})
    changes: dict[str, dict[str, Any]] = {
        "run": {"directory": str(folder / name)},
        "model": {"init_from": str(folder / "base")},
        "data": {"row_length": 32},
        "objective": {"kind": "block_diffusion", "block_length": 4},
        "training": {"batch_size": 8, "micro_batch_size": 8, "max_steps": 4},
        "optimizer": {"kind": "adamw", "learning_rate": 1e-3, "eps": 1e-5, "weight_decay": 0.0},
        "schedule": {"kind": "constant", "warmup_steps": 0},
        "validation": {"final_rows": 4},
        "samples": {"every_steps": 2},
        "rl": {"prompts": prompts, **rl},
    }
    for section, values in sections.items():
        changes[section] = changes.get(section, {}) | values
    return load_config(TrainConfig, write_train_config(folder, name, **changes))


def train(config: TrainConfig) -> loop.TrainResult:
    return policy_run.reinforce_policy(config)


def build(config: TrainConfig, world: World = SINGLE_PROCESS) -> tuple[Run, RolloutLoader]:
    """A run with rollouts, before its first step."""
    with open_run_directory(config, world) as directory:
        run = policy_run.build_policy_run(config, directory, world)
    assert isinstance(run.loader, RolloutLoader)
    return run, run.loader


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
    [{"strategy": "ddp", "shard_optimizer": False}, pytest.param({"strategy": "fsdp"}, marks=pytest.mark.slow)],
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


def grade_by_length(self: GradedTask, item: TaskItem, text: str, steps: Any) -> tuple[Verdict, None]:
    """A reward that tells items apart; short questions cannot be graded."""
    if item.id == "x":
        raise ValueError("no reward")
    return Verdict({"reward": len(item.id) / 10.0 + sum(text.encode()) % 2}), None


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


# ----------------------------------------------------------------------------------------------------------------------
# Defects of published trainers


def check_logprobs(model: Transformer, answers: Answers) -> None:
    """Rows give the log-probabilities of decoding."""
    loader = FixedAnswers(model, rl_config(**UNGROUPED), answers, [1.0] * len(answers.requests))
    np.testing.assert_allclose(loader.token_values().numpy(), token_logprobs(answers), atol=1e-9)


def check_first_tokens(model: Transformer, **keys: Any) -> None:
    """The first tokens of rollouts have the frequencies of the model's distributions, given where they stand."""
    answers = sample_answers(model, [PROMPT] * 800, max_new_tokens=2, **keys)
    canvas = torch.tensor([[*PROMPT, TOKENS, TOKENS]])
    probabilities = log_probabilities(PlainModel(model)(canvas, torch.arange(4))[0])[0].exp().detach().numpy()
    chi2 = 0.0
    for position in (2, 3):
        own = [item.tokens_L[position] for item in answers.trajectories if item.step_map_L[position] == 1]
        expected = len(own) * probabilities[position] + 1e-9
        chi2 += float(((np.bincount(own, minlength=TOKENS) - expected) ** 2 / expected).sum())
    assert chi2 < 20.0  # four degrees of freedom: p about 5e-4


def check_micro_batches(model: Transformer, answers: Answers) -> None:
    """The gradient does not depend on the size of micro-batches."""
    rewards = np.linspace(-1.0, 1.0, len(answers.requests)).tolist()
    one, other = (
        FixedAnswers(model, rl_config(**UNGROUPED), answers, rewards, micro_batch_size=size).backward()[1]
        for size in (0, 3)
    )
    for first, second in zip(one, other, strict=True):
        torch.testing.assert_close(first, second, rtol=0.0, atol=1e-9)


def check_memory(model: Transformer, answers: Answers) -> None:
    """Batches have as many numbers as positions, a few times, and no mask of queries and keys."""
    loader = FixedAnswers(model, rl_config(**UNGROUPED), answers, [1.0] * len(answers.requests))
    for batch in loader.next_step(0).noised_batches:
        tensors = [value for part in (batch, batch.pattern) for value in vars(part).values()]
        count = sum(value.numel() for value in tensors if isinstance(value, torch.Tensor))
        assert count <= 8 * batch.inputs_BS.numel()


def check_rewards(prompts: PromptSet, model: Transformer) -> None:
    """Each answer has the reward of its own item."""
    for item in map(prompts.grade, prompts.decode(model, 0, range(8))):
        own = chat_tokenizer().decode(item.request.token_ids)
        assert item.reward == len(own) / 10.0 + sum(item.answer.text.encode()) % 2


DEVIATIONS: tuple[dict[str, Any], ...] = ({"temperature": 0.8}, {"confidence_of": "sampled"})
"""(d) and (e): keys of decoding that `check_trainable` refuses."""


def encode_again(trajectory: Trajectory) -> Trajectory:
    """(a) The text of the answer, encoded again and cut or padded to the steps: pairs of tokens have become one."""
    tokens_L = trajectory.tokens_L.copy()
    answer = tokens_L[~trajectory.is_given_L]
    merged = np.append(answer[1:], answer[:1])
    tokens_L[~trajectory.is_given_L] = merged
    return replace(trajectory, tokens_L=tokens_L)


def count_from_answer(request: PreparedRequest) -> PreparedRequest:
    """(c) Blocks that are counted from the beginning of the answer."""
    return replace(request, options=replace(request.options, segment_starts=(int(request.masked_positions[0]),)))


def test_defects_of_published_trainers_are_found(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each check passes, and fails with the defect in place."""
    model = small_model(2)
    sampled: dict[str, Any] = {**ONE_BY_ONE, "stop_token_ids": ()}
    answers = sample_answers(model, [(1, 2, 0)] * 6, max_new_tokens=3, **sampled)
    check_logprobs(model, answers)
    with pytest.raises(AssertionError):
        check_logprobs(model, replace(answers, trajectories=[*map(encode_again, answers.trajectories)]))
    with pytest.raises(AssertionError):
        check_logprobs(model, replace(answers, requests=[*map(count_from_answer, answers.requests)]))

    config = configure("run", training={"batch_size": 24})
    monkeypatch.setattr(GradedTask, "grade_steps", grade_by_length)
    run, loader = build(config)
    check_rewards(loader.prompts, run.state.model)
    grade = PromptSet.grade

    def grade_without_dropping(self: PromptSet, rollout: Rollout) -> Rollout:
        item = self.prepared.items[self.items.index(rollout.item)]  # (b)
        return grade(self, replace(rollout, item=item))

    with monkeypatch.context() as patched:
        patched.setattr(PromptSet, "grade", grade_without_dropping)
        with pytest.raises(AssertionError):
            check_rewards(loader.prompts, run.state.model)

    sharp = small_model(scale=0.8, seed=2)
    check_first_tokens(sharp, **sampled)
    with monkeypatch.context() as patched:
        patched.setattr("tests.policy_answers.check_trainable", lambda settings: None)
        for keys in DEVIATIONS:
            with pytest.raises(AssertionError):
                check_first_tokens(sharp, **(sampled | keys))
    for keys in DEVIATIONS:
        with pytest.raises(ValueError, match=next(iter(keys))):
            check_first_tokens(sharp, **(sampled | keys))

    check_micro_batches(model, answers)
    weigh = PolicyLoss.weigh

    def lose_the_tail(self: PolicyLoss, *parts: Any) -> list[WeighedLoss]:
        *first, last = weigh(self, *parts)  # (f)
        inputs = replace(last.loss_inputs, weights_N=torch.zeros_like(last.loss_inputs.weights_N))
        return [*first, replace(last, loss_inputs=inputs)]

    with monkeypatch.context() as patched:
        patched.setattr(PolicyLoss, "weigh", lose_the_tail)
        with pytest.raises(AssertionError):
            check_micro_batches(model, answers)

    check_memory(model, answers)
    with monkeypatch.context() as patched:
        patched.setattr(RolloutLoader, "next_step", with_dense_masks(RolloutLoader.next_step))  # (g)
        with pytest.raises(AssertionError):
            check_memory(model, answers)


def with_dense_masks(next_step: Callable[..., LoadedStep]) -> Callable[..., LoadedStep]:
    def patched(self: RolloutLoader, step: int) -> LoadedStep:
        loaded = next_step(self, step)
        batches = []
        for batch in loaded.noised_batches:
            rows, length = batch.inputs_BS.shape
            pattern: Any = SimpleNamespace(mask=torch.ones(rows, length, length, dtype=torch.bool))
            batches.append(replace(batch, pattern=pattern))
        return replace(loaded, noised_batches=batches)

    return patched
