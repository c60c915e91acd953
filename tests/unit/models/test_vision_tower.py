"""The vision tower and a model with images against transformers' Qwen3-VL on random weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from config.model import ModelConfig
from diffusionlm.models.init import init_weights
from diffusionlm.models.patterns import AttentionPattern, Bidirectional, BlockCausal, BlockDiffusion, Causal
from diffusionlm.models.transformer import Transformer
from tests.qwen3_vl_oracle import CONFIG, IMAGE, VISION, build_example, build_oracle, build_ours, compute_in_double

TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-9}


def build_pair(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Transformer]:
    oracle = build_oracle(dtype)
    if dtype == torch.float64:
        compute_in_double(monkeypatch, oracle)
    return oracle, build_ours(oracle)


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * float(expected.detach().abs().max()))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_tower(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle, model = build_pair(dtype, monkeypatch)
    example = build_example(oracle, dtype)
    expected = oracle.model.visual(example.oracle_inputs["pixel_values"], example.oracle_inputs["image_grid_thw"])
    assert model.model.visual is not None
    features_EFD = model.model.visual(example.patches_PC, example.grids)
    assert_close(features_EFD[0], expected.pooler_output, dtype)
    for features_FD, deep_features_FD in zip(features_EFD[1:], expected.deepstack_features, strict=True):
        assert_close(features_FD, deep_features_FD, dtype)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("pattern", [Causal(), Bidirectional()], ids=["causal", "bidirectional"])
def test_model(pattern: AttentionPattern, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle, model = build_pair(dtype, monkeypatch)
    example = build_example(oracle, dtype)
    inputs: dict[str, Any] = dict(example.oracle_inputs)
    if isinstance(pattern, Bidirectional):
        length = example.tokens_1L.shape[1]
        mask = torch.zeros(1, 1, length, length, dtype=dtype)
        inputs |= {"attention_mask": mask, "position_ids": example.positions_3BL}
    expected_1LV = oracle(**inputs).logits
    logits_1LV = model(example.tokens_1L, pattern=pattern, images=example.images)
    assert_close(logits_1LV, expected_1LV, dtype)


def test_gradients() -> None:
    oracle = build_oracle()
    model, example = build_ours(oracle), build_example(oracle)
    oracle(**example.oracle_inputs).logits.square().sum().backward()
    model(example.tokens_1L, pattern=Causal(), images=example.images).square().sum().backward()
    parameters = dict(model.named_parameters())
    for name, parameter in oracle.named_parameters():
        gradient = parameters.pop(name.replace("model.language_model.", "model.")).grad
        assert gradient is not None and parameter.grad is not None
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-3, atol=1e-4 * float(parameter.grad.abs().max()))
    assert not parameters


def test_text_alone_is_qwen3() -> None:
    model = build_ours(build_oracle())
    text_model = Transformer(CONFIG.model_copy(update={"vision": None}))
    weights = {name: value for name, value in model.state_dict().items() if not name.startswith("model.visual.")}
    text_model.load_state_dict(weights)
    tokens_BL = torch.arange(20).view(2, 10)
    positions_3BL = torch.arange(10).expand(3, 2, 10)
    for pattern in (Causal(), Bidirectional(), BlockCausal(4)):
        expected = text_model(tokens_BL, pattern=pattern)
        assert torch.equal(model(tokens_BL, pattern=pattern), expected)
        tables = model.rope(positions_3BL)
        assert all(map(torch.equal, tables, text_model.rope(torch.arange(10).expand(2, 10))))


def test_attention_patterns() -> None:
    oracle = build_oracle()
    model, example = build_ours(oracle), build_example(oracle)
    # The images begin at 0, 10, 15 and 21; the last token changes.
    changed_1L = example.tokens_1L.clone()
    changed_1L[0, 18] = 12
    length = changed_1L.shape[1]

    def moved(pattern: AttentionPattern) -> list[int]:
        logits = [
            model(tokens_1L, pattern=pattern, images=example.images) for tokens_1L in (example.tokens_1L, changed_1L)
        ]
        return (logits[0] - logits[1]).abs().amax(-1)[0].gt(1e-6).nonzero()[:, 0].tolist()

    assert moved(Bidirectional()) == [*range(length)]
    assert moved(BlockCausal(4)) == [*range(16, length)]
    assert moved(Causal()) == [*range(18, length)]


def test_images_are_independent_in_the_tower() -> None:
    oracle = build_oracle()
    model, example = build_ours(oracle), build_example(oracle)
    assert model.model.visual is not None
    features_EFD = model.model.visual(example.patches_PC, example.grids)
    other_PC = example.patches_PC.clone()
    other_PC[-16:] += 1.0
    others_EFD = model.model.visual(other_PC, example.grids)
    assert torch.equal(features_EFD[:, :-4], others_EFD[:, :-4])
    assert not torch.isclose(features_EFD[:, -4:], others_EFD[:, -4:]).all(-1).any()


def test_two_streams_repeat_the_images() -> None:
    """The noisy half of block diffusion with nothing masked sees what the clean half sees before its block."""
    oracle = build_oracle()
    model, example = build_ours(oracle), build_example(oracle)
    length = example.tokens_1L.shape[1]
    doubled_1S = example.tokens_1L.repeat(1, 2)
    logits_1SV = model(doubled_1S, pattern=BlockDiffusion(4), images=example.images.double())
    expected_1LV = model(example.tokens_1L, pattern=BlockCausal(4), images=example.images)
    for half_1LV in (logits_1SV[:, :length], logits_1SV[:, length:]):
        torch.testing.assert_close(half_1LV, expected_1LV, rtol=1e-4, atol=1e-4)


def test_repeat_and_select() -> None:
    oracle = build_oracle()
    example, other = build_example(oracle), build_example(oracle, seed=1)
    rows_M = example.images.feature_rows_M
    both = replace(
        example.images.repeat(2),
        feature_rows_M=torch.cat([rows_M, rows_M + len(rows_M)]),
        patches_PC=torch.cat([example.patches_PC, other.patches_PC]),
        grids=(*example.grids, *other.grids),
    )
    model, tokens_2L = build_ours(oracle), example.tokens_1L.repeat(2, 1)
    logits_2LV = model(tokens_2L, pattern=Causal(), images=both)
    for index, images in enumerate((example.images, other.images)):
        alone_1LV = model(example.tokens_1L, pattern=Causal(), images=images)
        torch.testing.assert_close(logits_2LV[index], alone_1LV[0], rtol=1e-4, atol=1e-4)
        selected = both.select(slice(index, index + 1))
        assert selected is not None and selected.grids == images.grids
        torch.testing.assert_close(selected.patches_PC, images.patches_PC, rtol=0.0, atol=0.0)
        torch.testing.assert_close(
            model(example.tokens_1L, pattern=Causal(), images=selected), alone_1LV, rtol=1e-4, atol=1e-4
        )


def test_output_positions_and_stored_features() -> None:
    oracle = build_oracle()
    model, example = build_ours(oracle), build_example(oracle)
    assert model.model.visual is not None
    expected_1LV = model(example.tokens_1L, pattern=Causal(), images=example.images)
    stored = replace(
        example.images, patches_PC=None, features_EFD=model.model.visual(example.patches_PC, example.grids)
    )
    positions_P = torch.tensor([2, 7, 20])
    logits_PV = model(example.tokens_1L, pattern=Causal(), images=stored, output_positions=positions_P)
    torch.testing.assert_close(logits_PV, expected_1LV[0, positions_P])


def test_initial_weights_are_finite_and_complete() -> None:
    model = Transformer(CONFIG)
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    init_weights(model, seed=0)
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    parameters = dict(model.named_parameters())
    assert parameters["model.visual.blocks.0.norm1.weight"].eq(1).all()
    assert parameters["model.visual.blocks.0.norm1.bias"].eq(0).all()
    stds = {"blocks.0.attn.qkv": 32**-0.5, "blocks.0.attn.proj": 0.0, "patch_embed.proj": 96**-0.5, "pos_embed": 0.5}
    for name, std in stds.items():
        assert float(parameters[f"model.visual.{name}.weight"].std()) == pytest.approx(std, rel=0.1)


def test_refusals() -> None:
    oracle = build_oracle()
    model, example = build_ours(oracle), build_example(oracle)
    too_many = replace(example.images, patches_PC=torch.zeros(96, 48))
    with pytest.raises(ValueError, match=r"96 patches for image grids .*, which have 56"):
        model(example.tokens_1L, pattern=Causal(), images=too_many)
    text_model = Transformer(CONFIG.model_copy(update={"vision": None}))
    init_weights(text_model, seed=0)
    with pytest.raises(ValueError, match="no vision tower"):
        text_model(example.tokens_1L, pattern=Causal(), images=example.images)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mrope_section": (6, 5, 4)}, "must sum to head_dim / 2 = 16"),
        ({"mrope_section": (4, 6, 6)}, "at most a third"),
        ({"mrope_section": (5, 5, 6)}, "at most a third"),
        ({"mrope_section": (8, 8)}, "three numbers"),
        ({"num_heads": 3}, "times a multiple of 4"),
        ({"num_position_embeddings": 15}, "square"),
        ({"deepstack_visual_indexes": (0, 4)}, "below depth = 4"),
        ({"deepstack_visual_indexes": (1, 1)}, "different blocks"),
        ({"deepstack_visual_indexes": (0, 1, 2)}, "fewer than num_hidden_layers = 3"),
    ],
)
def test_config_refusals(changes: dict[str, Any], message: str) -> None:
    vision = VISION.model_dump() | changes
    with pytest.raises(ValueError, match=message):
        ModelConfig.model_validate(CONFIG.model_dump() | {"vision": vision})
    with pytest.raises(ValueError, match="needs the ids of its tokens: image_token_id"):
        ModelConfig.model_validate(CONFIG.model_dump() | {"image_token_id": None})
    assert CONFIG.image_token_id == IMAGE
