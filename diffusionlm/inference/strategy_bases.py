"""Families, base classes and selection functions that several strategies share. No torch or numpy at import."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from config.base import NonNegativeFloat
from diffusionlm.inference.strategy import TOKEN_PROBABILITY, DecodeState, OffByDefault, Strategy, StrategyFamily
from diffusionlm.inference.unmasking_schedules import even_tokens_per_step

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ThresholdComparison = Literal[">", ">="]

LLADA = StrategyFamily("LLaDA", confidence_from="unfiltered")
SDAR = StrategyFamily("SDAR", confidence_from="filtered", uses_whole_blocks=True)
FAST_DLLM = StrategyFamily("Fast-dLLM", confidence_from="unfiltered")
DREAM = StrategyFamily("Dream", confidence_from="filtered")
MDLM = StrategyFamily("MDLM", confidence_from="unfiltered", temperature=1.0)
P2 = StrategyFamily("P2", confidence_from="filtered")
REMDM = StrategyFamily("ReMDM", confidence_from="unfiltered", temperature=1.0)

LLADA_SOURCE = "Nie et al. 2025, arXiv 2502.09992, generate.py"
SDAR_SOURCE = "Cheng et al. 2025, arXiv 2510.06303, generate.py"
FAST_DLLM_SOURCE = "Wu et al. 2025, arXiv 2505.22618"
DREAM_SOURCE = "Ye et al. 2025, arXiv 2508.15487, generation_utils.py"
REMDM_SOURCE = "Wang et al. 2025, arXiv 2503.00307"


class MostConfident(Strategy):
    """Base of the strategies that commit a scheduled count of the most confident positions."""

    measure = TOKEN_PROBABILITY
    uses_steps = True
    uses_randomness = False
    can_remask = False

    alg_temp: Annotated[NonNegativeFloat, OffByDefault()] = 0.0
    """Sample positions without replacement from softmax(confidence / alg_temp). 0: the most confident positions."""

    @property
    def is_deterministic(self) -> bool:
        return self.alg_temp == 0.0

    def select_positions(self, state: DecodeState) -> NDArray[np.bool_]:
        confidence_M = state.confidence_M
        if self.alg_temp > 0.0:
            confidence_M = add_gumbel_noise(confidence_M, self.alg_temp, state.uniforms_M)
        return select_most_confident(confidence_M, int(state.schedule_value))


class RandomPositions(Strategy):
    """Base of the strategies that commit a scheduled count of random positions; all sets are equally likely."""

    measure = None
    uses_steps = True
    uses_randomness = True
    can_remask = False

    def unmasking_schedule(self, num_masked: int, num_steps: int, block_length: int) -> tuple[float, ...]:
        return even_tokens_per_step(num_masked, num_steps)

    def select_positions(self, state: DecodeState) -> NDArray[np.bool_]:
        return select_most_confident(state.uniforms_M, int(state.schedule_value))


class IndependentUnmasking(Strategy):
    """Base of the strategies that commit each position independently with a scheduled probability."""

    measure = None
    uses_steps = True
    uses_randomness = True
    can_remask = False

    def select_positions(self, state: DecodeState) -> NDArray[np.bool_]:
        return state.uniforms_M < state.schedule_value


class ConfidenceDependentCount(Strategy):
    """Base of the strategies whose counts follow from the confidences alone, at least one per step."""

    measure = TOKEN_PROBABILITY
    uses_steps = False
    uses_randomness = False
    can_remask = False

    def unmasking_schedule(self, num_masked: int, num_steps: int, block_length: int) -> tuple[float, ...]:
        return (1,) * num_masked


def select_most_confident(confidence_M: NDArray[np.float64], count: int) -> NDArray[np.bool_]:
    """The ``count`` most confident positions; the first ones among equals."""
    return select_first((-confidence_M).argsort(kind="stable"), count)


def select_first(order_M: NDArray[np.intp], count: int) -> NDArray[np.bool_]:
    """Mask of the first ``count`` positions of an order."""
    import numpy as np

    is_selected_M = np.zeros(len(order_M), dtype=np.bool_)
    is_selected_M[order_M[:count]] = True
    return is_selected_M


def add_gumbel_noise(
    confidence_M: NDArray[np.float64], temperature: float, uniforms_M: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Perturb confidences so that the k highest are k samples without replacement from softmax(confidence /
    temperature) (Gumbel top-k, Vieira 2014)."""
    import numpy as np

    # A uniform of 0 would give -inf; 2^-54 is below every positive uniform of 53 bits.
    noise_M = -np.log(-np.log(np.maximum(uniforms_M, 2.0**-54)))
    # The order of confidence / temperature + noise, without overflow at tiny or huge temperatures.
    return confidence_M / max(temperature, 1.0) + min(temperature, 1.0) * noise_M


def exceeds_threshold(
    confidence_M: NDArray[np.float64], threshold: float, comparison: ThresholdComparison
) -> NDArray[np.bool_]:
    return confidence_M > threshold if comparison == ">" else confidence_M >= threshold
