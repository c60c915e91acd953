"""``diffusionlm-train`` around the work: ``--dry-run``, errors and warnings before, the suggested command after it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from cli import train
from cli.infer import main as infer
from config.infer import InferConfig
from config.load import load_config
from config.train import TrainConfig
from diffusionlm.training import loop
from profiling.machine import Memory
from profiling.rollouts import estimate_rollouts
from tests.unit.cli.conftest import Fails
from tests.unit.data.chat_cases import chat_tokenizer
from tokenizer import save_tokenizer

TRAIN = Path(__file__).parents[3] / "config/resources/train.toml"
RL = """
[rl.prompts]
kind = "gsm8k"
data = "questions.jsonl"
repeats = 2
batch_size = 2
generation = { max_new_tokens = 16, denoising_steps = 2 }
[objective]
kind = "block_diffusion"
block_length = 4
"""
QWEN3_06B = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}

CONFIG = """
[run]
directory = "run"
[model]
{model}
[data]
source = "python-stdlib"
row_length = 64
[training]
batch_size = 4
max_steps = 10
"""

SMALL = """hidden_size = 16
num_hidden_layers = 1
num_attention_heads = 1
num_key_value_heads = 1
head_dim = 16
intermediate_size = 16
max_position_embeddings = 64
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Has a base without weights and tokenizer, and configs that start from it and from random weights."""
    monkeypatch.chdir(tmp_path)
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(QWEN3_06B))
    (tmp_path / "adapted.toml").write_text(CONFIG.format(model='init_from = "base"'))
    (tmp_path / "new.toml").write_text(CONFIG.format(model=SMALL))
    return tmp_path


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, str]:
    assert train.main([*arguments, "--dry-run"]) == 0
    lines = (line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    return {name: value.strip() for name, value in lines}


def test_parameters_and_vocabulary_are_those_of_the_base(capsys: pytest.CaptureFixture[str]) -> None:
    values = plan(capsys, "--config", "adapted.toml")
    assert values["parameters"].startswith("596,049,920 ")
    assert values["vocabulary"] == "151,936 tokens"


def test_the_vocabulary_is_that_of_the_tokenizer(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a new run that of `tokenizer.path`, of one that is resumed that of its directory."""
    assert plan(capsys, "--config", "new.toml")["vocabulary"].startswith("4,096 tokens assumed; the tokenizer that is")
    tokenizer = chat_tokenizer()
    for path in ("own", "run/tokenizer"):
        (folder / path).mkdir(parents=True)
        save_tokenizer(tokenizer, folder / path)
        arguments = ["--set", "tokenizer={path='own'}"] if path == "own" else []
        values = plan(capsys, "--config", "new.toml", *arguments)
        assert values["vocabulary"] == f"{tokenizer.vocab_size} tokens"
        assert f"({16 * tokenizer.vocab_size:,} in embedding" in values["parameters"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("lora.trainable_tokens=[151936]", "151936 is not in the model's vocabulary of 151,936 tokens"),
        ('lora.targets=["x_proj"]', "the model has down_proj, gate_proj"),
        ("tokenizer={path='missing'}", "tokenizer.path = missing: "),
    ],
)
def test_what_the_run_refuses_is_refused(override: str, message: str, fails: Fails) -> None:
    arguments = ["--config", "adapted.toml", "--set", override]
    error = fails(train.main, *arguments, "--dry-run")
    assert error == fails(train.main, *arguments) and message in error


def test_a_tokenizer_with_more_tokens_than_the_base_is_refused(folder: Path, fails: Fails) -> None:
    (folder / "base" / "config.json").write_text(json.dumps(QWEN3_06B | {"vocab_size": 20}))
    save_tokenizer(chat_tokenizer(), folder)
    error = fails(train.main, "--config", "adapted.toml", "--set", "tokenizer={path='.'}", "--dry-run")
    assert "model.init_from = base has 20 rows in its embedding" in error


def allocate_too_much(*_: Any) -> None:
    torch.empty(1 << 55)


def test_missing_memory_ends_training_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: Fails
) -> None:
    monkeypatch.setattr(loop, "train", allocate_too_much)
    error = fails(train.main, "--config", TRAIN, "--set", f"run.directory={tmp_path / 'run'}", code=1)
    assert error.startswith("diffusionlm-train: error: out of memory, ") and error.count("\n") == 1
    assert "lower training.micro_batch_size" in error


def test_a_run_larger_than_the_memory_is_announced_or_refused(
    train_config: TrainConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def check(total: int, free: int, **changes: Any) -> str:
        monkeypatch.setattr(train, "read_memory", lambda: Memory(total, free))
        train.check_memory(train_config.model_copy(update=changes))
        return capsys.readouterr().err

    monkeypatch.setattr(train, "drivers", list)
    assert not check(1 << 40, 1 << 40)
    assert "training.micro_batch_size" in check(1 << 40, 1 << 10)
    training = train_config.training.model_copy(update={"batch_size": 100_000_000, "micro_batch_size": None})
    with pytest.raises(ValueError, match=r"this machine has 16\.0 GiB: lower training\.micro_batch_size"):
        check(1 << 34, 1 << 33, training=training)
    monkeypatch.setattr(train, "drivers", lambda: ["580, GPU"])
    run = train_config.run.model_copy(update={"device": "auto"})
    assert not check(1 << 40, 1 << 10, run=run), "the GPU has memory of its own"


@pytest.mark.parametrize(
    ("text", "option"),
    [
        ("A line\nand a 'quoted' \\n", "--prompt"),
        ("--dashes", "--prompt"),
        ("-[MASK:1]", "--infill"),
    ],
)
def test_the_next_command_reads_its_text_back(text: str, option: str, tmp_path: Path, fails: Fails) -> None:
    words = shlex.split(train.suggest_next_command(Path("runs/a b"), text))
    assert words[:5] == ["uv", "run", "diffusionlm-infer", "--model", "runs/a b"]
    assert words[5].partition("=")[0] == option
    path = tmp_path / "infer.toml"
    path.write_text(fails(infer, *words[3:], "--print-config", code=0), encoding="utf-8")
    config = load_config(InferConfig, path)
    assert (config.input.infills if option == "--infill" else config.input.prompts) == (text,)


def test_reinforcement_needs_prompts_and_estimates_its_rollouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """4 answers of 4 blocks in 2 steps each, 2 at a time: 8 forwards, and 2 rows for the steps of all blocks."""
    monkeypatch.chdir(tmp_path)
    text = CONFIG.format(model=SMALL)
    Path("plain.toml").write_text(text, encoding="utf-8")
    with pytest.raises(SystemExit) as caught:
        train.reinforce(["--config", "plain.toml"])
    assert caught.value.code == 2 and "[rl] is missing: add [rl.prompts]" in capsys.readouterr().err
    Path("rl.toml").write_text(text + RL, encoding="utf-8")
    assert train.reinforce(["--config", "rl.toml", "--dry-run"]) == 0
    lines = {line.partition("  ")[0]: line.split("  ")[-1].strip() for line in capsys.readouterr().out.splitlines()}
    assert lines["answers of an update"] == "4 on a rank"
    assert lines["forwards of an answer"] == "8 at most, decoded"
    assert lines["rows of an answer"] == "2 at most, scored"
    assert lines["memory, cache"] == "0.0 MiB"
    cases = {"rl.logprobs=mean_field": 1, "rl.logprobs=coupled": 3, "rl.logprobs=sandwich": 4}
    for override, rows in cases.items():
        config = load_config(TrainConfig, Path("rl.toml"), [override])
        assert estimate_rollouts(config).rows == rows
    whole = load_config(TrainConfig, Path("rl.toml"), ["objective={kind='masked_diffusion'}"])
    sampled = load_config(
        TrainConfig, Path("rl.toml"), ["objective={kind='masked_diffusion'}", "rl.logprobs.sampled_steps=1"]
    )
    assert [estimate_rollouts(config).rows for config in (whole, sampled)] == [2, 1]
    assert estimate_rollouts(whole, ranks=2).answers == 2
