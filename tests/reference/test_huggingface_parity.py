"""The same weights give the same logits in transformers, in both directions, with every parameter off its default."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from config.model import ModelConfig
from diffusionlm.checkpoints.huggingface import load_model, load_weights, save_model_directory
from diffusionlm.models.patterns import AttentionPattern, Bidirectional, Causal
from diffusionlm.models.transformer import Transformer
from tokenizer import Tokenizer, train_bpe

transformers = pytest.importorskip("transformers")

MakeModel = Callable[..., Transformer]
TOKENS = torch.randint(0, 40, (2, 13), generator=torch.Generator().manual_seed(5))
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "intermediate_size": 56,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-3,
    "attention_bias": False,
    "vocab_size": 40,
}
CASES = [
    pytest.param("qwen3", {"tie_word_embeddings": True}, id="qwen3-tied"),
    pytest.param("qwen3", {"tie_word_embeddings": False, "num_key_value_heads": 1}, id="qwen3-untied-mqa"),
    pytest.param("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}, id="llama-tied-mha"),
    pytest.param("llama", {"tie_word_embeddings": False}, id="llama-untied"),
]
THETA = 500.0
PRECISIONS = [(torch.float32, 1e-3), (torch.float64, 1e-5)]
"""transformers takes norms and rotations in fp32 whatever the weights are, so double does not go deeper than that."""


def foreign(family: str, changes: dict[str, Any], **extra: Any) -> Any:
    """A random model of transformers, all gains and weights moved."""
    config_class, model_class = {
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    }[family]
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": THETA}}
    config = config_class(**{**SHAPE, **changes, **rope, **extra}, attn_implementation="eager")
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    return model


def their_logits(model: Any, pattern: AttentionPattern) -> torch.Tensor:
    zero_mask = torch.zeros(2, 1, 13, 13, dtype=model.dtype)
    with torch.no_grad():
        options = {} if isinstance(pattern, Causal) else {"attention_mask": zero_mask}
        logits: torch.Tensor = model(TOKENS, **options).logits
    return logits


@pytest.mark.parametrize("pattern", [Bidirectional(), Causal()], ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS, ids=str)
@pytest.mark.parametrize(("family", "changes"), CASES)
def test_their_weights_in_our_model(
    family: str,
    changes: dict[str, Any],
    dtype: torch.dtype,
    tolerance: float,
    pattern: AttentionPattern,
    tmp_path: Path,
) -> None:
    theirs = foreign(family, changes)
    theirs.save_pretrained(tmp_path)
    config = ModelConfig(**{**SHAPE, **changes}, qk_norm=family == "qwen3", rope_theta=THETA, mask_token_id=39)
    ours = Transformer(config)
    load_weights(ours, tmp_path / "model.safetensors")
    expected = their_logits(theirs.to(dtype), pattern)
    assert expected.std() > 0.1
    torch.testing.assert_close(ours.to(dtype)(TOKENS, pattern=pattern), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_their_directory_is_loaded_right_or_refused(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """rope_theta lies in rope_parameters there; reading it as the default would be silently wrong."""
    extra = {"mask_token_id": 39, "qk_norm": family == "qwen3"}
    theirs = foreign(family, changes, **extra)
    theirs.save_pretrained(tmp_path)
    try:
        ours = load_model(tmp_path)
    except ValueError as error:
        if "rope" not in str(error):
            raise  # refused, but the message does not name the key
        return
    torch.testing.assert_close(ours(TOKENS, pattern=Causal()), their_logits(theirs, Causal()), rtol=1e-3, atol=1e-3)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_scaling", YARN),
        ("rope_parameters", YARN),
        ("hidden_act", "gelu"),
        ("sliding_window", {"sliding_window": 8, "use_sliding_window": True}),
    ],
)
def test_what_is_not_computed_here_is_refused(
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
        torch.testing.assert_close(
            ours(TOKENS, pattern=pattern), their_logits(theirs.eval(), pattern), rtol=1e-3, atol=1e-3
        )
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
