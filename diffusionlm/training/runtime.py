"""The switches of ``[runtime]``, applied to a model and its optimizers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from config.runtime import RuntimeConfig
from diffusionlm.models.transformer import Block, Transformer
from diffusionlm.optim.build import Optimizers
from diffusionlm.optim.master_weights import MasterWeights, select_block_matrices
from diffusionlm.training.activation_checkpointing import checkpoint_activations
from profiling import memory, nvtx

DeviceSkip = Callable[[Tensor], contextlib.AbstractContextManager[None]]


def prepare_model(
    model: Transformer, config: RuntimeConfig, precision: torch.dtype, device: torch.device
) -> MasterWeights:
    """Compile, checkpoint and narrow a model, in place; before its optimizers are made.

    Raises:
        ValueError: bfloat16 weights for products of another precision.
    """
    is_narrow = config.weights == "bfloat16_with_master"
    if is_narrow and precision != torch.bfloat16:
        raise ValueError(
            f'runtime.weights = "bfloat16_with_master", but training.precision = "auto" is '
            f'{str(precision).removeprefix("torch.")} on this processor: set training.precision = "bfloat16", which it '
            'may compute slowly, or runtime.weights = "float32"'
        )
    if config.compile == "blocks" or (config.compile == "auto" and device.type == "cuda"):
        from diffusionlm.training.compilation import (  # It loads the compiler: a second.
            compile_blocks,
            should_compile_blocks,
        )

        if should_compile_blocks(config, device):
            compile_blocks(model)
    checkpoint_activations(model, config.activation_checkpointing)
    _add_nvtx_ranges(model)
    return MasterWeights(select_block_matrices(model) if is_narrow else {})


def _add_nvtx_ranges(model: Transformer) -> None:
    """Ranges of the blocks, and of what is in them, for Nsight Systems."""
    blocks = {f"block {index}": block for index, block in enumerate(model.model.layers)}
    nvtx.add_module_ranges(dict(blocks), "fine")
    for name, block in blocks.items():
        assert isinstance(block, Block)
        nvtx.add_module_ranges({f"{name} attention": block.self_attn, f"{name} feed-forward": block.mlp}, "verbose")


def find_device_skip(optimizers: Optimizers) -> DeviceSkip | None:
    """A context in which a step of the optimizers does nothing where a tensor on the device is true; None: not all of
    them can, and the host has to know. Torch's fused optimizers can, for its gradient scaler."""
    if not all(getattr(each, "_step_supports_amp_scaling", False) for each in optimizers.optimizers):
        return None

    @contextlib.contextmanager
    def skipping(skip: Tensor) -> Iterator[None]:
        for each in optimizers.optimizers:
            each.found_inf = skip.float()  # type: ignore[attr-defined]
        try:
            yield
        finally:
            for each in optimizers.optimizers:
                del each.found_inf  # type: ignore[attr-defined]

    return skipping


def describe_memory(model: Transformer, optimizers: Optimizers, peak: int, planned: int) -> str:
    """A run's peak of memory in words: what weights, their gradients and the optimizer hold, and the rest, which is
    activations, beside what was planned for them. All in bytes."""
    weights = [each.data for each in model.parameters()]
    trained = [each.data for each in model.parameters() if each.requires_grad]  # gradients are as large
    parts = memory.split_peak_memory(weights, trained, optimizers.state_dict().values(), peak)
    told = ", ".join(f"{name} {size / 2**20:,.1f} MiB" for name, size in parts.items())
    return f"memory: {told} ({planned / 2**20:,.1f} MiB by the plan); {peak / 2**20:,.1f} MiB at most"
