"""The graphs that torch's compiler gets of a training step with compiled blocks, recorded on the CPU as on a GPU.

Attention is the backend that a GPU selects; norms and rotary tables are those of a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from config.model import ModelConfig
from config.training.runtime import AttentionBackend
from diffusionlm.kernels.cross_entropy import LossInputs
from diffusionlm.kernels.precision import compute_dtype
from diffusionlm.models import attention, flex, layers
from diffusionlm.models.init import init_weights
from diffusionlm.models.patterns import AttentionPattern, Bidirectional, BlockDiffusion, Causal
from diffusionlm.models.transformer import Transformer
from diffusionlm.training.block_wrapping import checkpoint_activations, compile_blocks

NUM_LAYERS = 2
"""An ordinary block and the last one, which computes the output positions only."""
BATCH, LENGTH = 2, 512
SHAPE = {
    "vocab_size": 512,
    "hidden_size": 256,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
    "max_position_embeddings": LENGTH,
    "qk_norm": True,
}
DOCUMENTS = torch.arange(LENGTH).div(200, rounding_mode="floor").expand(BATCH, -1)
SEGMENTS = torch.arange(LENGTH).div(50, rounding_mode="floor").expand(BATCH, -1)
GEMMA = {
    "head_dim": 128,
    "hidden_act": "gelu_pytorch_tanh",
    "sandwich_norms": True,
    "norm_offset": True,
    "qk_norm": False,
    "attn_logit_softcapping": 50.0,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"],
}


@dataclass(frozen=True)
class StepCase:
    """A training step: its attention pattern, and what its model has in place of `SHAPE`."""

    pattern: AttentionPattern
    backend: AttentionBackend
    """What ``auto`` is on a GPU."""
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Positions of a sequence, those of both streams in block diffusion."""
        return LENGTH * self.pattern.positions_per_token


CASES = {
    "masked diffusion": StepCase(Bidirectional(), "sdpa"),
    "block diffusion": StepCase(BlockDiffusion(16), "flex"),
    "block diffusion, segments, width 128": StepCase(
        BlockDiffusion(16, DOCUMENTS, SEGMENTS), "flex", {"head_dim": 128}
    ),
    "next token, documents": StepCase(Causal(DOCUMENTS), "flex"),
    "next token, soft cap, windows, width 128": StepCase(Causal(), "flex", GEMMA),
}


@dataclass(frozen=True)
class Graph:
    """A graph that the compiler got, with its fake inputs."""

    is_backward: bool
    module: torch.fx.GraphModule
    inputs: Sequence[Any]


def make_recorder(graphs: list[Graph]) -> Callable[..., Any]:
    """A backend of ``torch.compile`` that appends the graphs it gets, with torch's decompositions, and runs them."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.compile_fx import _recursive_joint_graph_passes
    from torch._inductor.decomposition import select_decomp_table

    def record(is_backward: bool) -> Callable[..., Any]:
        def compile_graph(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            graphs.append(Graph(is_backward, module, inputs))
            return module.forward

        return compile_graph

    def partition(module: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        _recursive_joint_graph_passes(module)
        return min_cut_rematerialization_partition(module, inputs, **options)

    return aot_autograd(
        fw_compiler=record(False),
        bw_compiler=record(True),
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )


def record_graphs(
    case: StepCase, checkpointing: str = "none", num_outputs: Sequence[int] = (256,), *, is_dynamic: bool = False
) -> list[Graph]:
    """Graphs of the blocks in steps with bfloat16 autocast.

    Args:
        case: pattern and model.
        checkpointing: ``runtime.activation_checkpointing``.
        num_outputs: number of output positions of each step.
        is_dynamic: the graph of the last block is for any number of output positions, as in training; else its sizes
            are those of the step.
    """
    graphs: list[Graph] = []
    backend = make_recorder(graphs)
    torch._dynamo.reset()
    model = Transformer(ModelConfig.model_validate({**SHAPE, **case.options}), attention_backend=case.backend)
    init_weights(model, seed=0)
    compile_blocks(model, backend)
    checkpoint_activations(model, checkpointing)  # type: ignore[arg-type]
    tokens_BL = torch.zeros(BATCH, case.length, dtype=torch.int64)
    with _computed_as_on_a_gpu(), contextlib.ExitStack() as stack:
        if not is_dynamic:
            stack.enter_context(patch.object(torch._dynamo, "maybe_mark_dynamic", lambda *_: None))
        for number in num_outputs:
            positions = torch.arange(number) * 2
            loss_inputs = LossInputs(torch.zeros_like(positions), torch.ones(number))
            output = model(tokens_BL, pattern=case.pattern, output_positions=positions, loss_inputs=loss_inputs)
            output.loss_sum.backward()
    return graphs


@contextlib.contextmanager
def _computed_as_on_a_gpu() -> Iterator[None]:
    """bfloat16 autocast, the norm and the rotary tables of a GPU, and FlexAttention as there."""
    with torch.autocast("cpu", torch.bfloat16), flex_as_on_a_gpu(), norms_as_on_a_gpu():
        yield


@contextlib.contextmanager
def norms_as_on_a_gpu() -> Iterator[None]:
    """The norm, the rotation and the rotary tables of a GPU."""

    def normalize(x: Tensor, gain: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        wide = x if gain.dtype == x.dtype else x.to(torch.promote_types(x.dtype, torch.float32))
        return F.rms_norm(wide, gain.shape, gain.to(wide.dtype), eps).to(dtype)

    def build_rotary_tables(self: Transformer, positions: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        tables: tuple[Tensor, Tensor] = self.rope(positions, heads=1, dtype=compute_dtype(x))
        return tables

    with (
        patch.object(layers, "_RMSNorm", SimpleNamespace(apply=normalize)),
        patch.object(attention, "normalize_and_rotate", lambda x, norm, rope: layers.rotate(norm(x), rope)),
        patch.object(Transformer, "_build_rotary_tables", build_rotary_tables),
    ):
        yield


@contextlib.contextmanager
def flex_as_on_a_gpu() -> Iterator[None]:
    """FlexAttention with the options of an H100 and a backward.

    Its forward keeps what the backward needs if gradients are enabled.
    """
    from torch._C import DispatchKey
    from torch._higher_order_ops.flex_attention import flex_attention_backward
    from torch.nn.attention.flex_attention import _apply_kernel_options as apply_kernel_options

    def choose_kernel_options(*args: Any, **named: Any) -> Any:
        return {**apply_kernel_options(*args, **named), "OUTPUT_LOGSUMEXP": torch.is_grad_enabled()}

    def skip_flex_backward(*args: Any) -> tuple[Any, ...]:
        *tensors, score_buffers, mask_buffers = args
        return *(torch.zeros_like(tensor) for tensor in tensors[:3]), (None,) * len(score_buffers + mask_buffers)

    # Its gradients on the CPU take minutes under a soft cap, and are not needed.
    skipped = {DispatchKey.CompositeExplicitAutograd: skip_flex_backward}
    with (
        patch.dict(flex_attention_backward.py_kernels, skipped),
        patch.dict(flex_attention_backward._dispatch_cache, clear=True),
        patch("torch.nn.attention.flex_attention._apply_kernel_options", choose_kernel_options),
        patch.object(flex, "is_hopper", lambda device: True),
        patch.object(flex, "_check_backward", lambda *tensors: None),
        patch("torch.nn.attention.flex_attention._validate_device", lambda *tensors: None),
    ):
        yield
