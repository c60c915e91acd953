"""What a run writes while it goes, and where."""

from __future__ import annotations

from typing import Literal

from config.base import NonEmptyStr, NonNegativeInt, PositiveFloat, PositiveInt, Section, StrTuple, TupleOf

Artifact = Literal["checkpoints", "tokenizer", "samples"]


class WandbConfig(Section):
    """``[logging.wandb]``: a copy of the metrics at Weights & Biases; on where this table is there. It never ends a
    run: what goes wrong with it is said once."""

    project: NonEmptyStr = "diffusionlm"
    """Of Weights & Biases."""
    entity: NonEmptyStr | None = None
    """User or team. None: the key's."""
    name: NonEmptyStr | None = None
    """Of the run. None: that of its directory."""
    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """auto: WANDB_MODE where it is set, else online where there is a key, else offline."""
    tags: StrTuple = ()
    """Of the run."""
    artifacts: TupleOf[Artifact] = ()
    """What is uploaded at the end: the newest checkpoint, the tokenizer, a table of the samples. A checkpoint takes its
    size once more on this machine's disk meanwhile."""
    timeout_seconds: PositiveFloat = 60.0
    """So long the service may take to begin the run, and so long the end of a run waits for what is still on its way:
    `wandb sync` sends it later."""


class TensorBoardConfig(Section):
    """``[logging.tensorboard]``: a copy of the metrics for TensorBoard, in ``tensorboard/`` of the run directory."""

    enabled: bool = False
    """Write it."""


class LoggingConfig(Section):
    """``[logging]``: what is written while it runs. The record is metrics.jsonl; all else is a copy."""

    every_steps: PositiveInt = 10
    """Steps between lines of metrics.jsonl."""
    norms_every_steps: NonNegativeInt = 0
    """Steps between norms of weights and activations, which are lines of their own; 0: none."""
    progress: Literal["auto", "bar", "lines", "none"] = "auto"
    """What standard error shows to people. auto: a bar in a terminal, plain lines elsewhere."""
    console: Literal["none", "json"] = "none"
    """What standard output has beside the table at the end. json: the metrics alone, a JSON object a line, for ``jq``
    and other programs; the table goes to standard error."""
    wandb: WandbConfig | None = None
    """None: no Weights & Biases."""
    tensorboard: TensorBoardConfig = TensorBoardConfig()
