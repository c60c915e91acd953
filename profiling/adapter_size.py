"""Count the parameters of an adapter (LoRA) from its config. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from config.finetune.lora import HEAD, LoraConfig
from config.model import ModelConfig
from diffusionlm.families.registry import get_family
from profiling.flops import list_vision_parameters


@dataclass(frozen=True)
class AdapterSize:
    """Number of values of an adapter, and of the weights that it adapts."""

    parameters: int
    """All trained values."""
    base_parameters: int
    """Those of them that are the base's own (`modules_to_save`, `bias`)."""
    active_factors: int
    """Values of A and B that a token meets; of experts, those that it is sent to."""
    active_base: int
    """The same of trained matrices of the base."""
    adapted_weights: int
    """Values of the projections with an adapter."""

    @property
    def factors_in_flops(self) -> int:
        """``active_factors`` of `step_flops`: of the three products of a matrix of the base one is due to training."""
        return self.active_factors + self.active_base // 3


def measure_adapter(lora: LoraConfig, model: ModelConfig) -> AdapterSize:
    """Measure the adapter that a config puts on a model."""
    family = get_family(model)
    parameters, base_parameters, active, active_base, adapted = 0, 0, 0.0, 0.0, 0
    has_head_rows = lora.trainable_head_rows and not model.tie_word_embeddings
    for name, num_inputs, num_outputs, share in _list_projections(model):
        target, size = family.stored_name(f"{name}.weight").removesuffix(".weight"), num_inputs * num_outputs
        is_adapted, is_saved = lora.adapts(name, target), lora.saves(f"{target}.weight")
        if is_adapted:
            factors = lora.rank_of(target) * (num_inputs + num_outputs)
            parameters += factors + num_outputs * lora.dora
            active += share * factors
            adapted += size
        if is_saved:
            base_parameters += size
            active_base += share * size
        has_bias = model.attention_output_bias if name.endswith("o_proj") else model.attention_bias
        if has_bias and ".self_attn." in name and lora.trains(f"{target}.bias", is_adapted=is_adapted):
            base_parameters += num_outputs
        has_head_rows = has_head_rows and not (name == HEAD and (is_adapted or is_saved))
    for names, size in _list_other_parameters(model):
        if any(lora.trains(family.stored_name(name), is_adapted=False) for name in names):
            base_parameters += size
    parameters += len(lora.token_ids(0)) * model.hidden_size * (2 if has_head_rows else 1)
    return AdapterSize(parameters + base_parameters, base_parameters, round(active), round(active_base), adapted)


def check_targets(lora: LoraConfig, model: ModelConfig) -> None:
    """
    Raises:
        ValueError: the config adapts no projection of a model, or a name, pattern, layer or bias of it is that of none;
            lists what the model has.
    """
    family = get_family(model)
    names = [name for name, *_ in _list_projections(model)]
    targets = [family.stored_name(f"{name}.weight").removesuffix(".weight") for name in names]
    known = ", ".join(sorted({target.rpartition(".")[2] for target in targets}))
    if not any(lora.adapts(name, target) for name, target in zip(names, targets, strict=True)):
        raise ValueError(f"lora.targets = {lora.targets!r} selects no projection; the model has {known}")
    for key, name in lora.find_unused_names(targets):
        raise ValueError(f"lora.{key}: {name!r} is the name of no projection; the model has {known}")
    for name in lora.modules_to_save:
        if not measure_adapter(LoraConfig(modules_to_save=(name,)), model).base_parameters:
            raise ValueError(
                f"lora.modules_to_save: {name!r} ends the name of no module; the model has {known} and others"
            )
    if lora.bias != "none" and not measure_adapter(LoraConfig(bias="all"), model).base_parameters:
        raise ValueError(f'lora.bias = "{lora.bias}", and the model has no bias: set lora.bias = "none"')
    if max(lora.layers_to_transform, default=0) >= model.num_hidden_layers:
        last = model.num_hidden_layers - 1
        raise ValueError(f"lora.layers_to_transform = {list(lora.layers_to_transform)}: the last layer is {last}")


def _list_projections(model: ModelConfig) -> Iterator[tuple[str, int, int, float]]:
    """Name, inputs, outputs and share of the tokens of each projection."""
    D, H = model.hidden_size, model.head_dim
    if not model.tie_word_embeddings:
        yield HEAD, D, model.vocab_size, 0.5  # about half of the tokens are masked
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


def _list_other_parameters(model: ModelConfig) -> Iterator[tuple[tuple[str, ...], int]]:
    """Names and size of the embedding, with a tied head, of each norm, and of the parameters of the vision tower."""
    embedding = "model.embed_tokens.weight"
    names = (embedding, f"{HEAD}.weight") if model.tie_word_embeddings else (embedding,)
    yield names, model.vocab_size * model.hidden_size
    yield ("model.norm.weight",), model.hidden_size
    places = ("input", "post_attention", *(("pre_feedforward", "post_feedforward") if model.sandwich_norms else ()))
    sizes = {f"{place}_layernorm": model.hidden_size for place in places}
    if model.qk_norm:
        sizes |= {"self_attn.q_norm": model.head_dim, "self_attn.k_norm": model.head_dim}
    for layer in range(model.num_hidden_layers):
        yield from (((f"model.layers.{layer}.{name}.weight",), size) for name, size in sizes.items())
    yield from (((name,), size) for name, size in list_vision_parameters(model))


def _list_feed_forward(stem: str, width: int, inner: int, share: float) -> Iterator[tuple[str, int, int, float]]:
    yield f"{stem}.gate_proj", width, inner, share
    yield f"{stem}.up_proj", width, inner, share
    yield f"{stem}.down_proj", inner, width, share
