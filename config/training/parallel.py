"""``[parallel]`` of a training config: distribution over ranks (processes that train one model)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from config.base import NonNegativeInt, PositiveFloat, PositiveInt, Section
from config.model import Architecture


class SingleProcess(Section):
    """One process on one device."""

    strategy: Literal["single"] = "single"
    has_collective_forwards: ClassVar[bool] = False
    """Whether a forward needs several ranks."""
    decodes_together: ClassVar[bool] = False
    """Whether a forward needs ranks with other data."""


class MultiProcessOptions(Section):
    """Options of all strategies with several ranks."""

    local_ranks: Literal["auto"] | PositiveInt = "auto"
    """Ranks that ``diffusionlm-train-ddp`` starts on this machine. auto: one per GPU, or 2 without a GPU. torchrun
    ignores it."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Backend of collectives. auto: NCCL on CUDA, gloo on a CPU."""
    timeout_seconds: PositiveFloat = 600.0
    """A collective that takes longer ends the run, because a rank hangs or died."""
    max_restarts: NonNegativeInt = 0
    """Times that ``diffusionlm-train-ddp`` restarts all ranks from the newest checkpoint after one of them died."""
    tensor: PositiveInt = 1
    """Ranks that divide each matrix: heads, inner widths and the vocabulary. They load the same sequences. The other
    ranks, after ``tensor``, ``context`` and ``expert``, have other data."""
    sequence_norms: bool = False
    """With ``tensor``: between attention and feed-forward each rank keeps its own part of the positions, so that norms
    and the residual stream are divided as well (Korthikanti et al. 2022): less memory, the same traffic."""
    context: PositiveInt = 1
    """Ranks that divide each sequence of a training step."""
    expert: PositiveInt = 1
    """Ranks that divide the experts of each layer; each loads sequences of its own."""

    @property
    def ranks_of_model(self) -> int:
        """Ranks that have all weights together."""
        return self.tensor * self.context * self.expert

    @property
    def is_divided(self) -> bool:
        """True if a model is divided over ranks."""
        return self.ranks_of_model > 1

    @property
    def has_collective_forwards(self) -> bool:
        """Whether a forward needs several ranks."""
        return self.is_divided or isinstance(self, FSDP)

    @property
    def decodes_together(self) -> bool:
        """Whether a forward needs ranks with other data."""
        return self.expert > 1 or isinstance(self, FSDP)

    @property
    def ranks_of_data(self) -> int:
        """Ranks that load the same sequences."""
        return self.tensor * self.context

    def check_model(self, model: Architecture) -> None:
        """
        Raises:
            ValueError: the mesh does not divide the sizes of a model; names the keys.
        """
        check_tensor_ranks(model, self.tensor, "parallel.tensor")
        if self.expert > 1 and (model.num_experts == 0 or model.num_experts % self.expert):
            raise ValueError(
                f"parallel.expert = {self.expert} must divide the model's num_experts = {model.num_experts}: set it to "
                "a divisor, or to 1"
            )

    def check_ranks(self, num_ranks: int) -> None:
        """
        Raises:
            ValueError: the mesh does not divide the ranks; names the keys.
        """
        if num_ranks % self.ranks_of_model:
            raise ValueError(
                f"parallel.tensor = {self.tensor}, context = {self.context} and expert = {self.expert} need a multiple "
                f"of {self.ranks_of_model} ranks, not {num_ranks}: set parallel.local_ranks or the mesh"
            )


def check_tensor_ranks(model: Architecture, num_ranks: int, key: str) -> None:
    """Check that so many ranks can divide the matrices of a model.

    Args:
        key: names the number of ranks in the error.

    Raises:
        ValueError: they cannot; names the key of the model.
    """
    sizes = {"num_attention_heads": model.num_attention_heads}
    if not all(model.is_sparse(layer) for layer in range(model.num_hidden_layers)):
        sizes["intermediate_size"] = model.intermediate_size
    if model.num_experts and model.moe_intermediate_size is not None:
        sizes["moe_intermediate_size"] = model.moe_intermediate_size
    for name, size in sizes.items():
        if size % num_ranks:
            raise ValueError(f"{key} = {num_ranks} does not divide the model's {name} = {size}: set it to a divisor")
    num_heads = model.num_key_value_heads
    if num_heads % num_ranks and num_ranks % num_heads:
        raise ValueError(
            f"{key} = {num_ranks} neither divides the model's num_key_value_heads = {num_heads} nor is a multiple of "
            "it: set it to a divisor or a multiple"
        )


class DDP(MultiProcessOptions):
    """Data parallelism: each rank has the whole model, and gradients are reduced during the backward."""

    strategy: Literal["ddp"] = "ddp"
    shard_optimizer: bool = True
    """ZeRO stage 1 (Rajbhandari et al. 2020): each rank keeps and updates 1 / world size of the optimizer state;
    gradients are reduce-scattered, and weights are all-gathered at the beginning of the next step."""
    bucket_mib: PositiveFloat = 32.0
    """Size of a bucket of gradients in one collective, in MiB."""


class FSDP(MultiProcessOptions):
    """Fully sharded data parallelism (torch's FSDP2): each rank keeps 1 / world size of weights, gradients and
    optimizer state, and gathers the weights of a block when it runs. For models that do not fit otherwise."""

    strategy: Literal["fsdp"] = "fsdp"
    reshard_after_forward: bool = True
    """Free the gathered weights of a block between forward and backward: less memory, more communication."""


Parallel = Annotated[SingleProcess | DDP | FSDP, Field(discriminator="strategy")]
