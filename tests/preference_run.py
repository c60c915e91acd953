"""Tiny runs with objective.kind = "preference"."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from config.load import load_config
from config.train import TrainConfig
from diffusionlm.checkpoints.huggingface import save_model_directory
from tests.conftest import MakeModel
from tests.tiny_run import write_train_config
from tests.unit.data.chat_cases import chat_tokenizer

PREFERENCE_ROW_LENGTH = 96


def write_preferences(folder: Path, tiny_model: MakeModel) -> None:
    """Write 60 preferences for "yes", one that is too long, 60 answers with a label, and an untrained model, `base`."""
    tokenizer = chat_tokenizer()
    vocabulary = {"vocab_size": tokenizer.vocab_size, "mask_token_id": tokenizer.mask_token_id}
    ends = dict.fromkeys(("eos_token_id", "pad_token_id"), tokenizer.eos_token_id)
    model = tiny_model(scale=0.05, max_position_embeddings=PREFERENCE_ROW_LENGTH, **vocabulary, **ends)
    save_model_directory(model, tokenizer, folder / "base")
    rows = [{"prompt": f"q{index}?", "chosen": "yes", "rejected": "no"} for index in range(60)]
    rows.append({"prompt": "x" * 60, "chosen": "yes", "rejected": "no"})
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    labeled = [
        {"prompt": f"q{index}?", "completion": ("no", "yes")[index % 2], "label": index % 2} for index in range(60)
    ]
    (folder / "labeled.jsonl").write_text("\n".join(map(json.dumps, labeled)))


def configure_preferences(folder: Path, name: str, **sections: dict[str, Any]) -> TrainConfig:
    """The config of a run of six steps on what `write_preferences` wrote, in the directory ``name``."""
    is_labeled = sections.get("objective", {}).get("loss") == "kto"
    chat = {"format": "unpaired" if is_labeled else "preference", "eos_padding": "length:6"}
    path = folder / ("labeled.jsonl" if is_labeled else "pairs.jsonl")
    source = {"kind": "files", "paths": [str(path)], "chat": chat, "validation_fraction": 0.2}
    changes: dict[str, dict[str, Any]] = {
        "run": {"directory": str(folder / name)},
        "model": {"init_from": str(folder / "base")},
        "data": {"source": source},
        "objective": {"kind": "preference", "num_draws": 2},
        "training": {"micro_batch_size": 2, "max_steps": 6},
        "optimizer": {"kind": "adamw", "learning_rate": 5e-3},
        "validation": {"final_rows": 4},
        "checkpoint": {"every_steps": 3},
    }
    for section, values in sections.items():
        changes[section] = changes.get(section, {}) | values
    return load_config(TrainConfig, write_train_config(folder, name, **changes))
