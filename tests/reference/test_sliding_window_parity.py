"""Sliding layers compute what transformers' Qwen3 computes, and are written and read in its keys."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from diffusionlm.checkpoints.huggingface import build_config_json, load_model, save_model
from diffusionlm.models.patterns import Bidirectional, Causal
from diffusionlm.models.transformer import Transformer

transformers = pytest.importorskip("transformers")

MakeModel = Callable[..., Transformer]
TOKENS = torch.randint(0, 18, (2, 13), generator=torch.Generator().manual_seed(5))
FULL, SLIDING = "full_attention", "sliding_attention"
CASES = [
    pytest.param((SLIDING, FULL), 4, id="first"),
    pytest.param((FULL, SLIDING), 1, id="last-sees-itself-alone"),
    pytest.param((SLIDING, SLIDING), 5, id="both"),
    pytest.param((SLIDING, SLIDING), 64, id="wider-than-the-text"),
]


@pytest.mark.parametrize(("layer_types", "window"), CASES)
def test_our_sliding_layers_in_transformers(
    layer_types: tuple[str, ...], window: int, tiny_model: MakeModel, tmp_path: Path
) -> None:
    ours = tiny_model(layer_types=layer_types, sliding_window=window, block_length=1)
    save_model(ours, tmp_path)
    theirs = transformers.Qwen3ForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", dtype=torch.float32
    ).eval()
    with torch.no_grad():
        expected = theirs(TOKENS).logits
        torch.testing.assert_close(ours(TOKENS, pattern=Causal()), expected, rtol=1e-3, atol=1e-3)
        full = tiny_model()(TOKENS, pattern=Causal())
    assert torch.allclose(full, expected, atol=1e-3) == (window > TOKENS.shape[1])
    again = load_model(tmp_path)
    assert again.config == ours.config
    assert torch.equal(again(TOKENS, pattern=Causal()), ours(TOKENS, pattern=Causal()))


def test_bidirectional_sliding_layers_in_transformers(tiny_model: MakeModel, tmp_path: Path) -> None:
    """Their window counts the positions on each side, ours also the query itself, as the model card says."""
    ours = tiny_model(layer_types=(SLIDING, FULL), sliding_window=4)
    save_model(ours, tmp_path)
    logits = {}
    for window in (3, 4):
        theirs = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path, sliding_window=window, dtype=torch.float32)
        with torch.no_grad():
            logits[window] = theirs.eval()(TOKENS).logits
    with torch.no_grad():
        expected = ours(TOKENS, pattern=Bidirectional())
    torch.testing.assert_close(logits[3], expected, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(logits[4], expected, atol=1e-2)


def test_their_sliding_layers_are_read(tmp_path: Path) -> None:
    shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "vocab_size": 40}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12}
    sliding = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
    config = transformers.Qwen3Config(
        **shape, **heads, **sliding, max_position_embeddings=64, mask_token_id=39, attn_implementation="eager"
    )
    theirs = transformers.Qwen3ForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path)
    assert ours.config.layer_types == (FULL, SLIDING)
    assert ours.config.sliding_window == 3
    with torch.no_grad():
        torch.testing.assert_close(ours(TOKENS, pattern=Causal()), theirs(TOKENS).logits, rtol=1e-3, atol=1e-3)


def test_a_window_that_no_layer_has_is_not_written(tiny_model: MakeModel) -> None:
    config = tiny_model(layer_types=(FULL, FULL), sliding_window=4).config
    assert not build_config_json(config, torch.float32).keys() & {"layer_types", "sliding_window", "use_sliding_window"}


def test_llama_has_no_sliding_layers(tiny_model: MakeModel) -> None:
    config = tiny_model(layer_types=(FULL, SLIDING), sliding_window=4, qk_norm=False).config
    with pytest.raises(ValueError, match=r"sliding_attention.*llama.*qk_norm"):
        build_config_json(config, torch.float32)


@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": False},
        {"use_sliding_window": None},
        {"layer_types": None},
        {"model_type": "llama", "qk_norm": False},
    ],
    ids=str,
)
def test_contradictory_keys_are_rejected(changes: dict[str, Any], tiny_model: MakeModel, tmp_path: Path) -> None:
    save_model(tiny_model(layer_types=(FULL, SLIDING), sliding_window=4), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError, match=r"use_sliding_window|layer_types"):
        load_model(tmp_path)
