"""Forwards, memory and least time of an update with rollouts, estimated from the config of a run. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from config.finetune.rl import BoundConfig, CoupledConfig, ReplayConfig, RLConfig, SandwichConfig
from config.train import TrainConfig
from profiling.flops import PEAK_FLOPS, count_idle_parameters, count_parameters, flops_per_token

GPU = "NVIDIA H100"
GPU_BANDWIDTH = 3.35e12
"""Bytes per second of its memory."""


@dataclass(frozen=True)
class RolloutEstimate:
    """What an update costs on each of some GPUs of the kind `GPU`, if each answer has its full length and each forward
    commits as few tokens as the settings allow. Times are lower bounds: products at the peak, or memory traffic."""

    answers: int
    """Answers of this rank."""
    forwards: int
    """Forwards that decode an answer."""
    rows: int
    """Rows that score an answer."""
    cache_bytes: int
    """Keys and values of the answers that are decoded at a time, in bfloat16."""
    rollout_seconds: float
    scoring_seconds: float
    """Of the forwards and backwards of all rows of all inner steps."""


def estimate_rollouts(config: TrainConfig, ranks: int = 1) -> RolloutEstimate:
    """Estimate the rollouts of a config with [rl]; its `tokenizer.vocab_size` is the model's."""
    rl, model, length, vocab_size = config.rl, config.model, config.row_length, config.tokenizer.vocab_size
    assert rl is not None
    block_length, forwards, rows = _count_forwards(config, rl)
    answers = -(-config.training.batch_size // ranks)
    parallel_answers = min(answers, rl.prompts.batch_size)
    parameters, tables = count_parameters(model, vocab_size)
    active = parameters - count_idle_parameters(model) - tables // (1 if model.tie_word_embeddings else 2)
    positions = length if block_length is None else 2 * block_length
    cache = 0
    if block_length is not None:
        cache = 4 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim * length
    flops = 2.0 * answers * forwards * positions * active
    traffic = forwards * (2 * parameters * -(-answers // parallel_answers) + answers * cache // 2)
    has_reference = rl.kl is not None and rl.kl.reference == "start"
    scoring = flops_per_token(
        model,
        vocab_size,
        length,
        0.5 / rows,
        "bidirectional" if block_length is None else "block_diffusion",
        block_length or 1,
        num_measuring_forwards=rl.is_measured + has_reference,
    )
    return RolloutEstimate(
        answers=answers,
        forwards=forwards,
        rows=rows,
        cache_bytes=parallel_answers * cache,
        rollout_seconds=max(flops / PEAK_FLOPS[GPU], traffic / GPU_BANDWIDTH),
        scoring_seconds=scoring * length * rows * answers * rl.inner_steps / PEAK_FLOPS[GPU],
    )


def _count_forwards(config: TrainConfig, rl: RLConfig) -> tuple[int | None, int, int]:
    """Block length of the attention (None: bidirectional), forwards and scored rows of an answer."""
    generation, logprobs = rl.prompts.resolve_length(), rl.logprobs
    num_tokens = generation.max_new_tokens or config.row_length // 2
    block_length = generation.block_length or config.objective.final_block_length
    attention_block = None if config.objective.final_block_length is None else block_length
    per_block = min(block_length or num_tokens, num_tokens)
    num_blocks = -(-num_tokens // per_block)
    steps_per_block = min(generation.denoising_steps or per_block, per_block)
    if generation.steps is not None:
        steps_per_block = -(-generation.steps // num_blocks)
    forwards = steps_per_block * num_blocks
    match logprobs:
        case ReplayConfig():
            rows = -(-(forwards if attention_block is None else steps_per_block) // logprobs.shrink)
            rows = min(rows, logprobs.sampled_steps or rows)
        case BoundConfig() | SandwichConfig():
            rows = 2 * logprobs.num_draws
        case CoupledConfig():
            rows = 3
        case _:
            rows = 1
    return attention_block, forwards, rows
