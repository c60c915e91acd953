"""``[run]``, ``[training]`` and ``[checkpoint]`` of a training config."""

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
    TupleOf,
    check_distinct,
)
from config.model import VisionPart


class RunConfig(Section):
    """``[run]``: run directory, seed, device and CPU threads."""

    directory: ConfigPath
    """Directory of everything the run writes: config, tokenizer, checkpoints, metrics.jsonl, summary."""
    seed: NonNegativeInt = 0
    """Seed of the initial weights, the order of the data, and the noise."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA if there is a device, else the CPU."""
    threads: PositiveInt | None = None
    """CPU threads of torch. None: OMP_NUM_THREADS in a single process, else one per core that the process (or its
    control group) may use, divided among the ranks on this machine."""


class TrainingConfig(Section):
    """``[training]``: batch size, length, precision and stability of the training loop."""

    batch_size: PositiveInt
    """Sequences of an optimizer step, over all ranks."""
    micro_batch_size: PositiveInt | None = None
    """Sequences of a forward on a rank; gradients are accumulated over the step. None: no accumulation."""
    max_steps: PositiveInt | None = None
    """Optimizer steps of the run. Alternative to `epochs`."""
    epochs: PositiveInt | None = None
    """Passes over the training sequences, which are counted first. Alternative to `max_steps`."""
    max_grad_norm: PositiveFloat = 1.0
    """Clip gradients to this global L2 norm."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of matrix products (autocast); weights and losses are float32. auto: bfloat16 if the hardware supports
    it."""
    ema_decay: HalfOpenFraction = 0.0
    """Decay per step of an exponential moving average of the weights, which validation, samples and model.safetensors
    then use. 0: no average."""
    freeze: TupleOf[VisionPart] = ()
    """Parts of a vision tower that are not trained: "vision" (patch embedding, position table and blocks) and "merger"
    (what projects their outputs to the text)."""
    neftune_alpha: PositiveFloat | None = None
    """Add uniform noise in +- alpha / sqrt(L d) to the input embeddings of training (NEFTune, Jain et al. 2023), for
    the L tokens of a conversation or text, packed or not, and the hidden size d; 5 to 15 are usual. None: no noise."""
    max_nonfinite_steps: PositiveInt = 5
    """A step with a non-finite loss or gradient, or a spike, is skipped. This many in a row end the run."""
    max_spike_deviations: PositiveFloat | None = None
    """A step is a spike, and is skipped, if its loss or gradient norm is more than this many standard deviations above
    the mean of the last steps; 6 is usual. None: no step is a spike."""
    spike_window: Annotated[int, Field(ge=2)] = 128
    """Steps of that mean and deviation, without skipped ones. No step is a spike before half of them are complete."""

    @model_validator(mode="after")
    def _check_run_length(self) -> Self:
        if (self.max_steps is None) == (self.epochs is None):
            raise ValueError("max_steps and epochs are alternatives: set one of them")
        micro = self.micro_batch_size
        if micro is not None and self.batch_size % micro:
            raise ValueError(f"batch_size = {self.batch_size} must be a multiple of micro_batch_size = {micro}")
        check_distinct({"freeze": self.freeze})
        return self


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
