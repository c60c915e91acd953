"""The remasking strategies. A new one is one class here: config keys, checks, help, documentation and tests follow.

Notation of the docstrings: m masks are left in the block, S steps are scheduled for it, a step goes from time t to s.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from config.base import Fraction, NonNegativeFloat, PositiveFloat, PositiveFraction, Probability
from diffusionlm.inference.strategy import (
    DREAM,
    FAST_DLLM,
    LLADA,
    MDLM,
    NEGATIVE_ENTROPY,
    P2,
    REMDM,
    SDAR,
    TOKEN_PROBABILITY,
    TOP2_MARGIN,
    WEDLM,
    ConfidenceDependentCount,
    DecodeState,
    IndependentUnmasking,
    MostConfident,
    RandomPositions,
    Strategy,
    ThresholdComparison,
    dream_tokens_per_step,
    dream_unmask_probabilities,
    even_tokens_per_step,
    exceeds_threshold,
    linear_fractions,
    linear_unmask_probabilities,
    one_token_per_step,
    select_first,
    select_most_confident,
    whole_block_tokens_per_step,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class LowConfidence(MostConfident):
    """The m/S most probable tokens; the first steps take the surplus."""

    name = "low_confidence"
    family = LLADA
    forwards = "min(S, m)"
    schedule = even_tokens_per_step


class RandomOrder(RandomPositions):
    """Commit m/S positions in random order."""

    name = "random"
    family = LLADA
    forwards = "min(S, m)"


class RandomTopK(RandomPositions):
    """Like `low_confidence`, but ties (probabilities equal to 6 decimals) are broken at random."""

    name = "random_topk"
    family = LLADA
    source = "LLaDA's low_confidence with jitter 1e-6"
    forwards = "min(S, m)"
    measure = TOKEN_PROBABILITY

    def select_positions(self, state: DecodeState) -> NDArray[np.bool_]:
        import numpy as np

        confidence_M = state.confidence_M.round(6)  # published code adds noise of 1e-6
        return select_first(np.lexsort((state.uniforms_M, -confidence_M)), int(state.schedule_value))


class Sequential(Strategy):
    """The first masked positions, as many as 1/S of a whole block."""

    name = "sequential"
    family = SDAR
    forwards = "at most min(S, B)"
    measure = None
    schedule = whole_block_tokens_per_step

    def select_positions(self, state: DecodeState) -> NDArray[np.bool_]:
        return state.is_masked_M.cumsum() <= state.schedule_value


class LowConfidenceStatic(MostConfident):
    """The most probable tokens, as many as 1/S of a whole block."""

    name = "low_confidence_static"
    family = SDAR
    forwards = "at most min(S, B)"
    schedule = whole_block_tokens_per_step


class LowConfidenceDynamic(Strategy):
    """All tokens above `confidence_threshold`; if they are fewer than 1/S of a whole block, `threshold_fallback`
    decides."""

    name = "low_confidence_dynamic"
    family = SDAR
    forwards = "1 to min(S, B)"
    schedule = whole_block_tokens_per_step

    confidence_threshold: Probability = 0.85
    """Threshold on the token's probability."""
    threshold_comparison: ThresholdComparison = ">"
    """Comparison of the probability with the threshold."""
    threshold_fallback: Literal["quota", "leftmost", "one"] = "quota"
    """If too few tokens pass the threshold, commit: quota: the scheduled count, most confident first (SDAR). leftmost:
    the scheduled count, from the left (JetEngine). one: those that pass, at least the most confident one (LMDeploy);
    the number of forwards follows from the confidences."""

    def check_options(self, steps: Mapping[str, int]) -> None:
        if self.threshold_fallback == "one" and steps:
            [(key, value)] = steps.items()
            raise ValueError(
                f'{key} = {value} has no effect with threshold_fallback = "one", which takes as many forwards as the '
                "confidences need: remove one of the two"
            )

    def unmasking_schedule(self, num_masked: int, num_steps: int, block_length: int) -> tuple[float, ...]:
        if self.threshold_fallback == "one":
            return one_token_per_step(num_masked, num_steps, block_length)
        return super().unmasking_schedule(num_masked, num_steps, block_length)

    def select_positions(self, state: DecodeState) -> NDArray[np.bool_]:
        import numpy as np

        count = int(state.schedule_value)
        passes_M = exceeds_threshold(state.confidence_M, self.confidence_threshold, self.threshold_comparison)
        if passes_M.sum() >= count:
            return passes_M
        if self.threshold_fallback == "leftmost":
            # Deferred tokens (-inf) stay last.
            return select_most_confident(np.where(np.isneginf(state.confidence_M), -np.inf, 0.0), count)
        return select_most_confident(state.confidence_M, count)


class EntropyBounded(ConfidenceDependentCount):
    """The positions of lowest entropy while the sum of their entropies is below `entropy_bound`, at least one."""

    # Ben-Hamu et al. leave the largest entropy out of the sum, JetEngine does not.
    name = "entropy_bounded"
    family = SDAR
    source = "Ben-Hamu et al. 2025, arXiv 2505.24857, as in JetEngine"
    forwards = "1 to m"
    measure = NEGATIVE_ENTROPY

    entropy_bound: PositiveFloat = 0.35
    """Bound on the sum of entropies, in nats."""

    def select_positions(self, state: DecodeState) -> NDArray[np.bool_]:
        import numpy as np

        entropy_sums_M = np.sort(-state.confidence_M).cumsum()
        return select_most_confident(state.confidence_M, max(1, int((entropy_sums_M < self.entropy_bound).sum())))


class Threshold(ConfidenceDependentCount):
    """All tokens of at least `confidence_threshold`, at least the most probable one."""

    name = "threshold"
    family = FAST_DLLM
    forwards = "1 to m"

    confidence_threshold: Probability = 0.9
    """Threshold on the token's probability."""
    threshold_comparison: ThresholdComparison = ">="
    """Comparison of the probability with the threshold."""

    def select_positions(self, state: DecodeState) -> NDArray[np.bool_]:
        passes_M = exceeds_threshold(state.confidence_M, self.confidence_threshold, self.threshold_comparison)
        return select_most_confident(state.confidence_M, 1) | passes_M


class Factor(ConfidenceDependentCount):
    """The n-th most probable token while its probability is at least 1 - `factor` / (n + 1), at least the first."""

    name = "factor"
    family = FAST_DLLM
    source = FAST_DLLM.source + ", theorem 1"
    forwards = "1 to m"

    factor: PositiveFloat = 1.0
    """A larger factor commits more tokens per forward."""

    def select_positions(self, state: DecodeState) -> NDArray[np.bool_]:
        import numpy as np

        sorted_M = np.sort(state.confidence_M)[::-1]
        required_M = 1.0 - self.factor / np.arange(2, len(sorted_M) + 2)
        # Confidences fall and requirements rise, so the positions that pass come first.
        return select_most_confident(state.confidence_M, max(1, int((sorted_M >= required_M).sum())))


class PenalizedEntropy(ConfidenceDependentCount):
    """All positions i whose entropy + `position_penalty` (i - first masked position) is below `entropy_threshold`, at
    least the one with the lowest sum."""

    # The published code slides a window of 16 positions over its masks; here the window is the block.
    name = "penalized_entropy"
    family = WEDLM
    forwards = "1 to m"
    measure = NEGATIVE_ENTROPY

    entropy_threshold: PositiveFloat = 0.4
    """Threshold on the sum, in nats."""
    position_penalty: NonNegativeFloat = 0.02
    """Nats for each position after the first masked one."""

    def select_positions(self, state: DecodeState) -> NDArray[np.bool_]:
        scores_M = state.confidence_M - self.position_penalty * (state.positions_M - state.positions_M[0])
        passes_M = exceeds_threshold(scores_M, -self.entropy_threshold, ">")
        return select_most_confident(scores_M, 1) | passes_M


class Origin(IndependentUnmasking):
    """Each position with probability 1 - s/t, where time runs from 1 to 0.001; the last step commits the rest."""

    name = "origin"
    family = DREAM
    forwards = "at most min(S, m)"
    schedule = dream_unmask_probabilities


class MaskGITPlus(MostConfident):
    """The floor(m (1 - s/t)) most probable tokens, where time runs from 1 to 0.001; the last step commits the rest."""

    name = "maskgit_plus"
    family = DREAM
    forwards = "at most min(S, m)"
    schedule = dream_tokens_per_step


class TopKMargin(MostConfident):
    """Commit as many positions as `maskgit_plus`, ranked by the difference of the two highest probabilities."""

    name = "topk_margin"
    family = DREAM
    forwards = "at most min(S, m)"
    measure = TOP2_MARGIN
    schedule = dream_tokens_per_step


class Entropy(MostConfident):
    """Commit as many positions as `maskgit_plus`, ranked by lowest entropy."""

    name = "entropy"
    family = DREAM
    forwards = "at most min(S, m)"
    measure = NEGATIVE_ENTROPY
    schedule = dream_tokens_per_step


class Ancestral(IndependentUnmasking):
    """Each position with probability 1 - s/t, where time runs from 1 to 0: ancestral sampling."""

    name = "ancestral"
    family = MDLM
    forwards = "at most min(S, m)"
    schedule = linear_unmask_probabilities


class FirstHitting(RandomPositions):
    """One random position: ancestral sampling in the limit of many steps."""

    name = "first_hitting"
    family = MDLM
    source = "Zheng et al. 2024, arXiv 2409.02908"
    forwards = "m"
    uses_steps = False
    schedule = one_token_per_step


class EqualCounts(RandomPositions):
    """m/S random positions, sampled like `first_hitting`."""

    name = "equal_counts"
    family = MDLM
    source = "first_hitting with equal counts per forward"
    forwards = "min(S, m)"


class PathPlanning(Strategy):
    """In step i the (i + 1)/S most probable tokens of the block are committed, the others are masked again."""

    # A committed token is ranked by its own present probability; Open-dLLM uses that of the newly proposed token.
    name = "p2"
    family = P2
    forwards = "S"
    can_remask = True
    schedule = linear_fractions

    def select_positions(self, state: DecodeState) -> NDArray[np.bool_]:
        # In integers: (1 - 0.9) * 10 is less than 1 in floating point.
        num_masks = len(state.confidence_M) * (state.num_steps - state.step - 1) // state.num_steps
        return select_most_confident(state.confidence_M, len(state.confidence_M) - num_masks)


class ReMDM(Strategy):
    """Base of ReMDM's strategies: a committed token is masked again with probability sigma, and more masks are
    committed in return, so that the fraction of committed tokens follows alpha."""

    measure = None
    uses_randomness = True
    can_remask = True
    schedule = linear_fractions

    @abstractmethod
    def alpha(self, step: int, num_steps: int) -> float:
        """Expected fraction of committed positions before a step."""

    @abstractmethod
    def sigma(self, step: int, num_steps: int) -> float:
        """Probability with which a committed token is masked again in a step."""

    def select_positions(self, state: DecodeState) -> NDArray[np.bool_]:
        import numpy as np

        alpha_t, alpha_s = self.alpha(state.step, state.num_steps), self.alpha(state.step + 1, state.num_steps)
        sigma = self.sigma(state.step, state.num_steps)
        is_last = state.step + 1 == state.num_steps
        commit_probability = 1.0 if is_last else (alpha_s - (1.0 - sigma) * alpha_t) / (1.0 - alpha_t)
        return np.where(state.is_masked_M, state.uniforms_M < commit_probability, state.uniforms_M >= sigma)


class ReMDMCap(ReMDM):
    """Each mask with probability (alpha_s - (1 - sigma) alpha_t) / (1 - alpha_t); each token is masked again with
    probability sigma = min(`remdm_eta`, (1 - alpha_s) / alpha_t)."""

    name = "remdm_cap"
    family = REMDM
    forwards = "at most S"

    remdm_eta: PositiveFraction = 0.02
    """Upper bound on the probability with which a token is masked again in a step."""

    def alpha(self, step: int, num_steps: int) -> float:
        return step / num_steps

    def sigma(self, step: int, num_steps: int) -> float:
        # Before the first step nothing is committed, so any sigma is valid.
        return min(self.remdm_eta, (num_steps - step - 1) / step) if step else self.remdm_eta


class ReMDMLoop(ReMDM):
    """Like `ancestral` up to alpha = `remdm_alpha_on`; alpha is constant between `remdm_t_on` and `remdm_t_off`, with
    sigma = `remdm_eta`; then it rises to 1."""

    name = "remdm_loop"
    family = REMDM
    forwards = "at most S"

    remdm_eta: PositiveFraction = 0.02
    """Probability with which a token is masked again in a step of the loop."""
    remdm_t_on: Fraction = 0.55
    """Time at which the loop begins; time runs from 1 to 0."""
    remdm_t_off: Fraction = 0.05
    """Time at which the loop ends."""
    remdm_alpha_on: Fraction = 0.9
    """Fraction of committed tokens during the loop."""

    def check_options(self, steps: Mapping[str, int]) -> None:
        if self.remdm_t_on <= self.remdm_t_off:
            raise ValueError(
                f"remdm_t_on = {self.remdm_t_on} must be more than remdm_t_off = {self.remdm_t_off}: "
                "time runs from 1 down to 0"
            )
        eta, alpha = self.remdm_eta, self.remdm_alpha_on
        if eta * alpha - (1.0 - alpha) > 1e-12:  # 1 - 0.8 is slightly less than 0.2
            raise ValueError(
                f"remdm_eta = {eta} is more than {(1.0 - alpha) / alpha:.4g}, the probability of masking again that "
                f"remdm_alpha_on = {alpha} allows: lower one of the two"
            )

    def alpha(self, step: int, num_steps: int) -> float:
        time = (num_steps - step) / num_steps
        if time > self.remdm_t_on:
            return self.remdm_alpha_on * (1.0 - time) / (1.0 - self.remdm_t_on)
        if time >= self.remdm_t_off:
            return self.remdm_alpha_on
        return 1.0 - (1.0 - self.remdm_alpha_on) * time / self.remdm_t_off

    def sigma(self, step: int, num_steps: int) -> float:
        start, end = (num_steps - step) / num_steps, (num_steps - step - 1) / num_steps
        return self.remdm_eta if start <= self.remdm_t_on and end >= self.remdm_t_off else 0.0


STRATEGIES = MappingProxyType(
    {
        value.name: value
        for value in list(globals().values())
        if isinstance(value, type) and issubclass(value, Strategy) and "name" in vars(value)
    }
)
"""Strategy by name, in the order of the documentation."""
