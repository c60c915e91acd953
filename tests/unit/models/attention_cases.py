"""Attention written out, with random inputs, for the tests of each backend."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from diffusionlm.models.dense_attention import AttentionScale


def softmax_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, rule: AttentionScale | None = None
) -> torch.Tensor:
    """Attention on a boolean mask or a bias, [L, L], [B, L, L] or [B, N, L, L]."""
    scale, softcap = (None, None) if rule is None else (rule.scale, rule.softcap)
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    scores = torch.einsum("bqnh,bknh->bnqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    mask = mask[:, None] if mask.dim() == 3 else mask
    scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return torch.einsum("bnqk,bknh->bqnh", torch.softmax(scores, dim=-1), v)


def attention_inputs(
    length: int,
    queries: int | None = None,
    *,
    heads: tuple[int, int] = (4, 2),
    width: int = 4,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values of two rows; `heads` are those of queries and of keys."""
    shapes = [(2, queries or length, heads[0], width), *[(2, length, heads[1], width)] * 2]
    q, k, v = (torch.randn(shape).to(dtype).requires_grad_() for shape in shapes)
    return q, k, v


def assert_equal_with_gradients(
    ours: torch.Tensor, expected: torch.Tensor, inputs: tuple[torch.Tensor, ...], tolerance: float = 1e-12
) -> None:
    """Compare outputs and, with ten times the tolerance, their gradients."""
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)
    cotangent = torch.randn_like(expected)
    gradients = [torch.autograd.grad(output, inputs, cotangent) for output in (ours, expected)]
    torch.testing.assert_close(*gradients, rtol=10 * tolerance, atol=10 * tolerance)


def assert_near_with_gradients(
    ours: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    expected: torch.Tensor,
    wide_inputs: Sequence[torch.Tensor],
    tolerance: float,
) -> None:
    """Compare outputs and gradients, of any dtype and device, with those in double precision, as vectors."""
    cotangent = torch.randn_like(expected)
    gradients = torch.autograd.grad(ours, inputs, cotangent.to(ours))
    wide_gradients = torch.autograd.grad(expected, wide_inputs, cotangent)
    for our, their in zip((ours, *gradients), (expected, *wide_gradients), strict=True):
        assert our.dtype == ours.dtype
        assert (our.detach().cpu().double() - their).norm() < tolerance * their.norm()


def name_case(value: object) -> str:
    """The id of a pattern or of a window."""
    if isinstance(value, int | None):
        return f"window-{value}"
    block = getattr(value, "block_length", "")
    return f"{type(value).__name__}{block}" + ("" if getattr(value, "documents_BL", None) is None else "-documents")
