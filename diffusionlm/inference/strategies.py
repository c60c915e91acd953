"""Which masked positions become final after a forward.

A policy knows nothing of models or blocks: it turns probabilities into confidences, plans what each step of a block
settles, and chooses the positions. A new strategy is a row of `config.generation.STRATEGIES` and an arm in
`build_policy`, with a frozen dataclass here where its rule is a new one.

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

from config.generation import Comparison, Fallback, GenerationConfig, RemaskingStrategy
from diffusionlm.inference.unmasking_schedules import (
    block_quotas,
    dream_probabilities,
    dream_quotas,
    even_quotas,
    linear_probabilities,
)

Measure = Literal["probability", "margin", "entropy"]
Counts = Literal["llada", "sdar", "dream", "one"]

_Value = TypeVar("_Value")

SAME_CONFIDENCE_DECIMALS = 6
"""What counts as equal for ``random_topk``, whose published form adds noise of 1e-6."""


@dataclass(frozen=True)
class Look:
    """One request's block around a forward."""

    confidence_N: NDArray[np.float64]
    """As the policy's `confidence` said; -inf where the proposed token is put off; zeros for a blind policy."""
    is_masked_N: NDArray[np.bool_]
    """All True unless the policy makes tokens masks again."""
    uniforms_N: NDArray[np.float64]
    """Chance, in [0, 1)."""
    quota: float
    """This step's entry of the plan."""
    step: int
    """From 0 on within the block; steps that were left out count as well."""
    num_steps: int
    """Entries of the plan."""


class Policy(Protocol):
    """What the decoding loop knows of a strategy."""

    @property
    def is_blind(self) -> bool:
        """Whether it chooses without the model: then it is asked before the forward, which predicts the chosen rows."""

    @property
    def remasks(self) -> bool:
        """Whether it decides again on tokens of the block that it has settled before."""

    @property
    def is_deterministic(self) -> bool:
        """Whether its choices follow from the model's distributions alone, without chance."""

    @property
    def needs_distribution(self) -> bool:
        """Whether a confidence is more than the probability of the proposed token."""

    def confidence(self, probs_RV: Tensor, tokens_R: Tensor) -> Tensor:
        """How sure each row is, [R] in fp64; ``tokens_R`` were proposed, or stand there already."""

    def plan(self, num_masked: int, num_steps: int, block_length: int) -> tuple[float, ...]:
        """One entry for each step of a block: what `choose` finds as `Look.quota`. Counts are positive, and there may
        be fewer than ``num_steps``. After the last entry nothing is masked."""

    def choose(self, look: Look) -> NDArray[np.bool_]:
        """Which of the N positions hold a token after this step; at least one, unless the policy is blind or makes
        tokens masks again."""


class Looking:
    """What the policies share whose counts follow from the model: confidences are the probabilities of the proposed
    tokens, and each step settles at least one."""

    is_blind = False
    remasks = False
    is_deterministic = True
    needs_distribution = False

    def confidence(self, probs_RV: Tensor, tokens_R: Tensor) -> Tensor:
        """As in `Policy`."""
        return _measured("probability", probs_RV, tokens_R)

    def plan(self, num_masked: int, num_steps: int, block_length: int) -> tuple[float, ...]:
        """As in `Policy`."""
        return _planned("one", num_masked, num_steps, block_length)


class Blind:
    """What the policies share that do not look."""

    is_blind = True
    remasks = False
    is_deterministic = False
    needs_distribution = False

    def confidence(self, probs_RV: Tensor, tokens_R: Tensor) -> Tensor:
        """As in `Policy`; nobody asks for it."""
        return torch.zeros_like(probs_RV[:, 0])


@dataclass(frozen=True)
class Ranked:
    """So many positions a step, the most confident ones: LLaDA's ``low_confidence`` (Nie et al. 2025, generate.py) and
    ``random_topk``, SDAR's ``low_confidence_static`` (Cheng et al. 2025, generate.py), Dream's ``maskgit_plus``,
    ``topk_margin`` and ``entropy`` (Ye et al. 2025, generation_utils.py)."""

    measure: Measure
    counts: Counts
    alg_temp: float = 0.0
    """Positions are drawn without replacement from softmax(confidence / alg_temp); 0: the best."""
    shuffles_equals: bool = False
    """Any of those that are equal to 6 decimals, in place of the first."""

    is_blind = False
    remasks = False

    @property
    def is_deterministic(self) -> bool:
        return self.alg_temp == 0.0 and not self.shuffles_equals

    @property
    def needs_distribution(self) -> bool:
        return self.measure != "probability"

    def confidence(self, probs_RV: Tensor, tokens_R: Tensor) -> Tensor:
        return _measured(self.measure, probs_RV, tokens_R)

    def plan(self, num_masked: int, num_steps: int, block_length: int) -> tuple[float, ...]:
        return _planned(self.counts, num_masked, num_steps, block_length)

    def choose(self, look: Look) -> NDArray[np.bool_]:
        confidence_N = look.confidence_N
        if self.shuffles_equals:
            confidence_N = confidence_N.round(SAME_CONFIDENCE_DECIMALS)
            return _marked(np.lexsort((look.uniforms_N, -confidence_N))[: int(look.quota)], len(confidence_N))
        if self.alg_temp > 0.0:
            confidence_N = perturbed(confidence_N, self.alg_temp, look.uniforms_N)
        return most_confident(confidence_N, int(look.quota))


@dataclass(frozen=True)
class AtRandom(Blind):
    """So many positions a step, all sets of them equally likely: LLaDA's ``random``; ``equal_counts``; one a step is
    ``first_hitting`` (Zheng et al. 2024): ancestral sampling in infinitely many steps, without the empty ones."""

    counts: Counts

    def plan(self, num_masked: int, num_steps: int, block_length: int) -> tuple[float, ...]:
        return _planned(self.counts, num_masked, num_steps, block_length)

    def choose(self, look: Look) -> NDArray[np.bool_]:
        return most_confident(look.uniforms_N, int(look.quota))


@dataclass(frozen=True)
class Sequential(Blind):
    """SDAR's ``sequential``: the first masked positions, whatever the model says (Cheng et al. 2025)."""

    is_deterministic = True

    def plan(self, num_masked: int, num_steps: int, block_length: int) -> tuple[float, ...]:
        return _planned("sdar", num_masked, num_steps, block_length)

    def choose(self, look: Look) -> NDArray[np.bool_]:
        return np.arange(len(look.confidence_N)) < look.quota


@dataclass(frozen=True)
class Dynamic(Looking):
    """SDAR's ``low_confidence_dynamic``: every token above the threshold, if these are as many as the step should
    settle (Cheng et al. 2025, generate.py). If they are not, published code differs in what to do."""

    confidence_threshold: float
    threshold_comparison: Comparison = ">"
    threshold_fallback: Fallback = "quota"

    def plan(self, num_masked: int, num_steps: int, block_length: int) -> tuple[float, ...]:
        counts: Counts = "one" if self.threshold_fallback == "one" else "sdar"
        return _planned(counts, num_masked, num_steps, block_length)

    def choose(self, look: Look) -> NDArray[np.bool_]:
        quota = int(look.quota)
        passes_N = _passes(look.confidence_N, self.confidence_threshold, self.threshold_comparison)
        if passes_N.sum() >= quota:
            return passes_N
        if self.threshold_fallback == "leftmost":
            # Zeros leave what is put off behind all others.
            return most_confident(np.where(np.isneginf(look.confidence_N), -np.inf, 0.0), quota)
        return most_confident(look.confidence_N, quota)


@dataclass(frozen=True)
class Threshold(Looking):
    """Fast-dLLM's ``threshold``: everything of at least this probability, at least the best one (Wu et al. 2025)."""

    confidence_threshold: float
    threshold_comparison: Comparison = ">="

    def choose(self, look: Look) -> NDArray[np.bool_]:
        passes_N = _passes(look.confidence_N, self.confidence_threshold, self.threshold_comparison)
        return most_confident(look.confidence_N, 1) | passes_N


@dataclass(frozen=True)
class Factor(Looking):
    """Fast-dLLM's ``factor``: from the most confident on, as long as the n-th best has at least 1 - factor / (n + 1);
    the best one always (Wu et al. 2025, theorem 1)."""

    factor: float

    def choose(self, look: Look) -> NDArray[np.bool_]:
        sorted_N = np.sort(look.confidence_N)[::-1]
        needed_N = 1.0 - self.factor / np.arange(2, len(sorted_N) + 2)
        # One falls and the other rises, so that none passes after one that fails.
        return most_confident(look.confidence_N, max(1, int((sorted_N >= needed_N).sum())))


@dataclass(frozen=True)
class EntropyBounded(Looking):
    """The most certain positions while their entropies add up to less than a bound, the first always: JetEngine's
    ``entropy_bounded`` (Ben-Hamu et al. 2025 leave the greatest one out of the sum)."""

    entropy_bound: float
    """Nats."""

    needs_distribution = True

    def confidence(self, probs_RV: Tensor, tokens_R: Tensor) -> Tensor:
        return _measured("entropy", probs_RV, tokens_R)

    def choose(self, look: Look) -> NDArray[np.bool_]:
        sums_N = np.cumsum(np.sort(-look.confidence_N))
        return most_confident(look.confidence_N, max(1, int((sums_N < self.entropy_bound).sum())))


@dataclass(frozen=True)
class Independent(Blind):
    """Each masked position by itself, with the probability that the step's time asks for: ancestral sampling of
    masked diffusion (Sahoo et al. 2024), and Dream's ``origin``, whose time ends a little above 0."""

    time: Literal["linear", "dream"]

    def plan(self, num_masked: int, num_steps: int, block_length: int) -> tuple[float, ...]:
        return linear_probabilities(num_steps) if self.time == "linear" else dream_probabilities(num_steps)

    def choose(self, look: Look) -> NDArray[np.bool_]:
        return look.uniforms_N < look.quota


@dataclass(frozen=True)
class PathPlanning(Looking):
    """Open-dLLM's ``p2`` (Peng et al. 2025): after step i of S the floor((1 - i / S) N) least confident positions are
    masks, whether or not they were before. Among equals the later positions are. A token that stands there is as sure
    as the model is of it; Open-dLLM takes that of the token that it would propose in its place."""

    remasks = True
    is_deterministic = False

    def plan(self, num_masked: int, num_steps: int, block_length: int) -> tuple[float, ...]:
        return tuple((step + 1) / num_steps for step in range(num_steps))

    def choose(self, look: Look) -> NDArray[np.bool_]:
        # In whole numbers, because (1 - 0.9) * 10 is less than 1 in floats.
        num_masks = len(look.confidence_N) * (look.num_steps - look.step - 1) // look.num_steps
        return most_confident(look.confidence_N, len(look.confidence_N) - num_masks)


@dataclass(frozen=True)
class Remasking(Blind):
    """ReMDM (Wang et al. 2025): ancestral sampling in which a token becomes a mask again with probability sigma; more
    masks are settled in return, so that the share of tokens at each time is what it was, alpha.

    Without a loop alpha = 1 - t and sigma = min(eta, sigma_max). With one, alpha rises linearly from 0 to ``alpha_on``
    while time runs from 1 down to ``t_on``, stays there until ``t_off``, with sigma = eta, and rises to 1 at time 0.
    """

    eta: float
    loop: tuple[float, float, float] | None = None
    """``t_on``, ``t_off`` and ``alpha_on``."""

    remasks = True

    def plan(self, num_masked: int, num_steps: int, block_length: int) -> tuple[float, ...]:
        return tuple(self._sigma(step, num_steps) for step in range(num_steps))

    def choose(self, look: Look) -> NDArray[np.bool_]:
        before, after = self._alpha(look.step, look.num_steps), self._alpha(look.step + 1, look.num_steps)
        settles = 1.0 if look.step + 1 == look.num_steps else (after - (1.0 - look.quota) * before) / (1.0 - before)
        return np.where(look.is_masked_N, look.uniforms_N < settles, look.uniforms_N >= look.quota)

    def _alpha(self, step: int, num_steps: int) -> float:
        """Share of positions that hold a token after so many steps."""
        time = (num_steps - step) / num_steps
        if self.loop is None:
            return step / num_steps
        t_on, t_off, alpha_on = self.loop
        if time > t_on:
            return alpha_on * (1.0 - time) / (1.0 - t_on)
        return alpha_on if time >= t_off else 1.0 - (1.0 - alpha_on) * time / t_off

    def _sigma(self, step: int, num_steps: int) -> float:
        """Probability with which a token becomes a mask again in a step."""
        if self.loop is not None:
            t_on, t_off, _ = self.loop
            is_on = (num_steps - step) / num_steps <= t_on and (num_steps - step - 1) / num_steps >= t_off
            return self.eta if is_on else 0.0
        # sigma_max = min(1, (1 - alpha_s) / alpha_t); at the start nothing is settled, and any sigma does.
        return min(self.eta, (num_steps - step - 1) / step) if step else self.eta


_WITHOUT_OPTIONS: Mapping[RemaskingStrategy, Policy] = MappingProxyType(
    {
        "random": AtRandom("llada"),
        "random_topk": Ranked("probability", "llada", shuffles_equals=True),
        "sequential": Sequential(),
        "origin": Independent("dream"),
        "ancestral": Independent("linear"),
        "first_hitting": AtRandom("one"),
        "equal_counts": AtRandom("llada"),
        "p2": PathPlanning(),
    }
)
_RANKED: Mapping[RemaskingStrategy, tuple[Measure, Counts]] = MappingProxyType(
    {
        "low_confidence": ("probability", "llada"),
        "low_confidence_static": ("probability", "sdar"),
        "maskgit_plus": ("probability", "dream"),
        "topk_margin": ("margin", "dream"),
        "entropy": ("entropy", "dream"),
    }
)


def build_policy(config: GenerationConfig) -> Policy:
    """The policy that ``remasking_strategy`` names; the config is one of `with_defaults`."""
    name: RemaskingStrategy = _known(config.remasking_strategy)
    if name in _RANKED:
        return Ranked(*_RANKED[name], config.alg_temp)
    match name:
        case "low_confidence_dynamic":
            return Dynamic(
                _known(config.confidence_threshold),
                _known(config.threshold_comparison),
                _known(config.threshold_fallback),
            )
        case "threshold":
            return Threshold(_known(config.confidence_threshold), _known(config.threshold_comparison))
        case "factor":
            return Factor(_known(config.factor))
        case "entropy_bounded":
            return EntropyBounded(_known(config.entropy_bound))
        case "remdm_cap":
            return Remasking(_known(config.remdm_eta))
        case "remdm_loop":
            loop = (_known(config.remdm_t_on), _known(config.remdm_t_off), _known(config.remdm_alpha_on))
            return Remasking(_known(config.remdm_eta), loop)
        case _:
            return _WITHOUT_OPTIONS[name]


def most_confident(confidence_N: NDArray[np.float64], count: int) -> NDArray[np.bool_]:
    """The ``count`` most confident positions; among equals the first ones."""
    return _marked(np.argsort(-confidence_N, kind="stable")[:count], len(confidence_N))


def perturbed(
    confidence_N: NDArray[np.float64], temperature: float, uniforms_N: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Confidences whose k greatest are k draws without replacement from softmax(confidence / temperature): Gumbel noise
    is added (Vieira 2014)."""
    # 0 would be put off for ever; 2^-54 is below every other number of 53 bits.
    noise_N = -np.log(-np.log(np.maximum(uniforms_N, 2.0**-54)))
    # The same order as confidence / temperature + noise, for temperatures that would overflow, too.
    return confidence_N / max(temperature, 1.0) + min(temperature, 1.0) * noise_N


def _passes(confidence_N: NDArray[np.float64], threshold: float, comparison: Comparison) -> NDArray[np.bool_]:
    return confidence_N > threshold if comparison == ">" else confidence_N >= threshold


def _marked(places: NDArray[np.intp], size: int) -> NDArray[np.bool_]:
    chosen_N = np.zeros(size, dtype=np.bool_)
    chosen_N[places] = True
    return chosen_N


def _measured(measure: Measure, probs_RV: Tensor, tokens_R: Tensor) -> Tensor:
    match measure:
        case "probability":
            return probs_RV.gather(1, tokens_R[:, None])[:, 0]
        case "margin":
            best_R2 = probs_RV.topk(2, dim=1).values
            return best_R2[:, 0] - best_R2[:, 1]
        case "entropy":
            return torch.xlogy(probs_RV, probs_RV).sum(dim=1)


def _planned(counts: Counts, num_masked: int, num_steps: int, block_length: int) -> tuple[int, ...]:
    match counts:
        case "llada":
            return even_quotas(num_masked, num_steps)
        case "sdar":
            return block_quotas(num_masked, num_steps, block_length)
        case "dream":
            return dream_quotas(num_masked, num_steps)
        case "one":
            return (1,) * num_masked


def _known(value: _Value | None) -> _Value:
    assert value is not None, "with_defaults comes first"
    return value
