"""How a run is spread over ranks: processes that train one model together."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from config.base import NonNegativeInt, PositiveFloat, PositiveInt, Section


class SingleProcess(Section):
    """One process, one device."""

    strategy: Literal["single"] = "single"


class MultiProcessOptions(Section):
    """What is common to the strategies of several ranks."""

    local_ranks: Literal["auto"] | PositiveInt = "auto"
    """Ranks that ``diffusionlm-train-ddp`` starts on this machine. auto: one for each GPU, or 2 without one. Of no
    meaning under torchrun, which starts its own."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Of collectives on the training device. auto: NCCL on CUDA, gloo on a CPU."""
    timeout_seconds: PositiveFloat = 600.0
    """A collective that takes longer ends the run: a rank hangs or is gone."""
    max_restarts: NonNegativeInt = 0
    """How often ``diffusionlm-train-ddp`` starts all ranks anew, from the newest checkpoint, after one of them died."""


class DDP(MultiProcessOptions):
    """Each rank has the whole model, and gradients are summed while the backward runs."""

    strategy: Literal["ddp"] = "ddp"
    shard_optimizer: bool = True
    """Each rank keeps and updates 1 / ranks of the optimizer's state: gradients are reduce-scattered, weights
    all-gathered while the next step begins (ZeRO, Rajbhandari et al. 2020, stage 1)."""
    bucket_mib: PositiveFloat = 32.0
    """Size of the buckets in which gradients travel, in MiB."""


class FSDP(MultiProcessOptions):
    """Each rank keeps 1 / ranks of weights, gradients and optimizer state, and gathers a block's weights when it runs
    (torch's FSDP2): for what does not fit otherwise."""

    strategy: Literal["fsdp"] = "fsdp"
    reshard_after_forward: bool = True
    """Whether a block's gathered weights are dropped between forward and backward: less memory, more traffic."""


Parallel = Annotated[SingleProcess | DDP | FSDP, Field(discriminator="strategy")]
