"""Print tables of memory and step time for training on many GPUs, estimated by `profiling.scaling`.

python -m cli.scaling                    # the table of docs/distributed.md, in full
python -m cli.scaling --ranks 16 --row-length 2048
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from config.model import Architecture
from profiling.scaling import (
    PARALLEL_STRATEGIES,
    Cluster,
    TrainingJob,
    estimate_rank_memory,
    estimate_step_time,
    estimate_traffic,
    find_fastest_job,
)

GIGA = 1e9

QWEN3_VOCAB_SIZE = 151_936
QWEN3: dict[str, Any] = {"head_dim": 128, "max_position_embeddings": 40_960}

MODELS = {
    "Qwen3-1.7B": Architecture(
        **QWEN3,
        hidden_size=2048,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        intermediate_size=6144,
    ),
    "Qwen3-8B": Architecture(
        **QWEN3,
        hidden_size=4096,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=12_288,
        tie_word_embeddings=False,
    ),
    "Qwen3-30B-A3B": Architecture(
        **QWEN3,
        hidden_size=2048,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        intermediate_size=6144,
        tie_word_embeddings=False,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
    ),
}


def render(ranks: Sequence[int], cluster: Cluster, *, row_length: int = 4096, batch_size: int = 512) -> str:
    """Markdown: a table of memory and one of time."""
    memory, times = [], []
    for name, model in MODELS.items():
        for count in ranks:
            for strategy in PARALLEL_STRATEGIES:
                job = TrainingJob(
                    model, QWEN3_VOCAB_SIZE, count, strategy, row_length=row_length, batch_size=batch_size
                )
                head = f"| {name} | {count} | {strategy} |"
                best = find_fastest_job(job, cluster)
                smallest = replace(job, keeps_all_activations=False)
                memory.append(head + _memory_cells(best or smallest, fits=best is not None))
                if best is not None:
                    times.append(head + _time_cells(best, cluster))
    table = "| model | ranks | strategy | weights | gradients | optimizer | gathered | activations | together | |"
    rule = "|---|---:|---|" + "---:|" * 6 + "---|"
    second = "| model | ranks | strategy | sent GB | compute s | all traffic s | exposed s | update s | step s | kt/s |"
    return "\n".join([table, rule, *memory, "", second, "|---|---:|---|" + "---:|" * 7, *times])


def _memory_cells(job: TrainingJob, *, fits: bool) -> str:
    need = estimate_rank_memory(job)
    sizes = (need.weights, need.gradients, need.optimizer, need.gathered, need.activations, need.total)
    batch = f"{job.micro_batch_size} x {job.micro_batches}{'' if job.keeps_all_activations else ', checkpointed'}"
    return "".join(f" {size / GIGA:.1f} |" for size in sizes) + f" {batch if fits else 'does not fit'} |"


def _time_cells(job: TrainingJob, cluster: Cluster) -> str:
    time, moved = estimate_step_time(job, cluster), estimate_traffic(job)
    speed = job.batch_size * job.row_length / time.total / 1e3
    cells = (f"{moved.total / GIGA:.1f}", f"{time.compute:.2f}", f"{time.traffic:.3f}", f"{time.exposed:.3f}")
    return "".join(f" {cell} |" for cell in (*cells, f"{time.update:.3f}", f"{time.total:.2f}", f"{speed:,.0f}"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Plan training on many GPUs.", allow_abbrev=False)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64], help="numbers of GPUs (default: 8 64)")
    parser.add_argument("--row-length", type=int, default=4096, help="tokens of a row (default: 4096)")
    parser.add_argument("--batch-size", type=int, default=512, help="rows of a step (default: 512)")
    arguments = parser.parse_args()
    if any(ranks < 1 or arguments.batch_size % ranks for ranks in arguments.ranks):
        parser.error(f"--batch-size {arguments.batch_size} must be a multiple of each of --ranks")
    print(render(arguments.ranks, Cluster(), row_length=arguments.row_length, batch_size=arguments.batch_size))


if __name__ == "__main__":
    main()
