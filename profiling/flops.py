"""Parameters, floating-point operations and memory of a training run, on paper: no torch."""

from __future__ import annotations

from dataclasses import dataclass

from config.model import Architecture


@dataclass(frozen=True)
class Plan:
    """What a run will need."""

    parameters: int
    active_parameters: int
    """Those that a token meets: of a mixture, the router and the experts that it is sent to."""
    embedding_parameters: int
    tokens: int | None
    """Of the whole run; None where it is not known without reading the data."""
    flops_per_token: float
    """Forward and backward, with the head and the last block's queries and feed-forward on masked tokens alone."""
    bytes_weights: int
    bytes_gradients: int
    bytes_optimizer: int
    bytes_activations: int
    """Kept for the backward of one micro-batch; an estimate."""

    @property
    def bytes_total(self) -> int:
        """All of it."""
        return self.bytes_weights + self.bytes_gradients + self.bytes_optimizer + self.bytes_activations


def count_parameters(model: Architecture, vocab_size: int) -> tuple[int, int]:
    """All parameters, and those of embedding and head."""
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
    return model.num_hidden_layers * (attention + norms) + fed + D + tables, tables


def count_idle_parameters(model: Architecture) -> int:
    """Parameters of the experts that a token is not sent to, in all layers."""
    return sum(
        _feed_forward(model, layer, model.num_experts) - _feed_forward(model, layer, model.num_experts_per_tok)
        for layer in range(model.num_hidden_layers)
    )


def _inner_width(model: Architecture, layer: int, experts: int) -> int:
    """Of a layer's feed-forward, or of this many experts together where it has any."""
    if not model.is_sparse(layer):
        return model.intermediate_size
    assert model.moe_intermediate_size is not None
    return experts * model.moe_intermediate_size


def _feed_forward(model: Architecture, layer: int, experts: int) -> int:
    """Parameters of a layer's feed-forward, or of its router and this many experts."""
    router = model.num_experts * model.hidden_size if model.is_sparse(layer) else 0
    return router + 3 * model.hidden_size * _inner_width(model, layer, experts)


def flops_per_token(model: Architecture, vocab_size: int, row_length: int, masked_share: float = 0.5) -> float:
    """Training FLOPs for each token of a row: 6 for each weight that it meets, 12 L for each unit of attention width.

    ``masked_share`` of the tokens go through the head and, in the last block, through queries, output and
    feed-forward; the count estimator masks (L + 1) / 2L of them. Of a mixture of experts a token meets the router and
    the experts that it is sent to.
    """
    D, H = model.hidden_size, model.head_dim
    q_width, kv_width = model.num_attention_heads * H, model.num_key_value_heads * H
    for_all = 2 * D * kv_width
    for_masked = [
        2 * D * q_width + _feed_forward(model, layer, model.num_experts_per_tok)
        for layer in range(model.num_hidden_layers)
    ]
    attention = 12.0 * row_length * q_width
    full = sum(6.0 * (for_all + each) + attention for each in for_masked[:-1])
    last = 6.0 * for_all + attention + masked_share * 6.0 * for_masked[-1]
    return full + last + masked_share * 6.0 * vocab_size * D


def plan_run(
    model: Architecture, vocab_size: int, *, row_length: int, micro_batch_size: int, tokens: int | None, moments: float
) -> Plan:
    """The plan of a run; ``moments`` is how many fp32 numbers the optimizer keeps for each parameter."""
    parameters, tables = count_parameters(model, vocab_size)
    inner = sum(_inner_width(model, layer, model.num_experts_per_tok) for layer in range(model.num_hidden_layers))
    width = model.num_hidden_layers * 10 * model.hidden_size + 5 * inner
    heads = model.num_hidden_layers * model.num_attention_heads
    per_token = 4 * width + 4 * heads * row_length
    return Plan(
        parameters=parameters,
        active_parameters=parameters - count_idle_parameters(model),
        embedding_parameters=tables,
        tokens=tokens,
        flops_per_token=flops_per_token(model, vocab_size, row_length),
        bytes_weights=4 * parameters,
        bytes_gradients=4 * parameters,
        bytes_optimizer=round(4 * moments * parameters),
        bytes_activations=micro_batch_size * row_length * per_token,
    )
