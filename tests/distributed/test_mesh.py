"""Runs whose model is divided over a mesh: the numbers of one process, and checkpoints of any mesh for any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from config.train import TrainConfig
from diffusionlm.training import loop
from tests.distributed.test_training_ranks import ADAMW, DDP, check_equal, train_on
from tests.tiny_run import change_config

SHAPE = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 24, "qk_norm": True}
DENSE: dict[str, Any] = SHAPE | {"num_hidden_layers": 2}
MOE: dict[str, Any] = DENSE | {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "router_aux_loss_coef": 0.1,
}
FSDP = {"strategy": "fsdp"}
# A large eps answers rounding with rounding: near zero, the sign of a gradient decides the step.
STEADY = ADAMW | {"eps": 1e-5}


def configure(config: TrainConfig, folder: Path, **sections: dict[str, Any]) -> TrainConfig:
    """With averages, norms, validation and samples in between."""
    base: dict[str, Any] = {
        "model": DENSE,
        "optimizer": STEADY,
        "training": {"max_steps": 4, "ema_decay": 0.5},
        "logging": {"norms_every_steps": 2},
        "validation": {"every_steps": 2},
        "samples": {"every_steps": 3, "infills": ["the cat[MASK:2] sat"]},
    }
    for name, values in sections.items():
        base[name] = base.get(name, {}) | values if name not in ("parallel", "objective", "optimizer") else values
    return change_config(config, folder, **base)


MESHES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "expert": (2, DDP | {"expert": 2}, MOE),
    "expert, ddp": (4, DDP | {"expert": 2}, MOE),
    "expert, fsdp": (4, FSDP | {"expert": 2}, MOE),
    "tensor": (2, DDP | {"tensor": 2}, DENSE | {"tie_word_embeddings": False}),
    "tensor, replicated heads": (4, DDP | {"tensor": 4}, DENSE),
    "tensor, ddp": (4, DDP | {"tensor": 2}, DENSE),
    "tensor, all-reduced": (4, DDP | {"tensor": 2, "shard_optimizer": False}, DENSE),
    "tensor, fsdp": (4, FSDP | {"tensor": 2}, DENSE),
    "tensor, expert": (4, DDP | {"tensor": 2, "expert": 2}, MOE),
    "context": (2, DDP | {"context": 2}, DENSE),
    "context, fsdp": (4, FSDP | {"context": 2}, DENSE),
    "context, tensor": (4, DDP | {"context": 2, "tensor": 2}, DENSE),
    "context, expert": (4, DDP | {"context": 2, "expert": 2}, MOE),
}
BLOCKS = {"kind": "block_diffusion", "block_length": 4}


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_a_mesh_trains_as_one_process(name: str, config: TrainConfig, tmp_path: Path) -> None:
    world_size, parallel, model = MESHES[name]
    objective = BLOCKS if "context" in name else {"kind": "masked_diffusion"}
    one = configure(config, tmp_path / "one", model=model, objective=objective)
    loop.train(one)
    many = configure(config, tmp_path / "many", model=model, objective=objective, parallel=parallel)
    assert train_on(many, tmp_path, world_size) == [4] * world_size
    check_equal(many, one, 2e-5)
