"""The recipes of reinforcement learning, in small."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from cli.commands import main
from cli.train import check_files
from config.load import load_config
from config.model import ModelConfig
from config.train import TrainConfig
from diffusionlm.checkpoints.huggingface import save_model_directory
from diffusionlm.models.init import init_weights
from diffusionlm.models.transformer import Transformer
from diffusionlm.rl.run import reinforce_policy
from tests.integration.test_recipes import CHATML, HEADERS, ROOT, SHAPE, SMALL, to_overrides
from tests.tiny_run import read_records, read_steps
from tokenizer import train_bpe

SMALL_RL: dict[str, Any] = SMALL | {
    "model.init_from": "model",
    "data.row_length": 192,
    "data.source.validation_fraction": 0.2,
    "rl.prompts.repeats": 2,
    "rl.prompts.generation.max_new_tokens": 8,
    "training.batch_size": 4,
    "training.micro_batch_size": 4,
    "training.max_steps": 2,
    "schedule.warmup_steps": 0,
    "validation.every_steps": 1,
    "validation.final_rows": 2,
    "samples.every_steps": 1,
    "logging.every_steps": 1,
}
RECIPES: dict[str, tuple[dict[str, Any], tuple[str, ...], str, dict[str, Any]]] = {
    "rl_sdar_math": ({"model_type": "sdar", "block_length": 4}, CHATML, "problems", {}),
    "rl_llada_gsm8k": (
        {"model_type": "llada", "qk_norm": False},
        HEADERS,
        "gsm8k_train",
        {"rl.prompts.generation.block_length": 4, "rl.prompts.generation.denoising_steps": 2},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_recipe(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options, special_tokens, data, changes = RECIPES[name]
    tokens = (*special_tokens, "<|endoftext|>", "<|mask|>")
    tokenizer = train_bpe(["what is one and one"], vocab_size=290, special_tokens=tokens)
    ids: Any = {"mask_token_id": tokenizer.mask_token_id, "eos_token_id": tokenizer.eos_token_id}
    model = Transformer(
        ModelConfig(**SHAPE, max_position_embeddings=2560, vocab_size=tokenizer.vocab_size, **ids, **options)
    )
    init_weights(model, 0)
    save_model_directory(model, tokenizer, tmp_path / "model")
    problems = [{"question": f"what is {number}?", "answer": f"#### {number}"} for number in range(30)]
    (tmp_path / "data").mkdir()
    (tmp_path / f"data/{data}.jsonl").write_text("\n".join(map(json.dumps, problems)), encoding="utf-8")
    config = load_config(TrainConfig, ROOT / f"config/resources/{name}.toml", to_overrides(SMALL_RL | changes))
    check_files(config)
    assert reinforce_policy(config).summary is not None
    steps = read_steps(config)
    assert len(steps) == 2 and all(step["rl/ungraded"] == 0.0 for step in steps)
    assert len([record for record in read_records(config, "event") if record["event"] == "sample"]) == 4
    if config.lora is not None:
        tensors = load_file(config.run.directory / "checkpoints/latest/adapter_model.safetensors")
        assert len([key for key in tensors if key.endswith("lora_A.weight")]) == 7 * 2


@pytest.mark.slow
def test_sudoku(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Both commands, as the guide has them, with few steps."""
    (tmp_path / "config").symlink_to(ROOT / "config")
    monkeypatch.chdir(tmp_path)
    short = {"training.max_steps": 4, "validation.final_rows": 16, "logging.every_steps": 1}
    limits: dict[str, Any] = {
        "evaluation.tasks": "[]",
        "schedule.warmup_steps": 1,
        "evaluation.every_steps": 0,
        "training.batch_size": 16,
        "rl.prompts.repeats": 4,
    }
    for command, name, changes in (("train", "rl_shidoku_start", short), ("rl", "rl_shidoku", short | limits)):
        options = [part for override in to_overrides(changes) for part in ("--set", override)]
        assert main([command, "--config", f"config/resources/{name}.toml", *options]) == 0
    assert "step 4/4  reward " in capsys.readouterr().err
    assert all(step["rl/answer_tokens"] == 9.0 for step in read_steps(Path("runs/rl-shidoku")))


@pytest.mark.slow
def test_addition_as_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "config/resources/rl_addition.toml").read_text(encoding="utf-8")
    for old, new in (
        ("max_steps = 240", "max_steps = 3"),
        ("max_steps = 200", "max_steps = 2"),
        ("batch_size = 256 # answers", "batch_size = 16 # answers"),
        ("limit = 2000", "limit = 20"),
        ("limit = 256", "limit = 4"),
        ("warmup_steps = 5", "warmup_steps = 1"),
        ("final_rows = 256", "final_rows = 4"),
    ):
        assert old in text
        text = text.replace(old, new)
    Path("addition.toml").write_text(text, encoding="utf-8")
    assert main(["pipeline", "--config", "addition.toml"]) == 0
    folder = Path("runs/rl-addition")
    assert (folder / "exam-after/result.json").is_file()
    assert (folder / "reinforced/run/checkpoints/latest/model.safetensors").is_file()
