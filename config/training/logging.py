"""``[logging]`` of a training config."""

from __future__ import annotations

from typing import Literal

from config.base import NonEmptyStr, NonNegativeInt, PositiveFloat, PositiveInt, Section, StrTuple, TupleOf

Artifact = Literal["checkpoints", "tokenizer", "samples"]


class WandbConfig(Section):
    """``[logging.wandb]``: a copy of the metrics at Weights & Biases, on if this table exists. Its errors are reported
    once and never end a run."""

    project: NonEmptyStr = "diffusionlm"
    """Project at Weights & Biases."""
    entity: NonEmptyStr | None = None
    """User or team. None: the default of the API key."""
    name: NonEmptyStr | None = None
    """Name of the run. None: the name of the run directory."""
    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """auto: WANDB_MODE if it is set, else online if there is an API key, else offline."""
    tags: StrTuple = ()
    """Tags of the run."""
    artifacts: TupleOf[Artifact] = ()
    """Uploads at the end: the newest checkpoint, the tokenizer, a table of the samples. A checkpoint temporarily needs
    its size once more on the disk."""
    timeout_seconds: PositiveFloat = 60.0
    """Timeout for starting the W&B run, and for the last uploads at its end. `wandb sync` uploads the rest."""


class TensorBoardConfig(Section):
    """``[logging.tensorboard]``: a copy of the metrics for TensorBoard, in ``tensorboard/`` of the run directory."""

    enabled: bool = False
    """Write the event files."""


class LoggingConfig(Section):
    """``[logging]``: metrics and progress. metrics.jsonl is the record of a run; the other sinks are copies."""

    every_steps: PositiveInt = 10
    """Steps between lines of metrics.jsonl."""
    norms_every_steps: NonNegativeInt = 0
    """Steps between lines with norms of weights and activations; 0: none."""
    progress: Literal["auto", "bar", "lines", "none"] = "auto"
    """Progress on standard error. auto: a bar in a terminal, else lines; also with NO_COLOR or TERM=dumb."""
    console: Literal["none", "json"] = "none"
    """Metrics on standard output. json: one JSON object per line, for ``jq`` and other programs; the final table then
    goes to standard error. none: only the final table."""
    wandb: WandbConfig | None = None
    """None: nothing is sent to Weights & Biases."""
    tensorboard: TensorBoardConfig = TensorBoardConfig()
