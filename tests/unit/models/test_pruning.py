"""The last block computes output positions only: the same numbers for every pattern and backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diffusionlm.models.patterns import (
    AttentionPattern,
    BlockCausal,
    BlockDiffusion,
    Causal,
    DenseBias,
    PromptAndOwnBlock,
)
from tests.conftest import MakeModel

DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]])
IS_PROMPT = torch.tensor([[True] * 4 + [False] * 6])
BIAS = torch.randn(10, 10, generator=torch.Generator().manual_seed(1))
ROWS = torch.tensor([0, 3, 4, 8, 11, 16])
CASES: dict[str, tuple[AttentionPattern, dict[str, Any]]] = {
    "noisy and clean halves of documents": (BlockDiffusion(2, DOCUMENTS), {}),
    "answer blocks": (PromptAndOwnBlock(3, IS_PROMPT), {}),
    "a bias": (DenseBias(BIAS), {}),
    "windows": (Causal(), {"layer_types": ("full_attention", "sliding_attention"), "sliding_window": 3}),
    "packed": (BlockCausal(3, DOCUMENTS.repeat_interleave(2, dim=1)), {"attention_bias": True}),
    "soft caps": (
        BlockDiffusion(2),
        {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 4.0, "sandwich_norms": True, "norm_offset": True},
    ),
    "experts": (Causal(), {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}),
}


@pytest.mark.parametrize("backend", ["auto", "eager", "sdpa", "tiled"])
@pytest.mark.parametrize("case", CASES)
def test_output_positions_equal_the_full_forward(tiny_model: MakeModel, case: str, backend: str) -> None:
    pattern, overrides = CASES[case]
    if (case == "a bias" and backend == "tiled") or (case == "soft caps" and backend in ("sdpa", "tiled")):
        pytest.skip("refused, as other tests have it")
    model = tiny_model(torch.float64, backend=backend, **overrides)
    tokens = torch.randint(0, 19, (2, 10), generator=torch.Generator().manual_seed(3))
    full = model(tokens, pattern=pattern).flatten(0, 1)[ROWS]
    part = model(tokens, pattern=pattern, output_positions=ROWS)
    torch.testing.assert_close(part, full, rtol=1e-12, atol=1e-12)
    parameters, cotangent = list(model.parameters()), torch.randn(full.shape, dtype=torch.float64)
    ours = torch.autograd.grad(part, parameters, cotangent)
    for first, second in zip(ours, torch.autograd.grad(full, parameters, cotangent), strict=True):
        torch.testing.assert_close(first, second, rtol=1e-10, atol=1e-10)
