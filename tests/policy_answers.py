"""Answers of tiny models on the path of a run with rollouts, without the run: rows, log-probabilities and gradients.

Shapes: Q answers, J tokens of an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from config.finetune.rl import RLConfig
from config.generation import GenerationConfig
from ddp.process_group import SINGLE_PROCESS, World
from diffusionlm.diffusion.noised_batch import NoisedBatch
from diffusionlm.diffusion.preference import compute_nll
from diffusionlm.evaluation.answer_decoding import DecodedAnswer
from diffusionlm.inference.generate import Trajectory, decode
from diffusionlm.inference.request_builder import prepare_request
from diffusionlm.inference.requests import PreparedRequest
from diffusionlm.inference.settings import DecodingSettings, resolve_settings
from diffusionlm.models.transformer import Transformer
from diffusionlm.rl.loader import RolloutLoader
from diffusionlm.rl.policy import PolicyLoss, PolicyObjective
from diffusionlm.rl.rollouts import Rollout, check_trainable

PROMPTS = {"kind": "exact_match", "source": {"kind": "files", "paths": ["unused.jsonl"]}, "repeats": 2}
UNGROUPED: dict[str, Any] = {"advantage": "none", "prompts": PROMPTS | {"repeats": 1}}
"""The advantage of an answer is its reward."""


def rl_config(**values: Any) -> RLConfig:
    """The section [rl] with these keys; its prompts are not read."""
    return RLConfig.model_validate({"prompts": PROMPTS} | values)


def trainable_settings(model: Transformer, **keys: Any) -> DecodingSettings:
    """Decoding of rollouts at temperature 1.

    Raises:
        ValueError: it is not trainable.
    """
    settings = resolve_settings(GenerationConfig(**({"temperature": 1.0} | keys)), model.config)
    check_trainable(settings)
    return settings


@dataclass
class Answers:
    """Trajectories of requests with one decoding."""

    settings: DecodingSettings
    requests: Sequence[PreparedRequest]
    trajectories: Sequence[Trajectory]


def trajectories_of(model: Transformer, requests: Sequence[PreparedRequest]) -> list[Trajectory]:
    trajectories = [item.trajectory for item in decode(model, requests)]
    return [item for item in trajectories if item is not None]


def sample_answers(
    model: Transformer, prompts: Sequence[Sequence[int]], seeds: Sequence[int] | None = None, **keys: Any
) -> Answers:
    """One answer to each prompt."""
    settings = trainable_settings(model, **keys)
    seeds = range(len(prompts)) if seeds is None else seeds
    requests = [prepare_request(settings, prompt, seed) for prompt, seed in zip(prompts, seeds, strict=True)]
    return Answers(settings, requests, trajectories_of(model, requests))


class FixedAnswers(RolloutLoader):
    """A loader whose rollouts are these answers with these rewards."""

    def __init__(
        self,
        model: Transformer,
        config: RLConfig,
        answers: Answers,
        rewards: Sequence[float],
        *,
        micro_batch_size: int = 0,
        reference: Transformer | None = None,
        seed: int = 0,
        world: World = SINGLE_PROCESS,
    ) -> None:
        self.answers, self.rewards = answers, rewards
        run: Any = SimpleNamespace(
            config=SimpleNamespace(
                rl=config, run=SimpleNamespace(seed=seed), training=SimpleNamespace(micro_batch_size=micro_batch_size)
            ),
            world=world,
            state=SimpleNamespace(model=model),
        )
        repeats, count = config.prompts.repeats, len(answers.requests)
        prompts: Any = SimpleNamespace(
            settings=answers.settings,
            task=SimpleNamespace(repeats=repeats),
            num_prompts=count // repeats,
            num_left_out=0,
            digest="",
            items=[None] * (count // repeats),
        )
        super().__init__(run, prompts, PolicyLoss(config, reference))
        self.model = model

    def roll_out(self, rollout: int) -> list[Rollout]:
        item: Any = None
        rollouts = []
        for request, trajectory, reward in zip(
            self.answers.requests, self.answers.trajectories, self.rewards, strict=True
        ):
            answer = DecodedAnswer("", (), "length", int(trajectory.step_map_L.max()), trajectory)
            rollouts.append(Rollout(0, item, request, answer, reward))
        return rollouts

    def measure(self, step: int = 0) -> Tensor:
        """Log p of each scored position of a step, [N], in the order of the loss."""
        return torch.cat([-self._nll(batch).double() for batch in self.next_step(step).noised_batches])

    def token_values(self, step: int = 0) -> Tensor:
        """Log-probability of each token of all answers: sums of coefficients times log p."""
        logprobs_N, scored = self.measure(step), self.loss.answers
        assert scored is not None
        zeros = torch.zeros(len(scored.answers_J), dtype=torch.float64)
        return zeros.index_add(0, scored.tokens_N, scored.coefficients_N * logprobs_N)

    @property
    def num_rows(self) -> int:
        """Of the last step."""
        return sum(len(batch.inputs_BS) for batch in self.noised_batches)

    def _nll(self, batch: NoisedBatch) -> Tensor:
        objective = PolicyObjective(self.model.config.mask_token_id)
        return compute_nll(self.model, batch, objective.build_loss_inputs(batch, 1.0))

    def backward(self, step: int = 0) -> tuple[float, list[Tensor]]:
        """The loss of a step and its gradient by parameter, as `train_step` computes them."""
        model, objective = self.model, PolicyObjective(self.model.config.mask_token_id)
        batches = self.next_step(step).noised_batches
        denominator = sum(batch.denominator for batch in batches)
        inputs = [objective.build_loss_inputs(batch, denominator) for batch in batches]
        measured = [self.loss.measure(model, *pair) for pair in zip(batches, inputs, strict=True)]
        weighed = self.loss.weigh(batches, inputs, measured, denominator, lambda values: values)
        model.zero_grad()
        for batch, item in zip(batches, weighed, strict=True):
            output = model(
                batch.inputs_BS,
                pattern=batch.pattern,
                output_positions=batch.positions_N,
                loss_inputs=item.loss_inputs,
            )
            output.total_loss.backward()
        zeros = [torch.zeros_like(parameter) for parameter in model.parameters()]
        gradients = [
            zero if parameter.grad is None else parameter.grad.clone()
            for parameter, zero in zip(model.parameters(), zeros, strict=True)
        ]
        return float(sum(item.loss for item in weighed)), gradients


def token_logprobs(answers: Answers) -> NDArray[np.float64]:
    """Log p of all committed tokens, as decoding computed them."""
    return np.concatenate([item.logprobs_L[item.committed_positions] for item in answers.trajectories])
