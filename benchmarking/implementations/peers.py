"""Other libraries for the same shapes: training steps of transformers, with and without Liger's kernels, and its
autoregressive decoding with the weights of one of our models.

The dependency group `bench` installs transformers. Modules are imported by name and untyped, so that this file can be
checked without it.

Shapes: B sequences, L tokens, S positions of the model (L, or 2 L for [noisy | clean] halves), V vocabulary.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarking.implementations.training import (
    LEARNING_RATE,
    MAX_GRAD_NORM,
    TrainCase,
    TrainImplementation,
    synchronize,
)
from config.training.objective import BlockDiffusionConfig, MaskedDiffusionConfig, NextTokenConfig
from diffusionlm.models.patterns import BlockDiffusion
from diffusionlm.models.transformer import Transformer

MIN_MASK_PROBABILITY = 1e-3
"""Smallest mask probability of the peers' noise (epsilon of LLaDA)."""
IGNORE_INDEX = -100
"""Label of tokens that are not in the peers' losses."""

METHODS_OF_PEERS = {
    "transformers": "Qwen3ForCausalLM, with experts Qwen3MoeForCausalLM (sdpa attention, no cache); bidirectional with "
    "a 4-D additive mask of zeros, block diffusion as [noisy | clean] with such a mask and logits of the noisy half, "
    "next token causal; otherwise logits of all positions; cross-entropy of logits.float() with ignore_index; "
    "noise and weights of LLaDA; torch.optim.AdamW at its defaults (neither foreach nor fused on a CPU)",
    "liger": "the same model with apply_liger_kernel_to_qwen3; head and loss in its fused kernel, which has no token "
    "weights at full speed: the mean over the masked tokens; torch.optim.AdamW, fused",
}


@dataclass(frozen=True)
class PeerInputs:
    """The inputs of a peer's step."""

    arguments: dict[str, Any]
    """Arguments of the model."""
    labels_BL: Tensor
    """Targets; `IGNORE_INDEX` outside the loss."""
    weights_BL: Tensor
    """Loss weights."""
    num_outputs: int | None = None
    """Only the first outputs of a sequence are in the loss; None: all."""


def build_noise(case: TrainCase, tokens_BL: Tensor) -> Callable[[], PeerInputs]:
    """Build the function that samples the noise of a step."""
    B, L = tokens_BL.shape
    device, objective = tokens_BL.device, case.objective
    if isinstance(objective, NextTokenConfig):
        shifted_BL = F.pad(tokens_BL[:, 1:], (0, 1), value=IGNORE_INDEX)
        mean_BL = torch.full((B, L), 1 / (B * (L - 1)), device=device)
        return lambda: PeerInputs({"input_ids": tokens_BL}, shifted_BL, mean_BL)
    length = objective.block_length if isinstance(objective, BlockDiffusionConfig) else L
    assert isinstance(length, int)
    blocks = -(-L // length)
    S = L if length == L and isinstance(objective, MaskedDiffusionConfig) else 2 * L
    mask_11SS = torch.zeros(1, 1, S, S, device=device)
    if S > L:
        attends_1SS = BlockDiffusion(length).dense_mask(S, device)
        mask_11SS.masked_fill_(~attends_1SS, torch.finfo(torch.float32).min)
    mask_B1SS = mask_11SS.expand(B, 1, S, S)
    positions_1S = (torch.arange(S, device=device) % L)[None]

    def sample() -> PeerInputs:
        probability = (1 - MIN_MASK_PROBABILITY) * torch.rand(B, blocks, device=device) + MIN_MASK_PROBABILITY
        probability_BL = probability.repeat_interleave(length, dim=1)[:, :L]
        masked_BL = torch.rand(B, L, device=device) < probability_BL
        labels_BL = tokens_BL.masked_fill(~masked_BL, IGNORE_INDEX)
        inputs = tokens_BL.masked_fill(masked_BL, case.shape.mask_token)
        if S > L:
            inputs = torch.cat([inputs, tokens_BL], dim=1)
        arguments = {"input_ids": inputs, "attention_mask": mask_B1SS, "position_ids": positions_1S}
        return PeerInputs(arguments, labels_BL, 1 / (B * L * probability_BL), L if S > L else None)

    return sample


def _build_qwen3(case: TrainCase) -> Any:
    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(case.seed)
    settings = case.shape.model_dump(mode="json", exclude={"shape", "name", "batch_size", "qk_norm", "logit_alignment"})
    family = "Qwen3Moe" if case.shape.num_experts else "Qwen3"
    config = getattr(transformers, f"{family}Config")(**settings, attn_implementation="sdpa")
    return getattr(transformers, f"{family}ForCausalLM")(config).to(case.device).train()


def build_transformers(case: TrainCase) -> TrainImplementation:
    """Build a Qwen3 of the same shape and its common training step."""
    model = _build_qwen3(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    sample = build_noise(case, case.tokens().to(case.device))

    def compute_loss() -> Tensor:
        inputs = sample()
        keep = slice(inputs.num_outputs) if inputs.num_outputs else 0
        with case.autocast():
            logits_BLV = model(**inputs.arguments, use_cache=False, logits_to_keep=keep).logits
        logits = logits_BLV.float().flatten(0, 1)
        nll = F.cross_entropy(logits, inputs.labels_BL.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
        return (nll.view_as(inputs.weights_BL) * inputs.weights_BL).sum()

    return TrainImplementation(model, [optimizer], _build_step(model, optimizer, compute_loss))


def build_liger(case: TrainCase) -> TrainImplementation:
    """Build the Qwen3 of transformers with Liger's kernels."""
    liger: Any = importlib.import_module("liger_kernel.transformers")
    modeling: Any = importlib.import_module("transformers.models.qwen3.modeling_qwen3")
    model = _build_qwen3(case)
    original = dict(vars(modeling))
    liger.apply_liger_kernel_to_qwen3(model=model)
    patches = {name: value for name, value in vars(modeling).items() if original.get(name) is not value}
    vars(modeling).update({name: original[name] for name in patches})
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    sample = build_noise(case, case.tokens().to(case.device))
    fused_loss = liger.LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORE_INDEX)

    def compute_loss() -> Tensor:
        inputs = sample()
        # Liger replaces the rotary function of transformers for all models of the process, also for the implementation
        # without Liger, so that its patches are active only inside its own step.
        with case.autocast(), patch.multiple(modeling, **patches):
            hidden_BSD = model.model(**inputs.arguments, use_cache=False).last_hidden_state
            hidden = hidden_BSD[:, : inputs.num_outputs].flatten(0, 1)
            loss: Tensor = fused_loss(model.lm_head.weight, hidden, inputs.labels_BL.flatten())
        return loss

    return TrainImplementation(model, [optimizer], _build_step(model, optimizer, compute_loss))


def _build_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, compute_loss: Callable[[], Tensor]
) -> Callable[[], Tensor]:
    def step() -> Tensor:
        loss = compute_loss()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return synchronize(loss)

    return step


PEER_BUILDERS: Mapping[str, Callable[[TrainCase], TrainImplementation]] = {
    "transformers": build_transformers,
    "liger": build_liger,
}

SHARED_KEYS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "max_position_embeddings",
    "vocab_size",
    "rms_norm_eps",
    "rope_theta",
    "tie_word_embeddings",
)
"""Keys that our config and a Qwen3 config have in common."""


def convert_to_qwen3(model: Transformer) -> Any:
    """Build a Qwen3 of transformers with the weights of a model, on its device and in its dtype.

    Raises:
        ValueError: the model has other weights than a Qwen3.
    """
    transformers: Any = importlib.import_module("transformers")
    settings = {key: getattr(model.config, key) for key in SHARED_KEYS}
    config = transformers.Qwen3Config(**settings, attn_implementation="sdpa")
    peer = transformers.Qwen3ForCausalLM(config).to(model.lm_head.weight).eval()
    weights = model.state_dict()
    if {name: weight.shape for name, weight in weights.items()} != {
        name: weight.shape for name, weight in peer.state_dict().items()
    }:
        raise ValueError(
            'bench.peers has "transformers", which decodes a Qwen3, and [model.shape] is none: leave out the options '
            "of other families, or the peer"
        )
    peer.load_state_dict(weights, strict=True)
    # Without an end-of-text token no request stops early.
    peer.generation_config.update(eos_token_id=None, pad_token_id=0, bos_token_id=None)
    return peer


def build_autoregressive_call(peer: Any, prompts: list[list[int]], new_tokens: int) -> Callable[[], list[list[int]]]:
    """Build a call of greedy decoding with the peer's KV cache, which returns the new tokens of each request."""
    prompts_BP = torch.tensor(prompts, device=peer.device)
    attention_mask_BP = torch.ones_like(prompts_BP)

    @torch.inference_mode()
    def call() -> list[list[int]]:
        texts_BL = peer.generate(
            prompts_BP,
            attention_mask=attention_mask_BP,
            do_sample=False,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            use_cache=True,
        )
        new: list[list[int]] = texts_BL[:, prompts_BP.shape[1] :].tolist()
        return new

    return call
