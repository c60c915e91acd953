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


KEY_HINTS = {
    "logging.backend": 'is [logging.wandb], [logging.tensorboard] enabled = true or logging.console = "json" here',
    "logging.run_name": "is called logging.wandb.name here; the run itself has the name of run.directory",
    "logging.architecture": "is in the config, which Weights & Biases is given whole",
    "logging.dataset": "is in the config, which Weights & Biases is given whole",
    "logging.wandb.architecture": "is in the config, which Weights & Biases is given whole",
    "logging.wandb.dataset": "is in the config, which Weights & Biases is given whole",
    "logging.wandb.enabled": 'is whether [logging.wandb] is there at all; logging.wandb.mode = "disabled" is off',
    "logging.wandb.run_name": "is called logging.wandb.name here",
    "logging.wandb.run_id": "is made, and kept in the run directory",
    "logging.log_activation_norms": "is called logging.norms_every_steps here (0: none)",
    "logging.log_weight_norms": "is called logging.norms_every_steps here (0: none)",
    "logging.log_grad_norms": "is metrics.grad_l2_norm here, always",
    "logging.log_p_mask_bucket_loss": "is metrics.loss_by_masked_fraction here, always",
    "logging.p_mask_bucket_edges": "are fifths here: metrics.loss_by_masked_fraction/0.2-0.4 and so on",
    "logging.val_log_every": "is called validation.every_steps here",
    "logging.val_log_samples": "is called samples.every_steps here",
}
"""Keys of related projects, and where the same thing is said here."""
