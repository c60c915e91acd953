"""How a training step is computed, and what is recorded of where its time goes."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from config.base import NonNegativeInt, PositiveInt, Section

AttentionBackend = Literal["auto", "eager", "sdpa", "tiled", "flex"]
"""Implementation of attention. eager and sdpa use a dense mask; tiled and flex skip hidden keys, tiled on a CPU and flex
on CUDA. auto: the fastest for device, dtype, length and pattern."""


class RuntimeConfig(Section):
    """``[runtime]``: how a step is computed. The defaults are the fast way, and change nothing but rounding."""

    compile: Literal["auto", "none", "blocks"] = "auto"
    """blocks: torch.compile for the blocks of the model, each alone. auto: blocks on CUDA; none on a CPU, where it
    gains nothing, and where activations are kept selectively, which a compiled block does by itself."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """What of a block's activations is kept for the backward. selective: results of its projections and of fused
    attention, the rest is computed again. full: what goes into the block, all else is computed again."""
    attention_backend: AttentionBackend = "auto"
    """Implementation of attention. auto: the fastest for device, dtype, length and pattern. eager and sdpa use a dense
    mask. tiled skips hidden keys on a CPU, flex on CUDA."""
    weights: Literal["float32", "bfloat16_with_master"] = "float32"
    """Of the blocks' matrices. bfloat16_with_master: bfloat16 for forward and backward; beside it 16 bits with which
    they are float32 again for the optimizer, in checkpoints and where the model is judged. Embedding, head, norms and
    biases stay float32."""
    prefetch: bool = True
    """On CUDA, the next step's batch is copied from pinned memory while the present step is computed."""
    keep_freed_memory: bool = True
    """On a CPU with glibc, memory that a step frees stays with the process for the next one: else the system clears the
    same pages again in each step."""
    garbage_collection: NonNegativeInt = 50
    """Steps between runs of Python's garbage collector, which would else stop the loop at any time; 0: as Python does
    it."""

    @model_validator(mode="after")
    def _check_compile(self) -> Self:
        if self.compile == "blocks" and self.activation_checkpointing == "selective":
            raise ValueError(
                'compile = "blocks" with activation_checkpointing = "selective": a compiled block chooses by itself '
                'what it keeps; set compile = "none" or "auto", or activation_checkpointing = "none" or "full"'
            )
        return self


class ProfilerConfig(Section):
    """``[profiler]``: torch.profiler over some steps. Traces, and tables of where a step goes, lie in ``profile/`` of
    the run directory."""

    active: NonNegativeInt = 0
    """Recorded steps of a cycle; 0: nothing is recorded."""
    wait: NonNegativeInt = 5
    """Steps of a cycle before its warm-up."""
    warmup: NonNegativeInt = 2
    """Steps that are traced and dropped, since the first ones cost more."""
    repeat: PositiveInt = 1
    """Cycles, each with a trace of its own."""
