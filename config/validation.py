"""``[validation]`` and ``[samples]`` of a training config."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from config.base import NonNegativeInt, PositiveInt, Section, TupleOf


class ValidationConfig(Section):
    """``[validation]``: evaluation on a fixed grid of rows and masks, so that runs compare."""

    every_steps: NonNegativeInt = 500
    """Steps between validations during the run; 0: only at the end."""
    rows: PositiveInt = 256
    """Rows of a validation during the run."""
    final_rows: PositiveInt = 1_024
    """Rows of the validation at the end."""
    num_mc_samples: PositiveInt = 4
    """Masked versions of each row, with counts spread evenly."""
    batch_size: PositiveInt = 32
    """Rows of one forward."""
    ngrams: bool = True
    """Compare with n-gram models of the training tokens at the end."""


def _check_masked_span(text: str) -> str:
    if "[MASK:" not in text:
        raise ValueError("has no hole: write [MASK:n] where n tokens are to be filled in")
    return text


class SamplesConfig(Section):
    """``[samples]``: holes filled during the run, for the eye."""

    every_steps: NonNegativeInt = 500
    """Steps between samples; 0: none."""
    infills: TupleOf[Annotated[str, AfterValidator(_check_masked_span)]] = ()
    """Texts with [MASK:n] spans."""
