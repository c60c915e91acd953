"""Defects of published trainers, each with the check that finds it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from diffusionlm.data.loader import LoadedStep
from diffusionlm.diffusion.preference import WeighedLoss
from diffusionlm.inference.generate import Trajectory
from diffusionlm.inference.requests import PreparedRequest
from diffusionlm.models.transformer import Transformer
from diffusionlm.rl.graded import GradedTask
from diffusionlm.rl.loader import RolloutLoader
from diffusionlm.rl.policy import PolicyLoss
from diffusionlm.rl.rollouts import PromptSet, Rollout
from tests.policy_answers import UNGROUPED, Answers, FixedAnswers, rl_config, sample_answers, token_logprobs
from tests.reference.enumeration import PlainModel, log_probabilities
from tests.reference.policy_estimates import ONE_BY_ONE, PROMPT, TOKENS, small_model
from tests.reinforcement_run import Configure, build, grade_by_length
from tests.unit.data.chat_cases import chat_tokenizer


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
