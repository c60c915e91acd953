"""The estimate of a run: published models, and cases small enough to do by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from config.finetune.lora import LoraConfig
from config.model import VISION_PREFIX, Architecture
from config.train import TrainConfig
from diffusionlm.checkpoints.adapter_files import stored_module_names
from diffusionlm.models.lora import add_adapter
from diffusionlm.models.transformer import Transformer
from profiling.adapter_size import measure_adapter
from profiling.estimate import ResourceEstimate, estimate_run
from profiling.flops import (
    count_parameters,
    count_visible_pairs,
    count_vision_parameters,
    list_vision_parameters,
    step_flops,
)
from profiling.mesh_search import MEMORY_LIMIT, main
from tests.qwen3_vl_oracle import CONFIG

QWEN3: dict[str, Any] = {"head_dim": 128, "max_position_embeddings": 40_960, "hidden_size": 2048}
QWEN3_30B_A3B: dict[str, Any] = QWEN3 | {
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "intermediate_size": 6144,
    "tie_word_embeddings": False, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
}  # fmt: skip
QWEN3_17B: dict[str, Any] = QWEN3 | {
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 6144,
}  # fmt: skip


@pytest.mark.parametrize(("shape", "parameters"), [(QWEN3_17B, 1_720_574_976), (QWEN3_30B_A3B, 30_532_122_624)])
def test_models_have_the_parameters_of_the_published_checkpoints(shape: dict[str, Any], parameters: int) -> None:
    assert count_parameters(Architecture(**shape), 151_936)[0] == parameters


def test_parameters_of_a_vision_tower() -> None:
    with torch.device("meta"):
        model = Transformer(CONFIG)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    vision = {name: size for name, size in sizes.items() if name.startswith(VISION_PREFIX)}
    assert dict(list_vision_parameters(CONFIG)) == vision
    assert count_parameters(CONFIG, CONFIG.vocab_size)[0] == sum(sizes.values())
    mergers = sum(size for name, size in vision.items() if "merger" in name)
    assert count_vision_parameters(CONFIG) == (sum(vision.values()) - mergers, mergers)
    for lora in (LoraConfig(rank=3), LoraConfig(rank=3, modules_to_save=("merger",)), LoraConfig(bias="all")):
        with torch.device("meta"):
            adapted = Transformer(CONFIG)
        add_adapter(adapted, lora, names=stored_module_names(adapted))
        trained = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
        assert measure_adapter(lora, CONFIG).parameters == trained


def test_frozen_parts_of_a_tower_have_no_state() -> None:
    model = {name: getattr(CONFIG, name) for name in Architecture.model_fields}
    training: dict[str, Any] = {"max_steps": 10, "batch_size": 8, "micro_batch_size": 2}
    whole, *frozen = (
        estimate(model=model, training=training | {"freeze": parts})
        for parts in ([], ["vision"], ["merger"], ["vision", "merger"])
    )
    tower, mergers = count_vision_parameters(CONFIG)
    for part, num_frozen in zip(frozen, (tower, mergers, tower + mergers), strict=True):
        assert part.trained_parameters == whole.parameters - num_frozen
        assert part.bytes_weights == whole.bytes_weights
        assert part.bytes_gradients == whole.bytes_gradients - 4 * num_frozen
        assert part.bytes_optimizer == whole.bytes_optimizer - 8 * num_frozen


# A block: q 4 x 4, k and v 2 x 4 each, o 4 x 4, three of 6 x 4, two norms of 4 and two of 2.
BLOCK, TABLES, LAYERS = 16 + 8 + 8 + 16 + 72 + 8 + 4, 300 * 4, 2
BLOCKS = LAYERS * BLOCK + 4
"""And the last norm."""
P = BLOCKS + TABLES
MODEL: dict[str, Any] = {
    "hidden_size": 4, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 2,
    "intermediate_size": 6, "max_position_embeddings": 8, "tie_word_embeddings": True, "qk_norm": True,
}  # fmt: skip


def estimate(ranks: int = 1, **sections: Any) -> ResourceEstimate:
    values = {
        "run": {"directory": "run"},
        "model": MODEL,
        "data": {"source": "python-stdlib", "row_length": 8},
        "tokenizer": {"vocab_size": 300},
        "optimizer": {"kind": "adamw"},
        "training": {"max_steps": 10, "batch_size": 8, "micro_batch_size": 2},
    }
    return estimate_run(TrainConfig.model_validate(values | sections), ranks)


def test_one_process_by_hand() -> None:
    one = estimate()
    assert (one.parameters, one.embedding_parameters, one.tokens, one.bytes_sent) == (P, TABLES, 640, 0)
    assert (one.bytes_weights, one.bytes_gradients, one.bytes_optimizer) == (4 * P, 4 * P, 8 * P)
    assert one.bytes_activations == 4 * (2 * 8) * LAYERS * (10 * 4 + 5 * 6 + 2 * 8)
    assert one.step_seconds_bound == one.flops_per_token * 64 / 989.4e12


DDP, FSDP = {"strategy": "ddp", "shard_optimizer": False}, {"strategy": "fsdp"}
GATHERED = 2 * (BLOCKS + BLOCKS / LAYERS) + 8 * TABLES
"""Both blocks and the gradients of one in bfloat16; the embedding and its gradients."""


@pytest.mark.parametrize(
    ("parallel", "weights", "gradients", "optimizer", "sent"),
    [
        (DDP, 4 * P, 4 * P, 8 * P, 8 * P),
        ({"strategy": "ddp"}, 5 * P, 5 * P, 2 * P, 8 * P),
        # A rank has one micro-batch of two rows, with a forward and a backward.
        (FSDP, P + GATHERED, P, 2 * P, 4 * P + 2 * 2 * BLOCKS + 4 * TABLES),
        (FSDP | {"reshard_after_forward": False}, P + GATHERED, P, 2 * P, 4 * P + 2 * BLOCKS + 4 * TABLES),
    ],
)
def test_four_ranks_by_hand(
    parallel: dict[str, Any], weights: float, gradients: float, optimizer: float, sent: float
) -> None:
    part = estimate(4, parallel=parallel)
    assert (part.bytes_weights, part.bytes_gradients) == (round(weights), gradients)
    assert (part.bytes_optimizer, part.bytes_sent) == (optimizer, round(sent * 3 / 4))
    assert part.step_seconds_bound == max(part.flops_per_token * 64 / 4 / 989.4e12, part.bytes_sent / 450e9)
    with pytest.raises(ValueError, match=r"training\.batch_size = 8 cannot be divided among 3 ranks"):
        estimate(3, parallel=parallel)


def test_flops_depend_on_the_objective() -> None:
    pairs = count_visible_pairs("block_diffusion", 8, 4)
    config = Architecture(**MODEL)
    blocks = estimate(objective={"kind": "block_diffusion", "block_length": 4})
    expected = step_flops(config, 300, positions=16, scored=4, pairs=[pairs, pairs // 4]) / 8
    assert blocks.flops_per_token == expected
    assert blocks.bytes_activations == 2 * estimate().bytes_activations
    causal = step_flops(config, 300, positions=8, scored=8, pairs=[36] * LAYERS) / 8
    assert (
        estimate(objective={"kind": "next_token"}, model=MODEL | {"logit_alignment": "shifted"}).flops_per_token
        == causal
    )
    # Next tokens of the same forward cost the head and a part of the last block; a balance measures both terms before.
    one = {"kind": "block_diffusion", "block_length": 4, "clean_attention": "token", "next_token_weight": 0.5}
    model = MODEL | {"clean_alignment": "shifted"}
    scored = step_flops(config, 300, positions=16, scored=12, pairs=[pairs, round(pairs * 0.75)]) / 8
    assert estimate(objective=one, model=model).flops_per_token == scored
    assert estimate(objective=one | {"balance": True}, model=model).flops_per_token > 1.2 * scored
    # The other forward runs later, so the larger memory of the two is needed.
    both = estimate(objective={"kind": "masked_diffusion", "next_token_weight": 0.5})
    assert both.flops_per_token == estimate().flops_per_token + causal
    assert both.bytes_total == estimate().bytes_total


def test_activation_checkpointing_keeps_less() -> None:
    none, selective, full = (
        estimate(runtime={"activation_checkpointing": mode}).bytes_activations for mode in ("none", "selective", "full")
    )
    assert none > selective > full > none / LAYERS


def test_a_mesh_by_hand() -> None:
    """Of four ranks two divide matrices and two divide sequences; each pair has half of the model."""
    mesh = estimate(4, parallel=DDP | {"tensor": 2, "context": 2})
    assert (mesh.bytes_weights, mesh.bytes_gradients, mesh.bytes_optimizer) == (2 * P, 2 * P, 4 * P)
    assert mesh.bytes_sent == 2 * P  # an all-reduce over the two ranks with other positions
    assert mesh.bytes_activations == 4 * (2 * 8) * LAYERS * (6 * 4 + (4 * 4 + 5 * 6 + 2 * 8) / 2) / 2
    positions, layers = 8 * 8, LAYERS
    sums = (4 * layers + 2) * 2 * (positions // 2) * 4 * 2 / 2  # bfloat16, half of the positions; a ring of two
    keys = 2 * layers * (positions * 2 * 1 * 2 * 2 / 2) / 2
    assert mesh.model_bytes_sent == sums + keys


def test_the_fastest_meshes_fit_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--shape", "sdar-30b-a3b", "--ranks", "8"])
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().err.splitlines()[1:]]
    assert len(rows) == 3 and [float(row[-1]) for row in rows] == sorted(float(row[-1]) for row in rows)
    assert all(int(row[5]) * 1e9 <= MEMORY_LIMIT for row in rows)
