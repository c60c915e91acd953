"""Count the parameters of an adapter (LoRA) from its config. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from config.finetune.lora import LoraConfig
from config.model import ModelConfig
from diffusionlm.families.registry import get_family


@dataclass(frozen=True)
class AdapterSize:
    """Number of values of an adapter, and of the weights that it adapts."""

    parameters: int
    """All trained values."""
    active_factors: int
    """Values of A and B that a token meets; of experts, those that it is sent to."""
    adapted_weights: int
    """Values of the projections with an adapter."""


def measure_adapter(lora: LoraConfig, model: ModelConfig) -> AdapterSize:
    """Measure the adapter that a config puts on a model."""
    family = get_family(model)
    parameters, active, adapted = 0, 0.0, 0
    for name, num_inputs, num_outputs, share in _list_projections(model):
        target = family.stored_name(f"{name}.weight").removesuffix(".weight")
        if not lora.adapts(name, target):
            continue
        factors = lora.rank_of(target) * (num_inputs + num_outputs)
        parameters += factors + num_outputs * lora.dora
        active += share * factors
        adapted += num_inputs * num_outputs
    has_head_rows = lora.trainable_head_rows and not model.tie_word_embeddings
    parameters += len(lora.trainable_tokens) * model.hidden_size * (2 if has_head_rows else 1)
    return AdapterSize(parameters, round(active), adapted)


def check_targets(lora: LoraConfig, model: ModelConfig) -> None:
    """
    Raises:
        ValueError: the config adapts no projection of a model, or a name or pattern of it is that of none; lists what
            the model has.
    """
    family = get_family(model)
    names = [name for name, *_ in _list_projections(model)]
    targets = [family.stored_name(f"{name}.weight").removesuffix(".weight") for name in names]
    known = ", ".join(sorted({target.rpartition(".")[2] for target in targets}))
    if not any(lora.adapts(name, target) for name, target in zip(names, targets, strict=True)):
        raise ValueError(f"lora.targets = {lora.targets!r} selects no projection; the model has {known}")
    for key, name in lora.find_unused_names(targets):
        raise ValueError(f"lora.{key}: {name!r} is the name of no projection; the model has {known}")


def _list_projections(model: ModelConfig) -> Iterator[tuple[str, int, int, float]]:
    """Name, inputs, outputs and share of the tokens of each projection of the blocks."""
    D, H = model.hidden_size, model.head_dim
    q_width, kv_width = model.num_attention_heads * H, model.num_key_value_heads * H
    attention = (("q_proj", D, q_width), ("k_proj", D, kv_width), ("v_proj", D, kv_width), ("o_proj", q_width, D))
    for layer in range(model.num_hidden_layers):
        stem = f"model.layers.{layer}"
        for name, num_inputs, num_outputs in attention:
            yield f"{stem}.self_attn.{name}", num_inputs, num_outputs, 1.0
        if not model.is_sparse(layer):
            yield from _list_feed_forward(f"{stem}.mlp", D, model.intermediate_size, 1.0)
            continue
        assert model.moe_intermediate_size is not None
        yield f"{stem}.mlp.gate", D, model.num_experts, 1.0
        share = model.num_experts_per_tok / model.num_experts
        for expert in range(model.num_experts):
            yield from _list_feed_forward(f"{stem}.mlp.experts.{expert}", D, model.moe_intermediate_size, share)


def _list_feed_forward(stem: str, width: int, inner: int, share: float) -> Iterator[tuple[str, int, int, float]]:
    yield f"{stem}.gate_proj", width, inner, share
    yield f"{stem}.up_proj", width, inner, share
    yield f"{stem}.down_proj", inner, width, share
