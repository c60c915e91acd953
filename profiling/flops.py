"""Count the parameters and floating-point operations of a model. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from config.model import Architecture

AttentionKind = Literal["bidirectional", "causal", "block_causal", "block_diffusion"]
"""Attention patterns: the keys that a query attends to. Block diffusion has two streams, noisy and clean."""

PEAK_FLOPS = {
    "NVIDIA B200": 2250e12,
    "NVIDIA GH200": 989.4e12,
    "NVIDIA H200 NVL": 835.5e12,
    "NVIDIA H200": 989.4e12,
    "NVIDIA H100 NVL": 835.5e12,
    "NVIDIA H100 PCIe": 756.5e12,
    "NVIDIA H100": 989.4e12,
    "NVIDIA H800": 989.4e12,
    "NVIDIA A100": 312e12,
    "NVIDIA A800": 312e12,
    "NVIDIA L40S": 362.05e12,
    "NVIDIA L4": 121e12,
    "NVIDIA GeForce RTX 4090": 165.2e12,
}
"""Device name prefix -> dense bfloat16 FLOPs per second with float32 accumulation, from data sheets."""


def peak_flops(device_name: str) -> float | None:
    """Return the peak of a GPU for dense bfloat16 products, in FLOPs per second; None: unknown."""
    # Only whole words count: an L40 is not an L4.
    names = [name for name in PEAK_FLOPS if f"{device_name} ".startswith((f"{name} ", f"{name}-"))]
    return PEAK_FLOPS[max(names, key=len)] if names else None


def count_visible_pairs(pattern: AttentionKind, length: int, block_length: int = 1) -> int:
    """Count the pairs of a query and a visible key in a document of ``length`` tokens, in closed form.

    For block diffusion, those of both streams.
    """
    n, b = length, block_length
    whole, rest = divmod(n, b)
    before = b * b * whole * (whole - 1) // 2 + rest * whole * b  # of earlier blocks
    own = whole * b * b + rest * rest
    match pattern:
        case "bidirectional":
            return n * n
        case "causal":
            return n * (n + 1) // 2
        case "block_causal":
            return own + before
        case "block_diffusion":
            return 2 * (own + before)


def step_flops(
    model: Architecture,
    vocab_size: int,
    *,
    positions: int,
    scored: int,
    pairs: Sequence[int],
    active_factors: int | None = None,
    num_measuring_forwards: int = 0,
) -> float:
    """Count the FLOPs of the matrix products of a forward and its backward, which has two for each one of the forward,
    or one if the weight is frozen.

    Args:
        vocab_size: rows of the head.
        positions: input positions, over all sequences and streams.
        scored: positions in the head and in the last block's queries, output and feed-forward.
        pairs: visible pairs of queries and keys in each layer.
        active_factors: of an adapter on the frozen model, `AdapterSize.factors_in_flops`; they are counted at all
            positions. None: the model is trained.
        num_measuring_forwards: of preferences, without gradients: of the model, and of its reference, which has no
            adapter.

    Norms are left out, and so is recomputation (`runtime.activation_checkpointing`, fused attention's backward). Of
    images: `tower_flops`.
    """
    D, H = model.hidden_size, model.head_dim
    q_width, kv_width = model.num_attention_heads * H, model.num_key_value_heads * H
    products, attention = float(scored * vocab_size * D), 0.0
    last = model.num_hidden_layers - 1
    for layer in range(model.num_hidden_layers):
        queries = scored if layer == last else positions
        products += positions * 2 * D * kv_width + queries * 2 * D * q_width
        products += queries * _feed_forward(model, layer, model.num_experts_per_tok)
        attention += 2 * pairs[layer] * q_width
    factors = positions * (active_factors or 0)
    flops = (6.0 if active_factors is None else 4.0) * products + 6.0 * (attention + factors)
    if num_measuring_forwards:
        flops += 2.0 * (num_measuring_forwards * (products + attention) + factors)
    return flops


def tower_flops(
    model: Architecture, grids: Sequence[tuple[int, int]], *, is_trained: bool, num_measuring_forwards: int = 0
) -> float:
    """Count the FLOPs of the matrix products of the vision tower and its mergers, as `step_flops` does.

    ``grids``: rows and columns of each image, in positions of the text.
    """
    vision = model.vision
    assert vision is not None
    T, patches_per_position = vision.hidden_size, vision.spatial_merge_size**2
    joined, mergers = T * patches_per_position, 1 + len(vision.deepstack_visual_indexes)
    per_patch = 3 * vision.patch_size**2 * T + vision.depth * (4 * T**2 + 2 * T * vision.intermediate_size)
    per_position = patches_per_position * per_patch + mergers * joined * (joined + model.hidden_size)
    sizes = [rows * columns for rows, columns in grids]
    attention = 2 * vision.depth * T * sum((patches_per_position * size) ** 2 for size in sizes)
    return 2.0 * (sum(sizes) * per_position + attention) * (1 + 2 * is_trained + num_measuring_forwards)


def count_parameters(model: Architecture, vocab_size: int) -> tuple[int, int]:
    """Return the numbers of all parameters and of those in embedding and head."""
    D, H = model.hidden_size, model.head_dim
    q_width, kv_width = model.num_attention_heads * H, model.num_key_value_heads * H
    attention = D * (q_width + 2 * kv_width) + q_width * D
    if model.attention_bias:
        attention += q_width + 2 * kv_width
    if model.attention_output_bias:
        attention += D
    norms = (4 if model.sandwich_norms else 2) * D + (2 * H if model.qk_norm else 0)
    fed = sum(_feed_forward(model, layer, model.num_experts) for layer in range(model.num_hidden_layers))
    tables = vocab_size * D * (1 if model.tie_word_embeddings else 2)
    text = model.num_hidden_layers * (attention + norms) + fed + D + tables
    return text + sum(size for _, size in list_vision_parameters(model)), tables


def count_vision_parameters(model: Architecture) -> tuple[int, int]:
    """Return the numbers of parameters of the vision tower and of its mergers."""
    sizes = dict(list_vision_parameters(model))
    mergers = sum(size for name, size in sizes.items() if "merger" in name)
    return sum(sizes.values()) - mergers, mergers


def list_vision_parameters(model: Architecture) -> Iterator[tuple[str, int]]:
    """Names and sizes of the parameters of the vision tower and its mergers. None without a tower."""
    vision = model.vision
    if vision is None:
        return
    T, inner, joined = vision.hidden_size, vision.intermediate_size, vision.hidden_size * vision.spatial_merge_size**2
    frames, size = vision.temporal_patch_size, vision.patch_size
    modules = {"patch_embed.proj": (3 * frames * size**2, T)}  # inputs and outputs; a norm has one input
    for block in range(vision.depth):
        stem = f"blocks.{block}"
        modules |= {f"{stem}.norm1": (1, T), f"{stem}.attn.qkv": (T, 3 * T), f"{stem}.attn.proj": (T, T)}
        modules |= {f"{stem}.norm2": (1, T), f"{stem}.mlp.linear_fc1": (T, inner), f"{stem}.mlp.linear_fc2": (inner, T)}
    deepstack = [f"deepstack_merger_list.{index}" for index in range(len(vision.deepstack_visual_indexes))]
    for merger, width in (("merger", T), *((name, joined) for name in deepstack)):
        modules |= {f"{merger}.norm": (1, width), f"{merger}.linear_fc1": (joined, joined)}
        modules |= {f"{merger}.linear_fc2": (joined, model.hidden_size)}
    yield "model.visual.pos_embed.weight", vision.num_position_embeddings * T
    for name, (num_inputs, num_outputs) in modules.items():
        yield f"model.visual.{name}.weight", num_inputs * num_outputs
        yield f"model.visual.{name}.bias", num_outputs


def count_idle_parameters(model: Architecture) -> int:
    """Count the parameters of experts that a token does not use, in all layers."""
    return sum(
        _feed_forward(model, layer, model.num_experts) - _feed_forward(model, layer, model.num_experts_per_tok)
        for layer in range(model.num_hidden_layers)
    )


def feed_forward_width(model: Architecture, layer: int, experts: int) -> int:
    """Return the inner width of a layer's feed-forward, or of ``experts`` experts together in a sparse layer."""
    if not model.is_sparse(layer):
        return model.intermediate_size
    assert model.moe_intermediate_size is not None
    return experts * model.moe_intermediate_size


def _feed_forward(model: Architecture, layer: int, experts: int) -> int:
    """Count the parameters of a layer's feed-forward, or of its router and ``experts`` experts."""
    router = model.num_experts * model.hidden_size if model.is_sparse(layer) else 0
    return router + 3 * model.hidden_size * feed_forward_width(model, layer, experts)


def flops_per_token(
    model: Architecture,
    vocab_size: int,
    row_length: int,
    masked_share: float = 0.5,
    pattern: AttentionKind = "bidirectional",
    block_length: int = 1,
    active_factors: int | None = None,
    *,
    num_measuring_forwards: int = 0,
) -> float:
    """Return training FLOPs per token of a sequence that is one document: `step_flops` divided by its tokens.

    ``masked_share`` of the tokens go through the head and, in the last block, through queries, output and
    feed-forward; the count estimator masks (L + 1) / 2L of them. Of a mixture of experts a token meets the router and
    the experts that it is sent to.
    """
    streams = 2 if pattern == "block_diffusion" else 1
    pairs = count_visible_pairs(pattern, row_length, block_length)
    scored = round(masked_share * row_length)
    last = round(pairs * masked_share / streams)
    layers = [*[pairs] * (model.num_hidden_layers - 1), last]
    positions = streams * row_length
    flops = step_flops(
        model,
        vocab_size,
        positions=positions,
        scored=scored,
        pairs=layers,
        active_factors=active_factors,
        num_measuring_forwards=num_measuring_forwards,
    )
    return flops / row_length
