"""The plan of a training run, in words: what ``--dry-run`` prints. No torch."""

from __future__ import annotations

from dataclasses import replace

from config.objective import BlockDiffusionConfig, NextTokenConfig
from config.parallel import DDP, FSDP
from config.train import TrainConfig
from profiling.flops import AttentionKind, ResourceEstimate, estimate_resources
from profiling.scaling import ParallelStrategy, TrainingJob, estimate_rank_memory


def estimate_run(config: TrainConfig, ranks: int = 1) -> ResourceEstimate:
    """What a run will need, on paper; its memory is that of one of the ranks.

    Raises:
        ValueError: the rows of a step cannot be shared out evenly.
    """
    training, row_length = config.training, config.row_length
    micro_batch_size = training.micro_batch_size or config.sequences_per_rank(ranks)
    plan = estimate_resources(
        config.model,
        config.tokenizer.vocab_size,
        row_length=row_length,
        micro_batch_size=micro_batch_size,
        tokens=None if training.max_steps is None else training.max_steps * training.batch_size * row_length,
        floats_per_parameter=_optimizer_floats(config),
        blocks=_attention_kind(config),
        checkpointing=config.runtime.activation_checkpointing,
    )
    if ranks == 1:
        return plan
    parallel, strategy = config.parallel, _parallel_strategy(config)
    job = TrainingJob(
        config.model,
        config.tokenizer.vocab_size,
        ranks,
        strategy,
        batch_size=training.batch_size,
        micro_batch_size=micro_batch_size,
        floats_per_parameter=_optimizer_floats(config),
        reshards_after_forward=not isinstance(parallel, FSDP) or parallel.reshard_after_forward,
    )
    need = estimate_rank_memory(job)
    return replace(
        plan,
        bytes_weights=round(need.weights + need.gathered),
        bytes_gradients=round(need.gradients),
        bytes_optimizer=round(need.optimizer),
    )


def _optimizer_floats(config: TrainConfig) -> float:
    # The average is one more copy.
    return config.optimizer.state_floats_per_parameter + (1.0 if config.training.ema_decay else 0.0)


def _parallel_strategy(config: TrainConfig) -> ParallelStrategy:
    if isinstance(config.parallel, FSDP):
        return "fsdp"
    return "ddp, sharded" if isinstance(config.parallel, DDP) and config.parallel.shard_optimizer else "ddp"


def format_run_estimate(config: TrainConfig, ranks: int = 1) -> str:
    """Parameters, tokens, FLOPs and memory.

    Raises:
        ValueError: the rows of a step cannot be shared out evenly.
    """
    training, row_length, vocab_size = config.training, config.row_length, config.tokenizer.vocab_size
    per_step = training.batch_size * row_length
    plan = estimate_run(config, ranks)
    tokens = plan.tokens
    known = config.tokenizer.path is None and config.model.init_from is None
    lines = [
        ("parameters", f"{plan.parameters:,} ({plan.embedding_parameters:,} in embedding and head)"),
        *([("of them active", f"{plan.active_parameters:,} for each token")] if config.model.num_experts else []),
        ("vocabulary", f"{vocab_size:,} tokens" if known else f"that of the given tokenizer; {vocab_size:,} assumed"),
        ("tokens per step", f"{per_step:,} ({training.batch_size} rows of {row_length})"),
        ("tokens", "by the data: epochs are counted first" if tokens is None else f"{tokens:,}"),
        ("FLOPs per token", f"{plan.flops_per_token / 1e6:,.1f} M, forward and backward"),
    ]
    if tokens is not None:
        lines.append(("FLOPs", f"{tokens * plan.flops_per_token / 1e12:,.1f} T"))
    if ranks > 1:
        lines.append(("ranks", f"{ranks}, {_parallel_strategy(config)}; memory is that of each"))
    for name, size in (
        ("memory, weights", plan.bytes_weights),
        ("memory, gradients", plan.bytes_gradients),
        ("memory, optimizer", plan.bytes_optimizer),
        ("memory, activations", plan.bytes_activations),
        ("memory, together", plan.bytes_total),
    ):
        lines.append((name, f"{size / 2**20:,.1f} MiB" + (" (estimate)" if "act" in name or "tog" in name else "")))
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines)


def _attention_kind(config: TrainConfig) -> tuple[AttentionKind, int]:
    """Who sees whom, at the end of the run."""
    objective = config.objective
    if isinstance(objective, NextTokenConfig):
        return "causal", 1
    if isinstance(objective, BlockDiffusionConfig) and (length := objective.final_block_length) is not None:
        return ("block_diffusion", length) if length < config.row_length else ("bidirectional", 1)
    return "bidirectional", 1
