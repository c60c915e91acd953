"""Parameters, FLOPs and memory of a training run, estimated from its config. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from config.finetune.lora import LoraTrainingConfig
from config.finetune.preference import PreferenceConfig
from config.model import Architecture
from config.train import TrainConfig
from config.training.objective import NextTokenConfig
from config.training.parallel import DDP, FSDP
from profiling.adapter_size import measure_adapter
from profiling.flops import (
    AttentionKind,
    count_idle_parameters,
    count_parameters,
    feed_forward_width,
    flops_per_token,
)
from profiling.scaling import ParallelStrategy, TrainingJob, estimate_rank_memory

CheckpointingMode = Literal["none", "selective", "full"]
"""Values of `runtime.activation_checkpointing`."""


@dataclass(frozen=True)
class ResourceEstimate:
    """Parameters, tokens, FLOPs and memory of a run.

    Memory is that of one rank, in bytes, before the first step allocates anything else.
    """

    parameters: int
    active_parameters: int
    """Parameters that one token uses: of a mixture of experts, the router and the experts chosen for it."""
    embedding_parameters: int
    """Parameters of embedding and head."""
    trained_parameters: int
    """All, or those of the adapter."""
    tokens: int | None
    """Tokens of the whole run; None: unknown before the data is read."""
    flops_per_token: float
    """Forward and backward; head, and the last block's queries and feed-forward, on masked tokens only."""
    bytes_weights: int
    bytes_gradients: int
    bytes_optimizer: int
    bytes_activations: int
    """Activations that the backward of one micro-batch needs."""

    @property
    def bytes_total(self) -> int:
        return self.bytes_weights + self.bytes_gradients + self.bytes_optimizer + self.bytes_activations


def estimate_run(config: TrainConfig, ranks: int = 1) -> ResourceEstimate:
    """Estimate a run's resources; memory is that of one of ``ranks`` ranks.

    Raises:
        ValueError: `training.batch_size` is not a multiple of ``ranks``.
    """
    training, row_length = config.training, config.row_length
    micro_batch_size = training.micro_batch_size or config.sequences_per_rank(ranks)
    estimate = estimate_resources(
        config.model,
        config.tokenizer.vocab_size,
        row_length=row_length,
        micro_batch_size=micro_batch_size,
        tokens=None if training.max_steps is None else training.max_steps * training.batch_size * row_length,
        floats_per_parameter=_optimizer_floats(config),
        blocks=_attention_kind(config),
        checkpointing=config.runtime.activation_checkpointing,
    )
    estimate = replace(estimate, flops_per_token=_count_flops_per_token(config))
    if isinstance(config.objective, PreferenceConfig):
        estimate = _add_reference(estimate, config, config.objective)
    if config.lora is not None:
        estimate = _freeze_base(estimate, config, config.lora)
    if ranks == 1:
        return estimate
    parallel = config.parallel
    job = TrainingJob(
        config.model,
        config.tokenizer.vocab_size,
        ranks,
        parallel_strategy(config),
        batch_size=training.batch_size,
        micro_batch_size=micro_batch_size,
        floats_per_parameter=_optimizer_floats(config),
        reshards_after_forward=not isinstance(parallel, FSDP) or parallel.reshard_after_forward,
    )
    memory = estimate_rank_memory(job)
    # Shares of one rank: an adapter has other sizes than the whole model that the job describes.
    whole = 4.0 * estimate.parameters
    return replace(
        estimate,
        bytes_weights=round(estimate.bytes_weights * (memory.weights + memory.gathered) / whole),
        bytes_gradients=round(estimate.bytes_gradients * memory.gradients / whole),
        bytes_optimizer=round(estimate.bytes_optimizer * memory.optimizer / (whole * job.floats_per_parameter)),
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
            has_reference=True,
        )
        return flops * _num_draws(objective)
    masked_share = 1.0 if kind == "causal" else 0.5
    flops = flops_per_token(config.model, size, length, masked_share, kind, block_length, active_factors)
    if not isinstance(objective, NextTokenConfig) and objective.next_token_weight:
        flops += flops_per_token(config.model, size, length, 1.0, "causal", active_factors=active_factors)
    return flops


def _num_draws(objective: PreferenceConfig) -> int:
    return 1 if objective.block_length == 1 else objective.num_draws


def _add_reference(estimate: ResourceEstimate, config: TrainConfig, objective: PreferenceConfig) -> ResourceEstimate:
    """The memory of preference training: the draws of a micro-batch, and without adapters a copy of the weights, whose
    blocks are bfloat16 if their products are. The forwards without gradients keep no activations."""
    copy_bytes = estimate.bytes_weights if config.lora is None else 0
    if copy_bytes and config.training.precision == "bfloat16" and not isinstance(config.parallel, FSDP):
        copy_bytes -= 2 * (estimate.parameters - estimate.embedding_parameters)
    return replace(
        estimate,
        bytes_weights=estimate.bytes_weights + copy_bytes,
        bytes_activations=estimate.bytes_activations * _num_draws(objective),
    )


def _freeze_base(estimate: ResourceEstimate, config: TrainConfig, lora: LoraTrainingConfig) -> ResourceEstimate:
    """The estimate of a run that trains an adapter, from that of training the whole model."""
    model = config.model.to_adapted_config(vocab_size=config.tokenizer.vocab_size)
    size = measure_adapter(lora, model)
    dtype = config.training.precision if lora.base == "auto" else lora.base
    bytes_per_weight = {"bfloat16": 2.0, "nf4": 0.5 + 4 / 64}.get(dtype, 4.0)
    return replace(
        estimate,
        parameters=estimate.parameters + size.parameters,
        active_parameters=estimate.active_parameters + size.active_factors,
        trained_parameters=size.parameters,
        flops_per_token=_count_flops_per_token(config, size.active_factors),
        bytes_weights=round(
            estimate.bytes_weights + 4 * size.parameters - (4.0 - bytes_per_weight) * size.adapted_weights
        ),
        bytes_gradients=4 * size.parameters,
        bytes_optimizer=round(4 * _optimizer_floats(config) * size.parameters),
    )


def estimate_resources(
    model: Architecture,
    vocab_size: int,
    *,
    row_length: int,
    micro_batch_size: int,
    tokens: int | None,
    floats_per_parameter: float,
    blocks: tuple[AttentionKind, int] = ("bidirectional", 1),
    checkpointing: CheckpointingMode = "none",
) -> ResourceEstimate:
    """Estimate the resources of training on one device in float32 with eager attention and all logits.

    Args:
        vocab_size: rows of embedding and head.
        row_length: tokens of a sequence.
        micro_batch_size: sequences of one forward.
        tokens: tokens of the whole run, if known.
        floats_per_parameter: float32 values that the optimizer keeps for each parameter.
        blocks: attention kind and block length.
    """
    parameters, tables = count_parameters(model, vocab_size)
    kind, block_length = blocks
    masked_share = 1.0 if kind == "causal" else 0.5
    positions = micro_batch_size * row_length * (2 if kind == "block_diffusion" else 1)
    return ResourceEstimate(
        parameters=parameters,
        active_parameters=parameters - count_idle_parameters(model),
        embedding_parameters=tables,
        trained_parameters=parameters,
        tokens=tokens,
        flops_per_token=flops_per_token(model, vocab_size, row_length, masked_share, kind, block_length),
        bytes_weights=4 * parameters,
        bytes_gradients=4 * parameters,
        bytes_optimizer=round(4 * floats_per_parameter * parameters),
        bytes_activations=4 * positions * _activation_width(model, row_length, checkpointing),
    )


def parallel_strategy(config: TrainConfig) -> ParallelStrategy:
    """Return the strategy of a run on several ranks."""
    if isinstance(config.parallel, FSDP):
        return "fsdp"
    return "ddp, sharded" if isinstance(config.parallel, DDP) and config.parallel.shard_optimizer else "ddp"


def _optimizer_floats(config: TrainConfig) -> float:
    # The weight average is one more copy.
    return config.optimizer.state_floats_per_parameter + (1.0 if config.training.ema_decay else 0.0)


def _attention_kind(config: TrainConfig) -> tuple[AttentionKind, int]:
    """Return attention kind and block length at the end of the run."""
    objective = config.objective
    if isinstance(objective, NextTokenConfig):
        return "causal", 1
    length = objective.final_block_length
    if length == 1 and config.model.logit_alignment == "shifted":
        return "causal", 1
    if length is None or length >= config.row_length:
        return "bidirectional", 1
    return "block_diffusion", length


def _activation_width(model: Architecture, row_length: int, checkpointing: CheckpointingMode) -> int:
    """Estimate the values that one position keeps for the backward.

    `scaling.activation_bytes` differs on purpose: it assumes bfloat16, fused attention and the fused loss of a GPU.
    """
    widths = [feed_forward_width(model, layer, model.num_experts_per_tok) for layer in range(model.num_hidden_layers)]
    all_values = [10 * model.hidden_size + 5 * width + model.num_attention_heads * row_length for width in widths]
    if checkpointing == "none":
        return sum(all_values)
    projections = [0 if checkpointing == "full" else 6 * model.hidden_size + 2 * width for width in widths]
    # The input of each block is always kept, and one block at a time is recomputed as a whole.
    return sum(projections) + len(widths) * model.hidden_size + max(all_values)
