"""The loader of a run with rollouts: a step's batches score the answers that the model has just written.

Answers are decoded by all ranks together and gathered on each; every rank then scores its share of them, whole answers,
so that a loss that needs all rows of an answer has them. The draws do not depend on the number of ranks. The state of
the loader is the number of the step: rollouts are a function of (weights, step).

Shapes: L positions of a canvas, N scored positions of a micro-batch, J tokens of all answers, Q answers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from config.finetune.rl import ReplayConfig
from config.training.parallel import FSDP
from diffusionlm.data.loader import LoadedStep, StepLoader
from diffusionlm.diffusion.layout import InputLayout
from diffusionlm.diffusion.noised_batch import CleanBatch, NoisedBatch, NoiseKey
from diffusionlm.inference.requests import TextSegments
from diffusionlm.rl.logprobs import ScoredRow, ScoredText, build_rows
from diffusionlm.rl.policy import PolicyLoss, ScoredAnswers, compute_advantages
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
        self._noised_batches: list[NoisedBatch] = []
        self._num_positions = self._num_padding = 0
        self._step = 0

    @property
    def can_resume(self) -> bool:
        return self._step % self.config.inner_steps == 0

    def next_step(self, step: int) -> LoadedStep:
        started = time.perf_counter()
        rollout, inner_step = divmod(step, self.config.inner_steps)
        metrics: dict[str, float] = {}
        if inner_step == 0:
            self.rollouts = self.roll_out(rollout)
            advantages_J = self._compute_advantages()
            metrics = summarize(
                self.rollouts, np.array([own.mean() for own in advantages_J]), self.prompts.task.repeats
            )
            rollout_seconds = time.perf_counter() - started
            self._build_batches(rollout, advantages_J)
            metrics |= {"rl/rollout_seconds": rollout_seconds, "rl/prompts_left_out": float(self.prompts.num_too_long)}
        self.loss.metrics = metrics
        self._step = step + 1
        seconds = time.perf_counter() - started
        num_tokens = sum(batch.num_targets for batch in self._noised_batches)
        return LoadedStep(self._noised_batches, self.state_dict(), num_tokens / seconds, seconds, metrics=metrics)

    def state_dict(self) -> dict[str, Any]:
        """Counts that are logged; what is rolled out next follows from the step."""
        epoch = self._step // self.config.inner_steps * self.prompts.num_prompts // len(self.prompts.items)
        return {"epoch": epoch, "num_positions": self._num_positions, "padding": self._num_padding}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._num_positions, self._num_padding = state["num_positions"], state["padding"]

    def roll_out(self, rollout: int) -> list[Rollout]:
        """Answers to the prompts of a rollout, of all ranks, with the weights of the last update, in training's
        precision.

        Under FSDP, whose forwards are collective, every rank decodes all of them.
        """
        state, world = self.run.state, self.run.world
        count = self.prompts.num_prompts * self.prompts.task.repeats
        is_collective = isinstance(self.run.config.parallel, FSDP)
        own = range(count) if is_collective else self._own_answers(count)
        state.parallel.wait_for_weights()

        def compute() -> list[Rollout]:
            with torch.no_grad(), autocast(self.run.settings):
                return self.prompts.roll_out(state.model, rollout, own)

        if is_collective:
            return compute()
        return [item for part in world.run_on_all(compute) for item in part]

    def _own_answers(self, count: int) -> range:
        """Numbers of the answers that this rank decodes and scores."""
        world = self.run.world
        return range(count * world.rank // world.size, count * (world.rank + 1) // world.size)

    def _compute_advantages(self) -> list[NDArray[np.float64]]:
        """Advantage of each committed token of each answer. With rewards of steps, that of a token is the rewards from
        its step on, less what the whole answer's baseline takes off."""
        config, repeats = self.config, self.prompts.task.repeats
        rewards_PG = np.array([item.reward for item in self.rollouts]).reshape(-1, repeats)
        with np.errstate(invalid="ignore"):
            means_P = np.nanmean(np.where(np.isnan(rewards_PG).all(1, keepdims=True), 0.0, rewards_PG), axis=1)
        low, high = config.min_reward, config.max_reward
        is_used_P = (means_P >= (-np.inf if low is None else low)) & (means_P <= (np.inf if high is None else high))
        advantages_PG = compute_advantages(rewards_PG, config.advantage) * is_used_P[:, None]
        advantages = []
        for item, advantage in zip(self.rollouts, advantages_PG.flatten().tolist(), strict=True):
            steps_J = item.answer.trajectory.step_map_L[item.answer.trajectory.committed_positions]
            own_J = np.full(len(steps_J), advantage)
            if item.step_rewards is not None and advantage != 0.0:
                past_J = np.concatenate([[0.0], np.cumsum(item.step_rewards)])[steps_J - 1]
                own_J -= past_J
            advantages.append(own_J)
        return advantages

    def _build_batches(self, rollout: int, advantages: Sequence[NDArray[np.float64]]) -> None:
        """Build this rank's micro-batches, as many as the other ranks have, and what the loss knows of them."""
        config, world = self.config, self.run.world
        own = self._own_answers(len(self.rollouts))
        is_replayed = isinstance(config.logprobs, ReplayConfig)
        placed: list[tuple[ScoredText, TextSegments]] = []
        for number in own:
            segments = self.rollouts[number].request.options.segments
            trajectory, block_length = self.rollouts[number].answer.trajectory, self.layout.block_length
            text = ScoredText.from_trajectory(trajectory, block_length, segments, is_replayed=is_replayed)
            placed.append((text, segments))
        key = NoiseKey(self.run.config.run.seed, rollout, own.start, len(self.rollouts))
        rows = build_rows(config.logprobs, [text for text, _ in placed], key)
        first_tokens = np.cumsum([0, *(len(text.positions_J) for text, _ in placed)]).tolist()
        # An answer without advantage has no gradient, but for the penalty.
        is_active = [bool((advantages[number] != 0.0).any()) or config.kl is not None for number in own]
        selected = [
            PlacedRow(*placed[index], row, first_tokens[index])
            for index, own_rows in enumerate(rows)
            for row in own_rows
            if is_active[index]
        ] or [PlacedRow(*placed[0], rows[0][0], 0)]
        size = self.run.config.training.micro_batch_size or len(selected)
        groups = [selected[start : start + size] for start in range(0, len(selected), size)]
        is_empty = [False] * len(groups) + [True] * (max(world.all_gather_objects(len(groups))) - len(groups))
        groups += [groups[0]] * (len(is_empty) - len(groups))
        answers_J = np.repeat(np.arange(len(placed)), [len(text.positions_J) for text, _ in placed])
        advantages_J = np.concatenate(
            [advantages[number][: len(text.positions_J)] for number, (text, _) in zip(own, placed, strict=True)]
        )
        self._collate(groups, is_empty, answers_J, advantages_J)

    def _collate(
        self,
        groups: Sequence[Sequence[PlacedRow]],
        is_empty: Sequence[bool],
        answers_J: NDArray[np.int64],
        advantages_J: NDArray[np.float64],
    ) -> None:
        """Build a micro-batch of each group of rows; an empty one has coefficients 0."""
        longest = max(len(item.text.tokens_L) for group in groups for item in group)
        context = self.run.state.model.config.max_position_embeddings
        length = min(-(-longest // LENGTH_MULTIPLE) * LENGTH_MULTIPLE, context)
        batches, tokens, coefficients = [], [], []
        weights_J = np.ones(len(answers_J))
        for group, is_filler in zip(groups, is_empty, strict=True):
            noised_batch, tokens_N, coefficients_N = build_scored_batch(group, self.layout, length)
            batches.append(noised_batch)
            tokens.append(tokens_N)
            coefficients.append(coefficients_N * (not is_filler))
            for item in group:
                weights_J[item.first_token + item.row.tokens] = item.row.weight
            if not is_filler:
                self._num_positions += noised_batch.inputs_BS.numel()
                self._num_padding += sum(length - len(item.text.tokens_L) for item in group)
        num_answers = int(answers_J.max(initial=-1)) + 1
        lengths_Q = np.bincount(answers_J, minlength=num_answers).clip(min=1)
        denominator = len(answers_J) if self.config.divisor == "tokens" else num_answers
        batches[0] = replace(batches[0], denominator=float(denominator), num_targets=len(answers_J))
        self._noised_batches = batches
        self.loss.start(
            ScoredAnswers(
                torch.from_numpy(np.concatenate(tokens)),
                torch.from_numpy(np.concatenate(coefficients)),
                torch.from_numpy(answers_J),
                torch.from_numpy(weights_J),
                torch.from_numpy(advantages_J),
                torch.from_numpy(lengths_Q).double(),
                tuple(len(own) for own in tokens),
            )
        )


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
