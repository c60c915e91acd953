"""``[checkpoint]`` of a training config."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from config.base import NonNegativeInt, PositiveInt, Section


class CheckpointConfig(Section):
    """``[checkpoint]``: when checkpoints are written, which are kept, and what a run resumes from."""

    every_steps: PositiveInt = 500
    """Steps between checkpoints; the last step is always saved."""
    background: bool = True
    """Write checkpoints in the background, from a copy of weights and optimizer state in memory, while training goes
    on."""
    keep_last: Annotated[int, Field(ge=1)] = 2
    """Newest checkpoints to keep; older ones are removed when a newer one is complete, unless another key keeps them.
    With 1 there is no fallback if the newest is corrupt."""
    keep_best: bool = True
    """Keep the checkpoint with the lowest validation bound at its step, or the highest accuracy by evaluation.best; the
    link `best` points to it."""
    keep_every_steps: NonNegativeInt = 0
    """Keep checkpoints at multiples of this step for ever; 0: none."""
    resume: Literal["auto", "never"] = "auto"
    """auto: resume from the newest checkpoint of the run directory whose checksums verify. never: the directory must be
    new."""
    config_change: Literal["refuse", "accept"] = "refuse"
    """If the run directory has another config, other data or another chat template: refuse to resume and name the
    differences, or accept the new values."""
