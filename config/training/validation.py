"""``[validation]`` and ``[samples]`` of a training config."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from config.base import NonNegativeFloat, NonNegativeInt, PositiveInt, Section, TupleOf


class EarlyStoppingConfig(Section):
    """``[validation.early_stopping]``: end a run whose validation bound no longer falls."""

    patience: PositiveInt = 3
    """Validations in a row without a better bound after which the run ends, as after its last step."""
    min_delta: NonNegativeFloat = 0.0
    """A bound is better if it is below the best one by more than this, in nats per token."""


class ValidationConfig(Section):
    """``[validation]``: evaluation on a fixed grid of sequences and masks, so that runs can be compared."""

    every_steps: NonNegativeInt = 500
    """Steps between validations during the run; 0: only at the end."""
    rows: PositiveInt = 256
    """Sequences of a validation during the run."""
    final_rows: PositiveInt = 1_024
    """Sequences of the validation at the end."""
    num_mc_samples: PositiveInt = 4
    """Random masks of each sequence, with evenly spaced numbers of masked tokens."""
    batch_size: PositiveInt = 32
    """Sequences of a forward."""
    ngrams: bool = True
    """At the end, compare with n-gram models of the training tokens."""
    early_stopping: EarlyStoppingConfig | None = None
    """End the run when validations every `every_steps` no longer improve; checkpoints of better ones are saved for
    `checkpoint.keep_best`. {} has the defaults. None: make all steps."""


def _check_masked_span(text: str) -> str:
    if "[MASK:" not in text:
        raise ValueError("has no masked span: write [MASK:n] in place of n tokens to fill in")
    return text


class SamplesConfig(Section):
    """``[samples]``: texts whose masked spans are filled in during the run, or prompts that are answered, to read."""

    every_steps: NonNegativeInt = 500
    """Steps between samples; 0: no samples."""
    infills: TupleOf[Annotated[str, AfterValidator(_check_masked_span)]] | None = None
    """Texts with [MASK:n] spans. None: lines of Python for the source `python-stdlib`, and passages of the validation
    text with a masked word for other text, which an autoregressive model does not fill. In a run on conversations: no
    texts, but answers to three held-out prompts."""
