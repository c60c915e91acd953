"""diffusionlm: training and inference of masked and block diffusion language models in plain PyTorch.

The names in ``__all__`` and ``__version__`` are the public API. Each is imported at its first use, so that
``import diffusionlm`` is fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from config.generation import GenerationConfig
    from config.model import ModelConfig
    from diffusionlm.checkpoints.adapter_files import read_adapter
    from diffusionlm.checkpoints.huggingface import load_model, save_model_directory
    from diffusionlm.checkpoints.model_files import load_tokenizer
    from diffusionlm.evaluation.likelihood.scoring import LikelihoodEstimate, conditional_likelihood
    from diffusionlm.evaluation.nelbo import NelboReport, nelbo
    from diffusionlm.evaluation.sampler_likelihood import SamplerReport, sampler_likelihood
    from diffusionlm.inference.constraints.compiler import ConstraintCompiler, TokenConstraint
    from diffusionlm.inference.generate import Generation, generate, infill, stream
    from diffusionlm.inference.healing import HealedText, TokenHealer
    from diffusionlm.inference.images import expand_images
    from diffusionlm.inference.requests import RequestOptions
    from diffusionlm.models.init import init_weights
    from diffusionlm.models.patterns import Bidirectional, BlockCausal, Causal
    from diffusionlm.models.transformer import Transformer
    from diffusionlm.serving.engine import Engine
    from diffusionlm.vision.processor import load_processor
    from tokenizer import encode_chat, load_chat_template, render_chat

    __version__: str

_MODULE_OF_NAME = {
    "GenerationConfig": "config.generation",
    "ModelConfig": "config.model",
    "read_adapter": "diffusionlm.checkpoints.adapter_files",
    "load_model": "diffusionlm.checkpoints.huggingface",
    "load_tokenizer": "diffusionlm.checkpoints.model_files",
    "save_model_directory": "diffusionlm.checkpoints.huggingface",
    "LikelihoodEstimate": "diffusionlm.evaluation.likelihood.scoring",
    "NelboReport": "diffusionlm.evaluation.nelbo",
    "conditional_likelihood": "diffusionlm.evaluation.likelihood.scoring",
    "nelbo": "diffusionlm.evaluation.nelbo",
    "ConstraintCompiler": "diffusionlm.inference.constraints.compiler",
    "TokenConstraint": "diffusionlm.inference.constraints.compiler",
    "Generation": "diffusionlm.inference.generate",
    "generate": "diffusionlm.inference.generate",
    "infill": "diffusionlm.inference.generate",
    "HealedText": "diffusionlm.inference.healing",
    "TokenHealer": "diffusionlm.inference.healing",
    "expand_images": "diffusionlm.inference.images",
    "SamplerReport": "diffusionlm.evaluation.sampler_likelihood",
    "sampler_likelihood": "diffusionlm.evaluation.sampler_likelihood",
    "stream": "diffusionlm.inference.generate",
    "init_weights": "diffusionlm.models.init",
    "Bidirectional": "diffusionlm.models.patterns",
    "BlockCausal": "diffusionlm.models.patterns",
    "Causal": "diffusionlm.models.patterns",
    "Transformer": "diffusionlm.models.transformer",
    "Engine": "diffusionlm.serving.engine",
    "RequestOptions": "diffusionlm.inference.requests",
    "load_processor": "diffusionlm.vision.processor",
    "encode_chat": "tokenizer",
    "load_chat_template": "tokenizer",
    "render_chat": "tokenizer",
}

__all__ = [
    "Bidirectional",
    "BlockCausal",
    "Causal",
    "ConstraintCompiler",
    "Engine",
    "Generation",
    "GenerationConfig",
    "HealedText",
    "LikelihoodEstimate",
    "ModelConfig",
    "NelboReport",
    "RequestOptions",
    "SamplerReport",
    "TokenConstraint",
    "TokenHealer",
    "Transformer",
    "conditional_likelihood",
    "encode_chat",
    "expand_images",
    "generate",
    "infill",
    "init_weights",
    "load_chat_template",
    "load_model",
    "load_processor",
    "load_tokenizer",
    "nelbo",
    "read_adapter",
    "render_chat",
    "sampler_likelihood",
    "save_model_directory",
    "stream",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("files.installed_version").read_version()
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"diffusionlm has no {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(_MODULE_OF_NAME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
