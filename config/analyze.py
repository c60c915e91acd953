"""The whole config of ``diffusionlm-analyze``."""

from __future__ import annotations

from typing import Literal

from config.base import ConfigPath, NonNegativeInt, Section


class AnalyzeConfig(Section):
    """Two model directories, side by side."""

    a: ConfigPath | None = None
    """A model directory, a checkpoint or a run directory; required, here or as the first argument."""
    b: ConfigPath | None = None
    """The other one; None: only the first one is described."""
    values: bool = True
    """Compare the values of tensors that belong together, too; else only names, shapes and dtypes."""
    max_rows: NonNegativeInt = 40
    """Rows of each table that are shown; 0: all."""
    format: Literal["text", "json"] = "text"
    """text: tables. json: one JSON object."""
