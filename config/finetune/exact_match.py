"""``[exact_match]`` of ``diffusionlm-eval``."""

from __future__ import annotations

from typing import Literal

from config.base import NonNegativeInt, PositiveInt, Section
from config.data import TextSourceOrName
from config.generation import GenerationConfig


class ExactMatchConfig(Section):
    """``[exact_match]``: let the model answer conversations, and compare its answers with theirs."""

    source: TextSourceOrName
    """A source of conversations, as for training: their last answer is the reference, the messages before it are the
    prompt."""
    split: Literal["validation", "train"] = "validation"
    """Conversations of the source: those a training run validates on, or those it trains on."""
    max_prompts: PositiveInt = 256
    """Number of prompts: the first different ones of the split."""
    generation: GenerationConfig = GenerationConfig()
    """How answers are decoded. max_new_tokens is the canvas: an answer that has no stop token in it did not stop."""
    batch_size: PositiveInt = 32
    """Prompts that are decoded together; the answers do not depend on it."""
    seed: NonNegativeInt = 0
    """Seed of the first answer; each further one has the next."""
    samples: NonNegativeInt = 16
    """Answers that the JSON result has as text: wrong ones first."""
