"""Whole directories as we write them, tokenizer and all: transformers reads them; and what we refuse to read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from diffusionlm.checkpoints.huggingface import load_model, save_model_directory
from diffusionlm.models.patterns import AttentionPattern, Bidirectional, Causal
from diffusionlm.models.transformer import Transformer
from tests.reference.family_cases import BOUNDS, difference
from tokenizer import Tokenizer, train_bpe

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


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe(["some words and some more words"], vocab_size=280)


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
