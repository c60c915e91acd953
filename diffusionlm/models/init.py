"""Initial weights, all in one place."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from config.model import ModelConfig
from diffusionlm.models.transformer import Transformer

OUTPUT_PROJECTIONS = ("o_proj.weight", "down_proj.weight")
OUTPUT_NORMS = ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")
"""Of ``sandwich_norms``: the last thing before a residual."""


@torch.no_grad()
def init_weights(model: Transformer, seed: int) -> None:
    """Fill every parameter.

    | parameter                                   | value                              |
    |---------------------------------------------|------------------------------------|
    | embed_tokens (and lm_head where tied)       | normal, std ``initializer_range``  |
    | q_proj, k_proj, v_proj, gate_proj, up_proj  | normal, std 1 / sqrt(fan in)       |
    | gate of a mixture of experts, its router    | normal, std 1 / sqrt(fan in)       |
    | o_proj, down_proj                           | zero: each block starts as identity|
    | lm_head, untied                             | normal, std ``initializer_range``  |
    | norm gains                                  | one                                |
    | biases                                      | zero                               |

    With ``sandwich_norms`` the gains of the norms before a residual are zero and o_proj and down_proj are drawn as the
    others: blocks start as the identity just the same, but a norm of a vector near zero would make any first step of
    those projections a full one. With ``norm_offset`` a weight is its gain less one.

    Each parameter draws from its own generator, keyed by (seed, name), on the CPU: adding a layer or changing device
    leaves the others as they were.
    """
    for name, parameter in model.named_parameters():
        parameter.copy_(initial_value(name, parameter.shape, model.config, seed))


def initial_value(name: str, shape: torch.Size, config: ModelConfig, seed: int) -> Tensor:
    """What `init_weights` fills the parameter of this name with, on the CPU."""
    if name.endswith("norm.weight"):
        gain = 0.0 if config.sandwich_norms and name.endswith(OUTPUT_NORMS) else 1.0
        return torch.full(shape, gain - config.norm_offset)
    if name.endswith(".bias") or (name.endswith(OUTPUT_PROJECTIONS) and not config.sandwich_norms):
        return torch.zeros(shape)
    table = name.endswith(("embed_tokens.weight", "lm_head.weight"))
    std = config.initializer_range if table else shape[1] ** -0.5
    return torch.randn(shape, generator=torch.Generator().manual_seed(_seed_for_name(seed, name))) * std


def _seed_for_name(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:7], "little")
