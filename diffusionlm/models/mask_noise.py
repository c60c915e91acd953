"""Noise on the embedding of the mask token, at the start of adapting an autoregressive model.

Shapes: B sequences, S positions of the inputs, L tokens of the noisy half, D hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from diffusionlm.models.transformer import Transformer


@contextlib.contextmanager
def add_mask_noise(model: Transformer, std: float, seeds_B: Sequence[int], num_tokens: int) -> Iterator[None]:
    """Context in which the embeddings of mask tokens have Gaussian noise (LLaDA2).

    A mask row that no data trained is the same vector at every masked position, near zero in many models, and gradients
    explode. The noise of a sequence is a function of its seed.

    Args:
        std: standard deviation of the noise.
        seeds_B: a seed for each sequence of the forward.
        num_tokens: L; later positions hold clean tokens.
    """
    mask_token = model.config.required_mask_token_id

    def add_noise(_module: Any, inputs: tuple[Tensor], embeddings_BSD: Tensor) -> Tensor:
        tokens_BL = inputs[0][:, :num_tokens]
        generator = torch.Generator(embeddings_BSD.device)
        shape, noise = (num_tokens, embeddings_BSD.shape[2]), []
        for seed in seeds_B:
            generator.manual_seed(seed)
            noise.append(torch.randn(shape, device=embeddings_BSD.device, generator=generator))
        noise_BLD = torch.where((tokens_BL == mask_token)[..., None], std * torch.stack(noise), 0.0)
        noisy_BLD = embeddings_BSD[:, :num_tokens] + noise_BLD.to(embeddings_BSD.dtype)
        return torch.cat([noisy_BLD, embeddings_BSD[:, num_tokens:]], dim=1)

    handle = model.model.embed_tokens.register_forward_hook(add_noise)
    try:
        yield
    finally:
        handle.remove()
