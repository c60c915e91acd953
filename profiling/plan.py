"""The plan of a training run, in words: what ``--dry-run`` prints. No torch."""

from __future__ import annotations

from config.objective import BlockDiffusion, NextToken
from config.train import TrainConfig
from profiling.flops import Pattern, Plan, plan_run

MOMENTS = {"adamw": 2.0, "adamw8bit": 0.5, "muon": 1.0, "lion": 1.0, "lion8bit": 0.25}
"""Numbers of fp32 that an optimizer keeps for each parameter, by kind; those of 8 bits are a quarter."""


def planned_run(config: TrainConfig) -> Plan:
    """What a run will need, on paper."""
    training, row_length = config.training, config.row_length
    return plan_run(
        config.model,
        config.tokenizer.vocab_size,
        row_length=row_length,
        micro_batch_size=training.micro_batch_size or training.batch_size,
        tokens=None if training.max_steps is None else training.max_steps * training.batch_size * row_length,
        # The average is one more copy.
        moments=MOMENTS[config.optimizer.kind] + (1.0 if training.ema_decay else 0.0),
        blocks=_blocks_of(config),
        kept=config.runtime.activation_checkpointing,
    )


def render_plan(config: TrainConfig) -> str:
    """Parameters, tokens, FLOPs and memory."""
    training, row_length, vocab_size = config.training, config.row_length, config.tokenizer.vocab_size
    per_step = training.batch_size * row_length
    plan = planned_run(config)
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


def _blocks_of(config: TrainConfig) -> tuple[Pattern, int]:
    """Who sees whom, at the end of the run."""
    objective = config.objective
    if isinstance(objective, NextToken):
        return "causal", 1
    if isinstance(objective, BlockDiffusion) and (length := objective.final_block_length) is not None:
        return ("block_diffusion", length) if length < config.row_length else ("bidirectional", 1)
    return "bidirectional", 1
