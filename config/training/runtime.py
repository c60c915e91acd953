"""``[runtime]`` and ``[profiler]`` of a training config."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from config.base import NonNegativeInt, PositiveInt, Section

AttentionBackend = Literal["auto", "eager", "sdpa", "tiled", "flex"]
"""Implementation of attention. eager and sdpa use a dense mask; tiled and flex skip hidden keys, tiled on a CPU and
flex on CUDA. auto: the fastest for device, dtype, length and pattern."""


class RuntimeConfig(Section):
    """``[runtime]``: how a step is computed. The options change results by rounding only; the defaults are fast."""

    compile: Literal["auto", "none", "blocks"] = "auto"
    """blocks: compile each transformer block with torch.compile. auto: blocks on CUDA, and on a CPU with AMX in
    bfloat16 if `training.max_steps` make 1e14 FLOPs or more; none on other CPUs, where it is not faster, with selective
    activation checkpointing, which a compiled block does by itself, and without the compiler that it needs."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Activations of a block that are recomputed in the backward. none: no recomputation. selective: all except the
    outputs of projections and of fused attention. full: all except the input of the block."""
    attention_backend: AttentionBackend = "auto"
    """Implementation of attention. auto: the fastest for device, dtype, length and pattern. eager and sdpa use a dense
    mask. tiled skips hidden keys on a CPU, flex on CUDA."""
    weights: Literal["float32", "bfloat16_with_master"] = "float32"
    """Dtype of the blocks' matrices. bfloat16_with_master: bfloat16 in forward and backward, plus 16 extra bits each,
    so that the optimizer, checkpoints and evaluation use exact float32 values. Embedding, head, norms and biases are
    float32."""
    prefetch: bool = True
    """On CUDA, copy the next batch from pinned memory during the current step."""
    keep_freed_memory: bool = True
    """On a CPU with glibc, keep freed memory in the process for the next step, so that the system does not clear the
    same pages in every step."""
    garbage_collection: NonNegativeInt = 50
    """Steps between runs of Python's garbage collector, which otherwise may interrupt any step; 0: Python decides."""

    @model_validator(mode="after")
    def _check_compile(self) -> Self:
        if self.compile == "blocks" and self.activation_checkpointing == "selective":
            raise ValueError(
                'compile = "blocks" does not combine with activation_checkpointing = "selective", which a compiled '
                'block does by itself: set compile = "none" or "auto", or activation_checkpointing = "none" or "full"'
            )
        return self


class ProfilerConfig(Section):
    """``[profiler]``: torch.profiler over some steps. Traces and tables of a step's time are written to ``profile/`` in
    the run directory."""

    active: NonNegativeInt = 0
    """Recorded steps of a cycle; 0: the profiler is off."""
    wait: NonNegativeInt = 5
    """Steps of a cycle before its warm-up."""
    warmup: NonNegativeInt = 2
    """Traced steps of a cycle that are dropped, because the first ones are slower."""
    repeat: PositiveInt = 1
    """Cycles; each writes a trace."""
