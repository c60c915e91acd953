"""How masked positions become text: the settings of one generation or infilling, and the strategies there are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, Self

from pydantic import model_validator

from config.base import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    Probability,
    Section,
    TupleOf,
)

RemaskingStrategy = Literal[
    "low_confidence",
    "random",
    "random_topk",
    "sequential",
    "low_confidence_static",
    "low_confidence_dynamic",
    "entropy_bounded",
    "threshold",
    "factor",
    "origin",
    "maskgit_plus",
    "topk_margin",
    "entropy",
    "ancestral",
    "first_hitting",
    "equal_counts",
    "p2",
    "remdm_cap",
    "remdm_loop",
]
ConfidenceFrom = Literal["filtered", "unfiltered"]
ThresholdComparison = Literal[">", ">="]
ThresholdFallback = Literal["quota", "leftmost", "one"]

DEFAULT_NEW_TOKENS = 64
"""New tokens of a prompt where neither max_new_tokens nor total_length says how many."""


@dataclass(frozen=True)
class StrategyInfo:
    """What is known of a remasking strategy before any model is there."""

    family: str
    """Who decodes so."""
    source: str
    """Where the rule was published."""
    keys: tuple[str, ...]
    """Options of `GenerationConfig` that have an effect with it, of those that do not with some other strategy."""
    temperature: float = 0.0
    """Where the config gives none."""
    confidence_from: ConfidenceFrom | None = None
    """Where the config gives none. None: the strategy looks at no confidences."""
    confidence_threshold: float | None = None
    """Where the config gives none. None: the strategy has no threshold."""
    threshold_comparison: ThresholdComparison | None = None
    """Where the config gives none."""


_STEPS = ("steps", "denoising_steps")
_CONFIDENCE_KEYS = ("confidence_from", "defer_token_ids")
_RANKED = (*_STEPS, *_CONFIDENCE_KEYS, "alg_temp")
_THRESHOLD = (*_CONFIDENCE_KEYS, "confidence_threshold", "threshold_comparison")
_LOOP = ("remdm_eta", "remdm_t_on", "remdm_t_off", "remdm_alpha_on")

_LLADA = "Nie et al. 2025, arXiv 2502.09992, generate.py"
_SDAR = "Cheng et al. 2025, arXiv 2510.06303, generate.py"
_FAST = "Wu et al. 2025, arXiv 2505.22618"
_DREAM = "Ye et al. 2025, arXiv 2508.15487, generation_utils.py"
_MDLM = "Sahoo et al. 2024, arXiv 2406.07524"
_REMDM = "Wang et al. 2025, arXiv 2503.00307"

STRATEGIES: Mapping[RemaskingStrategy, StrategyInfo] = MappingProxyType(
    {
        "low_confidence": StrategyInfo("LLaDA", _LLADA, _RANKED, confidence_from="unfiltered"),
        "random": StrategyInfo("LLaDA", _LLADA, _STEPS),
        "random_topk": StrategyInfo(
            "LLaDA",
            "LLaDA's low_confidence with jitter 1e-6",
            (*_STEPS, *_CONFIDENCE_KEYS),
            confidence_from="unfiltered",
        ),
        "sequential": StrategyInfo("SDAR", _SDAR, _STEPS),
        "low_confidence_static": StrategyInfo("SDAR", _SDAR, _RANKED, confidence_from="filtered"),
        "low_confidence_dynamic": StrategyInfo(
            "SDAR",
            _SDAR,
            (*_STEPS, *_THRESHOLD, "threshold_fallback"),
            confidence_from="filtered",
            confidence_threshold=0.85,
            threshold_comparison=">",
        ),
        "entropy_bounded": StrategyInfo(
            "SDAR",
            "Ben-Hamu et al. 2025, arXiv 2505.24857, as in JetEngine",
            (*_CONFIDENCE_KEYS, "entropy_bound"),
            confidence_from="filtered",
        ),
        "threshold": StrategyInfo(
            "Fast-dLLM",
            _FAST,
            _THRESHOLD,
            confidence_from="unfiltered",
            confidence_threshold=0.9,
            threshold_comparison=">=",
        ),
        "factor": StrategyInfo("Fast-dLLM", _FAST, (*_CONFIDENCE_KEYS, "factor"), confidence_from="unfiltered"),
        "origin": StrategyInfo("Dream", _DREAM, _STEPS),
        "maskgit_plus": StrategyInfo("Dream", _DREAM, _RANKED, confidence_from="filtered"),
        "topk_margin": StrategyInfo("Dream", _DREAM, _RANKED, confidence_from="filtered"),
        "entropy": StrategyInfo("Dream", _DREAM, _RANKED, confidence_from="filtered"),
        "ancestral": StrategyInfo("MDLM", _MDLM, _STEPS, temperature=1.0),
        "first_hitting": StrategyInfo("MDLM", "Zheng et al. 2024, arXiv 2409.02908", (), temperature=1.0),
        "equal_counts": StrategyInfo("MDLM", "first_hitting with equal counts a forward", _STEPS, temperature=1.0),
        "p2": StrategyInfo(
            "P2",
            "Peng et al. 2025, arXiv 2502.03540, as in Open-dLLM",
            (*_STEPS, *_CONFIDENCE_KEYS),
            confidence_from="filtered",
        ),
        "remdm_cap": StrategyInfo("ReMDM", _REMDM, (*_STEPS, "remdm_eta"), temperature=1.0),
        "remdm_loop": StrategyInfo("ReMDM", _REMDM, (*_STEPS, *_LOOP), temperature=1.0),
    }
)
"""Every strategy: the defaults and checks of decoding, and what the documentation says of them, are read off here."""

DEFAULT_THRESHOLD_FALLBACK: ThresholdFallback = "quota"
DEFAULT_FACTOR = 1.0
DEFAULT_ENTROPY_BOUND = 0.35
DEFAULT_REMDM_ETA = 0.02
DEFAULT_REMDM_T_ON = 0.55
DEFAULT_REMDM_T_OFF = 0.05
DEFAULT_REMDM_ALPHA_ON = 0.9


class GenerationConfig(Section):
    """``[generation]``: decoding. The defaults are those of the model's family: LLaDA's, SDAR's or Dream's."""

    max_new_tokens: PositiveInt | None = None
    """New tokens of a prompt, exactly so many unless a stop token comes first. None: 64. Not used for infilling."""
    total_length: PositiveInt | None = None
    """In place of max_new_tokens: tokens of the prompt and new tokens together."""
    attention: Literal["bidirectional", "block_causal"] | None = None
    """bidirectional: every position sees the whole text, as LLaDA. block_causal: its block and those before it, as
    SDAR. None: what the model was trained with (block_length in its config.json)."""
    cache: Literal["none", "prefix", "dual", "block"] | None = None
    """Keys and values that are kept from one forward to the next. block: those of finished blocks; exact, for
    block-causal attention. prefix, dual: those before the block, or all outside it, renewed once a block (Fast-dLLM);
    approximate, for bidirectional attention. None: block where attention is block-causal, else none."""
    canvas: Literal["fixed", "growing"] = "fixed"
    """fixed: all masks are there from the start. growing: the text ends with the current block (LLaDA's "origin");
    for bidirectional attention."""
    block_length: PositiveInt | None = None
    """Masked positions are filled in blocks of this many, left to right. Bidirectional: counted from the first masked
    position, and all later masks stay visible; the last block may be shorter. Block-causal: counted from the start of
    the text. None: the model's, or, where it has none, all at once."""
    denoising_steps: PositiveInt | None = None
    """Forwards of one block. Neither this nor `steps`: one for each position. Forwards that would make nothing final
    are left out."""
    steps: PositiveInt | None = None
    """Forwards over all blocks, spread evenly, the surplus to the first blocks."""
    remasking_strategy: RemaskingStrategy | None = None
    """Which positions become final after a forward. LLaDA, equal counts per forward, the surplus first:
    low_confidence (the most probable tokens), random (any), random_topk (the most probable ones, any among those equal
    to 6 decimals). SDAR, equal counts of a whole block: sequential (the first masked positions),
    low_confidence_static (the most probable tokens), low_confidence_dynamic (all above `confidence_threshold`, or
    `threshold_fallback`); entropy_bounded (the most certain ones while their entropies together stay below
    `entropy_bound`). Fast-dLLM: threshold (all of at least `confidence_threshold`, at least the best one), factor (the
    n-th best while its probability is at least 1 - `factor` / (n + 1)). Dream, its counts per forward: maskgit_plus,
    topk_margin, entropy (by probability, by the gap between the two best tokens, by the least entropy); origin (each
    position by chance). MDLM: ancestral (each by chance), first_hitting (one at random), equal_counts (equal counts at
    random). With tokens that may become masks again: p2 (the least confident), remdm_cap, remdm_loop (by chance).
    None: low_confidence_dynamic of SDAR's models, entropy of Dream's, low_confidence of all others."""
    confidence_threshold: Probability | None = None
    """Of threshold (None: 0.9) and low_confidence_dynamic (None: 0.85)."""
    threshold_comparison: ThresholdComparison | None = None
    """What a confidence equal to the threshold counts for. None: ">" for low_confidence_dynamic, ">=" for threshold."""
    threshold_fallback: ThresholdFallback | None = None
    """Of low_confidence_dynamic, where fewer pass the threshold than the forward should settle. quota: that many, the
    most confident (SDAR). leftmost: that many, the first ones (JetEngine). one: those that pass, and the best one
    always (LMDeploy); the number of forwards follows. None: quota."""
    factor: PositiveFloat | None = None
    """Of factor. None: 1. More settles more tokens a forward."""
    entropy_bound: PositiveFloat | None = None
    """Of entropy_bounded, in nats. None: 0.35."""
    alg_temp: NonNegativeFloat = 0.0
    """Of the strategies that settle the most confident positions, a given count per forward: positions are drawn
    without replacement from softmax(confidence / alg_temp). 0: the best."""
    remdm_eta: PositiveFraction | None = None
    """Of remdm_cap: the greatest probability with which a token becomes a mask again in a step; of remdm_loop: that
    probability. None: 0.02."""
    remdm_t_on: Fraction | None = None
    """Of remdm_loop: time, from 1 down to 0, from which on tokens become masks again. None: 0.55."""
    remdm_t_off: Fraction | None = None
    """Of remdm_loop: time at which that ends. None: 0.05."""
    remdm_alpha_on: Fraction | None = None
    """Of remdm_loop: share of tokens that are not masks between these times. None: 0.9."""
    temperature: NonNegativeFloat | None = None
    """Of the tokens' choice. 0: the most probable token, the lowest id among equals. None: 1 for ancestral,
    first_hitting, equal_counts, remdm_cap and remdm_loop, 0 for all others."""
    top_k: PositiveInt | None = None
    """Choose among the k most probable tokens; None: among all."""
    top_p: PositiveFraction = 1.0
    """Choose among the fewest most probable tokens that hold this much probability together, after top_k; 1: all."""
    confidence_from: ConfidenceFrom | None = None
    """Probabilities that confidences are read from: after temperature (1 where it is 0), top_k and top_p, or the
    model's own. None: unfiltered for LLaDA's and Fast-dLLM's strategies, filtered for SDAR's, Dream's and p2."""
    cfg_scale: NonNegativeFloat = 0.0
    """Classifier-free guidance: logits = u + (cfg_scale + 1) (c - u), where u are those with everything that was given
    masked. 0: none; otherwise every forward is two."""
    stop_token_ids: TupleOf[NonNegativeInt] | None = None
    """The text ends before the first of these; not for infilling. None: the model's ends of text. []: never."""
    suppress_token_ids: TupleOf[NonNegativeInt] = ()
    """Never chosen; the mask token never is in any case."""
    defer_token_ids: TupleOf[NonNegativeInt] = ()
    """A position whose proposed token is one of these is settled last, for strategies that look at confidences."""

    @model_validator(mode="after")
    def _check_keys_agree(self) -> Self:
        if self.max_new_tokens is not None and self.total_length is not None:
            raise ValueError(
                f"max_new_tokens = {self.max_new_tokens} and total_length = {self.total_length} (the prompt and "
                "the new tokens) say the same thing twice: remove one"
            )
        if self.steps is not None and self.denoising_steps is not None:
            raise ValueError(
                f"steps = {self.steps} (over all blocks) and denoising_steps = {self.denoising_steps} (of each block) "
                "say the same thing twice: remove one"
            )
        self.check_strategy()
        return self

    def check_strategy(self) -> None:
        """The options fit the strategy; without one, which only a model can tell, nothing is known yet.

        Raises:
            ValueError: an option has no effect with it, or options contradict each other.
        """
        if self.remasking_strategy is None:
            return
        name, strategy = self.remasking_strategy, STRATEGIES[self.remasking_strategy]
        for key in STRATEGY_OPTION_KEYS:
            value = getattr(self, key)
            if value != type(self).model_fields[key].get_default() and key not in strategy.keys:
                takers = [other for other, known in STRATEGIES.items() if key in known.keys]
                others = f"one that takes it: {', '.join(takers)}" if len(takers) < 6 else "another strategy"
                raise ValueError(
                    f'{key} = {_format_toml_value(value)} has no effect with remasking_strategy = "{name}": remove it, or choose '
                    f"{others}"
                )
        if self.threshold_fallback == "one":
            for key in _STEPS:
                if getattr(self, key) is not None:
                    raise ValueError(
                        f'{key} = {getattr(self, key)} has no effect with threshold_fallback = "one", which takes as '
                        "many forwards as the confidences need: remove one of the two"
                    )
        if name == "remdm_loop":
            self._check_loop()

    def _check_loop(self) -> None:
        start, end = (
            _value_or_default(self.remdm_t_on, DEFAULT_REMDM_T_ON),
            _value_or_default(self.remdm_t_off, DEFAULT_REMDM_T_OFF),
        )
        if start <= end:
            raise ValueError(f"remdm_t_on = {start} must be more than remdm_t_off = {end}: time runs from 1 down to 0")
        eta, alpha = (
            _value_or_default(self.remdm_eta, DEFAULT_REMDM_ETA),
            _value_or_default(self.remdm_alpha_on, DEFAULT_REMDM_ALPHA_ON),
        )
        if eta * alpha - (1.0 - alpha) > 1e-12:  # 1 - 0.8 is a little less than 0.2
            raise ValueError(
                f"remdm_eta = {eta} is more than {(1.0 - alpha) / alpha:.4g}, the share of tokens that "
                f"remdm_alpha_on = {alpha} allows to become masks again in a step: lower one of the two"
            )


STRATEGY_OPTION_KEYS = tuple(
    key for key in GenerationConfig.model_fields if any(key in strategy.keys for strategy in STRATEGIES.values())
)
"""Options that have an effect with some strategies only."""


def _value_or_default(value: float | None, default: float) -> float:
    return default if value is None else value


def _format_toml_value(value: object) -> str:
    """As in TOML."""
    if isinstance(value, str):
        return f'"{value}"'
    return str(list(value)) if isinstance(value, tuple) else str(value)
