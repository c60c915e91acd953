"""The run and its loop."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from config.base import (
    ConfigPath,
    HalfOpenFraction,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)


class RunConfig(Section):
    """``[run]``: where, on what, with which chance."""

    directory: ConfigPath
    """Everything of the run lies here: config, tokenizer, checkpoints, metrics.jsonl, summary."""
    seed: NonNegativeInt = 0
    """Of initial weights, order of the data and noise."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where there is one."""
    threads: PositiveInt | None = None
    """CPU threads of torch. None: one for each core that the process may use, or that
    its control group grants; shared by the ranks on this machine."""


class TrainingConfig(Section):
    """``[training]``: the loop."""

    batch_size: PositiveInt
    """Rows of one optimizer step."""
    micro_batch_size: PositiveInt | None = None
    """Rows of one forward; gradients are accumulated over the step. None: the whole batch."""
    max_steps: PositiveInt | None = None
    """Optimizer steps of the run; or give `epochs`."""
    epochs: PositiveInt | None = None
    """Passes over the training rows; the rows are counted first. Or give `max_steps`."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this global norm."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of matrix products (autocast); weights and losses are float32. auto: bfloat16 where the processor has it."""
    ema_decay: HalfOpenFraction = 0.0
    """Per step, of the averaged weights that validation, samples and model.safetensors then use; 0: none."""
    max_nonfinite_steps: PositiveInt = 5
    """A step with a non-finite loss or gradient, or a spike, is skipped; this many in a row end the run."""
    max_spike_deviations: PositiveFloat | None = None
    """A step whose loss or gradient norm is more than so many standard deviations above the mean of the last steps is
    a spike, and is skipped; 6 is usual. None: no step is a spike."""
    spike_window: Annotated[int, Field(ge=2)] = 128
    """Steps of that mean and deviation, skipped ones left out; none is a spike before half of them are there."""

    @model_validator(mode="after")
    def _check_run_length(self) -> Self:
        if (self.max_steps is None) == (self.epochs is None):
            raise ValueError("give either max_steps or epochs")
        micro = self.micro_batch_size
        if micro is not None and self.batch_size % micro:
            raise ValueError(f"batch_size = {self.batch_size} must be a multiple of micro_batch_size = {micro}")
        return self
