"""What transformers lacks, SDAR, SDAR-MoE, Dream and LLaDA: plain references, in the words of the published code.

They share no code with the models that they check. B rows, L positions, N heads of width H.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

Values = dict[str, Any]
Weights = dict[str, Tensor]

COMMON: Values = {
    "rms_norm_eps": 1e-3,
    "rope_theta": 500.0,
    "mask_token_id": 39,
}
QWEN_JSON: Values = {
    **COMMON,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "intermediate_size": 56,
    "max_position_embeddings": 64,
    "vocab_size": 40,
    "pad_token_id": 3,
    "bos_token_id": 1,
    "eos_token_id": [2, 4],
    "hidden_act": "silu",
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "sliding_window": None,
}
EXPERTS_JSON: Values = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "norm_topk_prob": True,
}
LLADA_JSON: Values = {
    **COMMON,
    "model_type": "llada",
    "d_model": 32,
    "n_layers": 3,
    "n_heads": 4,
    "n_kv_heads": 2,
    "mlp_hidden_size": 56,
    "max_sequence_length": 64,
    "vocab_size": 38,
    "embedding_size": 40,
    "weight_tying": False,
    "block_type": "llama",
    "layer_norm_type": "rms",
    "activation_type": "silu",
    "rope": True,
    "eos_token_id": 37,
    "pad_token_id": 37,
}


def norm(x: Tensor, gain: Tensor) -> Tensor:
    """RMSNorm."""
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-3) * gain


def turned(x: Tensor, theta: float) -> Tensor:
    """Positions as complex numbers: dimension i is the real part of the pair, i + H / 2 the imaginary one."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1])[:, None] * theta ** (-torch.arange(half) / half)
    pairs = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat([pairs.real, pairs.imag], dim=-1)


def attended(q: Tensor, k: Tensor, v: Tensor, sees_LL: Tensor) -> Tensor:
    """[B, L, N, H] to [B, L, N * H]; row i of ``sees_LL`` says which keys query i sees."""
    k, v = (tensor.repeat_interleave(q.shape[2] // tensor.shape[2], dim=2) for tensor in (k, v))
    scores = torch.einsum("bqnh,bknh->bnqk", q, k) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(~sees_LL, float("-inf"))
    return torch.einsum("bnqk,bknh->bqnh", scores.softmax(-1), v).flatten(2)


def gated_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """SwiGLU."""
    inner = x @ gate.T
    return (inner * torch.sigmoid(inner) * (x @ up.T)) @ down.T


def heads(x: Tensor, weight: Tensor, bias: Tensor | None, width: int) -> Tensor:
    """[B, L, N, H]."""
    out = x @ weight.T if bias is None else x @ weight.T + bias
    return out.unflatten(-1, (-1, width))


def qwen_logits(w: Weights, tokens: Tensor, sees_LL: Tensor) -> tuple[Tensor, list[Tensor]]:
    """SDAR (norms on queries and keys), SDAR-MoE (experts) or Dream (biases): whatever the weights have.

    Returns:
        Logits, and for each layer with experts the two that each token chose, [B * L, 2].
    """
    x, width, chosen = w["model.embed_tokens.weight"][tokens], 12, []
    for layer in range(3):
        p = f"model.layers.{layer}."
        n = norm(x, w[f"{p}input_layernorm.weight"])
        q, k, v = (
            heads(n, w[f"{p}self_attn.{c}_proj.weight"], w.get(f"{p}self_attn.{c}_proj.bias"), width) for c in "qkv"
        )
        if f"{p}self_attn.q_norm.weight" in w:
            q, k = norm(q, w[f"{p}self_attn.q_norm.weight"]), norm(k, w[f"{p}self_attn.k_norm.weight"])
        out = attended(turned(q, 500.0), turned(k, 500.0), v, sees_LL)
        x = x + out @ w[f"{p}self_attn.o_proj.weight"].T
        n = norm(x, w[f"{p}post_attention_layernorm.weight"])
        if f"{p}mlp.gate.weight" not in w:
            x = x + gated_mlp(n, *(w[f"{p}mlp.{c}_proj.weight"] for c in ("gate", "up", "down")))
            continue
        probabilities = (n @ w[f"{p}mlp.gate.weight"].T).softmax(-1)
        chosen.append(probabilities.flatten(0, 1).argsort(-1)[:, -2:])
        routing_weights = torch.where(probabilities >= probabilities.sort(-1).values[..., -2, None], probabilities, 0.0)
        routing_weights = routing_weights / routing_weights.sum(-1, keepdim=True)
        for expert in range(routing_weights.shape[-1]):
            matrices = (w[f"{p}mlp.experts.{expert}.{c}_proj.weight"] for c in ("gate", "up", "down"))
            x = x + routing_weights[..., expert, None] * gated_mlp(n, *matrices)
    return norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].T, chosen


def llada_logits(w: Weights, tokens: Tensor, sees_LL: Tensor) -> tuple[Tensor, list[Tensor]]:
    """LLaDA-8B, in OLMo's names; it has no experts."""
    t = "model.transformer."
    x = w[f"{t}wte.weight"][tokens]
    for layer in range(3):
        p = f"{t}blocks.{layer}."
        n = norm(x, w[f"{p}attn_norm.weight"])
        q, k, v = (heads(n, w[f"{p}{c}_proj.weight"], None, 8) for c in "qkv")
        x = x + attended(turned(q, 500.0), turned(k, 500.0), v, sees_LL) @ w[f"{p}attn_out.weight"].T
        n = norm(x, w[f"{p}ff_norm.weight"])
        x = x + gated_mlp(n, w[f"{p}ff_proj.weight"], w[f"{p}up_proj.weight"], w[f"{p}ff_out.weight"])
    return norm(x, w[f"{t}ln_f.weight"]) @ w[f"{t}ff_out.weight"].T, []


def gains(width: int) -> Tensor:
    """Of a norm, none of them near one."""
    return 1.0 + (0.1 + 0.4 * torch.rand(width)) * (torch.randint(2, (width,)) * 2 - 1)


def qwen_weights(*, norms: bool = False, biases: bool = False, experts: int = 0) -> Weights:
    """Random ones in Qwen's names."""
    D, A, K, F, E = 32, 48, 24, 56, 20
    w = {
        "model.embed_tokens.weight": torch.randn(40, D),
        "model.norm.weight": gains(D),
        "lm_head.weight": torch.randn(40, D) * D**-0.5,
    }
    for layer in range(3):
        p = f"model.layers.{layer}."
        w |= {f"{p}{name}.weight": gains(D) for name in ("input_layernorm", "post_attention_layernorm")}
        for name, rows in (("q", A), ("k", K), ("v", K)):
            w[f"{p}self_attn.{name}_proj.weight"] = torch.randn(rows, D) * D**-0.5
            if biases:
                w[f"{p}self_attn.{name}_proj.bias"] = gains(rows) - 1.0
        w[f"{p}self_attn.o_proj.weight"] = torch.randn(D, A) * A**-0.5
        if norms:
            w |= {f"{p}self_attn.{name}_norm.weight": gains(12) for name in "qk"}
        prefixes = {f"{p}mlp.experts.{expert}.": E for expert in range(experts)} or {f"{p}mlp.": F}
        if experts:
            w[f"{p}mlp.gate.weight"] = torch.randn(experts, D) * D**-0.5
        for prefix, inner in prefixes.items():
            w[f"{prefix}gate_proj.weight"] = torch.randn(inner, D) * D**-0.5
            w[f"{prefix}up_proj.weight"] = torch.randn(inner, D) * D**-0.5
            w[f"{prefix}down_proj.weight"] = torch.randn(D, inner) * inner**-0.5
    return w


def llada_weights() -> Weights:
    """Random ones in LLaDA's names."""
    t, D, F = "model.transformer.", 32, 56
    w = {f"{t}wte.weight": torch.randn(40, D), f"{t}ln_f.weight": gains(D)}
    w[f"{t}ff_out.weight"] = torch.randn(40, D) * D**-0.5
    for layer in range(3):
        p = f"{t}blocks.{layer}."
        w |= {f"{p}{name}.weight": gains(D) for name in ("attn_norm", "ff_norm")}
        shapes = {"q_proj": (D, D), "k_proj": (16, D), "v_proj": (16, D), "attn_out": (D, D)}
        shapes |= {"ff_proj": (F, D), "up_proj": (F, D), "ff_out": (D, F)}
        w |= {f"{p}{name}.weight": torch.randn(*shape) * shape[1] ** -0.5 for name, shape in shapes.items()}
    return w
