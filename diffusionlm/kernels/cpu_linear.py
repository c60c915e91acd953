"""Matrix products with weights on a CPU, without gradients: the fastest of torch's ways for a few rows.

The ways differ in rounding alone.

Shapes: T rows, I input features, O output features.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from profiling.machine import read_processor_vendor

TRANSPOSED_PRODUCT_ROWS = (2, 3, 4)
"""Numbers of rows for which W x^T is faster than x W^T (fp32, MKL of torch 2.15, one core); from 5 on it varies."""
TRANSPOSED_PRODUCT_MAX_INPUTS = 1024
"""With more input features W x^T is not always faster."""


def linear_without_gradient(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """``x W^T + b`` of rows [..., I], contiguous, [..., O]."""
    num_rows = x.numel() // weight_OI.shape[1]
    if not num_rows or not _is_fp32_on_cpu(x, weight_OI):
        return F.linear(x, weight_OI, bias_O)
    if num_rows in TRANSPOSED_PRODUCT_ROWS and weight_OI.shape[1] <= TRANSPOSED_PRODUCT_MAX_INPUTS:
        return multiply_transposed(x, weight_OI, bias_O)
    return (multiply_by_onednn if prefers_onednn() else F.linear)(x, weight_OI, bias_O)


def multiply_transposed(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Compute ``W x^T``, and transpose it."""
    out = torch.mm(weight_OI, x.flatten(0, -2).t()).t().contiguous().view(*x.shape[:-1], -1)
    return out if bias_O is None else out.add_(bias_O)


def multiply_by_onednn(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """The product of oneDNN in fp32; `torch.nn.functional.linear` takes MKL's."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight_OI, bias_O, "none", [], "")
    return product


@functools.cache
def prefers_onednn() -> bool:
    """Whether oneDNN is there and faster: on AMD's CPUs, where MKL does not use AVX-512."""
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    has_product = has_onednn and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return has_product and read_processor_vendor(Path("/")) == "AuthenticAMD"


def _is_fp32_on_cpu(x: Tensor, weight: Tensor) -> bool:
    """Also False inside of a compiled graph, whose compiler chooses its products."""
    return (
        x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )
