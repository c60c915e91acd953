"""Memory and traffic of a rank whose model is divided over a mesh. No torch.

Bytes that a rank sends are those of rings. Matrices and experts: activations in the dtype of products, forward and
backward. Collectives of the model are not hidden behind products; those of gradients are.
"""

from __future__ import annotations

from dataclasses import dataclass

from config.train import TrainConfig
from config.training.parallel import MultiProcessOptions
from profiling.flops import count_parameters

RANKS_OF_MACHINE = 8
MACHINE_BANDWIDTH, NETWORK_BANDWIDTH = 450e9, 50e9
"""Bytes per second that a GPU sends to those of its machine (NVLink 4), and to other machines (400 Gb/s for each)."""


@dataclass(frozen=True)
class MeshCost:
    """What a mesh makes of one rank's part of a model."""

    share: float = 1.0
    """Part of the parameters that a rank has."""
    dense_share: float = 1.0
    """Part of these that are no experts, which the replicas have in common."""
    bytes_sent: float = 0.0
    """Of the model's collectives in a step."""
    seconds_sent: float = 0.0


def ring_bytes(size: int, num_bytes: float) -> float:
    """Bytes that a rank sends in an all-gather, reduce-scatter or all-to-all of so many bytes."""
    return num_bytes * (size - 1) / size


def bandwidth(span: int) -> float:
    """Bytes per second between ranks of which the first and the last are ``span`` apart."""
    return MACHINE_BANDWIDTH if span <= RANKS_OF_MACHINE else NETWORK_BANDWIDTH


def estimate_mesh(config: TrainConfig, positions: int, itemsize: int) -> MeshCost:
    """The cost of a step with so many positions on a rank and its neighbors that have the same sequences.

    Tensor: an all-reduce after attention and feed-forward, and one of each gradient of their inputs; embedding, head.
    Expert: rows to the experts and back, and their gradients. Context: keys and values, and their gradients.
    """
    parallel, model, vocab_size = config.parallel, config.model, config.tokenizer.vocab_size
    if not isinstance(parallel, MultiProcessOptions) or not parallel.is_divided:
        return MeshCost()
    tensor, context, expert, layers = parallel.tensor, parallel.context, parallel.expert, model.num_hidden_layers
    num_sparse = sum(model.is_sparse(layer) for layer in range(layers))
    experts = 3 * model.hidden_size * (model.moe_intermediate_size or 0) * model.num_experts * num_sparse
    parameters, _ = count_parameters(model, vocab_size)
    own_dense, own_experts = (parameters - experts) / tensor, experts / (tensor * expert)
    own_positions = positions / context
    rows = own_positions * model.hidden_size * itemsize
    kv_bytes = positions * 2 * model.num_key_value_heads * model.head_dim * itemsize / tensor
    sent = [
        (tensor, ring_bytes(tensor, 2 * rows) * (4 * layers + 2)),
        (tensor * context, ring_bytes(context, kv_bytes) * 2 * layers),
        (tensor * context * expert, ring_bytes(expert, rows * model.num_experts_per_tok) * 4 * num_sparse),
    ]
    seconds = sum(num_bytes / bandwidth(span) for span, num_bytes in sent)
    own = own_dense + own_experts
    return MeshCost(own / parameters, own_dense / own, sum(num_bytes for _, num_bytes in sent), seconds)
