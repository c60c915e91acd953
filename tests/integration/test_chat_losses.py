"""Runs on conversations: answers and EOS padding apart in metrics and validation."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from cli.train import format_summary
from config.load import load_config
from config.train import TrainConfig
from diffusionlm.training.loop import train
from logger.pages.terminal import render_text
from tests.tiny_run import write_train_config

MASKED = {"kind": "masked_diffusion", "normalizer": "rows"}
BLOCKS = {"kind": "block_diffusion", "block_length": 4, "eos_padding_weight": 0.5, "next_token_weight": 0.2}
INDEPENDENT = {"kind": "block_diffusion", "block_length": 4, "attention": "prompt_and_own_block"}


def chat_config(folder: Path, objective: dict[str, Any]) -> TrainConfig:
    chat = {"template": "chatml", "eos_padding": "length:8", "turns": "expand"}
    sections: dict[str, dict[str, Any]] = {
        "run": {"directory": str(folder / "run")},
        "model": {"max_position_embeddings": 128},
        "tokenizer": {"vocab_size": 260, "special_tokens": ["<|im_start|>", "<|im_end|>"]},
        "data": {
            "source": {
                "kind": "chat_tasks",
                "max_length": 3,
                "documents_per_epoch": 60,
                "validation_documents": 12,
                "chat": chat,
            },
            "rows": "best_fit",
            "document_shuffle_window": 16,
        },
        "objective": objective,
        "training": {"batch_size": 4, "max_steps": 3},
        "validation": {"every_steps": 2, "rows": 4, "final_rows": 4, "ngrams": True},
    }
    return load_config(TrainConfig, write_train_config(folder, "train", **sections))


def metrics_of(config: TrainConfig) -> list[dict[str, Any]]:
    lines = (config.run.directory / "metrics.jsonl").read_text().splitlines()
    return [record["metrics"] for record in map(json.loads, lines) if "metrics" in record]


@pytest.mark.parametrize(
    "objective",
    [
        pytest.param(MASKED, id="masked", marks=pytest.mark.slow),
        pytest.param(BLOCKS, id="blocks"),
        pytest.param(INDEPENDENT, id="independent", marks=pytest.mark.slow),
    ],
)
def test_answers_and_eos_padding_are_reported_apart(objective: dict[str, Any], tmp_path: Path) -> None:
    config = chat_config(tmp_path, objective)
    result = train(config)
    steps = [metrics for metrics in metrics_of(config) if "loss" in metrics]
    assert len(steps) == 3
    for metrics in steps:
        parts = sorted([metrics["loss_answer"], metrics["loss_eos_padding"]])
        has_next_token = bool(objective.get("next_token_weight"))
        assert ("loss_next_token" in metrics) == has_next_token
        loss = metrics["loss"] - (0.2 * metrics["loss_next_token"] * 0.95 if has_next_token else 0.0)
        assert parts[0] - 0.5 <= loss <= parts[1] + 0.5
    validations = [metrics for metrics in metrics_of(config) if "val_nats_per_token" in metrics]
    assert validations and all(metrics["val_eos_padding_nats_per_token"] > 0 for metrics in validations)
    assert result.summary is not None
    assert result.summary.evaluation.eos_padding_nats_per_token is not None and not result.summary.ngrams
    assert "EOS padding after answers" in render_text(format_summary(result.summary, config.run.directory), StringIO())
