"""Initial weights of all parameters."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from config.model import VISION_PREFIX, ModelConfig
from diffusionlm.models.transformer import Transformer

OUTPUT_PROJECTIONS = ("o_proj.weight", "down_proj.weight", "attn.proj.weight", "mlp.linear_fc2.weight")
"""The last two are those of a vision tower."""
OUTPUT_NORMS = ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")
"""Norms of ``sandwich_norms`` whose output is added to the residual stream."""


@torch.no_grad()
def init_weights(model: Transformer, seed: int) -> None:
    """Initialize every parameter.

    | parameter                                   | value                              |
    |---------------------------------------------|------------------------------------|
    | embed_tokens (and lm_head where tied)       | normal, std ``initializer_range``  |
    | q_proj, k_proj, v_proj, gate_proj, up_proj  | normal, std 1 / sqrt(fan in)       |
    | router (gate) of a mixture of experts       | normal, std 1 / sqrt(fan in)       |
    | o_proj, down_proj; proj, fc2 of a tower     | zero: each block is the identity   |
    | lm_head, untied                             | normal, std ``initializer_range``  |
    | norm gains                                  | one                                |
    | biases                                      | zero                               |
    | other matrices of a vision tower            | normal, std 1 / sqrt(fan in)       |
    | pos_embed of a vision tower                 | normal, std 0.5                    |

    Patches have about unit size when they are embedded, and a position table much smaller than that would be learned
    late.

    With ``sandwich_norms`` the gains of the norms before a residual are zero, and o_proj and down_proj are initialized
    like the other projections. Blocks are the identity all the same; with zero projections the norm would scale the
    tiny output of their first step up to full size. With ``norm_offset`` a weight is its gain minus one.

    Each parameter has its own generator, keyed by (seed, name), on the CPU: adding a layer or changing the device does
    not change the other parameters.
    """
    for name, parameter in model.named_parameters():
        parameter.copy_(initial_value(name, parameter.shape, model.config, seed))


def initial_std(name: str, shape: torch.Size, config: ModelConfig) -> float:
    """Standard deviation of the initial values of a matrix that is not zero."""
    if name.endswith("pos_embed.weight"):
        return 0.5
    table = name.endswith(("embed_tokens.weight", "lm_head.weight"))
    return config.initializer_range if table else float(shape[1:].numel() ** -0.5)


def initial_value(name: str, shape: torch.Size, config: ModelConfig, seed: int) -> Tensor:
    """Initial value of a parameter, on the CPU: see `init_weights`."""
    if name.startswith(VISION_PREFIX) and ".norm" in name:
        return torch.full(shape, float(name.endswith(".weight")))
    if name.endswith("norm.weight"):
        gain = 0.0 if config.sandwich_norms and name.endswith(OUTPUT_NORMS) else 1.0
        return torch.full(shape, gain - config.norm_offset)
    if name.endswith(".bias") or (name.endswith(OUTPUT_PROJECTIONS) and not config.sandwich_norms):
        return torch.zeros(shape)
    std = initial_std(name, shape, config)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.randn(shape, generator=torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))) * std
