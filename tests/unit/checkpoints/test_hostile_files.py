"""Files that promise more than they hold are refused before memory is allocated for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from diffusionlm.checkpoints import huggingface
from diffusionlm.checkpoints.huggingface import load_model, save_model
from diffusionlm.checkpoints.weights import read_weights
from diffusionlm.models.transformer import Transformer

MakeModel = Callable[..., Transformer]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("this must not be reached")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("vocab_size", 10**8),
        ("hidden_size", 10**8),
        ("intermediate_size", 10**8),
        ("num_attention_heads", 10**6),
        ("num_key_value_heads", 1),
    ],
)
def test_shapes_are_compared_before_memory_is_allocated(
    key: str, value: int, tiny_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tiny_model(), tmp_path)
    change_config(tmp_path, **{key: value})
    monkeypatch.setattr(huggingface, "_allocate_parameters", refuse)
    with pytest.raises(ValueError, match=r"has shape \[.*\], the model has"):
        load_model(tmp_path)


@pytest.mark.parametrize(("key", "value"), [("num_hidden_layers", 9999), ("num_experts", 10**8)])
def test_layers_and_experts_are_counted_before_they_are_built(
    key: str, value: int, tiny_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tiny_model(**EXPERTS), tmp_path)
    change_config(tmp_path, **{key: value})
    monkeypatch.setattr(huggingface, "Transformer", refuse)
    with pytest.raises(ValueError, match=rf"{key} = {value}, but the weights are only \d+ tensors"):
        load_model(tmp_path)


def test_stacked_experts_without_values_are_not_split(tiny_model: MakeModel, tmp_path: Path) -> None:
    save_model(tiny_model(**EXPERTS), tmp_path)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    save_file(read_weights(tmp_path) | {name: torch.empty(10**12, 0, 5)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"unexpected {name}"):
        load_model(tmp_path)


def test_a_pickle_of_expanded_tensors_is_refused(tiny_model: MakeModel, tmp_path: Path) -> None:
    save_model(tiny_model(), tmp_path)
    name = "model.norm.weight"
    torch.save(read_weights(tmp_path) | {name: torch.ones(1).expand(10**12)}, tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=rf"pytorch_model\.bin: {name} has shape \[1000000000000\]"):
        load_model(tmp_path)
