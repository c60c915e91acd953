"""Whole directories as we write them, tokenizer and all: transformers reads them; and what we refuse to read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from diffusionlm.checkpoints.huggingface import load_model, save_model_directory
from diffusionlm.models.patterns import AttentionPattern, Bidirectional, BlockCausal, Causal
from diffusionlm.models.transformer import Transformer
from tests.reference.family_cases import BOUNDS, difference
from tokenizer import Tokenizer

transformers = pytest.importorskip("transformers")

MakeModel = Callable[..., Transformer]
TOKENS = torch.randint(0, 40, (2, 13), generator=torch.Generator().manual_seed(5))


def their_logits(model: Any, pattern: AttentionPattern) -> torch.Tensor:
    zero_mask = torch.zeros(2, 1, 13, 13, dtype=model.dtype)
    with torch.no_grad():
        options = {} if isinstance(pattern, Causal) else {"attention_mask": zero_mask}
        logits: torch.Tensor = model(TOKENS, **options).logits
    return logits


LONGROPE = {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_scaling", LONGROPE),
        ("rope_parameters", LONGROPE),
        ("hidden_act", "gelu"),
        ("sliding_window", {"sliding_window": 8, "use_sliding_window": True}),
    ],
)
def test_unsupported_config_is_rejected(
    key: str, value: Any, tiny_model: MakeModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """A key that changes the function and that this model does not know must not be dropped."""
    save_model_directory(tiny_model(vocab_size=300, mask_token_id=299), tokenizer, tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    values |= value if key == "sliding_window" else {key: value}
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=key):
        load_model(tmp_path)


OURS = [
    pytest.param({"qk_norm": True, "tie_word_embeddings": True}, id="qwen3-tied"),
    pytest.param({"qk_norm": True, "tie_word_embeddings": False, "num_key_value_heads": 1}, id="qwen3-untied-mqa"),
    pytest.param({"qk_norm": True, "attention_bias": True}, id="qwen3-bias"),
    pytest.param({"qk_norm": False, "tie_word_embeddings": True, "num_key_value_heads": 4}, id="llama-tied-mha"),
    pytest.param({"qk_norm": False, "tie_word_embeddings": False}, id="llama-untied"),
    pytest.param({"qk_norm": False, "attention_bias": True}, id="llama-bias"),
]


@pytest.mark.parametrize("overrides", OURS)
def test_our_directory_in_transformers(
    overrides: dict[str, Any], tiny_model: MakeModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Autoregressive, with the causal attention of transformers and with a mask that hides nothing."""
    overrides = {**overrides, "block_length": 1, "logit_alignment": "shifted"}
    ours = tiny_model(vocab_size=tokenizer.vocab_size, mask_token_id=tokenizer.mask_token_id, **overrides)
    save_model_directory(ours, tokenizer, tmp_path)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    unexpected = {key: value for key, value in report.items() if value and key != "missing_keys"}
    assert not unexpected
    assert not [key for key in report["missing_keys"] if not key.endswith("o_proj.bias")]
    for pattern in (Causal(), Bidirectional()):
        with torch.no_grad():
            logits = ours(TOKENS, pattern=pattern)
        assert difference(logits, their_logits(theirs.eval(), pattern)) <= BOUNDS["float32"]
    words = "some more"
    theirs_ids = transformers.AutoTokenizer.from_pretrained(tmp_path)(words)["input_ids"]
    assert theirs_ids == tokenizer.encode(words)


FAMILIES = [
    *OURS,
    pytest.param({"qk_norm": False, "attention_bias": True, "attention_output_bias": False}, id="qwen2"),
    pytest.param({"qk_norm": True, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}, id="moe"),
    pytest.param(
        {
            "qk_norm": False,
            "sandwich_norms": True,
            "norm_offset": True,
            "scale_embeddings": True,
            "hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
        },
        id="gemma2",
    ),
]


@pytest.mark.parametrize("overrides", FAMILIES)
def test_bidirectional_model_in_transformers(
    overrides: dict[str, Any], tiny_model: MakeModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """config.json alone makes transformers compute our attention: without a mask, in each of its implementations."""
    ours = tiny_model(vocab_size=tokenizer.vocab_size, mask_token_id=tokenizer.mask_token_id, **overrides)
    save_model_directory(ours, tokenizer, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["is_causal"] is False
    for implementation in ("eager",) if "sandwich_norms" in overrides else ("eager", "sdpa"):
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, attn_implementation=implementation, dtype=torch.float32
        )
        with torch.no_grad():
            logits, their_logits = ours(TOKENS, pattern=Bidirectional()), theirs.eval()(TOKENS).logits
        assert difference(logits, their_logits) <= BOUNDS["float32"]
    assert load_model(tmp_path).config == ours.config


@pytest.mark.parametrize("block_length", [1, 4])
def test_block_diffusion_model_in_transformers(
    block_length: int, tiny_model: MakeModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Blocks of one token are causal attention; longer ones need a mask, as the model card says."""
    ours = tiny_model(vocab_size=tokenizer.vocab_size, mask_token_id=tokenizer.mask_token_id, block_length=block_length)
    save_model_directory(ours, tokenizer, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    pattern = BlockCausal(block_length)
    mask = None if block_length == 1 else pattern.dense_mask(TOKENS.shape[1]).expand(2, 1, -1, -1)
    with torch.no_grad():
        logits, their_logits = ours(TOKENS, pattern=pattern), theirs(TOKENS, attention_mask=mask).logits
    assert difference(logits, their_logits) <= BOUNDS["float32"]
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert ("block-causal `attention_mask`" in card) == (block_length > 1) and "is_causal" not in card


def test_contradiction_of_attentions_is_rejected(tiny_model: MakeModel, tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_model_directory(tiny_model(vocab_size=300, mask_token_id=299, block_length=4), tokenizer, tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    for changes in ({}, {"block_length": None, "mask_token_id": None, "logit_alignment": None}):
        path.write_text(json.dumps(values | changes | {"is_causal": False}))
        with pytest.raises(ValueError, match="is_causal = False contradicts block_length = "):
            load_model(tmp_path)


@pytest.mark.parametrize("overrides", OURS)
def test_our_directory_comes_back(
    overrides: dict[str, Any], tiny_model: MakeModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    ours = tiny_model(vocab_size=tokenizer.vocab_size, mask_token_id=tokenizer.mask_token_id, **overrides)
    save_model_directory(ours, tokenizer, tmp_path)
    again = load_model(tmp_path)
    assert again.config == ours.config
    assert torch.equal(again(TOKENS, pattern=Causal()), ours(TOKENS, pattern=Causal()))
    assert load_model(tmp_path, dtype="bfloat16").lm_head.weight.dtype == torch.bfloat16
