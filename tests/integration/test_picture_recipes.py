"""The recipes with images, in small: drawn pictures from random weights, and an adapter on conversations."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from cli.commands import main
from config.load import load_config
from config.train import TrainConfig
from diffusionlm.training.loop import train
from tests.image_run import write_conversations
from tests.tiny_run import read_events, read_losses

RESOURCES = Path(__file__).parents[2] / "config" / "resources"
SMALL: dict[str, Any] = {
    "run.device": "cpu",
    "run.threads": 1,
    "data.workers": 0,
    "training.precision": "float32",
    "validation.final_rows": 2,
    "logging.progress": "none",
}


def to_overrides(values: dict[str, Any]) -> list[str]:
    return [f"{key}={value}" for key, value in values.items()]


def test_pictures(tmp_path: Path) -> None:
    changes = {
        "run.directory": tmp_path / "run",
        "training.max_steps": 2,
        "training.batch_size": 2,
        "data.row_shuffle_window": 4,
        "data.packing_window": 16,
        "samples.every_steps": 2,
        "evaluation.tasks.0.limit": 3,
        "evaluation.tasks.1.limit": 3,
    }
    config = load_config(TrainConfig, RESOURCES / "pictures.toml", to_overrides(SMALL | changes))
    train(config)
    samples = [event["values"] for event in read_events(config, "sample")]
    assert len(samples) == 3
    for values in samples:
        assert values["given"].count("<|image_pad|>") == "".join(values["tokens"]).count("<|image_pad|>") == 1
        [picture] = values["pictures"]
        assert picture.startswith("data:image/png;base64,")
    page = (config.run.directory / "report.html").read_text(encoding="utf-8")
    assert len(re.findall(r'<img src="data:image/png;base64,[\w+/=]+" alt="image 1">', page)) == 3
    tasks = " ".join(event["text"] for event in read_events(config, "tasks"))
    assert "pictures" in tasks and "text_alone" in tasks


def test_fine_tuning_of_qwen3_vl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_conversations(tmp_path)
    monkeypatch.chdir(tmp_path)
    changes = {
        "model.init_from": "base",
        "data.source.paths": '["chats.jsonl"]',
        "data.source.validation_fraction": 0.2,
        "data.row_length": 96,
        "training.batch_size": 2,
        "training.micro_batch_size": 1,
        "training.epochs": 1,
    }
    overrides = to_overrides(SMALL | changes)
    arguments = [argument for override in overrides for argument in ("--set", override)]
    main(["train", "--config", str(RESOURCES / "sft_qwen3_vl.toml"), "--dry-run", *arguments])
    assert "in the tower" in capsys.readouterr().out
    config = load_config(TrainConfig, RESOURCES / "sft_qwen3_vl.toml", overrides)
    train(config)
    assert read_losses(config)
    assert [path.suffix for path in Path("runs/image-features").rglob("*") if path.is_file()]
