"""The loader of a run with rollouts: a step's batches score the answers that the model has just written.

Answers are decoded by all ranks together and gathered on each; every rank then scores its share of them, whole answers,
so that a loss that needs all rows of an answer has them. The draws do not depend on the number of ranks. The state of
the loader is the number of the step: rollouts are a function of (weights, step).

Shapes: L positions of a canvas, N scored positions of a micro-batch, J tokens of all answers, Q answers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from config.finetune.rl import ReplayConfig
from diffusionlm.data.loader import LoadedStep, StepLoader
from diffusionlm.diffusion.layout import InputLayout
from diffusionlm.diffusion.noised_batch import CleanBatch, NoisedBatch, NoiseKey
from diffusionlm.inference.blocks import TextSegments
from diffusionlm.rl.logprobs import ScoredRow, ScoredText, build_rows
from diffusionlm.rl.policy import PolicyLoss, ScoredAnswers, Timeline, compute_advantages
from diffusionlm.rl.rollouts import PromptSet, Rollout, summarize
from diffusionlm.training.run import Run
from diffusionlm.training.step import autocast

LENGTH_MULTIPLE = 16
"""Rows are padded to a multiple of this, or to the model's context."""


@dataclass(frozen=True)
class PlacedRow:
    """A row of an answer, with where its tokens are among those of all answers."""

    text: ScoredText
    segments: TextSegments
    row: ScoredRow
    first_token: int


class RolloutLoader(StepLoader):
    """Rolls out the prompts of a step, and builds the rows that score the answers."""

    def __init__(self, run: Run, prompts: PromptSet, loss: PolicyLoss) -> None:
        assert run.config.rl is not None
        self.run, self.prompts, self.loss, self.config = run, prompts, loss, run.config.rl
        block_length = prompts.settings.block_causal_length
        self.layout = InputLayout.from_config(run.state.model.config, block_length)
        self.rollouts: list[Rollout] = []
        """Answers of the last step, of all ranks."""
        self.noised_batches: list[NoisedBatch] = []
        """Rows that score this rank's answers of the last step."""
        self._metrics: dict[str, float] = {}
        """Of the last rollout, for all of its inner steps."""
        self._has_warned = False
        """Of an answer that could not be graded."""
        self._num_positions = self._num_padding = 0
        self._digest = prompts.digest
        self._step = 0

    @property
    def can_resume(self) -> bool:
        return self._step % self.config.inner_steps == 0

    def next_step(self, step: int) -> LoadedStep:
        started = time.perf_counter()
        rollout, inner_step = divmod(step, self.config.inner_steps)
        if inner_step == 0:
            self.rollouts = self.roll_out(rollout)
            is_used = self._select_answers()
            advantages = self._compute_advantages(is_used)
            self._metrics = summarize(self.rollouts, [bool(own.any()) for own in advantages], self.prompts.task.repeats)
            self._metrics["rl/prompts_left_out"] = float(self.prompts.num_left_out)
            self._metrics["rl/rollout_seconds"] = time.perf_counter() - started
            self._build_batches(rollout, is_used, advantages)
        metrics = self.loss.metrics = dict(self._metrics)
        self._step = step + 1
        seconds = time.perf_counter() - started
        num_tokens = sum(batch.num_targets for batch in self.noised_batches)
        return LoadedStep(self.noised_batches, self.state_dict(), num_tokens / seconds, seconds, metrics=metrics)

    def state_dict(self) -> dict[str, Any]:
        """Counts that are logged; what is rolled out next follows from the step."""
        epoch = self._step // self.config.inner_steps * self.prompts.num_prompts // len(self.prompts.items)
        state: dict[str, Any] = {"epoch": epoch, "num_positions": self._num_positions, "padding": self._num_padding}
        state["prompts"] = self._digest
        # The head writes what it learns in the step into its state.
        return state if self.loss.value is None else {**state, "value": self.loss.value.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._num_positions, self._num_padding = state["num_positions"], state["padding"]
        is_same = state["prompts"] == self._digest
        if not is_same and self.run.config.checkpoint.config_change == "refuse":
            raise ValueError(
                "rl.prompts: the prompts, or a file of their rewards, are not those of the checkpoint: restore them, "
                'name another run.directory, or set checkpoint.config_change = "accept"'
            )
        if self.loss.value is not None:
            self.loss.value.load_state_dict(state["value"])

    def roll_out(self, rollout: int) -> list[Rollout]:
        """Answers to the prompts of a rollout, of all ranks, with the weights of the last update, in training's
        precision.

        Where forwards are collective, every rank decodes all of them.
        """
        state, world = self.run.state, self.run.world
        count = self.prompts.num_prompts * self.prompts.task.repeats
        is_collective = self.run.config.parallel.decodes_together
        own = range(count) if is_collective else self._own_answers(count)
        state.parallel.wait_for_weights()

        def decode() -> list[Rollout]:
            with torch.no_grad(), autocast(self.run.settings):
                return self.prompts.decode(state.model, rollout, own)

        if is_collective:
            share = self._own_answers(count)
            decoded = decode()[share.start : share.stop]
            parts = world.run_on_all(lambda: list(map(self.prompts.grade, decoded)))
        else:
            parts = world.run_on_all(lambda: list(map(self.prompts.grade, decode())))
        rollouts = [item for part in parts[:: world.mesh.num_data_copies] for item in part]
        self._check_grades(rollouts)
        return rollouts

    def _check_grades(self, rollouts: Sequence[Rollout]) -> None:
        """Warn of the first answer that cannot be graded.

        Raises:
            ValueError: no answer can be graded, or rewards of steps cannot be compared with those of answers.
        """
        errors = [item.error for item in rollouts if item.error is not None]
        if len(errors) == len(rollouts):
            raise ValueError(f"rl.prompts: no answer of {len(rollouts)} can be graded: {errors[0]}")
        if errors and not self._has_warned:
            self._has_warned = True
            self.run.log(f"warning: {len(errors)} answers cannot be graded, and are left out: {errors[0]}")
        has_steps = any(item.step_rewards is not None for item in rollouts)
        if has_steps and self.config.value is None and self.config.advantage in ("standardized", "softmax"):
            raise ValueError(
                f'rl.advantage = "{self.config.advantage}" changes the scale of rewards, and those of steps are '
                'taken off: set rl.advantage = "centered" or "leave_one_out"'
            )

    def _own_answers(self, count: int) -> range:
        """Numbers of the answers that this rank decodes and scores."""
        world = self.run.world
        return range(count * world.data_rank // world.data_size, count * (world.data_rank + 1) // world.data_size)

    def _select_answers(self) -> list[bool]:
        """Which answers are used: those with a reward, of groups whose mean reward is within the limits."""
        config, repeats = self.config, self.prompts.task.repeats
        is_used: list[bool] = []
        for start in range(0, len(self.rollouts), repeats):
            rewards = [item.reward for item in self.rollouts[start : start + repeats]]
            graded = [reward for reward in rewards if not math.isnan(reward)]
            mean = sum(graded) / max(len(graded), 1)
            is_low = config.min_reward is not None and mean < config.min_reward
            is_high = config.max_reward is not None and mean > config.max_reward
            is_used += [not (is_low or is_high or math.isnan(reward)) for reward in rewards]
        return is_used

    def _compute_advantages(self, is_used: Sequence[bool]) -> list[NDArray[np.float64]]:
        """Advantage of each committed token of each answer, from the rewards of its group. With rewards of steps, those
        before the token's step are taken off."""
        rewards_PG = np.where(is_used, [item.reward for item in self.rollouts], np.nan)
        advantages_PG = compute_advantages(rewards_PG.reshape(-1, self.prompts.task.repeats), self.config.advantage)
        advantages = []
        for item, advantage, is_own in zip(self.rollouts, advantages_PG.flatten().tolist(), is_used, strict=True):
            steps_J = read_steps(item)
            past_J = np.concatenate([[0.0], np.cumsum(list_step_rewards(item))])[steps_J - 1]
            has_steps = is_own and item.step_rewards is not None and self.config.value is None
            advantages.append(np.full(len(steps_J), advantage) - (past_J if has_steps else 0.0))
        return advantages

    def _build_batches(self, rollout: int, is_used: Sequence[bool], advantages: Sequence[NDArray[np.float64]]) -> None:
        """Build this rank's micro-batches, as many as the other ranks have, and what the loss knows of them."""
        config, world = self.config, self.run.world
        own = self._own_answers(len(self.rollouts))
        is_replayed = isinstance(config.logprobs, ReplayConfig)
        texts, segments = [], [self.rollouts[number].request.options.segments for number in own]
        for number, own_segments in zip(own, segments, strict=True):
            trajectory, block_length = self.rollouts[number].answer.trajectory, self.layout.block_length
            texts.append(ScoredText.from_trajectory(trajectory, block_length, own_segments, is_replayed=is_replayed))
        counts = [len(text.positions_J) for text in texts]
        first_tokens = np.cumsum([0, *counts]).tolist()
        rows = build_rows(
            config.logprobs, texts, NoiseKey(self.run.config.run.seed, rollout, own.start, len(advantages))
        )
        # An answer without advantage has no gradient, but for a penalty; with a value function it may get one.
        keeps_all = config.kl is not None or config.value is not None
        is_active = [bool(advantages[number].any()) or (keeps_all and is_used[number]) for number in own]
        selected = [
            PlacedRow(texts[index], segments[index], row, first_tokens[index])
            for index, own_rows in enumerate(rows)
            for row in own_rows
            if is_active[index]
        ] or [PlacedRow(texts[0], segments[0], rows[0][0], 0)]
        selected.sort(key=lambda item: -len(item.text.tokens_L))  # so that micro-batches have little padding
        size = self.run.config.training.micro_batch_size or len(own)
        groups = [selected[start : start + size] for start in range(0, len(selected), size)]
        num_filled = len(groups) if any(is_active) else 0
        groups += [groups[0]] * (max(world.all_gather_objects(len(groups))) - len(groups))
        timelines = [
            Timeline(
                read_steps(self.rollouts[number])[:count], list_step_rewards(self.rollouts[number]), is_used[number]
            )
            for number, count in zip(own, counts, strict=True)
        ]
        advantages_J = np.concatenate([advantages[number][:count] for number, count in zip(own, counts, strict=True)])
        sampled = [self.rollouts[number].answer.trajectory for number in own]
        sampled_J = np.concatenate(
            [item.logprobs_L[item.committed_positions][:count] for item, count in zip(sampled, counts, strict=True)]
        )
        self._collate(groups, num_filled, timelines, advantages_J, sampled_J)

    def _collate(
        self,
        groups: Sequence[Sequence[PlacedRow]],
        num_filled: int,
        timelines: Sequence[Timeline],
        advantages_J: NDArray[np.float64],
        sampled_J: NDArray[np.float64],
    ) -> None:
        """Build a micro-batch of each group of rows; those after ``num_filled`` have coefficients 0."""
        context = self.run.state.model.config.max_position_embeddings
        batches, tokens, coefficients = [], [], []
        answers_J = np.repeat(np.arange(len(timelines)), [len(own.steps_J) for own in timelines])
        weights_J = np.ones(len(answers_J))
        for index, group in enumerate(groups):
            longest = max(len(item.text.tokens_L) for item in group)
            length = min(-(-longest // LENGTH_MULTIPLE) * LENGTH_MULTIPLE, context)
            noised_batch, tokens_N, coefficients_N = build_scored_batch(group, self.layout, length)
            batches.append(noised_batch)
            tokens.append(tokens_N)
            coefficients.append(coefficients_N * (index < num_filled))
            for item in group:
                weights_J[item.first_token + item.row.tokens] = item.row.weight
            if index < num_filled:
                self._num_positions += noised_batch.inputs_BS.numel()
                self._num_padding += sum(length - len(item.text.tokens_L) for item in group)
        lengths_Q = np.bincount(answers_J, minlength=len(timelines)).clip(min=1)
        denominator = len(answers_J) if self.config.divisor == "tokens" else len(timelines)
        batches[0] = replace(batches[0], denominator=float(denominator), num_targets=len(answers_J))
        self.noised_batches = batches
        self.loss.start(
            ScoredAnswers(
                torch.from_numpy(np.concatenate(tokens)),
                torch.from_numpy(np.concatenate(coefficients)),
                torch.from_numpy(answers_J),
                torch.from_numpy(weights_J),
                torch.from_numpy(advantages_J),
                torch.from_numpy(lengths_Q).double(),
                torch.from_numpy(sampled_J),
                tuple(len(own) for own in tokens),
                tuple(timelines),
            )
        )


def read_steps(rollout: Rollout) -> NDArray[np.int64]:
    """Forward, from 1 on, of each committed token."""
    trajectory = rollout.answer.trajectory
    return trajectory.step_map_L[trajectory.committed_positions]


def list_step_rewards(rollout: Rollout) -> NDArray[np.float64]:
    """Reward of each forward; without rewards of steps all of it in the last one. 0 without a reward."""
    rewards_U = np.zeros(max(rollout.answer.num_forwards, 1))
    if rollout.step_rewards is not None:
        rewards_U[:] = rollout.step_rewards
    elif not math.isnan(rollout.reward):
        rewards_U[-1] = rollout.reward
    return rewards_U


def build_scored_batch(
    rows: Sequence[PlacedRow], layout: InputLayout, length: int
) -> tuple[NoisedBatch, NDArray[np.int64], NDArray[np.float64]]:
    """The forward that scores some rows, padded to a length; and of each output position the index of its token among
    those of all answers, and the coefficient of its log p."""
    shape = (len(rows), length)
    tokens_BL, is_hidden_BL = np.zeros(shape, np.int64), np.zeros(shape, np.bool_)
    documents_BL, segments_BL = np.full(shape, -1), np.full(shape, -1)
    numbers_BL = np.zeros(shape)
    """1 + the index of the scored position among those of the rows; 0 elsewhere."""
    tokens_N = np.concatenate([item.first_token + item.row.tokens for item in rows])
    coefficients_N = np.concatenate([item.row.coefficients for item in rows])
    first = 1
    for index, item in enumerate(rows):
        own = slice(len(item.text.tokens_L))
        tokens_BL[index, own], is_hidden_BL[index, own] = item.text.tokens_L, item.row.is_hidden_L
        documents_BL[index, own], segments_BL[index, own] = 0, item.segments.numbers(own.stop)
        positions = item.text.positions_J[item.row.tokens]
        numbers_BL[index, positions] = np.arange(first, first + len(positions))
        first += len(positions)
    has_segments = any(len(item.segments.starts) > 1 for item in rows)
    batch = CleanBatch(
        torch.from_numpy(tokens_BL),
        torch.from_numpy(numbers_BL > 0),
        torch.from_numpy(documents_BL),
        torch.from_numpy(segments_BL) if has_segments else None,
    )
    noised_batch = layout.build_noised_batch(batch, is_hidden_BL, numbers_BL)
    is_scored_N = noised_batch.weights_N > 0.0
    order = noised_batch.weights_N[is_scored_N].long().numpy() - 1
    scored = replace(
        noised_batch,
        positions_N=noised_batch.positions_N[is_scored_N],
        targets_N=noised_batch.targets_N[is_scored_N],
        weights_N=torch.ones(len(order), dtype=torch.float64),
        segment_BL=None,
    )
    return scored, tokens_N[order], coefficients_N[order]
