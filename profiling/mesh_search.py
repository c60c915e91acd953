"""Search the mesh with the least estimated time of a step on H200s. No torch.

python -m profiling.mesh_search --shape 8b --ranks 8,64
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from config.train import TrainConfig
from config.training.parallel import DDP, FSDP, MultiProcessOptions
from files.terminal_text import print_message
from profiling.estimate import estimate_run

MEMORY_LIMIT = 0.9 * 141e9
"""Bytes of an H200 that a run may be estimated to need."""


def _shape(layers: int, hidden: int, kv_heads: int, inner: int, **experts: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": 32,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "intermediate_size": inner,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "qk_norm": True,
        **experts,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "8b": _shape(36, 4096, 8, 12288),
    "sdar-30b-a3b": _shape(48, 2048, 4, 6144, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768),
    "llada2-flash": _shape(32, 4096, 4, 9216, num_experts=256, num_experts_per_tok=8, moe_intermediate_size=1024),
}
"""Models: Qwen3-8B; SDAR-30B-A3B; LLaDA2-flash without its shared expert and its dense layer."""
RUN: dict[str, Any] = {
    "run": {"directory": "unused"},
    "data": {"source": "python-stdlib", "row_length": 4096},
    "tokenizer": {"vocab_size": 151_936},
    "objective": {"kind": "block_diffusion", "block_length": 4},
    "training": {"batch_size": 1024, "max_steps": 1000, "precision": "bfloat16"},
    "optimizer": {"kind": "adamw", "learning_rate": 1e-4},
    "runtime": {"activation_checkpointing": "full"},
}
"""The run of a shape: 4 M tokens in a step, two streams, all activations recomputed."""


def list_meshes(config: TrainConfig, ranks: int) -> Iterator[TrainConfig]:
    """The configs with every mesh that divides the ranks, the model and the batch, by ddp and fsdp."""
    powers = [2**power for power in range(ranks.bit_length())]
    strategies = DDP(shard_optimizer=True), FSDP()
    for base, tensor, context, expert in itertools.product(strategies, powers[:4], powers, powers):
        parallel = base.model_copy(update={"tensor": tensor, "context": context, "expert": expert})
        if ranks % parallel.ranks_of_model or config.row_length % (2 * context):
            continue
        if config.training.batch_size % (ranks // parallel.ranks_of_data):
            continue
        try:
            parallel.check_model(config.model)
        except ValueError:
            continue
        training = config.training.model_copy(update={"micro_batch_size": 1})
        yield config.model_copy(update={"parallel": parallel, "training": training})


def search(config: TrainConfig, ranks: int) -> list[list[str]]:
    """Rows of the fastest meshes that fit: strategy, tensor, context, expert, GB, GB sent, seconds of a step."""
    found = []
    for candidate in list_meshes(config, ranks):
        estimate, parallel = estimate_run(candidate, ranks), candidate.parallel
        assert isinstance(parallel, MultiProcessOptions)
        if estimate.bytes_total <= MEMORY_LIMIT:
            sizes = [str(size) for size in (parallel.tensor, parallel.context, parallel.expert)]
            cells = [f"{estimate.bytes_total / 1e9:.0f}", f"{estimate.bytes_sent / 1e9:.1f}"]
            found.append((estimate.step_seconds_bound, [str(ranks), parallel.strategy, *sizes, *cells]))
    found.sort(key=lambda item: item[0])
    return [[*cells, f"{seconds:.3g}"] for seconds, cells in found[:3]]


def main(argv: Sequence[str] | None = None) -> None:
    """Print the three fastest meshes for each number of ranks."""
    parser = argparse.ArgumentParser(description="Search the mesh with the least estimated time of a step.")
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--ranks", default="8", help="numbers of ranks, separated by commas")
    options = parser.parse_args(argv)
    config = TrainConfig.model_validate(RUN | {"model": SHAPES[options.shape]})
    print_message("| ranks | strategy | tensor | context | expert | GB | GB sent | seconds |")
    for ranks in map(int, options.ranks.split(",")):
        for row in search(config, ranks) or [[str(ranks), *["-"] * 6, "none fits"]]:
            print_message("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
