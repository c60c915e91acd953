"""Training on conversations with images, to a checkpoint from which others are trained, and that is scored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from config.eval import EvalConfig
from config.load import load_config
from config.train import TrainConfig
from diffusionlm import load_model, load_processor
from diffusionlm.evaluation.text_likelihood import OpenedText, evaluate_likelihood, exchange_prompts
from diffusionlm.training.loop import train
from diffusionlm.training.setup import open_processor
from tests.tiny_run import failing_at, read_losses, write_train_config
from tests.unit.data.chat_cases import VISION, chat, picture

NUM_ROWS = 40


def write_source(folder: Path) -> dict[str, Any]:
    rows = []
    for index in range(NUM_ROWS):
        (folder / f"{index}.png").write_bytes(picture(1 + index % 2, 2, index))
        rows.append(chat("<image>what", f"answer {index}") | {"image": f"{index}.png"})
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    chats = {"template": "chatml", "eos_padding": "none"}
    return {"kind": "files", "paths": [str(folder / "chats.jsonl")], "validation_fraction": 0.2, "chat": chats}


def config_of(folder: Path, name: str, **changes: dict[str, Any]) -> TrainConfig:
    sections: dict[str, dict[str, Any]] = {
        "run": {"directory": str(folder / name)},
        "model": {"max_position_embeddings": 96, "vision": VISION.model_dump()},
        "data": {"source": write_source(folder), "images": {"max_pixels": 256}},
        "tokenizer": {"vocab_size": 263, "special_tokens": ["<|im_start|>", "<|im_end|>"]},
        "training": {"batch_size": 4, "max_steps": 4},
    }
    if "model" in changes:
        del sections["tokenizer"], sections["model"]
    return load_config(TrainConfig, write_train_config(folder, name, **(sections | changes)))


def test_a_run_with_images_resumes_and_others_begin_with_its_checkpoint(tmp_path: Path) -> None:
    config = config_of(tmp_path, "first")
    train(config)
    interrupted = config_of(tmp_path, "second")
    with failing_at(3):
        train(interrupted)
    train(interrupted)
    assert read_losses(interrupted) == read_losses(config)

    processor = load_processor(config.run.directory)
    assert processor == open_processor(config) and processor.config.max_pixels == 256
    model = load_model(config.run.directory).config
    assert (model.vision_start_token_id, model.image_token_id, model.vision_end_token_id) == (260, 261, 262)

    tuned = config_of(
        tmp_path, "tuned", model={"init_from": str(config.run.directory)}, data={"source": write_source(tmp_path)}
    )
    assert tuned.model.vision == VISION and open_processor(tuned) == processor
    train(tuned)
    assert load_processor(tuned.run.directory) == processor


def test_likelihoods_of_answers_read_the_images(tmp_path: Path) -> None:
    config = config_of(tmp_path, "run")
    train(config)
    values: dict[str, Any] = {
        "model": {"path": str(config.run.directory)},
        "data": {"source": write_source(tmp_path), "split": "all", "rows": "padded", "max_rows": 8, "row_length": 96},
        "likelihood": {"kind": "nelbo", "prompt_gap": True, "num_mc_samples": 2},
    }
    text = OpenedText(EvalConfig.model_validate(values))
    result = evaluate_likelihood(text, load_model(config.run.directory))
    assert result.num_rows == 8 and result.prompt_gap is not None
    exchanged, num_exchanged = exchange_prompts(text.rows)
    assert num_exchanged == 8
    for row, other in zip(text.rows, exchanged, strict=True):
        assert other.images != row.images and len(other.images) == 1
        (placed,) = other.images
        is_image_L = other.tokens_L == 261
        assert is_image_L[placed.start : placed.end].all() and is_image_L.sum() == placed.image.num_tokens
        answers = [each.tokens_L[each.loss_mask_L].tolist() for each in (row, other)]
        assert answers[0] == answers[1]
