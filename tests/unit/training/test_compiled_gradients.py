"""Gradients of compiled blocks are those of plain ones, for every variant of a block: a fault of torch's compiler can
leave some of them zero, and the loss still falls.

`just check-torch-versions` runs this file with other versions of torch.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from config.finetune.lora import LoraConfig
from diffusionlm.kernels.cross_entropy import LossInputs
from diffusionlm.models.lora import add_adapter, find_dropout
from diffusionlm.models.patterns import AttentionPattern, Bidirectional, BlockDiffusion, Causal
from diffusionlm.models.transformer import Transformer
from diffusionlm.training.block_wrapping import compile_blocks
from profiling.torch_setup import find_compile_problem
from tests.conftest import MakeModel
from tests.training_graphs import norms_as_on_a_gpu

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")]
"""The compiler is loaded, which takes seconds."""

GEMMA = {
    "hidden_act": "gelu_pytorch_tanh",
    "sandwich_norms": True,
    "norm_offset": True,
    "scale_embeddings": True,
    "attn_logit_softcapping": 5.0,
    "query_pre_attn_scalar": 7.0,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "norms of queries and keys": ("bidirectional", {}),
    "norm offset, a key-value head for each query": ("documents", {"norm_offset": True, "num_key_value_heads": 4}),
    "biases, one key-value head": (
        "documents",
        {"qk_norm": False, "attention_bias": True, "attention_output_bias": True, "num_key_value_heads": 1},
    ),
    "gemma": ("documents", {**GEMMA, "qk_norm": False}),
    "gemma with norms of queries and keys, yarn": ("documents", {**GEMMA, "rope_scaling": YARN}),
    "experts": ("bidirectional", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}),
    "sdpa": ("two streams", {"backend": "sdpa"}),
    "eager": ("two streams", {"backend": "eager"}),
    "tiled": ("two streams", {"backend": "tiled"}),
    "flex": ("two streams", {"backend": "flex"}),
}
"""Pattern and options of each model."""
ADAPTERS: dict[str, dict[str, Any]] = {
    "dropout": {"dropout": 0.5},
    "dora": {"dora": True, "dropout": 0.5},
    "masked positions": {"dropout": 0.5, "positions": "masks"},
    "pissa, trained rows": {"init": "pissa", "trainable_tokens": (1, 5)},
    "whole modules": {"modules_to_save": ("norm", "down_proj", "embed_tokens"), "targets": ("q_proj", "up_proj")},
}
PATTERNS: dict[str, AttentionPattern] = {
    "bidirectional": Bidirectional(),
    "documents": Causal(torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 2, 2], [0] * 10])),
    "two streams": BlockDiffusion(2),
}


@pytest.fixture(autouse=True, params=["cpu", "gpu"])
def _device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Norm, rotation and tables of both devices. FlexAttention has no backward on a CPU; what a compiler records of it
    has one."""
    if request.param == "cpu" and find_compile_problem(torch.__version__, "cpu"):
        pytest.skip("runs refuse to compile")
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *tensors: None)
    monkeypatch.setattr("diffusionlm.models.flex._check_backward", lambda *tensors: None)
    torch._dynamo.reset()
    with norms_as_on_a_gpu() if request.param == "gpu" else nullcontext():
        yield


def trained_parameters(model: Transformer) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def compute_gradients(model: Transformer, pattern: AttentionPattern) -> dict[str, Tensor]:
    """The gradient of each trained parameter."""
    tokens_BL = torch.randint(0, 19, (2, 10), generator=torch.Generator().manual_seed(3))
    positions_N = torch.tensor([0, 3, 5, 17])
    loss_inputs = LossInputs(torch.arange(4), torch.ones(4), load_balancing_weight=float(model.config.num_experts > 0))
    dropout, trained = find_dropout(model), trained_parameters(model)
    with nullcontext() if dropout is None else dropout.dropout_context(5, torch.arange(2), 10, positions_N):
        output = model(
            tokens_BL,
            pattern=pattern,
            masked_BL=tokens_BL > 9,
            output_positions=positions_N,
            loss_inputs=loss_inputs,
        )
        return dict(zip(trained, torch.autograd.grad(output.total_loss, list(trained.values())), strict=True))


def check_gradients(plain: Transformer, compiled: Transformer, pattern: AttentionPattern) -> None:
    compile_blocks(compiled, "aot_eager")
    for (name, expected), ours in zip(
        compute_gradients(plain, pattern).items(), compute_gradients(compiled, pattern).values(), strict=True
    ):
        assert expected.abs().max() > 0, f"{name}: the comparison would show nothing"
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("variant", VARIANTS)
def test_blocks(variant: str, tiny_model: MakeModel) -> None:
    pattern, options = VARIANTS[variant]
    plain, compiled = (tiny_model(torch.float64, **options) for _ in range(2))
    check_gradients(plain, compiled, PATTERNS[pattern])


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_adapters(adapter: str, tiny_model: MakeModel) -> None:
    models = [tiny_model(torch.float64, clean_alignment="shifted") for _ in range(2)]
    for model in models:
        add_adapter(model, LoraConfig(rank=2, **ADAPTERS[adapter]))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():  # B is zero at first, and so is the gradient of A
            for parameter in trained_parameters(model).values():
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    check_gradients(models[0], models[1], PATTERNS["bidirectional"])
