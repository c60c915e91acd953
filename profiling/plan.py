"""The plan of a training run, in words: what ``--dry-run`` prints. No torch."""

from __future__ import annotations

from config.optimizer import AdamW
from config.train import TrainConfig
from profiling.flops import plan_run


def render_plan(config: TrainConfig) -> str:
    """Parameters, tokens, FLOPs and memory."""
    training, row_length = config.training, config.row_length
    vocab_size = config.tokenizer.vocab_size
    per_step = training.batch_size * row_length
    tokens = None if training.max_steps is None else training.max_steps * per_step
    plan = plan_run(
        config.model,
        vocab_size,
        row_length=row_length,
        micro_batch_size=training.micro_batch_size or training.batch_size,
        tokens=tokens,
        # Muon keeps a momentum, AdamW two moments; the average is one more copy.
        moments=(2.0 if isinstance(config.optimizer, AdamW) else 1.0) + (1.0 if training.ema_decay else 0.0),
    )
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
