"""Which masked positions become final after a forward.

A policy knows nothing of models or blocks: it turns probabilities into confidences, plans what each step of a block
settles, and chooses the positions. A new strategy is a row of `config.generation.STRATEGIES` and an arm in
`build_strategy`, with a frozen dataclass here where its rule is a new one.

Shapes: R rows of a forward, V vocabulary, N positions of one request's block that a policy decides on, in order: the
masked ones, or all that were not given where it makes tokens masks again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from config.generation import GenerationConfig, RemaskingStrategy, ThresholdComparison, ThresholdFallback
from diffusionlm.inference.unmasking_schedules import (
    dream_tokens_per_step,
    dream_unmask_probabilities,
    even_tokens_per_step,
    linear_unmask_probabilities,
    whole_block_tokens_per_step,
)

ConfidenceMeasure = Literal["probability", "margin", "entropy"]
ScheduleName = Literal["llada", "sdar", "dream", "one"]

_OptionValue = TypeVar("_OptionValue")

RANDOM_TOPK_TIE_DECIMALS = 6
"""What counts as equal for ``random_topk``, whose published form adds noise of 1e-6."""


@dataclass(frozen=True)
class DecodeState:
    """One request's block around a forward."""

    confidence_M: NDArray[np.float64]
    """As the policy's `confidence` said; -inf where the proposed token is put off; zeros for a blind policy."""
    is_masked_M: NDArray[np.bool_]
    """All True unless the policy makes tokens masks again."""
    uniforms_M: NDArray[np.float64]
    """Chance, in [0, 1)."""
    tokens_per_step: float
    """This step's entry of the plan."""
    step: int
    """From 0 on within the block; steps that were left out count as well."""
    num_steps: int
    """Entries of the plan."""


class Strategy(Protocol):
    """What the decoding loop knows of a strategy."""

    @property
    def is_model_independent(self) -> bool:
        """Whether it chooses without the model: then it is asked before the forward, which predicts the chosen rows."""

    @property
    def can_remask(self) -> bool:
        """Whether it decides again on tokens of the block that it has settled before."""

    @property
    def is_deterministic(self) -> bool:
        """Whether its choices follow from the model's distributions alone, without chance."""

    @property
    def needs_distribution(self) -> bool:
        """Whether a confidence is more than the probability of the proposed token."""

    def confidence(self, probs_NV: Tensor, tokens_N: Tensor) -> Tensor:
        """How sure each row is, [R] in fp64; ``tokens_N`` were proposed, or stand there already."""

    def unmasking_schedule(self, num_masked: int, num_steps: int, block_length: int) -> tuple[float, ...]:
        """One entry for each step of a block: what `choose` finds as `Look.quota`. Counts are positive, and there may
        be fewer than ``num_steps``. After the last entry nothing is masked."""

    def select_positions(self, state: DecodeState) -> NDArray[np.bool_]:
        """Which of the N positions hold a token after this step; at least one, unless the policy is blind or makes
        tokens masks again."""


class ConfidenceStrategy:
    """What the policies share whose counts follow from the model: confidences are the probabilities of the proposed
    tokens, and each step settles at least one."""

    is_model_independent = False
    can_remask = False
    is_deterministic = True
    needs_distribution = False

    def confidence(self, probs_NV: Tensor, tokens_N: Tensor) -> Tensor:
        """As in `Strategy`."""
        return _compute_confidence("probability", probs_NV, tokens_N)

    def unmasking_schedule(self, num_masked: int, num_steps: int, block_length: int) -> tuple[float, ...]:
        """As in `Strategy`."""
        return _build_schedule("one", num_masked, num_steps, block_length)


class ModelIndependentStrategy:
    """What the policies share that do not look."""

    is_model_independent = True
    can_remask = False
    is_deterministic = False
    needs_distribution = False

    def confidence(self, probs_NV: Tensor, tokens_N: Tensor) -> Tensor:
        """As in `Strategy`; nobody asks for it."""
        return torch.zeros_like(probs_NV[:, 0])


@dataclass(frozen=True)
class MostConfident:
    """So many positions a step, the most confident ones: LLaDA's ``low_confidence`` (Nie et al. 2025, generate.py) and
    ``random_topk``, SDAR's ``low_confidence_static`` (Cheng et al. 2025, generate.py), Dream's ``maskgit_plus``,
    ``topk_margin`` and ``entropy`` (Ye et al. 2025, generation_utils.py)."""

    measure: ConfidenceMeasure
    counts: ScheduleName
    alg_temp: float = 0.0
    """Positions are drawn without replacement from softmax(confidence / alg_temp); 0: the best."""
    should_shuffle_ties: bool = False
    """Any of those that are equal to 6 decimals, in place of the first."""

    is_model_independent = False
    can_remask = False

    @property
    def is_deterministic(self) -> bool:
        return self.alg_temp == 0.0 and not self.should_shuffle_ties

    @property
    def needs_distribution(self) -> bool:
        return self.measure != "probability"

    def confidence(self, probs_NV: Tensor, tokens_N: Tensor) -> Tensor:
        return _compute_confidence(self.measure, probs_NV, tokens_N)

    def unmasking_schedule(self, num_masked: int, num_steps: int, block_length: int) -> tuple[float, ...]:
        return _build_schedule(self.counts, num_masked, num_steps, block_length)

    def select_positions(self, state: DecodeState) -> NDArray[np.bool_]:
        confidence_M = state.confidence_M
        if self.should_shuffle_ties:
            confidence_M = confidence_M.round(RANDOM_TOPK_TIE_DECIMALS)
            return _mask_from_indices(
                np.lexsort((state.uniforms_M, -confidence_M))[: int(state.tokens_per_step)], len(confidence_M)
            )
        if self.alg_temp > 0.0:
            confidence_M = add_gumbel_noise(confidence_M, self.alg_temp, state.uniforms_M)
        return select_most_confident(confidence_M, int(state.tokens_per_step))


@dataclass(frozen=True)
class RandomPositions(ModelIndependentStrategy):
    """So many positions a step, all sets of them equally likely: LLaDA's ``random``; ``equal_counts``; one a step is
    ``first_hitting`` (Zheng et al. 2024): ancestral sampling in infinitely many steps, without the empty ones."""

    counts: ScheduleName

    def unmasking_schedule(self, num_masked: int, num_steps: int, block_length: int) -> tuple[float, ...]:
        return _build_schedule(self.counts, num_masked, num_steps, block_length)

    def select_positions(self, state: DecodeState) -> NDArray[np.bool_]:
        return select_most_confident(state.uniforms_M, int(state.tokens_per_step))


@dataclass(frozen=True)
class Sequential(ModelIndependentStrategy):
    """SDAR's ``sequential``: the first masked positions, whatever the model says (Cheng et al. 2025)."""

    is_deterministic = True

    def unmasking_schedule(self, num_masked: int, num_steps: int, block_length: int) -> tuple[float, ...]:
        return _build_schedule("sdar", num_masked, num_steps, block_length)

    def select_positions(self, state: DecodeState) -> NDArray[np.bool_]:
        return np.arange(len(state.confidence_M)) < state.tokens_per_step


@dataclass(frozen=True)
class DynamicThreshold(ConfidenceStrategy):
    """SDAR's ``low_confidence_dynamic``: every token above the threshold, if these are as many as the step should
    settle (Cheng et al. 2025, generate.py). If they are not, published code differs in what to do."""

    confidence_threshold: float
    threshold_comparison: ThresholdComparison = ">"
    threshold_fallback: ThresholdFallback = "quota"

    def unmasking_schedule(self, num_masked: int, num_steps: int, block_length: int) -> tuple[float, ...]:
        counts: ScheduleName = "one" if self.threshold_fallback == "one" else "sdar"
        return _build_schedule(counts, num_masked, num_steps, block_length)

    def select_positions(self, state: DecodeState) -> NDArray[np.bool_]:
        tokens_per_step = int(state.tokens_per_step)
        passes_M = _exceeds_threshold(state.confidence_M, self.confidence_threshold, self.threshold_comparison)
        if passes_M.sum() >= tokens_per_step:
            return passes_M
        if self.threshold_fallback == "leftmost":
            # Zeros leave what is put off behind all others.
            return select_most_confident(np.where(np.isneginf(state.confidence_M), -np.inf, 0.0), tokens_per_step)
        return select_most_confident(state.confidence_M, tokens_per_step)


@dataclass(frozen=True)
class Threshold(ConfidenceStrategy):
    """Fast-dLLM's ``threshold``: everything of at least this probability, at least the best one (Wu et al. 2025)."""

    confidence_threshold: float
    threshold_comparison: ThresholdComparison = ">="

    def select_positions(self, state: DecodeState) -> NDArray[np.bool_]:
        passes_M = _exceeds_threshold(state.confidence_M, self.confidence_threshold, self.threshold_comparison)
        return select_most_confident(state.confidence_M, 1) | passes_M


@dataclass(frozen=True)
class ConfidenceFactor(ConfidenceStrategy):
    """Fast-dLLM's ``factor``: from the most confident on, as long as the n-th best has at least 1 - factor / (n + 1);
    the best one always (Wu et al. 2025, theorem 1)."""

    factor: float

    def select_positions(self, state: DecodeState) -> NDArray[np.bool_]:
        sorted_M = np.sort(state.confidence_M)[::-1]
        needed_M = 1.0 - self.factor / np.arange(2, len(sorted_M) + 2)
        # One falls and the other rises, so that none passes after one that fails.
        return select_most_confident(state.confidence_M, max(1, int((sorted_M >= needed_M).sum())))


@dataclass(frozen=True)
class EntropyBounded(ConfidenceStrategy):
    """The most certain positions while their entropies add up to less than a bound, the first always: JetEngine's
    ``entropy_bounded`` (Ben-Hamu et al. 2025 leave the greatest one out of the sum)."""

    entropy_bound: float
    """Nats."""

    needs_distribution = True

    def confidence(self, probs_NV: Tensor, tokens_N: Tensor) -> Tensor:
        return _compute_confidence("entropy", probs_NV, tokens_N)

    def select_positions(self, state: DecodeState) -> NDArray[np.bool_]:
        sums_M = np.cumsum(np.sort(-state.confidence_M))
        return select_most_confident(state.confidence_M, max(1, int((sums_M < self.entropy_bound).sum())))


@dataclass(frozen=True)
class IndependentUnmasking(ModelIndependentStrategy):
    """Each masked position by itself, with the probability that the step's time asks for: ancestral sampling of
    masked diffusion (Sahoo et al. 2024), and Dream's ``origin``, whose time ends a little above 0."""

    time: Literal["linear", "dream"]

    def unmasking_schedule(self, num_masked: int, num_steps: int, block_length: int) -> tuple[float, ...]:
        return (
            linear_unmask_probabilities(num_steps) if self.time == "linear" else dream_unmask_probabilities(num_steps)
        )

    def select_positions(self, state: DecodeState) -> NDArray[np.bool_]:
        return state.uniforms_M < state.tokens_per_step


@dataclass(frozen=True)
class PathPlanning(ConfidenceStrategy):
    """Open-dLLM's ``p2`` (Peng et al. 2025): after step i of S the floor((1 - i / S) N) least confident positions are
    masks, whether or not they were before. Among equals the later positions are. A token that stands there is as sure
    as the model is of it; Open-dLLM takes that of the token that it would propose in its place."""

    can_remask = True
    is_deterministic = False

    def unmasking_schedule(self, num_masked: int, num_steps: int, block_length: int) -> tuple[float, ...]:
        return tuple((step + 1) / num_steps for step in range(num_steps))

    def select_positions(self, state: DecodeState) -> NDArray[np.bool_]:
        # In whole numbers, because (1 - 0.9) * 10 is less than 1 in floats.
        num_masks = len(state.confidence_M) * (state.num_steps - state.step - 1) // state.num_steps
        return select_most_confident(state.confidence_M, len(state.confidence_M) - num_masks)


@dataclass(frozen=True)
class ReMDM(ModelIndependentStrategy):
    """ReMDM (Wang et al. 2025): ancestral sampling in which a token becomes a mask again with probability sigma; more
    masks are settled in return, so that the share of tokens at each time is what it was, alpha.

    Without a loop alpha = 1 - t and sigma = min(eta, sigma_max). With one, alpha rises linearly from 0 to ``alpha_on``
    while time runs from 1 down to ``t_on``, stays there until ``t_off``, with sigma = eta, and rises to 1 at time 0.
    """

    eta: float
    loop: tuple[float, float, float] | None = None
    """``t_on``, ``t_off`` and ``alpha_on``."""

    can_remask = True

    def unmasking_schedule(self, num_masked: int, num_steps: int, block_length: int) -> tuple[float, ...]:
        return tuple(self._remask_probability(step, num_steps) for step in range(num_steps))

    def select_positions(self, state: DecodeState) -> NDArray[np.bool_]:
        before, after = (
            self._unmasked_fraction(state.step, state.num_steps),
            self._unmasked_fraction(state.step + 1, state.num_steps),
        )
        settles = (
            1.0
            if state.step + 1 == state.num_steps
            else (after - (1.0 - state.tokens_per_step) * before) / (1.0 - before)
        )
        return np.where(state.is_masked_M, state.uniforms_M < settles, state.uniforms_M >= state.tokens_per_step)

    def _unmasked_fraction(self, step: int, num_steps: int) -> float:
        """Share of positions that hold a token after so many steps."""
        time = (num_steps - step) / num_steps
        if self.loop is None:
            return step / num_steps
        t_on, t_off, alpha_on = self.loop
        if time > t_on:
            return alpha_on * (1.0 - time) / (1.0 - t_on)
        return alpha_on if time >= t_off else 1.0 - (1.0 - alpha_on) * time / t_off

    def _remask_probability(self, step: int, num_steps: int) -> float:
        """Probability with which a token becomes a mask again in a step."""
        if self.loop is not None:
            t_on, t_off, _ = self.loop
            is_on = (num_steps - step) / num_steps <= t_on and (num_steps - step - 1) / num_steps >= t_off
            return self.eta if is_on else 0.0
        # sigma_max = min(1, (1 - alpha_s) / alpha_t); at the start nothing is settled, and any sigma does.
        return min(self.eta, (num_steps - step - 1) / step) if step else self.eta


_WITHOUT_OPTIONS: Mapping[RemaskingStrategy, Strategy] = MappingProxyType(
    {
        "random": RandomPositions("llada"),
        "random_topk": MostConfident("probability", "llada", should_shuffle_ties=True),
        "sequential": Sequential(),
        "origin": IndependentUnmasking("dream"),
        "ancestral": IndependentUnmasking("linear"),
        "first_hitting": RandomPositions("one"),
        "equal_counts": RandomPositions("llada"),
        "p2": PathPlanning(),
    }
)
_RANKED: Mapping[RemaskingStrategy, tuple[ConfidenceMeasure, ScheduleName]] = MappingProxyType(
    {
        "low_confidence": ("probability", "llada"),
        "low_confidence_static": ("probability", "sdar"),
        "maskgit_plus": ("probability", "dream"),
        "topk_margin": ("margin", "dream"),
        "entropy": ("entropy", "dream"),
    }
)


def build_strategy(config: GenerationConfig) -> Strategy:
    """The policy that ``remasking_strategy`` names; the config is one of `fill_defaults`."""
    name: RemaskingStrategy = _require(config.remasking_strategy)
    if name in _RANKED:
        return MostConfident(*_RANKED[name], config.alg_temp)
    match name:
        case "low_confidence_dynamic":
            return DynamicThreshold(
                _require(config.confidence_threshold),
                _require(config.threshold_comparison),
                _require(config.threshold_fallback),
            )
        case "threshold":
            return Threshold(_require(config.confidence_threshold), _require(config.threshold_comparison))
        case "factor":
            return ConfidenceFactor(_require(config.factor))
        case "entropy_bounded":
            return EntropyBounded(_require(config.entropy_bound))
        case "remdm_cap":
            return ReMDM(_require(config.remdm_eta))
        case "remdm_loop":
            loop = (_require(config.remdm_t_on), _require(config.remdm_t_off), _require(config.remdm_alpha_on))
            return ReMDM(_require(config.remdm_eta), loop)
        case _:
            return _WITHOUT_OPTIONS[name]


def select_most_confident(confidence_M: NDArray[np.float64], count: int) -> NDArray[np.bool_]:
    """The ``count`` most confident positions; among equals the first ones."""
    return _mask_from_indices(np.argsort(-confidence_M, kind="stable")[:count], len(confidence_M))


def add_gumbel_noise(
    confidence_M: NDArray[np.float64], temperature: float, uniforms_M: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Confidences whose k greatest are k draws without replacement from softmax(confidence / temperature): Gumbel noise
    is added (Vieira 2014)."""
    # 0 would be put off for ever; 2^-54 is below every other number of 53 bits.
    noise_M = -np.log(-np.log(np.maximum(uniforms_M, 2.0**-54)))
    # The same order as confidence / temperature + noise, for temperatures that would overflow, too.
    return confidence_M / max(temperature, 1.0) + min(temperature, 1.0) * noise_M


def _exceeds_threshold(
    confidence_M: NDArray[np.float64], threshold: float, comparison: ThresholdComparison
) -> NDArray[np.bool_]:
    return confidence_M > threshold if comparison == ">" else confidence_M >= threshold


def _mask_from_indices(places: NDArray[np.intp], size: int) -> NDArray[np.bool_]:
    chosen_M = np.zeros(size, dtype=np.bool_)
    chosen_M[places] = True
    return chosen_M


def _compute_confidence(measure: ConfidenceMeasure, probs_NV: Tensor, tokens_N: Tensor) -> Tensor:
    match measure:
        case "probability":
            return probs_NV.gather(1, tokens_N[:, None])[:, 0]
        case "margin":
            best_N2 = probs_NV.topk(2, dim=1).values
            return best_N2[:, 0] - best_N2[:, 1]
        case "entropy":
            return torch.xlogy(probs_NV, probs_NV).sum(dim=1)


def _build_schedule(counts: ScheduleName, num_masked: int, num_steps: int, block_length: int) -> tuple[int, ...]:
    match counts:
        case "llada":
            return even_tokens_per_step(num_masked, num_steps)
        case "sdar":
            return whole_block_tokens_per_step(num_masked, num_steps, block_length)
        case "dream":
            return dream_tokens_per_step(num_masked, num_steps)
        case "one":
            return (1,) * num_masked


def _require(value: _OptionValue | None) -> _OptionValue:
    assert value is not None, "fill_defaults comes first"
    return value
