"""Initial weights, all in one place."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from diffusionlm.models.transformer import Transformer

OUTPUT_PROJECTIONS = ("o_proj.weight", "down_proj.weight")


@torch.no_grad()
def init_weights(model: Transformer, seed: int) -> None:
    """Fill every parameter.

    | parameter                                   | value                              |
    |---------------------------------------------|------------------------------------|
    | embed_tokens (and lm_head where tied)       | normal, std ``initializer_range``  |
    | q_proj, k_proj, v_proj, gate_proj, up_proj  | normal, std 1 / sqrt(fan in)       |
    | o_proj, down_proj                           | zero: each block starts as identity|
    | lm_head, untied                             | normal, std ``initializer_range``  |
    | norm gains                                  | one                                |
    | biases                                      | zero                               |

    Each parameter draws from its own generator, keyed by (seed, name), on the CPU: adding a layer or changing device
    leaves the others as they were.
    """
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            nn.init.ones_(parameter)
        elif name.endswith((".bias", *OUTPUT_PROJECTIONS)):
            nn.init.zeros_(parameter)
        else:
            table = name.endswith(("embed_tokens.weight", "lm_head.weight"))
            std = model.config.initializer_range if table else parameter.shape[1] ** -0.5
            generator = torch.Generator().manual_seed(_key(seed, name))
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


def _key(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:7], "little")
