"""``[logging]`` of a training config."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, create_model

from config.base import NonNegativeInt, PositiveInt, Section
from logger.sinks import SINKS

if TYPE_CHECKING:

    class SinkTables(Section):
        pass

else:
    SinkTables = create_model(
        "SinkTables",
        __base__=Section,
        __module__=__name__,
        **{
            name: (sink | None, Field(default=None, description=f"{sink.__doc__} None: off."))
            for name, sink in SINKS.items()
        },
    )


class LoggingConfig(SinkTables):
    """``[logging]``: metrics and progress. metrics.jsonl is the record of a run; the sinks are copies."""

    every_steps: PositiveInt = 10
    """Steps between lines of metrics.jsonl."""
    norms_every_steps: NonNegativeInt = 0
    """Steps between lines with norms of weights and activations; 0: none."""
    progress: Literal["auto", "bar", "lines", "none"] = "auto"
    """Progress on standard error. auto: a bar in a terminal, else lines; also with NO_COLOR or TERM=dumb."""
    console: Literal["none", "json"] = "none"
    """Metrics on standard output. json: one JSON object per line, for ``jq`` and other programs; the final table then
    goes to standard error. none: only the final table."""
