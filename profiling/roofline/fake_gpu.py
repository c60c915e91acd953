"""A training step on a GPU that is not there: shapes, dtypes and operators of its forward and backward, no values.

Tensors are torch's fake ones on ``cuda``, so the project's code takes the paths of a GPU.

Shapes: B sequences, Q queries, S keys, N query heads, K key-value heads, H width of a head, C positions of a chunk, V
vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils import _foreach_utils
from torch.utils._pytree import tree_leaves

from benchmarking.implementations.matrix_products import MatrixProduct, MatrixSpec
from diffusionlm.kernels import chunked_loss
from diffusionlm.models import transformer
from diffusionlm.models.attention import PreparedAttention
from diffusionlm.models.patterns import AttentionPattern
from profiling.roofline.backward import python_backward
from profiling.roofline.operators import OperatorRecorder, PartTracker

ATTENTION = "fused_attention"
ATTENTION_BACKWARD = "fused_attention_backward"
LOSS = "loss_kernel"
RecordAttention = Callable[[Sequence[Tensor], Sequence[Tensor], bool], None]
TILE = 128
"""Queries and keys of a tile of fused attention, which is computed whole if it has a visible pair."""


class FakeGpuRecorder(OperatorRecorder):  # type: ignore[no-untyped-call]  # torch's base class
    """Records operators on fake tensors."""

    def __init__(self, tracker: PartTracker) -> None:
        super().__init__(tracker)
        self._kept: list[torch.UntypedStorage] = []  # so that none is given to two tensors; fake ones take no memory

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if not _is_on_gpu((args, kwargs)):
            with unset_fake_temporarily():  # what the host computes has values
                return func(*args, **kwargs)
        if func is torch.ops.aten._to_copy.default and not isinstance(args[0], FakeTensor):
            # Of a small tensor with values the mode itself would make a copy on a real GPU.
            return torch.empty(args[0].shape, dtype=kwargs.get("dtype", args[0].dtype), device=kwargs.get("device"))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def add(self, name: str, products: Any, reads: Sequence[Tensor], writes: Sequence[Tensor], *call: Any) -> None:
        self._kept += [tensor.untyped_storage() for tensor in (*reads, *writes)]
        super().add(name, products, reads, writes, *call)


class FusedAttention(torch.autograd.Function):
    """Stands for torch's fused attention or FlexAttention. Queries, keys and values have the width of a head last.

    ``record`` is called with the tensors that are read and written, and whether by the backward.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, record: RecordAttention) -> Tensor:
        out = torch.empty_like(q)
        log_sums = q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, log_sums)
        ctx.record = record
        record((q, k, v), (out, log_sums), False)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        gradients = tuple(torch.empty_like(tensor) for tensor in saved[:3])
        ctx.record((*saved, *grads), gradients, True)
        return (*gradients, None)


class _FakeAttention(PreparedAttention):
    def __init__(self, pattern: AttentionPattern, length: int, recorder: Callable[[], OperatorRecorder]) -> None:
        self._pairs, self._recorder = count_tile_pairs(pattern, length), recorder

    def __call__(self, q_BQNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor) -> Tensor:
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else q_BQNH.dtype
        out: Tensor = FusedAttention.apply(q_BQNH.to(dtype), k_BSKH.to(dtype), v_BSKH.to(dtype), self._record)
        return out

    def _record(self, reads: Sequence[Tensor], writes: Sequence[Tensor], is_backward: bool) -> None:
        """Add an operator with the products of each pair of a query and a key."""
        q_BQNH = reads[0]
        product = _product_of_pairs(len(q_BQNH) * q_BQNH.shape[2], self._pairs, q_BQNH.shape[3], q_BQNH.dtype)
        name, num_products = (ATTENTION_BACKWARD, 5) if is_backward else (ATTENTION, 2)
        self._recorder().add(name, [product] * num_products, reads, writes)


def count_tile_pairs(pattern: AttentionPattern, length: int, tile: int = TILE) -> int:
    """Pairs of queries and keys in the tiles that have a visible pair; all, if no mask is needed."""
    if pattern.is_unrestricted:
        return length * length
    with torch.utils._python_dispatch._disable_current_modes():
        mask = pattern.dense_mask(length)[0]
        padding = -length % tile
        padded = F.pad(mask, (0, padding, 0, padding))
        tiles = padded.view(len(padded) // tile, tile, len(padded) // tile, tile)
        return int(tiles.any(dim=3).any(dim=1).sum()) * tile * tile


def _is_on_gpu(tree: Any) -> bool:
    """Whether a tensor or device among values is the GPU."""
    return any(
        isinstance(leaf, FakeTensor) or (isinstance(leaf, torch.device) and leaf.type == "cuda")
        for leaf in tree_leaves(tree)
    )


def _attend_without_gradient(
    record: Callable[..., None], q_BNQH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, attn_mask: Tensor | None
) -> Tensor:
    """Stands for torch's fused attention over all keys."""
    out_BNQH = torch.empty_like(q_BNQH)
    reads = (q_BNQH, k_BKSH, v_BKSH) if attn_mask is None else (q_BNQH, k_BKSH, v_BKSH, attn_mask)
    heads, width = q_BNQH.shape[0] * q_BNQH.shape[1], q_BNQH.shape[3]
    product = _product_of_pairs(heads, q_BNQH.shape[2] * k_BKSH.shape[2], width, q_BNQH.dtype)
    record(ATTENTION, [product] * 2, reads, (out_BNQH,))
    return out_BNQH


def _product_of_pairs(heads: int, pairs: int, width: int, dtype: torch.dtype) -> MatrixProduct:
    """A product that has the FLOPs of so many pairs of a query and a key in each head."""
    return MatrixProduct(MatrixSpec((heads, pairs, 1), False, dtype), MatrixSpec((heads, 1, width), False, dtype))


@contextlib.contextmanager
def fake_gpu(get_recorder: Callable[[], OperatorRecorder]) -> Iterator[None]:
    """Context in which a GPU with bfloat16 seems to be there. Build in it what is used in it, on ``cuda``.

    Fused attention and the loss kernel, which fake tensors cannot enter, are recorded with the recorder that is
    returned by ``get_recorder`` when they are called.
    """

    def prepare_attention(pattern: AttentionPattern, length: int, *_: Any) -> PreparedAttention:
        return _FakeAttention(pattern, length, get_recorder)

    def load_loss_backend(backend: str) -> Callable[..., tuple[Tensor, Tensor]]:
        def compute_chunk_loss(
            logits_CV: Tensor, targets_C: Tensor, weights_C: Tensor, options: Any, needs_grad: bool
        ) -> tuple[Tensor, Tensor]:
            nll_C = logits_CV.new_empty(len(logits_CV), dtype=torch.float32)
            written = (nll_C, logits_CV) if needs_grad else (nll_C,)
            get_recorder().add(LOSS, [], (logits_CV, targets_C, weights_C), written)
            return nll_C, nll_C

        return compute_chunk_loss

    def attend(q_BNQH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, attn_mask: Tensor | None = None, **_: Any) -> Tensor:
        return _attend_without_gradient(get_recorder().add, q_BNQH, k_BKSH, v_BKSH, attn_mask)

    with contextlib.ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(python_backward())
        for name in ("is_available", "is_bf16_supported"):
            stack.enter_context(patch.object(torch.cuda, name, lambda *_, **__: True))
        # Else gradients would be clipped one by one.
        stack.enter_context(patch.object(_foreach_utils, "_foreach_supported_types", [Tensor, FakeTensor]))
        stack.enter_context(patch.object(transformer, "prepare_attention", prepare_attention))
        stack.enter_context(patch.object(chunked_loss, "load_loss_backend", load_loss_backend))
        stack.enter_context(patch.object(F, "scaled_dot_product_attention", attend))
        stack.enter_context(patch.object(Tensor, "pin_memory", lambda tensor: tensor))
        yield
