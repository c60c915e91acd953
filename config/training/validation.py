"""``[validation]`` and ``[samples]`` of a training config."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from config.base import NonNegativeInt, PositiveInt, Section, TupleOf


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
