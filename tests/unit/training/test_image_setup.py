"""The processor and the tokens of images of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from config.load import ConfigError, load_config
from config.train import TrainConfig
from diffusionlm.data.pipeline import open_components
from diffusionlm.training.setup import create_model_builder, find_tokenizer, open_processor
from diffusionlm.vision.messages import IMAGE_TOKENS
from diffusionlm.vision.processor import ImageProcessor, save_processor
from tests.tiny_run import write_train_config
from tests.unit.data.chat_cases import VISION, chat, chat_tokenizer, image_processor
from tokenizer import save_tokenizer

CHATML = ("<|im_start|>", "<|im_end|>")


def config_of(folder: Path, **changes: dict[str, Any]) -> TrainConfig:
    rows = [chat("<image>what", f"a{index}") | {"image": f"{index}.png"} for index in range(30)]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    source = {"kind": "files", "paths": [str(folder / "chats.jsonl")], "chat": {"template": "chatml"}}
    sections: dict[str, dict[str, Any]] = {
        "model": {"max_position_embeddings": 200, "vision": VISION.model_dump()},
        "data": {"source": source},
        "tokenizer": {"vocab_size": 263, "special_tokens": list(CHATML)},
    }
    merged: Any = {key: sections.get(key, {}) | changes.get(key, {}) for key in sections | changes}
    return load_config(TrainConfig, write_train_config(folder, **merged))


def test_a_tokenizer_of_the_run_has_the_tokens_of_images(tmp_path: Path) -> None:
    """It is trained on text, without placeholders."""
    for special_tokens in (CHATML, (*CHATML, IMAGE_TOKENS[1])):
        config = config_of(tmp_path, tokenizer={"special_tokens": list(special_tokens), "vocab_size": 280})
        components = open_components(config.data, "train")
        tokenizer = find_tokenizer(config.tokenizer, config.model, components, lambda text: None)
        expected = ["<|endoftext|>", "<|mask|>", *special_tokens]
        assert list(tokenizer.special_tokens) == expected + [token for token in IMAGE_TOKENS if token not in expected]
        assert not any(b"vision" in token or b"|" in token for token in tokenizer.vocab if len(token) > 1)
    text_config = config.model_copy(update={"model": config.model.model_copy(update={"vision": None})})
    text = find_tokenizer(config_of(tmp_path).tokenizer, text_config.model, components, lambda text: None)
    assert list(text.special_tokens) == ["<|endoftext|>", "<|mask|>", *CHATML]


def test_a_tokenizer_without_the_tokens_of_images_is_refused(tmp_path: Path) -> None:
    save_tokenizer(chat_tokenizer(), tmp_path / "tokenizer")
    options = {"path": str(tmp_path / "tokenizer"), "vocab_size": 4096, "special_tokens": []}
    config = config_of(tmp_path, tokenizer=options)
    with pytest.raises(ValueError, match=r"no special token <\|vision_start\|>, <\|image_pad\|>, .* special_tokens"):
        create_model_builder(config, chat_tokenizer())


def test_the_processor_of_random_weights(tmp_path: Path) -> None:
    assert open_processor(config_of(tmp_path)) == ImageProcessor.for_model(VISION, 64, 256 * 64)
    limited = config_of(tmp_path, data={"images": {"min_pixels": 100, "max_pixels": 1_000}})
    assert open_processor(limited) == ImageProcessor.for_model(VISION, 100, 1_000)
    assert open_processor(load_config(TrainConfig, write_train_config(tmp_path, "text"))) is None
    with pytest.raises(
        ValueError,
        match=r"^\[data\.images\]: max_pixels = 10 must be at least .* the pixels of one position of the text$",
    ):
        open_processor(config_of(tmp_path, data={"images": {"max_pixels": 10}}))


def test_the_processor_of_a_model(tmp_path: Path) -> None:
    model = config_of(tmp_path)
    directory = tmp_path / "model"
    directory.mkdir()
    config = model.model_copy(update={"model": model.model.model_copy(update={"init_from": directory})})
    with pytest.raises(ValueError, match="model"):
        open_processor(config)
    save_processor(image_processor(), directory)
    assert open_processor(config) == image_processor()
    limits = config.data.images.model_copy(update={"max_pixels": 128})
    limited = config.model_copy(update={"data": config.data.model_copy(update={"images": limits})})
    assert open_processor(limited) == ImageProcessor.for_model(VISION, 64, 128)


def test_limits_of_images_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"min_pixels = 200 is more than max_pixels = 100"):
        config_of(tmp_path, data={"images": {"min_pixels": 200, "max_pixels": 100}})
    path = write_train_config(tmp_path, "text", data={"images": {"max_pixels": 100}})
    with pytest.raises(ConfigError, match=r"\[data\.images\] is for a model with a vision tower"):
        load_config(TrainConfig, path)
