"""The contract of a remasking strategy: which masked positions of a block are committed after each forward.

`strategies.py` holds the strategies. `config.generation` derives its keys and help texts from them, so neither module
loads torch or numpy at import: a rule imports numpy itself.

Shapes: N positions of a forward, V vocabulary, M candidate positions of one request's block, in order: the masked
ones, or all generated ones if the strategy can remask.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel

from config.base import Section

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

ConfidenceFrom = Literal["filtered", "unfiltered"]

STEP_KEYS = ("steps", "denoising_steps")
CONFIDENCE_KEYS = ("confidence_from", "defer_token_ids")


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
    confidence_from: ConfidenceFrom
    """Default of `GenerationConfig.confidence_from`."""
    temperature: float = 0.0
    """Default of `GenerationConfig.temperature`."""
    uses_whole_blocks: bool = False
    """Schedules count the whole block even if the prompt fills a part of it, and the last block is decoded to its end
    and then cut."""


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
    must set every class variable below, itself or in a base class.
    """

    model_config = Section.model_config

    name: ClassVar[str]
    """Value of `GenerationConfig.remasking_strategy`."""
    family: ClassVar[StrategyFamily]
    source: ClassVar[str]
    """Publication or code that defines the rule."""
    forwards: ClassVar[str]
    """Forwards per block, for the documentation: m masks, S steps, B positions."""
    measure: ClassVar[ConfidenceMeasure | None]
    """None: positions are selected before the forward, which then computes only their logits."""
    uses_steps: ClassVar[bool]
    """True: the number of forwards follows ``steps`` or ``denoising_steps``."""
    uses_randomness: ClassVar[bool]
    """True: `select_positions` reads `DecodeState.uniforms_M` whatever the options are."""
    can_remask: ClassVar[bool]
    """True: committed tokens of the current block may be masked again."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Reject an incomplete strategy when its class is defined."""
        super().__pydantic_init_subclass__(**kwargs)
        if "name" not in vars(cls):
            return
        missing = [key for key in Strategy.__annotations__ if key != "model_config" and not hasattr(cls, key)]
        missing += sorted(cls.__abstractmethods__)
        missing += [f"default of {key}" for key, option in cls.model_fields.items() if option.is_required()]
        missing += [f"docstring of {key}" for key, option in cls.model_fields.items() if not option.description]
        missing += [] if cls.__doc__ else ["docstring"]
        if missing:
            raise TypeError(f"strategy class {cls.__name__} lacks {', '.join(missing)}: define them")

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

    @abstractmethod
    def unmasking_schedule(self, num_masked: int, num_steps: int, block_length: int) -> tuple[float, ...]:
        """One entry per step of a block, passed to `select_positions` as ``schedule_value``: a positive count, or a
        probability. There may be fewer entries than ``num_steps``. After the last one nothing is masked."""

    @abstractmethod
    def select_positions(self, state: DecodeState) -> NDArray[np.bool_]:
        """Candidates that hold a token after this step, [M]. At least one, unless the strategy selects before the
        forward or can remask."""


def collect_strategies(namespace: Mapping[str, object]) -> Mapping[str, type[Strategy]]:
    """The strategies of a module by name, in order of definition.

    Raises:
        TypeError: two strategies share a name, or an option has different types.
    """
    strategies: dict[str, type[Strategy]] = {}
    annotations: dict[str, Any] = {}
    for value in namespace.values():
        if not (isinstance(value, type) and issubclass(value, Strategy) and "name" in vars(value)):
            continue
        if value.name in strategies:
            raise TypeError(f'strategy name "{value.name}" is defined twice: rename {value.__name__}')
        strategies[value.name] = value
        for key, option in value.model_fields.items():
            annotation = option.rebuild_annotation()
            if annotations.setdefault(key, annotation) != annotation:
                raise TypeError(f"option {key} of {value.__name__} has another type in an earlier strategy")
    return MappingProxyType(strategies)
