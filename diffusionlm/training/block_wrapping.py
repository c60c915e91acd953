"""Wrap the forward of a model's blocks as ``[runtime]`` says: compilation, activation checkpointing, NVTX ranges."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from config.training.runtime import RuntimeConfig
from diffusionlm.models.adapter_inputs import AdapterDropout, MaskedRows
from diffusionlm.models.attention import PreparedAttention
from diffusionlm.models.attention_backends import PatternAttention
from diffusionlm.models.layers import RotaryTables, compute_dtype
from diffusionlm.models.lora import find_dropout
from diffusionlm.models.moe import MoE, RoutingLog
from diffusionlm.models.transformer import Block, Transformer
from diffusionlm.optim.master_weights import MasterWeights, select_block_matrices
from profiling import nvtx, triton_setup
from profiling.torch_setup import find_compile_problem, has_amx

SAVED_OPERATORS = (
    "mm",
    "addmm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)
"""Operators whose results selective checkpointing saves: projections and torch's fused attention. Not ``bmm``, the
products of eager attention: their results are as large as the mask and modified in place. Not ``mm.out`` of experts."""

MIN_CPU_FLOPS = 1e14
"""A run of fewer is over on a CPU before the 25 seconds of compiling pay."""
MAX_VERSIONS = 64
"""Versions of a block that a process may compile, with all models in it."""

Forward = Callable[..., Tensor]
"""`Block.forward`: called with the hidden states, the rotary embedding, the prepared attention, and keyword options."""


def prepare_model(
    model: Transformer, config: RuntimeConfig, precision: torch.dtype, device: torch.device, num_tokens: int = 0
) -> MasterWeights:
    """Apply ``[runtime]`` to a model, in place, before its optimizers are built.

    Args:
        num_tokens: of the whole run; 0: unknown.

    Returns the float32 copies of weights that are stored in bfloat16, none by default.

    Raises:
        ValueError: bfloat16 weights with matrix products of another precision, or blocks that this version of torch
            compiles wrongly.
    """
    has_bfloat16_weights = config.weights == "bfloat16_with_master"
    if has_bfloat16_weights and precision != torch.bfloat16:
        raise ValueError(
            f'runtime.weights = "bfloat16_with_master", but training.precision = "auto" is '
            f'{str(precision).removeprefix("torch.")} on this processor: set training.precision = "bfloat16", which it '
            'may compute slowly, or runtime.weights = "float32"'
        )
    run_flops = 6.0 * num_tokens * sum(parameter.numel() for parameter in model.model.layers.parameters())
    if should_compile_blocks(config, device, precision, run_flops):
        compile_blocks(model)
    checkpoint_activations(model, config.activation_checkpointing)
    _add_nvtx_ranges(model)
    return MasterWeights(select_block_matrices(model) if has_bfloat16_weights else {})


def should_compile_blocks(
    config: RuntimeConfig, device: torch.device, precision: torch.dtype = torch.float32, run_flops: float = 0.0
) -> bool:
    """Resolve ``runtime.compile = "auto"``: compile where a compiler is found, unless checkpointing is selective, on a
    GPU, and on a CPU with AMX for long runs in bfloat16, whose products are so fast there that the rest takes longer.

    Raises:
        ValueError: ``runtime.compile = "blocks"``, and this version of torch compiles them wrongly.
    """
    if config.compile == "none":
        return False
    if config.compile == "blocks":
        if problem := find_compile_problem(torch.__version__, device.type):
            raise ValueError(f'runtime.compile = "blocks" {problem}, or set runtime.compile = "none"')
        return True
    if config.activation_checkpointing == "selective":
        return False
    if device.type == "cuda":
        return triton_setup.find_triton_problem() is None
    is_fast_and_long = has_amx() and precision == torch.bfloat16 and run_flops >= MIN_CPU_FLOPS
    problem = find_compile_problem(torch.__version__, device.type) or triton_setup.find_cpp_problem()
    return is_fast_and_long and problem is None


def compile_blocks(model: Transformer, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile the forward of each block at its first call. All layers share the code, so it does not grow with depth.

    A block is one graph, with its attention; masks are prepared outside. Two parts run uncompiled and split it: tiled
    attention, and experts, whose loop depends on the router's output.
    """
    triton_setup.set_kernel_rounding()
    # torch compiles eight versions of a function by default, and then runs it uncompiled with a warning.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_VERSIONS)
    dropout, masked_rows = find_dropout(model), model.masked_rows
    for block in model.model.layers:
        assert isinstance(block, Block)
        if isinstance(block.mlp, MoE):
            block.mlp.forward = _disable_compile(block.mlp.forward)  # type: ignore[method-assign]
        block.forward = _compile_forward(block, backend, dropout, masked_rows)  # type: ignore[method-assign]


def _compile_forward(
    block: Block, backend: str | Callable[..., Any], dropout: AdapterDropout | None, masked_rows: MaskedRows | None
) -> Forward:
    forward, head_dim = block.forward, block.self_attn.head_dim
    compiled = torch.compile(forward, backend=backend)
    call_attention, call_at_positions = _disable_compile(_call_attention), _disable_compile(_call_at_positions)

    def run(
        x_BLD: Tensor,
        rope: RotaryTables,
        attention: PreparedAttention,
        *,
        output_positions: Tensor | None = None,
        routings: RoutingLog | None = None,
    ) -> Tensor:
        if not torch.is_grad_enabled():  # validation has other shapes and few steps
            return forward(x_BLD, rope, attention, output_positions=output_positions, routings=routings)
        if output_positions is not None:
            torch._dynamo.maybe_mark_dynamic(output_positions, 0)
            if dropout is not None and dropout.output_tokens is not None:
                torch._dynamo.maybe_mark_dynamic(dropout.output_tokens, 0)
            if masked_rows is not None and masked_rows.outputs_P1 is not None:
                torch._dynamo.maybe_mark_dynamic(masked_rows.outputs_P1, 0)
        q_0L1H = x_BLD.new_empty((0, x_BLD.shape[1], 1, head_dim), dtype=compute_dtype(x_BLD))
        traceable = attention.traceable(q_0L1H)
        if traceable is None:
            traceable = _UncompiledAttention(attention, call_attention, call_at_positions)
        # A new list: its length is a constant of the compiled code, which would be compiled anew for each layer.
        block_routings = None if routings is None else RoutingLog()
        output = compiled(x_BLD, rope, traceable, output_positions=output_positions, routings=block_routings)
        if routings is not None and block_routings is not None:
            routings.routings += block_routings.routings
        return output

    return run


def _disable_compile(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compiler.disable(function)  # type: ignore[no-untyped-call, no-any-return]


def _call_attention(attention: Any, q_BQNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor) -> Tensor:
    return attention(q_BQNH, k_BSKH, v_BSKH)  # type: ignore[no-any-return]


def _call_at_positions(
    attention: Any, q_PNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, output_positions: Tensor
) -> Tensor:
    """The result is the input of other compiled code, which shall be compiled once for any number of positions."""
    out_PNH: Tensor = attention.at_positions(q_PNH, k_BSKH, v_BSKH, output_positions)
    torch._dynamo.maybe_mark_dynamic(out_PNH, 0)
    return out_PNH


@dataclass(frozen=True)
class _UncompiledAttention(PreparedAttention):
    """A prepared attention whose call the compiler does not trace."""

    attention: Any
    call: Callable[..., Tensor]
    call_at_positions: Callable[..., Tensor]

    def __call__(self, q_BQNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor) -> Tensor:
        return self.call(self.attention, q_BQNH, k_BSKH, v_BSKH)

    def at_positions(self, q_PNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, output_positions: Tensor) -> Tensor:
        return self.call_at_positions(self.attention, q_PNH, k_BSKH, v_BSKH, output_positions)


def checkpoint_activations(model: Transformer, mode: Literal["none", "selective", "full"]) -> None:
    """Recompute activations of the blocks in the backward instead of saving them. The results are bitwise equal.

    ``selective`` saves the results of `SAVED_OPERATORS`, ``full`` only the inputs of blocks. Call it after
    `compile_blocks`, so that the compiled forward is what is recomputed.
    """
    if mode == "none":
        return
    for block in model.model.layers:
        assert isinstance(block, Block)
        block.forward = _checkpoint_forward(block.forward, mode)  # type: ignore[method-assign]


def _checkpoint_forward(forward: Forward, mode: Literal["selective", "full"]) -> Forward:
    checkpoint_options: dict[str, Any] = {}
    if mode == "selective":
        checkpoint_options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _select_policy)

    def run(
        x_BLD: Tensor,
        rope: RotaryTables,
        attention: Any,
        *,
        routings: RoutingLog | None = None,
        **options: Any,
    ) -> Tensor:
        if not torch.is_grad_enabled():
            return forward(x_BLD, rope, attention, routings=routings, **options)
        if mode == "selective" and isinstance(attention, PatternAttention):
            attention = _FlexOutsidePolicy(attention)

        def compute(x_BLD: Tensor) -> tuple[Tensor, list[Any]]:
            # A new list for each computation: the recomputation must not append the routings again.
            log = None if routings is None else RoutingLog()
            return forward(x_BLD, rope, attention, routings=log, **options), [] if log is None else log.routings

        output, block_routings = checkpoint(
            compute, x_BLD, use_reentrant=False, preserve_rng_state=False, **checkpoint_options
        )
        if routings is not None:
            routings.routings += block_routings
        return output

    return run


def _select_policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Policy function of `create_selective_checkpoint_contexts`."""
    namespace, _, name = operator.name().partition("::")
    is_saved = namespace == "aten" and name in SAVED_OPERATORS
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


@dataclass(frozen=True)
class _FlexOutsidePolicy(PreparedAttention):
    """Hides FlexAttention from the policy, because torch does not compile it under a dispatch mode. It is
    recomputed."""

    attention: PatternAttention

    def __call__(self, q_BQNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor) -> Tensor:
        if self.attention.backend_for(q_BQNH) != "flex":
            return self.attention(q_BQNH, k_BSKH, v_BSKH)
        with _disable_current_modes():  # private: torch has no public way
            return self.attention(q_BQNH, k_BSKH, v_BSKH)


def _add_nvtx_ranges(model: Transformer) -> None:
    """NVTX ranges of the blocks, and at the finest level of their attention and feed-forward, for Nsight Systems."""
    blocks = {f"block {index}": block for index, block in enumerate(model.model.layers)}
    nvtx.add_module_ranges(dict(blocks), "fine")
    for name, block in blocks.items():
        assert isinstance(block, Block)
        nvtx.add_module_ranges({f"{name} attention": block.self_attn, f"{name} feed-forward": block.mlp}, "verbose")
