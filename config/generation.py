"""How masked positions become text: the settings of one generation or infilling."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from config.base import NonNegativeFloat, NonNegativeInt, PositiveFraction, PositiveInt, Probability, Section, TupleOf

RemaskingStrategy = Literal["low_confidence", "random", "topk_margin", "entropy", "sequential", "threshold"]

DEFAULT_CONFIDENCE_THRESHOLD = 0.9
"""Fast-dLLM's (Wu et al. 2025)."""


class GenerationConfig(Section):
    """``[generation]``: decoding. The defaults are LLaDA's: greedy, the most confident position first."""

    max_new_tokens: PositiveInt = 64
    """New tokens of a prompt, exactly so many unless a stop token comes first. Not used for infilling."""
    attention: Literal["bidirectional", "block_causal"] | None = None
    """bidirectional: every position sees the whole text, as LLaDA. block_causal: its block and those before it, as
    SDAR. None: what the model was trained with (block_length in its config.json)."""
    block_length: PositiveInt | None = None
    """Masked positions are filled in blocks of this many, left to right. Bidirectional: counted from the first masked
    position, and all later masks stay visible; the last block may be shorter. Block-causal: counted from the start of
    the text. None: the model's, or, where it has none, all at once."""
    denoising_steps: PositiveInt | None = None
    """Forwards of one block. Neither this nor `steps`: one for each position. Forwards that would make nothing final
    are left out."""
    steps: PositiveInt | None = None
    """Forwards over all blocks, spread evenly, the surplus to the first blocks."""
    remasking_strategy: RemaskingStrategy = "low_confidence"
    """Which positions become final after a forward. low_confidence, random: equal counts per forward, the surplus
    first, the most probable tokens or any (LLaDA). topk_margin, entropy: Dream's counts per forward, by the gap between
    the two best tokens or by the least entropy. sequential: equal counts, the first masked positions (SDAR).
    threshold: every token of at least `confidence_threshold`, at least the best one (Fast-dLLM); the number of
    forwards follows."""
    confidence_threshold: Probability | None = None
    """Of remasking_strategy = "threshold"; None there: 0.9."""
    temperature: NonNegativeFloat = 0.0
    """Of the tokens' choice. 0: the most probable token, the lowest id among equals."""
    top_k: PositiveInt | None = None
    """Choose among the k most probable tokens; None: among all."""
    top_p: PositiveFraction = 1.0
    """Choose among the fewest most probable tokens that hold this much probability together, after top_k; 1: all."""
    confidence_from: Literal["filtered", "unfiltered"] = "unfiltered"
    """Probabilities that confidences are read from: after temperature (1 where it is 0), top_k and top_p, as Dream
    does, or the model's own, as LLaDA does."""
    stop_token_ids: TupleOf[NonNegativeInt] | None = None
    """The text ends before the first of these; not for infilling. None: the model's ends of text. []: never."""
    suppress_token_ids: TupleOf[NonNegativeInt] = ()
    """Never chosen; the mask token never is in any case."""

    @model_validator(mode="after")
    def _keys_fit(self) -> Self:
        for name in ("steps", "denoising_steps"):
            if getattr(self, name) is not None and self.remasking_strategy == "threshold":
                raise ValueError(
                    f'{name} = {getattr(self, name)} has no effect with remasking_strategy = "threshold", which takes '
                    "as many forwards as the confidences need: remove it, or choose another strategy"
                )
        if self.steps is not None and self.denoising_steps is not None:
            raise ValueError(
                f"steps = {self.steps} (over all blocks) and denoising_steps = {self.denoising_steps} (of each block) "
                "say the same thing twice: remove one"
            )
        if self.confidence_threshold is not None and self.remasking_strategy != "threshold":
            raise ValueError(
                f'confidence_threshold = {self.confidence_threshold} needs remasking_strategy = "threshold", not '
                f'"{self.remasking_strategy}"'
            )
        return self
