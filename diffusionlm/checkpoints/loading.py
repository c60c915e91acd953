"""A model as the ``[model]`` section of a command asks for it."""

from __future__ import annotations

import torch

from config.infer import InferModelConfig
from diffusionlm.checkpoints.huggingface import load_model
from diffusionlm.models.transformer import Transformer


def load_configured_model(config: InferModelConfig) -> Transformer:
    """Load the model to its device, with the number of threads set.

    Raises:
        ValueError: no path, no CUDA where it is asked for, or what `load_model` raises.
    """
    if config.path is None:
        raise ValueError("model.path is missing: name a model directory, a checkpoint or a run directory")
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise ValueError('model.device = "cuda", but torch finds no CUDA device here: use "cpu" or "auto"')
    device = ("cuda" if has_cuda else "cpu") if config.device == "auto" else config.device
    return load_model(config.path, device=device, dtype=config.dtype)
