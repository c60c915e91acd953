"""The recipes of fine-tuning with adapters, in small: a random model of the family, some chats, two steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from cli.train import check_files, main
from config.load import load_config
from config.model import ModelConfig
from config.train import TrainConfig
from diffusionlm.checkpoints.huggingface import load_model, save_model_directory
from diffusionlm.models.init import init_weights
from diffusionlm.models.transformer import Transformer
from diffusionlm.training.loop import train
from tokenizer import train_bpe

RESOURCES = Path(__file__).parents[2] / "config" / "resources"
CHATML = ("<|im_start|>", "<|im_end|>")
HEADERS = ("<|startoftext|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
RECIPES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "sft_qwen3": ({"model_type": "qwen3", "block_length": 4}, CHATML),
    "sft_llada": ({"model_type": "llada", "qk_norm": False}, HEADERS),
    "sft_sdar": ({"model_type": "sdar", "block_length": 4}, CHATML),
    "preference": ({"model_type": "qwen3", "block_length": 4}, CHATML),
}


def write_model(directory: Path, options: dict[str, Any], special_tokens: tuple[str, ...]) -> int:
    """Write a random model with a tokenizer. Returns the id of the mask token."""
    tokens = (*special_tokens, "<|endoftext|>", "<|mask|>")
    tokenizer = train_bpe(["what is one and one"], vocab_size=290, special_tokens=tokens)
    assert tokenizer.mask_token_id is not None
    config = ModelConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=24,
        max_position_embeddings=2048,
        vocab_size=tokenizer.vocab_size,
        mask_token_id=tokenizer.mask_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **options,
    )
    model = Transformer(config)
    init_weights(model, 0)
    save_model_directory(model, tokenizer, directory)
    return tokenizer.mask_token_id


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "sft_sdar" else [pytest.mark.slow]) for name in RECIPES]
)
def test_recipe(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    options, special_tokens = RECIPES[name]
    write_model(tmp_path / "model", options, special_tokens)
    for folder in ("chats", "pairs"):
        (tmp_path / folder).mkdir()
    pairs = [{"prompt": f"what is {i}", "chosen": f"{i} and one", "rejected": "none"} for i in range(60)]
    (tmp_path / "pairs/a.jsonl").write_text("\n".join(map(json.dumps, pairs)), encoding="utf-8")
    records = [
        {"messages": [{"role": "user", "content": f"what is {i}"}, {"role": "assistant", "content": f"{i} and one"}]}
        for i in range(60)
    ]
    (tmp_path / "chats/a.jsonl").write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    changes = {
        "run.device": "cpu",
        "run.threads": 1,
        "model.init_from": "model",
        "data.row_length": 256,
        "data.workers": 0,
        "data.source.validation_fraction": 0.2,
        "training.batch_size": 2,
        "training.micro_batch_size": 1,
        "training.precision": "float32",
        "validation.final_rows": 2,
        "logging.progress": "none",
    }
    overrides = [f"{key}={value}" for key, value in changes.items()]
    recipe = RESOURCES / f"{name}.toml"
    assert main(["--config", str(recipe), "--dry-run", *(part for text in overrides for part in ("--set", text))]) == 0
    assert "trained" in capsys.readouterr().out
    config = load_config(TrainConfig, recipe, overrides)
    check_files(config)
    training = config.training.model_copy(update={"epochs": None, "max_steps": 2})
    schedule = config.schedule.model_copy(update={"warmup_steps": 1, "warmup_fraction": 0.0})
    config = config.model_copy(update={"training": training, "schedule": schedule})
    assert train(config).step == 2
    tensors = load_file(config.run.directory / "checkpoints/latest/adapter_model.safetensors")
    assert len([key for key in tensors if key.endswith("lora_A.weight")]) == 7 * 2
    assert load_model(config.run.directory).config.block_length == options.get("block_length")
