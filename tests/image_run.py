"""Tiny runs on conversations, of which some have images."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from config.load import load_config
from config.model import ModelConfig
from config.train import TrainConfig
from diffusionlm.checkpoints.huggingface import save_model_directory
from diffusionlm.vision.processor import save_processor
from tests.image_rows import make_model
from tests.tiny_run import write_train_config
from tests.unit.data.chat_cases import VISION, image_processor, image_tokenizer

IMAGE = 261
CONFIG = ModelConfig(
    vocab_size=263,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    intermediate_size=16,
    max_position_embeddings=96,
    tie_word_embeddings=False,
    vision=VISION.model_copy(update={"depth": 2, "deepstack_visual_indexes": (0,)}),
    mask_token_id=257,
    eos_token_id=256,
    pad_token_id=256,
    vision_start_token_id=260,
    image_token_id=IMAGE,
    vision_end_token_id=262,
)
"""A position of the text has 8 x 8 pixels."""
COLORS = {"red": (255, 0, 0), "blue": (0, 0, 255), "lime": (0, 255, 0)}
NUM_CONVERSATIONS, NUM_FILES, NUM_IMAGES = 24, 6, 4
"""Conversations, pictures, and those of them that conversations have."""


def write_conversations(folder: Path) -> None:
    """Write conversations and preferences on six pictures, every third one without, and a random model, `base`."""
    save_model_directory(make_model(CONFIG), image_tokenizer(), folder / "base")
    save_processor(image_processor(), folder / "base")
    rng = np.random.default_rng(0)
    for number in range(NUM_FILES):
        color = [*COLORS.values()][number % len(COLORS)]
        rows, columns = (1, 2) if number % 2 else (2, 2)
        pixels = (0.5 * np.array(color) + rng.integers(0, 128, (8 * rows, 8 * columns, 3))).astype(np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG")
        (folder / f"{number}.png").write_bytes(file.getvalue())
    conversations, preferences = [], []
    for index in range(NUM_CONVERSATIONS):
        number = index % NUM_FILES
        question: Any = f"{index}: color?"
        if index % 3:
            question = [{"type": "image", "image": f"{number}.png"}, {"type": "text", "text": question}]
        prompt, answer = [{"role": "user", "content": question}], [*COLORS][number % len(COLORS)]
        conversations.append({"messages": [*prompt, {"role": "assistant", "content": answer}]})
        preferences.append({"prompt": prompt, "chosen": answer, "rejected": "gray"})
    for name, lines in (("chats", conversations), ("preferences", preferences)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")


def configure_images(folder: Path, name: str, **sections: dict[str, Any]) -> TrainConfig:
    """The config of a run of six steps on what `write_conversations` wrote, in the directory ``name``."""
    is_preference = sections.get("objective", {}).get("kind") == "preference"
    source = {
        "kind": "files",
        "paths": [str(folder / ("preferences.jsonl" if is_preference else "chats.jsonl"))],
        "chat": {"eos_padding": "none", "format": "preference" if is_preference else "auto"},
        "validation_fraction": 0.2,
    }
    changes: dict[str, dict[str, Any]] = {
        "run": {"directory": str(folder / name)},
        "model": {"init_from": str(folder / "base")},
        "data": {"source": source},
        "training": {"batch_size": 4, "micro_batch_size": 1, "max_steps": 6},
        "optimizer": {"kind": "adamw", "learning_rate": 5e-3},
        "validation": {"final_rows": 4},
        "checkpoint": {"every_steps": 3},
    }
    for section, values in sections.items():
        changes[section] = changes.get(section, {}) | values
    return load_config(TrainConfig, write_train_config(folder, name, **changes))
