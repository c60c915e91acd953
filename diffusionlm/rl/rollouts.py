"""Rollouts: answers that the trained model writes to prompts, with their trajectories and rewards.

An answer is a function of the weights, its prompt and the key (seed, rollout, prompt, repeat) alone: not of the number
of ranks, or of what is decoded at the same time, up to rounding.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from config.generation import GenerationConfig
from config.model import ModelConfig
from config.train import TrainConfig
from diffusionlm.diffusion.rng import RngStream, keyed_rng
from diffusionlm.evaluation.answer_decoding import DecodedAnswer, decode_answers
from diffusionlm.evaluation.sampler_likelihood import check_plain_distributions
from diffusionlm.evaluation.tasks.item_task import TaskItem
from diffusionlm.evaluation.tasks.items import draw_seed, read_task_items
from diffusionlm.evaluation.tasks.preparation import PreparedItems
from diffusionlm.inference.requests import PreparedRequest
from diffusionlm.inference.settings import DecodingSettings, resolve_settings
from diffusionlm.inference.strategy import TOKEN_PROBABILITY
from diffusionlm.models.transformer import Transformer
from diffusionlm.rl.graded import GradedTask
from diffusionlm.vision.messages import split_images
from files.paths import hash_file
from files.usage_error import prefix_errors
from tokenizer import Tokenizer


@dataclass(frozen=True)
class Rollout:
    """An answer with its reward."""

    group: int
    """Number of its prompt in the step."""
    item: TaskItem
    request: PreparedRequest
    answer: DecodedAnswer
    reward: float = math.nan
    """nan: it is not graded, or could not be, and is left out."""
    step_rewards: tuple[float, ...] | None = None
    """Reward of each forward, in order. None: all of it belongs to the end."""
    error: str | None = None
    """Why it could not be graded."""

    @property
    def is_overlong(self) -> bool:
        """It ended without a stop token, where one may come."""
        has_stop = not self.request.options.is_infill and bool(self.request.settings.stop_token_ids)
        return has_stop and self.answer.finish_reason == "length"


def check_trainable(settings: DecodingSettings) -> None:
    """Check that the log-probabilities of an answer are those with which it was sampled.

    Raises:
        ValueError: tokens are not sampled from the model's distributions at temperature 1, or the order of positions
            depends on the sampled tokens, so that p(token) is not the probability with which it was committed; names
            the key.
    """
    strategy, config = settings.strategy, settings.config
    check_plain_distributions(settings, temperatures=(1.0,))
    if config.min_new_tokens:
        raise ValueError(f"min_new_tokens = {config.min_new_tokens} forbids stop tokens at first: remove it")
    if config.next_token_first:
        raise ValueError("next_token_first = true commits tokens of the clean half, which no replay scores: set false")
    if strategy.can_remask:
        raise ValueError(
            f'remasking_strategy = "{strategy.name}" masks tokens again, which no replay scores: use another'
        )
    if strategy.measure is None:
        return
    if not strategy.is_deterministic:
        raise ValueError(
            f'remasking_strategy = "{strategy.name}" draws positions by their confidences, whose probability no replay '
            "scores: set alg_temp = 0, or use a strategy whose order is random or deterministic"
        )
    if strategy.measure is TOKEN_PROBABILITY and config.confidence_of == "sampled":
        raise ValueError(
            f'remasking_strategy = "{strategy.name}" commits positions by the probability of the sampled token, so a '
            "token is committed more often than it is sampled, and its log-probability is not the sampler's: set "
            'confidence_of = "most_probable", or a strategy such as "entropy"'
        )


class PromptSet:
    """The prompts of a run, in an order that depends on the seed alone."""

    def __init__(self, config: TrainConfig, tokenizer: Tokenizer, model: ModelConfig) -> None:
        """Read the prompts. Those that do not fit the model, or a row, are left out with their rewards.

        Raises:
            ValueError: the items or the decoding are wrong, or no prompt fits; names the key.
        """
        assert config.rl is not None
        self.config, self.task = config.rl, config.rl.prompts
        self.seed, self.num_prompts = config.run.seed, config.training.batch_size // self.task.repeats
        with prefix_errors("rl.prompts"):
            prepared = PreparedItems(self.task, read_task_items(self.task), tokenizer, model)
            with prefix_errors("generation"):
                settings = resolve_settings(_set_temperature(self.task.resolve_length()), model)
                check_trainable(settings)
            # Without the suppressed ids of other tasks: what is sampled is what the loss computes.
            prepared.requests = replace(prepared.requests, settings=settings)
            self.prepared, self.settings = prepared, settings
            self.items: list[TaskItem] = []
            self.num_left_out, problem = 0, ""
            for item in prepared.items:
                with prefix_errors(f"item {item.id!r}"):
                    self.task.check_item(item)
                    if item.images or split_images(item.messages)[1]:
                        raise ValueError("rollouts read no images: leave items with images out")
                try:
                    length = len(prepared.build_request(item, 0).canvas_L)
                    if length > config.row_length:
                        raise ValueError(f"{length} tokens are more than data.row_length = {config.row_length}")
                    self.items.append(item)
                except ValueError as error:
                    self.num_left_out, problem = self.num_left_out + 1, problem or f"item {item.id!r}: {error}"
            if not self.items:
                raise ValueError(f"none of {self.num_left_out} prompts fits: {problem}")
        self.problem = problem

    def select(self, rollout: int) -> list[TaskItem]:
        """The prompts of a rollout, from 0: each epoch has all of them, in an order of its own."""
        size = len(self.items)
        numbers = range(rollout * self.num_prompts, (rollout + 1) * self.num_prompts)
        orders = {
            epoch: keyed_rng(self.seed, RngStream.DOCUMENT_ORDER, epoch).permutation(size)
            for epoch in range(numbers.start // size, numbers[-1] // size + 1)
        }
        return [self.items[orders[number // size][number % size]] for number in numbers]

    def decode(self, model: Transformer, rollout: int, numbers: Sequence[int]) -> list[Rollout]:
        """Decode some answers of a rollout, in order.

        Args:
            numbers: of the answers, from 0; those to a prompt follow each other.

        Raises:
            ValueError: the model's probabilities are not finite.
        """
        items, repeats, requests = self.select(rollout), self.task.repeats, []
        prompts = {group: self.prepared.build_request(items[group], 0) for group in {n // repeats for n in numbers}}
        for number in numbers:
            group, repeat = divmod(number, repeats)
            seed = draw_seed(self.seed, f"rollout {rollout} {group} {items[group].id}", repeat)
            requests.append((replace(prompts[group], seed=seed), self.task.stop))
        answers = dict(decode_answers(model, self.prepared.requests.tokenizer, requests, self.task.batch_size))
        return [
            Rollout(number // repeats, items[number // repeats], request, answers[index])
            for index, (number, (request, _)) in enumerate(zip(numbers, requests, strict=True))
        ]

    def grade(self, rollout: Rollout) -> Rollout:
        """Give an answer its reward."""
        item, answer = rollout.item, rollout.answer
        if rollout.is_overlong and self.config.overlong != "keep":
            return replace(rollout, reward=0.0 if self.config.overlong == "zero" else math.nan)
        text, has_steps = self.prepared.answer_prefix(item) + answer.text, self.reads_steps
        try:
            verdict, rewards = self.task.grade_steps(item, text, self._read_steps(answer) if has_steps else [text])
        except Exception as error:
            return replace(rollout, error=f"{type(error).__name__}: {error}")
        reward = next(iter(verdict.is_correct.values()))
        return replace(rollout, reward=reward, step_rewards=rewards if has_steps else None)

    @property
    def reads_steps(self) -> bool:
        """A reward reads the text after each forward, and may reward each."""
        return isinstance(self.task, GradedTask) and self.task.reads_steps

    @property
    def digest(self) -> str:
        """A hash of the prompts and of the files that their rewards are read from."""
        texts = [f"{item.id} {self.prepared.hash_prompt(item)} {item.gold}" for item in self.items]
        return hashlib.sha256("\n".join([*texts, *map(hash_file, self.task.input_files)]).encode()).hexdigest()[:16]

    def _read_steps(self, answer: DecodedAnswer) -> list[str]:
        """The text after each forward."""
        trajectory = answer.trajectory
        end = trajectory.text_length - (answer.finish_reason == "stop")
        tokens, steps = trajectory.tokens_L[:end], trajectory.step_map_L[:end]
        decode = self.prepared.requests.tokenizer.decode
        return [
            decode(tokens[(steps > 0) & (steps <= step)].tolist()) for step in range(1, max(answer.num_forwards, 1) + 1)
        ]


def _set_temperature(config: GenerationConfig) -> GenerationConfig:
    """Temperature 1, unless the config sets another one."""
    return config if config.temperature is not None else config.model_copy(update={"temperature": 1.0})


def summarize(rollouts: Sequence[Rollout], has_advantage: Sequence[bool], repeats: int) -> dict[str, float]:
    """Metrics of a rollout, over all ranks."""
    rewards_PG = np.array([item.reward for item in rollouts]).reshape(-1, repeats)
    logprobs = np.concatenate([item.answer.trajectory.logprobs_L for item in rollouts])
    lengths = [len(item.answer.token_ids) for item in rollouts]
    endings = Counter(item.answer.finish_reason for item in rollouts)
    num_committed = sum(len(item.answer.trajectory.committed_positions) for item in rollouts)
    num_forwards = sum(item.answer.num_forwards for item in rollouts)
    is_active_P = np.array(has_advantage).reshape(-1, repeats).any(axis=1)
    valid = rewards_PG[~np.isnan(rewards_PG)]
    graded = [own[~np.isnan(own)] for own in rewards_PG if not np.isnan(own).all()]
    return {
        "rl/reward": float(valid.mean()) if len(valid) else float("nan"),
        "rl/reward_deviation": float(valid.std()) if len(valid) else float("nan"),
        "rl/best_of_group": float(np.mean([max(own) for own in graded])) if graded else float("nan"),
        "rl/entropy": float(-np.nanmean(logprobs)) if num_committed else 0.0,
        "rl/groups_without_gradient": float(1.0 - is_active_P.mean()),
        "rl/answer_tokens": float(np.mean(lengths)),
        "rl/stopped_share": endings["stop"] / len(rollouts),
        "rl/overlong_share": sum(item.is_overlong for item in rollouts) / len(rollouts),
        "rl/tokens_per_forward": num_committed / max(num_forwards, 1),
        "rl/ungraded": float(sum(item.error is not None for item in rollouts)),
    }
