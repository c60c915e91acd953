"""Parameters, FLOPs, memory and traffic of a training run, estimated from its config. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from config.finetune.lora import LoraTrainingConfig
from config.finetune.preference import PreferenceConfig
from config.model import Architecture
from config.train import TrainConfig
from config.training.objective import AllMasked, BlockDiffusionConfig, NextTokenConfig
from config.training.parallel import DDP, FSDP, MultiProcessOptions
from profiling.adapter_size import measure_adapter
from profiling.flops import (
    PEAK_FLOPS,
    AttentionKind,
    count_idle_parameters,
    count_parameters,
    count_vision_parameters,
    feed_forward_width,
    flops_per_token,
)
from profiling.mesh_estimate import MACHINE_BANDWIDTH, MeshCost, bandwidth, estimate_mesh, ring_bytes

CheckpointingMode = Literal["none", "selective", "full"]
"""Values of `runtime.activation_checkpointing`."""

REFERENCE_GPU = "NVIDIA H200"


@dataclass(frozen=True)
class ResourceEstimate:
    """Parameters, tokens, FLOPs, memory and traffic of a run, without recomputation and temporary memory.

    FLOPs and activations are those of the text alone: how many images it has is not known.
    Memory and traffic are those of one rank, in bytes. Activations are in float32 with eager attention and all logits.
    """

    parameters: int
    active_parameters: int
    """Parameters that one token uses: of a mixture of experts, the router and the experts chosen for it."""
    embedding_parameters: int
    """Parameters of embedding and head."""
    trained_parameters: int
    """All without `training.freeze`, or those of the adapter."""
    tokens_per_step: int
    tokens: int | None
    """Tokens of the whole run; None: unknown before the data is read."""
    flops_per_token: float
    """Forward and backward; head, and the last block's queries and feed-forward, on masked tokens only."""
    bytes_weights: int
    bytes_gradients: int
    bytes_optimizer: int
    bytes_activations: int
    """Activations that the backward of one micro-batch needs."""
    ranks: int = 1
    bytes_sent: int = 0
    """Bytes that a rank sends in a step: those of a ring, the minimum of any algorithm."""
    model_bytes_sent: int = 0
    """The same of the collectives of a model that is divided over a mesh."""
    model_seconds: float = 0.0
    """Least time of these collectives."""
    data_bandwidth: float = MACHINE_BANDWIDTH
    """Bytes per second of gradients and weights."""

    @property
    def bytes_total(self) -> int:
        return self.bytes_weights + self.bytes_gradients + self.bytes_optimizer + self.bytes_activations

    @property
    def step_seconds_bound(self) -> float:
        """The least time of a step on GPUs of the kind `REFERENCE_GPU`: products at the peak and the collectives of
        the model, or the traffic of gradients and weights."""
        seconds = self.flops_per_token * self.tokens_per_step / self.ranks / PEAK_FLOPS[REFERENCE_GPU]
        return max(seconds + self.model_seconds, self.bytes_sent / self.data_bandwidth)


def estimate_run(config: TrainConfig, ranks: int = 1) -> ResourceEstimate:
    """Estimate a run's resources; memory is that of one of ``ranks`` ranks.

    Raises:
        ValueError: `training.batch_size` is not a multiple of ``ranks``.
    """
    training, model, vocab_size = config.training, config.model, config.tokenizer.vocab_size
    parallel = config.parallel
    tensor, context = 1, 1
    if ranks > 1 and isinstance(parallel, MultiProcessOptions):
        parallel.check_ranks(ranks)
        tensor, context = parallel.tensor, parallel.context
    rows = config.sequences_per_rank(ranks // (tensor * context))
    micro_batch_size = training.micro_batch_size or rows
    tokens_per_step = training.batch_size * config.row_length
    streams = 2 if _attention_kind(config)[0] == "block_diffusion" else 1
    parameters, tables = count_parameters(model, vocab_size)
    sizes_of_parts = dict(zip(("vision", "merger"), count_vision_parameters(model), strict=True))
    trained = parameters - sum(sizes_of_parts[part] for part in training.freeze)
    width = _activation_width(model, config.row_length, config.runtime.activation_checkpointing, tensor)
    estimate = ResourceEstimate(
        parameters=parameters,
        active_parameters=parameters - count_idle_parameters(model),
        embedding_parameters=tables,
        trained_parameters=trained,
        tokens_per_step=tokens_per_step,
        tokens=None if training.max_steps is None else training.max_steps * tokens_per_step,
        flops_per_token=_count_flops_per_token(config),
        bytes_weights=4 * parameters,
        bytes_gradients=4 * trained,
        bytes_optimizer=round(4 * _optimizer_floats(config) * trained),
        bytes_activations=round(4 * micro_batch_size * config.row_length * streams * width / context),
    )
    if config.rl is not None or isinstance(config.objective, PreferenceConfig):
        estimate = _add_reference(estimate, config)
    if config.lora is not None:
        estimate = _freeze_base(estimate, config, config.lora)
    if ranks == 1:
        return estimate
    cost = estimate_mesh(config, rows * config.row_length * streams, 4 if training.precision == "float32" else 2)
    return _divide(estimate, config, ranks, rows // micro_batch_size, cost)


def _divide(
    estimate: ResourceEstimate, config: TrainConfig, ranks: int, micro_batches: int, cost: MeshCost
) -> ResourceEstimate:
    """Divide the state of a run among its ranks.

    ``ddp`` with sharded optimizer: a rank has its part of weights and gradients once more, which the optimizer works
    on. ``fsdp``: two blocks are gathered in bfloat16, that which runs and the next one, with the gradients of one;
    embedding and head in float32, with their gradients. Gradients travel in float32, once a step; with fsdp for each
    micro-batch, and the weights of blocks in bfloat16 for each forward and, where they are dropped between, each
    backward. Divided experts belong to no strategy: their gradients are all-reduced, and their state is whole.
    """
    parallel = config.parallel
    tensor, expert = (parallel.tensor, parallel.expert) if isinstance(parallel, MultiProcessOptions) else (1, 1)
    replicas, dense = ranks // tensor, cost.dense_share
    part, rest = dense / replicas, 1.0 - dense
    sent_for_experts = ring_bytes(ranks // (tensor * expert), 2 * rest * cost.share * estimate.bytes_gradients)
    weights, gradients, optimizer = (
        cost.share * values for values in (estimate.bytes_weights, estimate.bytes_gradients, estimate.bytes_optimizer)
    )
    gathered, sent, kept = 0.0, 2 * dense * gradients, part + rest
    if isinstance(parallel, FSDP):
        layers, tables = config.model.num_hidden_layers, estimate.embedding_parameters / tensor
        block = (cost.share * dense * estimate.parameters - tables) / layers
        gathers = 2 * micro_batches if parallel.reshard_after_forward else 1
        gathered = 2 * block * ((2 if parallel.reshard_after_forward else layers) + 1) + 8 * tables
        sent = dense * gradients * micro_batches + 2 * block * layers * gathers + 4 * tables
        weights, gradients, optimizer = weights * kept + gathered, gradients * kept, optimizer * kept
    elif isinstance(parallel, DDP) and parallel.shard_optimizer:
        weights, gradients, optimizer = weights + gradients * part, gradients * (1.0 + part), optimizer * kept
    return replace(
        estimate,
        ranks=ranks,
        bytes_weights=round(weights),
        bytes_gradients=round(gradients),
        bytes_optimizer=round(optimizer),
        bytes_sent=round(ring_bytes(replicas, sent) + sent_for_experts),
        model_bytes_sent=round(cost.bytes_sent),
        model_seconds=cost.seconds_sent,
        data_bandwidth=bandwidth(ranks),
    )


def _count_flops_per_token(config: TrainConfig, active_factors: int | None = None) -> float:
    """FLOPs per token of all forwards of a step and their backward; ``active_factors``: see `step_flops`."""
    objective, (kind, block_length) = config.objective, _attention_kind(config)
    size, length = config.tokenizer.vocab_size, config.row_length
    if isinstance(objective, PreferenceConfig):
        masked_share = 1.0 if objective.block_length == 1 else 0.5
        # A row has two documents.
        flops = flops_per_token(
            config.model,
            size,
            length // 2,
            masked_share,
            kind,
            block_length,
            active_factors,
            num_measuring_forwards=objective.loss.has_reference + 1,
        )
        return flops * _num_draws(objective)
    masked_share = 1.0 if kind == "causal" else 0.5
    next_token_weight = 0.0 if isinstance(objective, NextTokenConfig) else objective.next_token_weight
    measuring = 0
    if isinstance(objective, BlockDiffusionConfig):
        masked_share = 1.0 if isinstance(objective.estimator, AllMasked) else masked_share
        measuring = int(objective.balance)
        if objective.clean_attention == "token" and next_token_weight:
            masked_share, next_token_weight = masked_share + 1.0, 0.0
    flops = flops_per_token(
        config.model, size, length, masked_share, kind, block_length, active_factors, num_measuring_forwards=measuring
    )
    if next_token_weight:
        flops += flops_per_token(config.model, size, length, 1.0, "causal", active_factors=active_factors)
    return flops


def _num_draws(objective: PreferenceConfig) -> int:
    return 1 if objective.block_length == 1 else objective.num_draws


def _add_reference(estimate: ResourceEstimate, config: TrainConfig) -> ResourceEstimate:
    """The memory of a reference, if there is one and it is not the base of an adapter: a copy of the weights, whose
    blocks are bfloat16 if their products are; and of preferences the draws of a micro-batch. The forwards without
    gradients keep no activations."""
    num_draws = _num_draws(config.objective) if isinstance(config.objective, PreferenceConfig) else 1
    has_copy = config.has_reference and (config.lora is None or config.lora.trains_base)
    copy_bytes = estimate.bytes_weights if has_copy else 0
    if copy_bytes and config.training.precision == "bfloat16" and not isinstance(config.parallel, FSDP):
        copy_bytes -= 2 * (estimate.parameters - estimate.embedding_parameters)
    return replace(
        estimate,
        bytes_weights=estimate.bytes_weights + copy_bytes,
        bytes_activations=estimate.bytes_activations * num_draws,
    )


def _freeze_base(estimate: ResourceEstimate, config: TrainConfig, lora: LoraTrainingConfig) -> ResourceEstimate:
    """The estimate of a run that trains an adapter, from that of training the whole model."""
    model = config.model.to_adapted_config(vocab_size=config.tokenizer.vocab_size)
    size = measure_adapter(lora, model)
    added = size.parameters - size.base_parameters
    dtype = config.training.precision if lora.base == "auto" else lora.base
    bytes_per_weight = {"bfloat16": 2.0, "nf4": 0.5 + 4 / 64}.get(dtype, 4.0)
    return replace(
        estimate,
        parameters=estimate.parameters + added,
        active_parameters=estimate.active_parameters + size.active_factors,
        trained_parameters=size.parameters,
        flops_per_token=_count_flops_per_token(config, size.factors_in_flops),
        bytes_weights=round(estimate.bytes_weights + 4 * added - (4.0 - bytes_per_weight) * size.adapted_weights),
        bytes_gradients=4 * size.parameters,
        bytes_optimizer=round(4 * _optimizer_floats(config) * size.parameters),
    )


def _optimizer_floats(config: TrainConfig) -> float:
    # The weight average is one more copy.
    return config.optimizer.state_floats_per_parameter + (1.0 if config.training.ema_decay else 0.0)


def _attention_kind(config: TrainConfig) -> tuple[AttentionKind, int]:
    """Return attention kind and block length at the end of the run."""
    objective = config.objective
    if isinstance(objective, NextTokenConfig):
        return "causal", 1
    length = objective.final_block_length
    is_token_causal = config.model.clean_alignment is not None
    if length == 1 and config.model.logit_alignment == "shifted" and not is_token_causal:
        return "causal", 1
    if length is None or (length >= config.row_length and not is_token_causal):
        return "bidirectional", 1
    return "block_diffusion", length


def _activation_width(model: Architecture, row_length: int, checkpointing: CheckpointingMode, tensor: int) -> float:
    """Estimate the values that one position keeps for the backward on each of ``tensor`` ranks, which divide heads and
    inner widths."""
    widths = [feed_forward_width(model, layer, model.num_experts_per_tok) for layer in range(model.num_hidden_layers)]
    all_values = [
        6 * model.hidden_size + (4 * model.hidden_size + 5 * width + model.num_attention_heads * row_length) / tensor
        for width in widths
    ]
    if checkpointing == "none":
        return sum(all_values)
    projections = [0.0 if checkpointing == "full" else (6 * model.hidden_size + 2 * width) / tensor for width in widths]
    # The input of each block is always kept, and one block at a time is recomputed as a whole.
    return sum(projections) + len(widths) * model.hidden_size + max(all_values)
