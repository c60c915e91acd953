"""The contract of a remasking strategy, which selects the masked positions of a block that a forward commits, and what
several strategies share: unmasking schedules, base classes and selection functions.

`strategies.py` holds the strategies. `config.generation` derives its keys and help texts from them, so neither module
loads torch or numpy at import: a rule imports numpy itself.

Shapes: N positions of a forward, V vocabulary, M candidate positions of one request's block, in order: the masked
ones, or all generated ones if the strategy can remask.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import BaseModel

from config.base import NonNegativeFloat, Section

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

ConfidenceFrom = Literal["filtered", "unfiltered"]

UnmaskingSchedule = Callable[[int, int, int], tuple[float, ...]]
"""(masked positions, steps and positions of a block) -> one entry per step: how many tokens it commits, or with which
probability. Counts have at most one entry per token. Probabilities are cached, so that all blocks share them."""
ThresholdComparison = Literal[">", ">="]

STEP_KEYS = ("steps", "denoising_steps")
CONFIDENCE_KEYS = ("confidence_from", "confidence_of", "defer_token_ids")


@dataclass(frozen=True)
class ConfidenceMeasure:
    """A function that computes the confidence of a position from its distribution."""

    compute: Callable[[Tensor, Tensor], Tensor]
    """(probabilities [N, V] in fp64, proposed or committed tokens [N]) -> confidence [N] in fp64."""


def _token_probability(probs_NV: Tensor, tokens_N: Tensor) -> Tensor:
    return probs_NV.gather(1, tokens_N[:, None])[:, 0]


def _top2_margin(probs_NV: Tensor, tokens_N: Tensor) -> Tensor:
    top2_N2 = probs_NV.topk(2, dim=1).values
    return top2_N2[:, 0] - top2_N2[:, 1]


def _negative_entropy(probs_NV: Tensor, tokens_N: Tensor) -> Tensor:
    return probs_NV.xlogy(probs_NV).sum(dim=1)


TOKEN_PROBABILITY = ConfidenceMeasure(_token_probability)
"""Probability of the position's token. With greedy decoding it is computed without an fp64 softmax (`sampling.py`)."""
TOP2_MARGIN = ConfidenceMeasure(_top2_margin)
"""Difference of the two highest probabilities."""
NEGATIVE_ENTROPY = ConfidenceMeasure(_negative_entropy)
"""Negative entropy of the distribution in nats."""


@dataclass(frozen=True)
class StrategyFamily:
    """Conventions that the strategies of one publication share."""

    name: str
    source: str
    """Publication or code that defines the rules."""
    confidence_from: ConfidenceFrom
    """Default of `GenerationConfig.confidence_from`."""
    temperature: float = 0.0
    """Default of `GenerationConfig.temperature`."""
    uses_whole_blocks: bool = False
    """Schedules count the whole block even if the prompt fills a part of it, and the last block is decoded to its end
    and then cut."""


LLADA = StrategyFamily("LLaDA", "Nie et al. 2025, arXiv 2502.09992, generate.py", confidence_from="unfiltered")
SDAR = StrategyFamily(
    "SDAR", "Cheng et al. 2025, arXiv 2510.06303, generate.py", confidence_from="filtered", uses_whole_blocks=True
)
FAST_DLLM = StrategyFamily("Fast-dLLM", "Wu et al. 2025, arXiv 2505.22618", confidence_from="unfiltered")
DREAM = StrategyFamily("Dream", "Ye et al. 2025, arXiv 2508.15487, generation_utils.py", confidence_from="filtered")
MDLM = StrategyFamily("MDLM", "Sahoo et al. 2024, arXiv 2406.07524", confidence_from="unfiltered", temperature=1.0)
WEDLM = StrategyFamily("WeDLM", "Tencent 2025, arXiv 2512.22737", confidence_from="unfiltered")
P2 = StrategyFamily("P2", "Peng et al. 2025, arXiv 2502.03540, as in Open-dLLM", confidence_from="filtered")
REMDM = StrategyFamily("ReMDM", "Wang et al. 2025, arXiv 2503.00307", confidence_from="unfiltered", temperature=1.0)


@dataclass(frozen=True)
class OffByDefault:
    """Mark an option (in `Annotated`) whose default turns it off: its flat key has the same default in every config,
    and every strategy accepts that value."""


@dataclass(frozen=True)
class DecodeState:
    """The inputs of a strategy for one request's block in one step."""

    confidence_M: NDArray[np.float64]
    """Computed by the strategy's `measure`; -inf where the proposed token is deferred; zeros without a measure."""
    is_masked_M: NDArray[np.bool_]
    """All True unless the strategy can remask."""
    positions_M: NDArray[np.int64]
    """In the text, ascending."""
    uniforms_M: NDArray[np.float64]
    """Random numbers in [0, 1). Undefined for a deterministic strategy."""
    schedule_value: float
    """This step's entry of `Strategy.unmasking_schedule`."""
    step: int
    """Step within the block, from 0; steps without a forward count."""
    num_steps: int
    """Length of the schedule."""


class Strategy(BaseModel, ABC):
    """Decides which positions of a block are committed after a forward.

    The fields of a subclass are its options: each has a default, and its docstring is the help text. The first line of
    the class docstring describes the rule in the help and in docs/decoding.md. A subclass with a ``name`` of its own
    must set every class variable below that has no default, itself or in a base class.
    """

    model_config = Section.model_config

    name: ClassVar[str]
    """Value of `GenerationConfig.remasking_strategy`."""
    family: ClassVar[StrategyFamily]
    source: ClassVar[str] = ""
    """Publication or code that defines the rule, if it is not the family's."""
    forwards: ClassVar[str]
    """Forwards per block, for the documentation: m masks, S steps, B positions."""
    measure: ClassVar[ConfidenceMeasure | None] = TOKEN_PROBABILITY
    """None: positions are selected before the forward, which then computes only their logits."""
    uses_steps: ClassVar[bool] = True
    """True: the number of forwards follows ``steps`` or ``denoising_steps``."""
    uses_randomness: ClassVar[bool] = False
    """True: `select_positions` reads `DecodeState.uniforms_M` whatever the options are."""
    can_remask: ClassVar[bool] = False
    """True: committed tokens of the current block may be masked again."""
    schedule: ClassVar[UnmaskingSchedule]

    @classmethod
    def option_keys(cls) -> tuple[str, ...]:
        """Keys of `GenerationConfig` that affect this strategy and not every other one."""
        return (*STEP_KEYS * cls.uses_steps, *CONFIDENCE_KEYS * (cls.measure is not None), *cls.model_fields)

    @classmethod
    def summary(cls) -> str:
        """First paragraph of the docstring, on one line."""
        return " ".join((cls.__doc__ or "").split("\n\n")[0].split())

    @property
    def is_deterministic(self) -> bool:
        """The selection depends on confidences alone."""
        return not self.uses_randomness

    @property
    def has_exact_likelihood(self) -> bool:
        """The order of unmasking follows from the model's distributions, so `sampler_likelihood` is defined."""
        return self.is_deterministic and not self.can_remask

    def check_options(self, steps: Mapping[str, int]) -> None:
        """Check that the options agree with each other and with the step keys that the config sets.

        Args:
            steps: key and value of ``steps`` or ``denoising_steps``, if set.

        Raises:
            ValueError: two options contradict each other.
        """

    def unmasking_schedule(self, num_masked: int, num_steps: int, block_length: int) -> tuple[float, ...]:
        """One entry per step of a block, passed to `select_positions` as ``schedule_value``: a positive count, or a
        probability. There may be fewer entries than ``num_steps``. After the last one nothing is masked."""
        return type(self).schedule(num_masked, num_steps, block_length)

    @abstractmethod
    def select_positions(self, state: DecodeState) -> NDArray[np.bool_]:
        """Candidates that hold a token after this step, [M]. At least one, unless the strategy selects before the
        forward or can remask."""


DREAM_FINAL_TIME = 1e-3


def even_tokens_per_step(num_masked: int, num_steps: int, block_length: int) -> tuple[int, ...]:
    """LLaDA's counts: an equal share each, the surplus one by one to the first steps; steps of 0 are left out."""
    share, surplus = divmod(num_masked, num_steps)
    return tuple(share + (1 if step < surplus else 0) for step in range(min(num_steps, num_masked)))


def whole_block_tokens_per_step(num_masked: int, num_steps: int, block_length: int) -> tuple[int, ...]:
    """SDAR's counts (generate.py): those of a whole block, also if a part of it is not masked, until nothing is
    left."""
    totals = accumulate(even_tokens_per_step(block_length, num_steps, block_length), initial=0)
    counts = (after - before for before, after in pairwise(min(num_masked, total) for total in totals))
    return tuple(count for count in counts if count)


def dream_tokens_per_step(num_masked: int, num_steps: int, block_length: int) -> tuple[int, ...]:
    """Dream's counts (generation_utils.py): a step from time t to s commits int(masked * (1 - s / t)) tokens, the last
    step the rest. Computed in fp32, as published; steps of 0 are left out."""
    fractions = _dream_unmask_fractions(num_steps)
    # Few of many steps commit anything: those in which even all masks together give one token.
    steps = (num_masked * fractions[:-1] >= 1).nonzero()[:, 0].tolist()
    remaining, counts = num_masked, []
    for step in steps:
        counts.append(int(remaining * fractions[step]))
        remaining -= counts[-1]
    return tuple(count for count in (*counts, remaining) if count)


def one_token_per_step(num_masked: int, num_steps: int, block_length: int) -> tuple[int, ...]:
    """One token in each step, however many steps are scheduled."""
    return (1,) * num_masked


def shared_by_blocks(compute: Callable[[int], tuple[float, ...]]) -> UnmaskingSchedule:
    """Make a schedule that depends on the number of steps alone, with one tuple for all blocks."""
    cached = lru_cache(maxsize=4)(compute)
    return lambda num_masked, num_steps, block_length: cached(num_steps)


@shared_by_blocks
def dream_unmask_probabilities(num_steps: int) -> tuple[float, ...]:
    """Probability with which Dream's ``origin`` commits each masked position in a step; 1 in the last one."""
    return (*_dream_unmask_fractions(num_steps)[:-1].tolist(), 1.0)


@shared_by_blocks
def linear_unmask_probabilities(num_steps: int) -> tuple[float, ...]:
    """1 - s / t for time that runs linearly from 1 to 0 (MDLM)."""
    return tuple(1.0 / (num_steps - step) for step in range(num_steps))


@shared_by_blocks
def linear_fractions(num_steps: int) -> tuple[float, ...]:
    """Fraction of all steps that are done after each step."""
    return tuple((step + 1) / num_steps for step in range(num_steps))


@lru_cache(maxsize=4)
def _dream_unmask_fractions(num_steps: int) -> Tensor:
    """1 - s / t of each step, in fp32."""
    import torch  # here, because the config imports this module

    times = torch.linspace(1.0, DREAM_FINAL_TIME, num_steps + 1, dtype=torch.float32, device="cpu")
    return 1.0 - times[1:] / times[:-1]


class MostConfident(Strategy):
    """Base of the strategies that commit a scheduled count of the most confident positions."""

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

    measure: ClassVar[ConfidenceMeasure | None] = None
    uses_randomness = True
    schedule = even_tokens_per_step

    def select_positions(self, state: DecodeState) -> NDArray[np.bool_]:
        return select_most_confident(state.uniforms_M, int(state.schedule_value))


class IndependentUnmasking(Strategy):
    """Base of the strategies that commit each position independently with a scheduled probability."""

    measure = None
    uses_randomness = True

    def select_positions(self, state: DecodeState) -> NDArray[np.bool_]:
        return state.uniforms_M < state.schedule_value


class ConfidenceDependentCount(Strategy):
    """Base of the strategies whose counts follow from the confidences alone, at least one per step."""

    uses_steps = False
    schedule = one_token_per_step


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
