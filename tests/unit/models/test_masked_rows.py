"""Adapters that act on masked positions alone: loss and gradients of training, and what stays as it is."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from config.finetune.lora import LoraConfig
from config.training.objective import AllMasked, BlockDiffusionConfig, FixedCountMasking
from diffusionlm.diffusion.noised_batch import CleanBatch, NoisedBatch, NoiseKey
from diffusionlm.diffusion.objectives import build_objective
from diffusionlm.models.lora import LoRALinear, adapter_modules, add_adapter, find_dropout, merge_adapter
from diffusionlm.models.patterns import Causal
from diffusionlm.models.transformer import Transformer
from diffusionlm.training.block_wrapping import checkpoint_activations
from tests.conftest import MakeModel
from tests.masked_adapters import HookedAdapter, add_drafter, move_adapter

MASK, B, L = 18, 3, 10
NEMOTRON: dict[str, Any] = {"clean_alignment": "shifted"}
I_DLM: dict[str, Any] = {**NEMOTRON, "logit_alignment": "shifted", "noisy_attention": "token"}
WEDLM: dict[str, Any] = {**NEMOTRON, "noisy_attention": "visible_first"}
DOCUMENTS = torch.tensor([[0] * 6 + [1] * 4, [0] * 10, [0] * 3 + [1] * 5 + [2] * 2])
TOKENS = torch.randint(0, MASK + 1, (B, L), generator=torch.Generator().manual_seed(5))
"""With mask tokens in text."""


def make_draw(model: Transformer, is_packed: bool, **values: Any) -> tuple[Any, NoisedBatch]:
    batch = CleanBatch(TOKENS, torch.ones_like(TOKENS, dtype=torch.bool), DOCUMENTS if is_packed else None)
    config = BlockDiffusionConfig.model_validate({"block_length": 4, "clean_attention": "token", **values})
    objective = build_objective(config, model.config)
    return objective, objective.build_noised_batch(batch, NoiseKey(2, 4, 0, B))


def find_masked(draw: NoisedBatch, shift: int) -> Tensor:
    """The masked tokens are the targets, in the noisy half."""
    masked_BS = torch.zeros_like(draw.inputs_BS, dtype=torch.bool)
    masked_BS.view(-1)[draw.positions_N + shift] = True
    assert not masked_BS[:, L:].any() and bool((draw.inputs_BS[masked_BS] == MASK).all())
    assert bool((draw.inputs_BS[~masked_BS] == MASK).any()), "there are mask tokens in text"
    return masked_BS


@pytest.mark.parametrize("options", [NEMOTRON, I_DLM, WEDLM], ids=["Nemotron", "I-DLM", "WeDLM"])
@pytest.mark.parametrize(
    ("values", "is_packed", "lora", "checkpointing"),
    [
        ({}, False, {}, "none"),
        ({"estimator": AllMasked()}, True, {"init": "pissa", "rank": 2}, "full"),
        ({"estimator": FixedCountMasking(complementary=True)}, True, {"targets": ("o_proj", "up_proj")}, "selective"),
    ],
)
def test_loss_and_gradients_are_those_of_masked_rows(
    tiny_model: MakeModel, options: Any, values: Any, is_packed: bool, lora: Any, checkpointing: Any
) -> None:
    base, model = (tiny_model(torch.float64, **options) for _ in range(2))
    add_drafter(model, **lora)
    hooked = HookedAdapter(base, model, lambda tokens: find_masked(draw, int(options is I_DLM)))
    objective, draw = make_draw(model, is_packed, **values)
    inputs = objective.build_loss_inputs(draw, draw.denominator)
    keywords: dict[str, Any] = {"pattern": draw.pattern, "output_positions": draw.positions_N, "loss_inputs": inputs}
    expected = base(draw.inputs_BS, **keywords).loss_sum
    expected_gradients = torch.autograd.grad(expected, [value for pair in hooked.factors.values() for value in pair])
    checkpoint_activations(model, checkpointing)
    loss = model(draw.inputs_BS, masked_BL=draw.masked_BS, **keywords).loss_sum
    modules = [module for _, module in adapter_modules(model) if isinstance(module, LoRALinear)]
    gradients = torch.autograd.grad(loss, [value for own in modules for value in (own.lora_A, own.lora_B)])
    torch.testing.assert_close(loss, expected, rtol=1e-11, atol=1e-13)
    for ours, other in zip(gradients, expected_gradients, strict=True):
        rows, columns = ours.shape  # of PiSSA a part of the factors is subtracted
        torch.testing.assert_close(ours.double(), other[:rows, :columns].double(), rtol=1e-5, atol=1e-7)
        assert ours.abs().max() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_gradient", [False, True])
def test_all_other_rows_have_the_bits_of_the_base(
    tiny_model: MakeModel, dtype: torch.dtype, has_gradient: bool
) -> None:
    base, model = (tiny_model(dtype, **NEMOTRON) for _ in range(2))
    add_drafter(model)
    masked_BL = (torch.arange(L) >= 6).expand(B, L)
    with torch.set_grad_enabled(has_gradient):
        expected = base(TOKENS, pattern=Causal())
        assert torch.equal(model(TOKENS, pattern=Causal()), expected)
        logits = model(TOKENS, pattern=Causal(), masked_BL=masked_BL)
        assert torch.equal(logits[:, :6], expected[:, :6]) and not torch.isclose(logits[:, 6:], expected[:, 6:]).all()
        assert torch.equal(model(TOKENS, pattern=Causal()), expected), "masks are those of one forward"


def test_dropout_is_that_of_masked_rows(tiny_model: MakeModel) -> None:
    """All rows masked: an adapter of all positions. In evaluation nothing is scaled."""
    models = [tiny_model(torch.float64, **NEMOTRON) for _ in range(3)]
    for model, positions in zip(models[1:], ("all", "masks"), strict=True):
        add_adapter(model, LoraConfig.model_validate({"rank": 2, "dropout": 0.5, "positions": positions}))
        move_adapter(model)
    everywhere, outputs = torch.ones_like(TOKENS, dtype=torch.bool), torch.arange(B * L)

    def run(model: Transformer, masked_BL: Tensor | None, has_dropout: bool) -> Tensor:
        dropout = find_dropout(model) if has_dropout else None
        with nullcontext() if dropout is None else dropout.dropout_context(3, torch.arange(B), L, outputs):
            return model(TOKENS, pattern=Causal(), masked_BL=masked_BL, output_positions=outputs)

    for has_dropout in (False, True):
        torch.testing.assert_close(run(models[2], everywhere, has_dropout), run(models[1], None, has_dropout))
        assert torch.equal(run(models[2], ~everywhere, has_dropout), run(models[0], None, has_dropout=False))
    assert not torch.allclose(run(models[1], None, has_dropout=True), run(models[1], None, has_dropout=False))


@pytest.mark.parametrize(
    "options", [{"modules_to_save": ["norm"]}, {"bias": "all"}, {"dora": True}, {"trainable_tokens": "mask"}]
)
def test_what_changes_other_rows_is_refused(options: dict[str, Any]) -> None:
    [key] = options
    with pytest.raises(ValueError, match=rf'positions = "masks" leaves .* {key}\b.* set positions = "all"'):
        LoraConfig.model_validate({"positions": "masks", **options})


@pytest.mark.parametrize(
    ("options", "lora", "message"),
    [
        ({}, {}, r'needs a model with a mask token that predicts next tokens .*lora\.positions = "all"'),
        ({"block_length": 1, "logit_alignment": "shifted", "mask_token_id": None}, {}, "needs a model with a mask"),
        ({**NEMOTRON, "tie_word_embeddings": False}, {"targets": ("q_proj", "lm_head")}, "not supported for lm_head"),
        (
            {**NEMOTRON, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
            {},
            r"not supported for model\.layers\.0\.mlp\.experts\.0.*lora\.exclude",
        ),
        (
            {**NEMOTRON, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
            {"targets": ("gate", "q_proj")},
            r"not supported for model\.layers\.0\.mlp\.gate:",
        ),
    ],
)
def test_models_and_projections_without_such_adapters_are_refused(
    tiny_model: MakeModel, options: dict[str, Any], lora: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        add_drafter(tiny_model(**options), **lora)


def test_next_token_models_with_masks_have_them_and_none_is_merged(tiny_model: MakeModel) -> None:
    model = add_drafter(tiny_model(block_length=1, logit_alignment="shifted"))
    with pytest.raises(ValueError, match=r'positions = "masks" has no merged weights.*--adapter'):
        merge_adapter(model)
