"""Runs that start from a converted Qwen3-VL: their checkpoints are directories of Qwen3-VL again."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cli.train import format_run_estimate
from config.convert import ConvertConfig
from config.load import load_config
from config.train import TrainConfig
from diffusionlm.checkpoints.convert import convert, prepare_conversion
from diffusionlm.checkpoints.huggingface import load_model
from diffusionlm.families.model_directory import read_model_config
from diffusionlm.families.registry import get_family
from diffusionlm.training.loop import train
from diffusionlm.vision.processor import ImageProcessor, load_processor, save_processor
from logger.pages.terminal import render_text
from profiling.flops import count_vision_parameters
from tests.qwen3_vl_oracle import CONFIG, IMAGE, VISION, build_oracle, reload_in_transformers
from tests.tiny_run import failing_at, read_losses, write_train_config
from tokenizer import Tokenizer, save_tokenizer, train_bpe

EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MAX_PIXELS = 10_000


def write_base(folder: Path, **changes: Any) -> Path:
    """A directory of transformers, converted for masked diffusion."""
    build_oracle(shape=CONFIG.model_copy(update=changes)).save_pretrained(folder / "source")
    trained = train_bpe(["the cat sat on the mat"], vocab_size=259)
    names = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    special = {"<|endoftext|>": trained.special_tokens["<|endoftext|>"]}
    special |= {name: IMAGE + index for index, name in enumerate(names)}
    tokenizer = Tokenizer(trained.vocab, trained.merges, special, "qwen", eos_token="<|endoftext|>")
    save_tokenizer(tokenizer, folder / "source")
    save_processor(ImageProcessor.for_model(VISION, min_pixels=64, max_pixels=MAX_PIXELS), folder / "source")
    conversion = ConvertConfig(source=folder / "source", target=folder / "base", diffusion={})  # type: ignore[arg-type]
    convert(prepare_conversion(conversion))
    return folder / "base"


def configure(folder: Path, name: str, **changes: dict[str, Any]) -> TrainConfig:
    sections: dict[str, dict[str, Any]] = {
        "run": {"directory": str(folder / name)},
        "model": {"init_from": str(folder / "base")},
        "training": {"max_steps": 4},
        "optimizer": {"kind": "adamw", "learning_rate": 1e-2},
    }
    path = write_train_config(folder, name, **(sections | changes))
    return load_config(TrainConfig, path, ["data.row_length=16"])


@pytest.mark.parametrize("changes", [{}, EXPERTS | {"tie_word_embeddings": True}], ids=["dense", "experts"])
def test_checkpoints_have_the_names_of_the_base(changes: dict[str, Any], tmp_path: Path) -> None:
    base = write_base(tmp_path, **changes)
    whole, resumed = configure(tmp_path, "whole"), configure(tmp_path, "resumed")
    train(whole)
    with failing_at(3):
        train(resumed)
    train(resumed)
    assert read_losses(whole) == read_losses(resumed)
    checkpoint, again = (tmp_path / name / "checkpoints" / "latest" for name in ("whole", "resumed"))
    tensors, resumed_tensors, old = (load_file(path / "model.safetensors") for path in (checkpoint, again, base))
    assert {name: value.shape for name, value in tensors.items()} == {name: value.shape for name, value in old.items()}
    assert all(torch.equal(value, resumed_tensors[name]) for name, value in tensors.items())
    assert not torch.equal(*(table["model.language_model.norm.weight"] for table in (tensors, old)))
    assert load_processor(checkpoint) == load_processor(base)
    theirs = reload_in_transformers(checkpoint).state_dict()
    config = read_model_config(checkpoint)
    assert config.video_token_id == IMAGE + 1
    family = get_family(config)
    for name, value in load_model(checkpoint).named_parameters():
        assert ".experts." in name or torch.equal(value, theirs[family.stored_name(name)])


def test_checkpoints_of_adapters(tmp_path: Path) -> None:
    write_base(tmp_path)
    limits = {"images": {"max_pixels": 5_000}}
    config = configure(tmp_path, "adapter", lora={"rank": 2}, data=limits)
    tower, mergers = count_vision_parameters(CONFIG)
    assert f"{tower:,} in the tower, {mergers:,} in its mergers" in render_text(
        [format_run_estimate(config)], StringIO()
    )
    train(config)
    checkpoint = config.run.directory / "checkpoints" / "latest"
    names = load_file(checkpoint / "adapter_model.safetensors").keys()
    assert {name.partition(".layers.")[0] for name in names} == {"base_model.model.model.language_model"}
    assert load_processor(checkpoint).config.max_pixels == 5_000
    convert(prepare_conversion(ConvertConfig(source=config.run.directory, target=tmp_path / "merged")))
    assert load_processor(tmp_path / "merged") == load_processor(checkpoint)
    reload_in_transformers(tmp_path / "merged")
