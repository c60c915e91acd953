"""FLOPs on paper against those that torch counts, and against masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from config.finetune.lora import LoraConfig
from config.finetune.preference import DPOLossConfig
from config.model import ModelConfig
from config.training.objective import BlockDiffusionConfig as BlockDiffusionObjective
from ddp.process_group import SINGLE_PROCESS
from diffusionlm.diffusion.noised_batch import CleanBatch, NoisedBatch, NoiseKey
from diffusionlm.diffusion.objectives import build_objective
from diffusionlm.diffusion.preference import PreferenceLoss
from diffusionlm.kernels.cross_entropy import LossInputs
from diffusionlm.models.lora import LoRALinear, adapter_modules, add_adapter
from diffusionlm.models.patterns import AttentionPattern, Bidirectional, BlockCausal, BlockDiffusion, Causal
from diffusionlm.models.transformer import Transformer
from diffusionlm.training.metrics import compute_batch_flops, count_visible_keys
from diffusionlm.training.reporting import count_peak_seconds
from profiling.adapter_size import measure_adapter
from profiling.flops import (
    PEAK_FLOPS,
    AttentionKind,
    count_visible_pairs,
    peak_flops,
    step_flops,
    tower_flops,
)
from tests.conftest import MakeConfig, MakeModel
from tests.image_rows import SMALL, build_example, make_model

PATTERNS: dict[AttentionKind, Callable[[int], AttentionPattern]] = {
    "bidirectional": lambda block: Bidirectional(),
    "causal": lambda block: Causal(),
    "block_causal": lambda block: BlockCausal(block),
    "block_diffusion": lambda block: BlockDiffusion(block),
}
LENGTHS = [(1, 1), (8, 3), (12, 4), (17, 5), (16, 16), (9, 20)]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_pairs_are_those_of_the_mask(pattern: AttentionKind) -> None:
    for length, block in LENGTHS:
        attention_pattern = PATTERNS[pattern](block)
        mask = attention_pattern.dense_mask(length * attention_pattern.positions_per_token)
        assert count_visible_pairs(pattern, length, block) == int(mask.sum()), (length, block)


def counted(model: Transformer, pattern: AttentionPattern, rows: torch.Tensor) -> int:
    """What torch counts of a forward and its backward; products in place are not among what it knows."""

    def product(left_shape: Any, right: Any, *rest: Any, out_val: Any = None, **kwargs: Any) -> int:
        return 2 * left_shape[0] * left_shape[1] * right[1]

    def product_in_place(total: Any, left_shape: Any, right: Any, *rest: Any, **kwargs: Any) -> int:
        return 2 * left_shape[0] * left_shape[1] * right[1]

    tokens = torch.randint(0, 19, (2, 10), generator=torch.Generator().manual_seed(3))
    loss_inputs = LossInputs(torch.zeros(len(rows), dtype=torch.int64), torch.ones(len(rows)))
    own = {torch.ops.aten.addmm_: product_in_place}
    with FlopCounterMode(display=False, custom_mapping=own) as counter:
        model(tokens, pattern=pattern, output_positions=rows, loss_inputs=loss_inputs).loss_sum.backward()
    return counter.get_total_flops()


def norm_gain_flops(config: ModelConfig, positions: int, scored: int) -> int:
    """FLOPs of the norms' gain gradients, which are products ``[1, N] x [N, W]`` on a CPU and not in `step_flops`."""
    q_width, kv_width = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
    assert config.qk_norm and not config.sandwich_norms
    total = scored * config.hidden_size  # the final norm
    for layer in range(config.num_hidden_layers):
        query_positions = scored if layer == config.num_hidden_layers - 1 else positions
        total += positions * (config.hidden_size + kv_width) + query_positions * (config.hidden_size + q_width)
    return 2 * total


@pytest.mark.slow  # torch's counter loads the compiler
@pytest.mark.parametrize(
    "overrides",
    [{}, {"tie_word_embeddings": True}, {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}],
    ids=["dense", "tied", "experts"],
)
@pytest.mark.parametrize("pattern", [Bidirectional(), BlockDiffusion(2)], ids=["one stream", "two streams"])
def test_a_step_has_the_flops_that_torch_counts(
    tiny_model: MakeModel, overrides: dict[str, Any], pattern: AttentionPattern
) -> None:
    """Eager attention computes all pairs, and in the last block those of every query up to the last that is asked."""
    model = tiny_model(backend="eager", **overrides)
    rows = torch.tensor([0, 3, 9, 12, 18, 19])
    expected = step_flops(model.config, 19, positions=20, scored=6, pairs=[2 * 10 * 10] * 2)
    assert counted(model, pattern, rows) == expected + norm_gain_flops(model.config, 20, 6)


@pytest.mark.slow  # torch's counter loads the compiler
def test_a_tower_has_the_flops_that_torch_counts() -> None:
    """Of the forward. In a step only images whose features are not stored count."""
    model, example = make_model(), build_example()
    images, visual = example.images, model.model.visual
    assert images is not None and images.patches_PC is not None and visual is not None
    with FlopCounterMode(display=False) as counter:  # without gradients the products of a CPU are not counted
        features_EFD = visual(images.patches_PC, images.grids)
    forward = tower_flops(SMALL, images.grids, is_trained=False)
    assert forward == counter.get_total_flops()
    assert tower_flops(SMALL, images.grids, is_trained=True, num_measuring_forwards=2) == 5 * forward
    objective = build_objective(BlockDiffusionObjective(block_length=4), SMALL)
    draw, text_draw = (
        objective.build_noised_batch(batch, NoiseKey(0, 0, 0, 8)) for batch in (example, replace(example, images=None))
    )
    text = compute_batch_flops(SMALL, text_draw)
    assert compute_batch_flops(SMALL, draw) == text + forward
    assert compute_batch_flops(SMALL, draw, trains_tower=True) == text + 3 * forward
    stored = replace(images, patches_PC=None, features_EFD=features_EFD)
    assert compute_batch_flops(SMALL, replace(draw, images=stored)) == text


def test_a_draw_is_counted_by_its_documents_and_rows(make_config: MakeConfig) -> None:
    """Two documents of 4 and 6 tokens, blocks of 4: the pairs of a row, and in the last layer those of scored rows."""
    config = make_config(num_hidden_layers=3)
    documents = torch.tensor([[0] * 4 + [1] * 6])
    draw = NoisedBatch(
        inputs_BS=torch.zeros(1, 20, dtype=torch.int64),
        pattern=BlockDiffusion(4, documents),
        positions_N=torch.tensor([0, 8, 9]),
        targets_N=torch.zeros(3, dtype=torch.int64),
        weights_N=torch.ones(3),
        num_targets=10,
        denominator=10.0,
    )
    pairs = count_visible_pairs("block_diffusion", 4, 4) + count_visible_pairs("block_diffusion", 6, 4)
    assert int(count_visible_keys(draw, None).sum()) == pairs
    last = 4 + 2 * (2 + 4)  # an own block of 4; one of 2, and the 4 clean tokens before it, twice
    expected = step_flops(config, 19, positions=20, scored=3, pairs=[pairs, pairs, last])
    assert compute_batch_flops(config, draw) == expected


def test_utilisation_where_a_peak_is_known(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(block_length=4)
    objective = build_objective(BlockDiffusionObjective(block_length=4), config)
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    draw = objective.build_noised_batch(
        CleanBatch(tokens, torch.ones_like(tokens, dtype=torch.bool)), NoiseKey(0, 0, 0, 2)
    )
    state = SimpleNamespace(model=SimpleNamespace(config=config), model_loss=None)
    run: Any = SimpleNamespace(
        settings=SimpleNamespace(device=torch.device("cpu")),
        state=state,
        config=SimpleNamespace(lora=None, training=SimpleNamespace(freeze=())),
        world=SINGLE_PROCESS,
    )
    assert count_peak_seconds(run, [draw]) is None
    run.settings.device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert count_peak_seconds(run, [draw, draw]) == 2 * compute_batch_flops(config, draw) / PEAK_FLOPS["NVIDIA H200"]
    on_device = replace(draw, positions_N=draw.positions_N[:0], on_host=draw)  # what it would have to wait for
    assert compute_batch_flops(config, on_device) == compute_batch_flops(config, draw)


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", PEAK_FLOPS["NVIDIA H100"]),
        ("NVIDIA H100 PCIe", PEAK_FLOPS["NVIDIA H100 PCIe"]),
        ("NVIDIA H200", PEAK_FLOPS["NVIDIA H200"]),
        ("NVIDIA A100-SXM4-80GB", PEAK_FLOPS["NVIDIA A100"]),
        ("NVIDIA L40", None),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_peaks_by_name(device: str, peak: float | None) -> None:
    assert peak_flops(device) == peak


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
ALL_VECTORS = {"sandwich_norms": True, "qk_norm": True, "attention_bias": True, "attention_output_bias": True}
ADAPTERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "all": ({}, {}),
    "dora, rows": ({"dora": True, "trainable_tokens": (3, 4)}, {}),
    "tied": ({"trainable_tokens": (3,), "targets": ("q_proj", "mlp.up_proj")}, {"tie_word_embeddings": True}),
    "experts": ({"rank_patterns": {"up_proj": 5}, "exclude": ("o_proj",)}, EXPERTS),
    "whole": ({"modules_to_save": ("norm", "lm_head"), "bias": "all"}, ALL_VECTORS | {"tie_word_embeddings": False}),
    "whole, tied": ({"modules_to_save": ("lm_head",), "bias": "lora_only", "targets": ("q_proj",)}, ALL_VECTORS),
}


@pytest.mark.parametrize("case", ADAPTERS)
def test_adapters_are_counted(case: str, tiny_model: MakeModel) -> None:
    lora, overrides = ADAPTERS[case]
    model = tiny_model(**overrides)
    config = LoraConfig(rank=3, **lora)
    size = measure_adapter(config, model.config)
    add_adapter(model, config)
    adapted = [module for _, module in adapter_modules(model) if isinstance(module, LoRALinear)]
    assert size.parameters == sum(value.numel() for value in model.parameters() if value.requires_grad)
    assert size.adapted_weights == sum(module.weight.numel() for module in adapted)


@pytest.mark.slow  # torch's counter loads the compiler
def test_a_step_of_preferences_has_the_flops_that_torch_counts(
    tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward and a backward of the model, and two forwards without gradients. An adapter has fewer: the first
    layer's input needs no gradient, and neither do the adapters of the last layer's unscored rows."""
    # Torch's counter does not know the product of oneDNN.
    monkeypatch.setattr("diffusionlm.kernels.cpu_linear.prefers_onednn", lambda: False)
    positions = torch.tensor([0, 3, 9, 12, 18, 19])
    noised_batch = NoisedBatch(
        inputs_BS=torch.randint(0, 19, (2, 10), generator=torch.Generator().manual_seed(3)),
        pattern=Bidirectional(),
        positions_N=positions,
        targets_N=torch.zeros(6, dtype=torch.int64),
        weights_N=torch.ones(6),
        num_targets=10,
        denominator=2.0,
        answers_N=torch.tensor([0, 0, 1, 2, 3, 3]),
        num_rows=2,
    )

    def count(model: Transformer, reference: Transformer | None) -> int:
        loss = PreferenceLoss(DPOLossConfig(), reference)
        with FlopCounterMode(display=False) as counter:
            loss.measure(model, noised_batch, LossInputs(noised_batch.targets_N, noised_batch.weights_N))
        return counter.get_total_flops() + counted(model, Bidirectional(), positions)

    model, copy = (tiny_model(backend="eager") for _ in range(2))
    sizes: dict[str, Any] = {"positions": 20, "scored": 6, "pairs": [2 * 10 * 10] * 2, "num_measuring_forwards": 2}
    expected = step_flops(model.config, 19, **sizes)
    assert compute_batch_flops(model.config, noised_batch, num_measuring_forwards=2) < expected
    assert count(model, copy) == expected + norm_gain_flops(model.config, 20, 6)
    config = LoraConfig(rank=3)
    add_adapter(model, config)
    factors = measure_adapter(config, model.config).active_factors
    estimate = step_flops(model.config, 19, **sizes, active_factors=factors)
    assert 0.8 * estimate < count(model, None) <= estimate
