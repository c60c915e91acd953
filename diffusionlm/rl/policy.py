"""Group-relative policy gradients: advantages of answers, and the loss whose gradient is a weighted cross-entropy.

For a loss f of the log-probabilities l of scored positions, the gradient is that of ``sum_n w_n nll_n`` with the
constants ``w_n = -df/dl_n``: a forward and backward with these weights needs neither logits nor a kernel of its own.

Shapes: N scored positions of all rows, J tokens of all answers, Q answers, of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from config.finetune.rl import KLConfig, ReplayConfig, RLConfig, SandwichConfig
from diffusionlm.diffusion.noised_batch import CleanBatch, NoisedBatch, NoiseKey
from diffusionlm.diffusion.preference import WeighedLoss, compute_nll
from diffusionlm.kernels.loss_types import LossInputs
from diffusionlm.models.lora import before_training
from diffusionlm.models.transformer import Transformer
from diffusionlm.rl.value import ValueHead, discount_rewards, estimate_advantages

EQUAL_REWARDS = 1e-9
"""Relative difference of rewards that is rounding."""
MAX_LOG_RATIO = 10.0
"""Log-ratios are cut to this, so that no exponential overflows."""


def compute_advantages(rewards_PG: NDArray[np.float64], kind: str) -> NDArray[np.float64]:
    """Advantages of the answers of each group, [P, G]. Answers without a reward (nan) have none, and count in no mean.

    A group of equal rewards has exactly zero, but for kind = "none".
    """
    advantages_PG = np.zeros_like(rewards_PG)
    for rewards_G, advantages_G in zip(rewards_PG, advantages_PG, strict=True):
        is_graded_G = ~np.isnan(rewards_G)
        rewards = rewards_G[is_graded_G]
        if kind == "none":
            advantages_G[is_graded_G] = rewards
        elif len(rewards) and np.ptp(rewards) > EQUAL_REWARDS * np.abs(rewards).max():
            advantages_G[is_graded_G] = _compare(rewards - rewards.mean(), kind)
    return advantages_PG


def _compare(centered_G: NDArray[np.float64], kind: str) -> NDArray[np.float64]:
    scale = 1.0
    match kind:
        case "leave_one_out":
            scale = len(centered_G) / (len(centered_G) - 1)
        case "standardized":
            scale = 1.0 / float(centered_G.std())
        case "softmax":  # wd1 (Tang et al. 2025)
            good_G, bad_G = np.exp(centered_G), np.exp(-centered_G)
            return np.asarray(good_G / good_G.sum() - bad_G / bad_G.sum())
    return scale * centered_G


@dataclass(frozen=True)
class Timeline:
    """When the tokens of an answer were committed, and what each forward was rewarded with."""

    steps_J: NDArray[np.int64]
    """Forward of each token, from 1 on."""
    rewards_U: NDArray[np.float64]
    is_used: bool = True
    """False: it has no advantage."""


@dataclass(frozen=True)
class ScoredAnswers:
    """What the loss knows of the answers of a step, on this rank. Tensors are fp64 and int64."""

    tokens_N: Tensor
    """Index of the token of each scored position, in the order of the micro-batches."""
    coefficients_N: Tensor
    """Factor of its log p in the log-probability of the token."""
    answers_J: Tensor
    """Number of each token's answer."""
    weights_J: Tensor
    """Weight of each token in the loss, for those of its answer that are not scored."""
    advantages_J: Tensor
    lengths_Q: Tensor
    """Tokens of each answer, at least 1."""
    sampled_J: Tensor
    """Log p of each token when it was sampled."""
    position_counts: tuple[int, ...]
    """Scored positions of each micro-batch."""
    timelines: tuple[Timeline, ...] = ()
    """Of each answer, for a value function."""

    def to(self, device: torch.device) -> ScoredAnswers:
        """Copy to a device."""
        moved: dict[str, Any] = {name: own.to(device) for name, own in vars(self).items() if isinstance(own, Tensor)}
        return replace(self, **moved)

    def sum_tokens(self, values_J: Tensor) -> Tensor:
        """Sum over the tokens of each answer, [Q]."""
        return torch.zeros_like(self.lengths_Q).index_add(0, self.answers_J, values_J)


def combine(config: RLConfig, answers: ScoredAnswers, logprobs_N: Tensor) -> Tensor:
    """Log-probability of each token, [J]: the sum of its scored positions; for a negative advantage with kind =
    "sandwich" the upper bound ``(1/beta) log sum_n c_n p_n^beta`` (SPG, Wang et al. 2025)."""
    zeros_J = torch.zeros_like(answers.advantages_J)
    sums_J = zeros_J.index_add(0, answers.tokens_N, answers.coefficients_N * logprobs_N)
    if not isinstance(config.logprobs, SandwichConfig):
        return sums_J
    beta = config.logprobs.beta
    powers_N = answers.coefficients_N * torch.exp(beta * logprobs_N)
    upper_J = zeros_J.index_add(0, answers.tokens_N, powers_N).clamp(min=1e-300).log() / beta
    return torch.where(answers.advantages_J < 0.0, upper_J, sums_J)


def estimate_kl(config: KLConfig, differences: Tensor) -> Tensor:
    """The penalty of each d = log p_reference - log p (Schulman 2020); k1 has the gradient of k2."""
    match config.estimator:
        case "k1":
            squares = differences.square() / 2
            return squares + (-differences - squares).detach()
        case "k2":
            return differences.square() / 2
        case "k3":
            return differences.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp() - 1.0 - differences


@dataclass
class LossTerms:
    """A loss with what is logged of it: sums over this rank."""

    loss: Tensor
    ratios: Tensor
    """Of tokens, or of answers."""
    is_clipped: Tensor
    penalties: Tensor


def compute_loss(
    config: RLConfig, answers: ScoredAnswers, logprobs_J: Tensor, old_J: Tensor, reference_J: Tensor | None
) -> LossTerms:
    """The loss of a step before it is divided by the number of answers, or of tokens.

    ``-sum_j w_j min(r_j A_j, clip(r_j) A_j) + coefficient * KL``, with w = 1, or one over the length of the answer.

    Args:
        old_J: log p of each token when the answers were new.
        reference_J: of the model that the penalty compares with. None: of ``old_J``.
    """
    lengths_J = answers.lengths_Q[answers.answers_J]
    weights_J = answers.weights_J / lengths_J if config.divisor == "length" else answers.weights_J
    if config.ratio != "sequence":
        differences, advantages, weights = logprobs_J - old_J, answers.advantages_J, weights_J
    else:
        differences = answers.sum_tokens(logprobs_J - old_J) / answers.lengths_Q
        advantages = answers.sum_tokens(answers.advantages_J / lengths_J)
        weights = torch.ones_like(advantages)
    ratios = differences.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if config.ratio == "none":
        ratios = torch.ones_like(ratios) + differences - differences.detach()
    gains, is_clipped = ratios * advantages, torch.zeros_like(ratios, dtype=torch.bool)
    if config.clip is not None:
        clipped_gains = ratios.clamp(1.0 - config.clip, 1.0 + config.clip) * advantages
        is_clipped = clipped_gains < gains
        gains = torch.minimum(gains, clipped_gains)
    loss, penalties = -(weights * gains).sum(), torch.zeros_like(ratios)
    if config.kl is not None:
        distances_J = (old_J if reference_J is None else reference_J) - logprobs_J
        if config.kl.per == "token":
            penalties = estimate_kl(config.kl, distances_J)
            loss = loss + config.kl.coefficient * (weights_J * penalties).sum()
        else:
            penalties = estimate_kl(config.kl, answers.sum_tokens(distances_J) / answers.lengths_Q)
            loss = loss + config.kl.coefficient * penalties.sum()
    return LossTerms(loss, ratios.detach(), is_clipped, penalties.detach())


@dataclass(frozen=True)
class PolicyObjective:
    """The loss inputs of rows with the weight 1, over the number of answers; `PolicyLoss` has the weights."""

    mask_token: int | None

    def build_noised_batch(self, batch: CleanBatch, key: NoiseKey) -> NoisedBatch:
        """Rows are built of answers (`RolloutLoader`), not of data."""
        raise NotImplementedError

    def build_auxiliary_batch(self, batch: CleanBatch) -> None:
        """None: there is no auxiliary loss."""

    def build_loss_inputs(self, noised_batch: NoisedBatch, denominator: float) -> LossInputs:
        """Targets, and the same weight for all of them."""
        return LossInputs(noised_batch.targets_N, noised_batch.weights_N / denominator, excluded_token=self.mask_token)


@dataclass
class PolicyLoss:
    """The loss of the answers of a step. The first inner step on them has the ratio 1 exactly: the old values are its
    own."""

    config: RLConfig
    reference: Transformer | None = None
    """None: the trained model without its adapter, or as that was at the start; or no reference."""
    value: ValueHead | None = None
    answers: ScoredAnswers | None = None
    """Of the step, in the order of its micro-batches."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the last step, over all ranks."""
    _old_J: Tensor | None = None
    """Values of the first inner step. None: this is the first one."""
    _reference_N: Tensor | None = None
    """The reference's log p of the scored positions."""
    _returns_J: Tensor = field(default_factory=lambda: torch.zeros(0))
    """Rewards from each token's step on, for a value function."""
    _values: list[Tensor] = field(default_factory=list)
    """Values of the scored positions, by micro-batch."""

    @property
    def num_measuring_forwards(self) -> int:
        """Of the model, and of its reference, whose values are kept for all inner steps."""
        return self.config.is_measured + self.has_reference

    @property
    def has_reference(self) -> bool:
        return self.config.kl is not None and self.config.kl.reference == "start"

    def start(self, answers: ScoredAnswers) -> None:
        """Begin with new answers."""
        self.answers, self._old_J, self._reference_N, self._values, self.metrics = answers, None, None, [], {}
        if self.config.value is not None:
            gamma = self.config.value.gamma
            returns = [discount_rewards(own.rewards_U, gamma)[own.steps_J - 1] for own in answers.timelines]
            self._returns_J = torch.from_numpy(np.concatenate(returns))

    def measure(self, model: Transformer, noised_batch: NoisedBatch, loss_inputs: LossInputs) -> list[Tensor]:
        """Log p of each target under the model and, before the first inner step, under the reference, each [N]."""
        with self._record_values(model):
            measured = [-compute_nll(model, noised_batch, loss_inputs).double()] if self.config.is_measured else []
        if self.has_reference and self._reference_N is None:
            reference = model if self.reference is None else self.reference
            with before_training(model) if self.reference is None else nullcontext():
                measured.append(-compute_nll(reference, noised_batch, loss_inputs).double())
        return measured

    @contextmanager
    def _record_values(self, model: Transformer) -> Iterator[None]:
        """Context of the forward of the next micro-batch, before the first inner step."""
        if self.value is None or self._old_J is not None:
            yield
            return
        assert self.answers is not None and self.config.value is not None, "start comes first"
        index, scored = len(self._values), (self.answers.tokens_N, self.answers.coefficients_N)
        tokens_N, coefficients_N = (torch.split(all_N, [*self.answers.position_counts])[index] for all_N in scored)
        device, returns_N = model.lm_head.weight.device, self._returns_J[tokens_N]
        is_counted_N = (coefficients_N != 0.0).double().to(device)
        with self.value.record(model, returns_N.to(device), is_counted_N, self._values):
            yield

    def _estimate_advantages(self, answers: ScoredAnswers, all_reduce: Callable[[Tensor], Tensor]) -> ScoredAnswers:
        """The answers with advantages by the value function, which then learns from their rewards."""
        assert self.value is not None and self.config.value is not None
        values_N = torch.cat(self._values)
        values_J = torch.zeros_like(answers.advantages_J).index_copy(0, answers.tokens_N, values_N).cpu().numpy()
        ends = np.cumsum([len(own.steps_J) for own in answers.timelines])[:-1]
        gamma, gae_lambda = self.config.value.gamma, self.config.value.gae_lambda
        advantages = [
            estimate_advantages(own_J, own.steps_J, own.rewards_U, gamma, gae_lambda) * own.is_used
            for own_J, own in zip(np.split(values_J, ends), answers.timelines, strict=True)
        ]
        self.metrics["rl/value_error"] = self.value.update(all_reduce)
        return replace(answers, advantages_J=torch.from_numpy(np.concatenate(advantages)).to(values_N.device))

    def weigh(
        self,
        noised_batches: Sequence[NoisedBatch],
        loss_inputs: Sequence[LossInputs],
        measured: Sequence[list[Tensor]],
        denominator: float,
        all_reduce: Callable[[Tensor], Tensor],
    ) -> list[WeighedLoss]:
        """Weights of the positions of all micro-batches. The first one has the whole loss."""
        assert self.answers is not None, "start comes first"
        answers = self.answers.to(loss_inputs[0].weights_N.device)
        logprobs_N = torch.zeros_like(answers.coefficients_N)
        if self.config.is_measured:
            logprobs_N = torch.cat([values[0] for values in measured])
        if self.has_reference and self._reference_N is None:
            self._reference_N = torch.cat([values[1] for values in measured])
        is_first = self._old_J is None
        if self.value is not None and is_first:
            self.answers = answers = self._estimate_advantages(answers, all_reduce)
        with torch.enable_grad():
            logprobs_N.requires_grad_()
            logprobs_J = combine(self.config, answers, logprobs_N)
            if self._old_J is None:
                self._old_J = logprobs_J.detach()
            reference_J = None
            if self._reference_N is not None:
                reference_J = combine(self.config, answers, self._reference_N)
            terms = compute_loss(self.config, answers, logprobs_J, self._old_J, reference_J)
            (slopes_N,) = torch.autograd.grad(terms.loss, logprobs_N)
        if self.config.is_measured:
            self._add_metrics(answers, terms, all_reduce)
        losses = torch.zeros(len(loss_inputs), dtype=torch.float64, device=logprobs_N.device)
        losses[0] = terms.loss.detach() / denominator
        slopes = torch.split(slopes_N, [*answers.position_counts])
        observers = self._build_observers(answers, all_reduce) if is_first else [None] * len(slopes)
        return [
            WeighedLoss(replace(inputs, weights_N=-own_N * inputs.weights_N), loss, observe=observe)
            for inputs, own_N, loss, observe in zip(loss_inputs, slopes, losses, observers, strict=True)
        ]

    def _build_observers(
        self, answers: ScoredAnswers, all_reduce: Callable[[Tensor], Tensor]
    ) -> Sequence[Callable[[Tensor], None] | None]:
        """For each micro-batch a function of the losses of its targets: together they measure ``rl/logprob_gap``, the
        mean difference between log p in training and when the tokens were sampled, which replays make rounding."""
        counts, totals = [*answers.position_counts], torch.zeros(2, dtype=torch.float64, device=answers.tokens_N.device)
        if not isinstance(self.config.logprobs, ReplayConfig):
            return [None] * len(counts)
        sampled, coefficients = (
            torch.split(all_N, counts) for all_N in (answers.sampled_J[answers.tokens_N], answers.coefficients_N)
        )

        def add(index: int, nll_N: Tensor) -> None:
            is_counted_N = (coefficients[index] != 0.0).double()
            totals.add_(torch.stack([((nll_N + sampled[index]).abs() * is_counted_N).sum(), is_counted_N.sum()]))
            if index == len(counts) - 1:
                total, count = all_reduce(totals).tolist()
                self.metrics["rl/logprob_gap"] = total / max(count, 1.0)

        return [partial(add, index) for index in range(len(counts))]

    def _add_metrics(self, answers: ScoredAnswers, terms: LossTerms, all_reduce: Callable[[Tensor], Tensor]) -> None:
        """Statistics of ratios and penalties over the tokens, or answers, that are scored; the host waits for them."""
        ones_N = (answers.coefficients_N != 0.0).double()
        is_scored_J = torch.zeros_like(answers.advantages_J).index_add(0, answers.tokens_N, ones_N) > 0.0
        is_scored_Q = answers.sum_tokens(is_scored_J.double()) > 0.0
        own = [
            is_scored_J if len(values) == len(is_scored_J) else is_scored_Q
            for values in (terms.ratios, terms.penalties)
        ]
        ratios, clipped, penalties = terms.ratios[own[0]], terms.is_clipped[own[0]], terms.penalties[own[1]]
        counts = [torch.ones_like(values).sum() for values in (ratios, penalties)]
        sums = (ratios.sum(), (ratios - 1.0).square().sum(), clipped.double().sum(), penalties.sum())
        total, squares, num_clipped, penalty, number, num_penalties = all_reduce(torch.stack([*sums, *counts])).tolist()
        self.metrics["rl/ratio_mean"] = total / max(number, 1.0)
        self.metrics["rl/ratio_deviation"] = (squares / max(number, 1.0)) ** 0.5
        if self.config.clip is not None:
            self.metrics["rl/clip_share"] = num_clipped / max(number, 1.0)
        if self.config.kl is not None:
            self.metrics["rl/kl"] = penalty / max(num_penalties, 1.0)
