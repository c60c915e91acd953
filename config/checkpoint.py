"""``[checkpoint]`` of a training config."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from config.base import NonNegativeInt, PositiveInt, Section


class CheckpointConfig(Section):
    """``[checkpoint]``: what is kept, and what a run starts from."""

    every_steps: PositiveInt = 500
    """Steps between checkpoints; the last step is always saved."""
    background: bool = True
    """Go on with training while a checkpoint is written, from a copy in memory of weights and optimizer."""
    keep_last: Annotated[int, Field(ge=1)] = 2
    """Older ones are removed once a newer one is complete, unless something else keeps them. With 1 there is none to
    fall back to where the newest is found damaged."""
    keep_best: bool = True
    """Keep the one whose validation at the same step gave the lowest bound; the link `best` points to it."""
    keep_every_steps: NonNegativeInt = 0
    """Keep those at multiples of this for ever; 0: none."""
    resume: Literal["auto", "never"] = "auto"
    """auto: go on from the newest checkpoint of the run directory that verifies. never: the directory must be new."""
    config_change: Literal["refuse", "accept"] = "refuse"
    """What to do when the run directory was made with another config; the differences are shown."""
