"""Gemma 2, Llama 3.1 and Qwen 2 beside transformers': in bf16, in each option that the logits see, and in gradients.

That the logits are the same is in `test_families_parity`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from config.model import ModelConfig
from diffusionlm.kernels.cross_entropy import LossInputs
from diffusionlm.models.patterns import Causal
from diffusionlm.models.transformer import Transformer

transformers = pytest.importorskip("transformers")

TOKENS = torch.randint(1, 40, (2, 23), generator=torch.Generator().manual_seed(5))
THETA = 500.0
SHAPE: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 56,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-3,
    "vocab_size": 40,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
"""Of the twelve frequencies of a head some stay, some are divided and some are in between."""
ALTERNATING = ("sliding_attention", "full_attention") * 2
GEMMA2: dict[str, Any] = {
    "head_dim": 20,
    "query_pre_attn_scalar": 31,
    "attn_logit_softcapping": 1.5,
    "final_logit_softcapping": 4.0,
    "sliding_window": 6,
}
OURS_GEMMA2: dict[str, Any] = {
    **GEMMA2,
    "qk_norm": False,
    "layer_types": ALTERNATING,
    "hidden_act": "gelu_pytorch_tanh",
    "sandwich_norms": True,
    "norm_offset": True,
    "scale_embeddings": True,
}
BIASES = {"attention_bias": True, "attention_output_bias": True}


def their_model(family: str) -> Any:
    """A random model of transformers; weights are large, so that caps bend and norms' gains are off their defaults."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": THETA}
    if family.startswith("gemma2"):
        bias = family.endswith("biases")
        config = transformers.Gemma2Config(
            **SHAPE, **GEMMA2, layer_types=list(ALTERNATING), rope_parameters=rope, attention_bias=bias
        )
        model = transformers.Gemma2ForCausalLM._from_config(config, attn_implementation="eager")
    elif family == "qwen2":
        config = transformers.Qwen2Config(**SHAPE, rope_parameters=rope, tie_word_embeddings=False)
        model = transformers.Qwen2ForCausalLM._from_config(config, attn_implementation="eager")
    else:
        scaling = LLAMA3 if family == "llama3" else {"rope_type": "linear", "factor": 3.0}
        config = transformers.LlamaConfig(
            **SHAPE, head_dim=24, rope_parameters=rope | scaling, attention_bias=True, mlp_bias=False
        )
        model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    return model.eval()


def our_config(family: str) -> ModelConfig:
    options: dict[str, dict[str, Any]] = {
        "gemma2": OURS_GEMMA2,
        "gemma2-biases": OURS_GEMMA2 | BIASES,
        "llama3": {"head_dim": 24, "rope_scaling": LLAMA3, "tie_word_embeddings": False, **BIASES},
        "llama-linear": {
            "head_dim": 24,
            "rope_scaling": {"rope_type": "linear", "factor": 3.0},
            "tie_word_embeddings": False,
            **BIASES,
        },
        "qwen2": {"head_dim": 12, "attention_bias": True, "tie_word_embeddings": False},
    }
    return ModelConfig(**SHAPE, **{"qk_norm": False, **options[family]}, rope_theta=THETA, mask_token_id=39)


def pair(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> tuple[Any, Transformer]:
    """Their model and ours with the same parameters, matched by their names alone, none left over."""
    theirs = their_model(family)
    ours = Transformer(ModelConfig(**{**our_config(family).model_dump(), **changes}))
    source, target = dict(theirs.named_parameters()), dict(ours.named_parameters())
    assert source.keys() == target.keys()
    with torch.no_grad():
        for name, parameter in target.items():
            parameter.copy_(source[name])
            assert len(parameter.unique()) > 1, f"{name} is at its default"
    return theirs.to(dtype), ours.to(dtype)


def relative_difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("family", ["gemma2-biases", "llama3", "qwen2"])
def test_bfloat16_is_theirs_within_its_precision(family: str) -> None:
    """Also the embeddings' factor, which is rounded to bf16 before it multiplies."""
    theirs, ours = pair(family, torch.bfloat16)
    with torch.no_grad():
        expected, logits = theirs(TOKENS).logits, ours(TOKENS, pattern=Causal())
        wide = theirs.float()(TOKENS).logits
    assert relative_difference(logits.float(), wide) < 1.5 * relative_difference(expected.float(), wide) + 1e-3


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gemma2", {"query_pre_attn_scalar": None}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma2", {"final_logit_softcapping": None}),
        ("gemma2", {"hidden_act": "silu"}),
        ("gemma2", {"norm_offset": False}),
        ("gemma2", {"scale_embeddings": False}),
        ("gemma2", {"layer_types": ALTERNATING[::-1]}),
        ("gemma2", {"sliding_window": 7}),
        ("llama3", {"rope_scaling": None}),
        ("llama3", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
        ("llama-linear", {"rope_scaling": None}),
    ],
    ids=str,
)
def test_each_option_is_seen_in_the_logits(family: str, changes: dict[str, Any]) -> None:
    """Otherwise the parity would say nothing of it."""
    theirs, ours = pair(family, **changes)
    with torch.no_grad():
        assert relative_difference(ours(TOKENS, pattern=Causal()), theirs(TOKENS).logits) > 1e-3


@pytest.mark.parametrize(("smoothing", "z_loss", "excluded"), [(0.0, 0.0, None), (0.1, 0.02, 39)])
@pytest.mark.parametrize("family", ["gemma2-biases", "llama3"])
def test_gradients_of_the_scored_loss(family: str, smoothing: float, z_loss: float, excluded: int | None) -> None:
    """The chunked loss, cap and all, against autograd through their logits, in double."""
    theirs, ours = pair(family, torch.float64)
    rows = torch.arange(1, TOKENS.numel(), 2)
    targets = TOKENS.flatten()[rows - 1].clamp(max=38)
    weights = torch.rand(len(rows), dtype=torch.float64)
    loss_inputs = LossInputs(targets, weights, excluded, label_smoothing=smoothing, z_loss=z_loss)
    scored = ours(TOKENS, pattern=Causal(), output_positions=rows, loss_inputs=loss_inputs)
    logits = theirs(TOKENS).logits.flatten(0, 1)[rows]
    allowed = logits if excluded is None else logits[:, :excluded]
    loss = F.cross_entropy(allowed, targets, reduction="none", label_smoothing=smoothing)
    expected = ((loss + z_loss * allowed.logsumexp(-1).square()) * weights).sum()
    # They take norms, rotations and softmax in fp32 whatever the dtype.
    torch.testing.assert_close(scored.loss_sum, expected, rtol=1e-5, atol=0.0)
    names = [name for name, _ in ours.named_parameters()]
    for name, our, their in zip(
        names,
        torch.autograd.grad(scored.loss_sum, list(ours.parameters())),
        torch.autograd.grad(expected, [dict(theirs.named_parameters())[name] for name in names]),
        strict=True,
    ):
        assert relative_difference(our, their) < 1e-4, name
