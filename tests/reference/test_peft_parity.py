"""Adapters go to PEFT and come from it: the same tensors, the same logits; what the model cannot compute is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from config.finetune.lora import LoraConfig
from diffusionlm.checkpoints.adapter_files import load_adapter, save_adapter
from diffusionlm.checkpoints.base_fingerprint import BaseFingerprint
from diffusionlm.checkpoints.huggingface import load_model, save_model
from diffusionlm.checkpoints.model_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from diffusionlm.models.lora import adapter_modules, add_adapter, merge_adapter
from diffusionlm.models.patterns import Causal
from diffusionlm.models.transformer import Transformer
from tests.conftest import MakeModel
from tests.reference.family_cases import BOUNDS, difference

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

TOKENS = torch.randint(0, 19, (2, 13), generator=torch.Generator().manual_seed(5))
BASE: dict[str, Any] = {"qk_norm": True, "block_length": 1, "logit_alignment": "shifted"}
UNTIED = {"tie_word_embeddings": False}
BIASES = {"qk_norm": False, "attention_bias": True}

CASES = [
    pytest.param({"targets": ("q_proj", "v_proj")}, {}, id="names"),
    pytest.param({}, {}, id="all-linear"),
    pytest.param({"targets": r".*\.(up|down)_proj", "rslora": True}, {}, id="regex-rslora"),
    pytest.param(
        {"rank_patterns": {"self_attn.q_proj": 5}, "alpha_patterns": {r"layers\.0\..*": 3.5, "q_proj": 64.0}},
        {},
        id="patterns",  # the first match counts; PEFT writes them sorted
    ),
    pytest.param({"dora": True}, {}, id="dora"),
    pytest.param({"trainable_tokens": (18, 3)}, {"tie_word_embeddings": False}, id="rows"),
    pytest.param({"trainable_tokens": (18, 3)}, {"tie_word_embeddings": True}, id="rows-tied"),
    pytest.param({"modules_to_save": ("lm_head", "embed_tokens", "norm")}, UNTIED, id="whole"),  # norm: all norms
    pytest.param({"modules_to_save": ("mlp", "model.norm"), "targets": ("q_proj", "up_proj")}, {}, id="whole-blocks"),
    pytest.param({"modules_to_save": ("embed_tokens",)}, {"tie_word_embeddings": True}, id="whole-tied"),
    pytest.param({"bias": "all", "targets": ("q_proj", "o_proj"), "modules_to_save": ("k_proj",)}, BIASES, id="bias"),
    pytest.param({"bias": "lora_only", "targets": ("q_proj",), "dora": True}, BIASES, id="bias-lora-only"),
    pytest.param({"targets": ("q_proj", "lm_head"), "rslora": True}, UNTIED, id="head"),
    pytest.param({"targets": ("v_proj", "lm_head"), "layers_to_transform": (1,)}, UNTIED, id="layers"),
    pytest.param({"targets": ("q_proj", "down_proj"), "exclude": r".*\.0\..*_proj"}, {}, id="exclude-regex"),
    pytest.param({"trainable_tokens": (18,), "modules_to_save": ("lm_head",)}, UNTIED, id="rows-whole-head"),
]


def move_adapter(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Move every trained parameter, so that none is at its initial value."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def save_moved_adapter(model: Transformer, config: LoraConfig, folder: Path) -> Path:
    """Add an adapter to a model, move its values, and save it. Returns its directory."""
    fingerprint = BaseFingerprint.from_model(model)
    add_adapter(model, config)
    move_adapter(model, torch.Generator().manual_seed(1))
    adapter = folder / "adapter"  # beside the base transformers would load it as well
    adapter.mkdir()
    save_adapter(model, config, adapter, fingerprint=fingerprint)
    return adapter


def load_in_peft(base: Path, adapter: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    return peft.PeftModel.from_pretrained(model, adapter)


def make_base(tiny_model: MakeModel, options: dict[str, Any]) -> Transformer:
    """A base whose biases and norms are not at their initial values."""
    model = tiny_model(**BASE | options)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    return model


def our_logits(model: Transformer) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS, pattern=Causal())


def their_logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(TOKENS).logits
    return logits


UNSORTED = {"alpha_patterns": {"q_proj": 64.0, r"layers\.0\..*": 3.5}}


@pytest.mark.parametrize(("options", "model_options"), [*CASES, pytest.param(UNSORTED, {}, id="unsorted-patterns")])
def test_peft_loads_our_adapter(
    options: dict[str, Any], model_options: dict[str, Any], tiny_model: MakeModel, tmp_path: Path
) -> None:
    ours = make_base(tiny_model, model_options)
    save_model(ours, tmp_path)
    config = LoraConfig(rank=3, alpha=7.0, **options)
    adapter = save_moved_adapter(ours, config, tmp_path)
    theirs = load_in_peft(tmp_path, adapter)
    assert difference(our_logits(ours), their_logits(theirs)) < BOUNDS["float32"]
    again = load_model(tmp_path, adapter=adapter)
    assert torch.equal(our_logits(again), our_logits(ours.eval()))
    expected = our_logits(ours)
    merge_adapter(again)
    assert difference(our_logits(again), expected) < BOUNDS["float32"]
    assert difference(our_logits(again), their_logits(theirs.merge_and_unload())) < BOUNDS["float32"]


PEFT_NAMES = {
    "targets": "target_modules",
    "rank_patterns": "rank_pattern",
    "alpha_patterns": "alpha_pattern",
    "rslora": "use_rslora",
    "dora": "use_dora",
    "trainable_tokens": "trainable_token_indices",
    "exclude": "exclude_modules",
}


@pytest.mark.parametrize(("options", "model_options"), CASES)
def test_we_load_the_adapter_of_peft(
    options: dict[str, Any], model_options: dict[str, Any], tiny_model: MakeModel, tmp_path: Path
) -> None:
    save_model(make_base(tiny_model, model_options), tmp_path)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    values: dict[str, Any] = {"targets": "all-linear", **options}
    lists = {PEFT_NAMES.get(key, key): list(x) if isinstance(x, tuple) else x for key, x in values.items()}
    ties = model_options.get("tie_word_embeddings", False)
    config = peft.LoraConfig(r=3, lora_alpha=7, ensure_weight_tying=ties, task_type="CAUSAL_LM", **lists)
    theirs = peft.get_peft_model(base, config)
    move_adapter(theirs, torch.Generator().manual_seed(1))
    theirs.save_pretrained(tmp_path / "adapter")
    ours = load_model(tmp_path, adapter=tmp_path / "adapter")
    assert difference(our_logits(ours), their_logits(theirs)) < BOUNDS["float32"]


@pytest.mark.parametrize("init", ["pissa", "olora"])
@pytest.mark.parametrize("rslora", [False, True])
def test_an_adapter_that_began_as_a_part_of_the_weight(
    init: Any, rslora: bool, tiny_model: MakeModel, tmp_path: Path
) -> None:
    """It is written as a difference, which PEFT adds to the same base."""
    ours = tiny_model(**BASE)
    save_model(ours, tmp_path)
    config = LoraConfig(rank=3, alpha=7.0, init=init, rslora=rslora)
    adapter = save_moved_adapter(ours, config, tmp_path)
    theirs = load_in_peft(tmp_path, adapter)
    assert difference(our_logits(ours), their_logits(theirs)) < BOUNDS["float32"]
    assert json.loads((adapter / ADAPTER_CONFIG).read_text())["r"] == 6


def test_an_adapter_of_masked_positions(tiny_model: MakeModel, tmp_path: Path) -> None:
    """PEFT has no such adapters: with it the adapter acts on all positions, as if all were masked."""
    ours = tiny_model(**BASE)
    save_model(ours, tmp_path)
    expected, masked_BL = our_logits(ours), torch.ones_like(TOKENS, dtype=torch.bool)
    adapter = save_moved_adapter(ours, LoraConfig(rank=3, positions="masks"), tmp_path)
    with torch.no_grad():
        everywhere = ours(TOKENS, pattern=Causal(), masked_BL=masked_BL)
        again = load_model(tmp_path, adapter=adapter)
        assert torch.equal(our_logits(again), expected)
        assert torch.equal(again(TOKENS, pattern=Causal(), masked_BL=masked_BL), everywhere)
    assert difference(everywhere, their_logits(load_in_peft(tmp_path, adapter))) < BOUNDS["float32"]
    path = adapter / ADAPTER_CONFIG
    values = json.loads(path.read_text())
    assert values.pop("positions") == "masks"
    path.write_text(json.dumps(values))
    assert difference(our_logits(load_model(tmp_path, adapter=adapter)), everywhere) < BOUNDS["float32"]


def test_a_rank_beyond_the_projection_and_dropout(tiny_model: MakeModel, tmp_path: Path) -> None:
    """PiSSA's export has twice the rank. Dropout is off in a loaded model."""
    ours = tiny_model(**BASE)
    save_model(ours, tmp_path)
    config = LoraConfig(rank=10, alpha=7.0, init="pissa", dropout=0.5)  # k_proj has 12 rows
    adapter = save_moved_adapter(ours, config, tmp_path)
    assert difference(our_logits(load_model(tmp_path, adapter=adapter)), our_logits(ours.eval())) < BOUNDS["float32"]


@pytest.fixture
def adapter(tiny_model: MakeModel, tmp_path: Path) -> Path:
    """A directory with an adapter of rank 2 on the default model."""
    model, config = tiny_model(**BASE), LoraConfig(rank=2, targets=("q_proj",))
    add_adapter(model, config)
    save_adapter(model, config, tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("peft_type", "IA3"),
        ("bias", "some"),
        ("modules_to_save", "lm_head"),
        ("layers_to_transform", [-1]),
        ("layers_pattern", "h"),
        ("target_parameters", ["mlp.experts.gate_up_proj"]),
        ("fan_in_fan_out", True),
        ("lora_bias", True),
        ("init_lora_weights", "pissa"),
        ("exclude_modules", "("),
        ("trainable_token_indices", {"embed_tokens": [1], "lm_head": [2]}),
        ("r", 0),
        ("target_modules", None),
        ("lora_alpha", None),
        ("positions", "drafts"),
        ("lora_dropout", "x"),
        ("alpha_pattern", [1]),
    ],
)
def test_what_the_model_cannot_compute_is_refused(key: str, value: Any, adapter: Path, tiny_model: MakeModel) -> None:
    path = adapter / ADAPTER_CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(ValueError, match=rf"{ADAPTER_CONFIG}: .*\b{key}\b"):
        load_adapter(tiny_model(**BASE), adapter)


def test_another_base_is_refused(adapter: Path, tiny_model: MakeModel) -> None:
    """Also one that differs in a single layer; a copy in another dtype is the same base."""
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        load_adapter(tiny_model(**BASE, dtype=dtype), adapter)
    other = tiny_model(**BASE)
    with torch.no_grad():
        other.get_parameter("model.layers.1.mlp.up_proj.weight").mul_(1.5)
    with pytest.raises(ValueError, match="another base"):
        load_adapter(other, adapter)


@pytest.mark.parametrize("change", ["missing", "unexpected", "shape"])
def test_tensors_that_do_not_fit_are_listed(change: str, adapter: Path, tiny_model: MakeModel) -> None:
    path = adapter / ADAPTER_WEIGHTS
    tensors = load_file(path)
    name = next(iter(tensors))
    if change == "missing":
        del tensors[name]
    elif change == "unexpected":
        name = name.replace("q_proj", "o_proj")
        tensors[name] = torch.zeros(2)
    else:
        tensors[name] = torch.zeros(5, 5)
    save_file(tensors, path)
    model = tiny_model(**BASE)
    with pytest.raises(ValueError) as error:
        load_adapter(model, adapter)
    assert not list(adapter_modules(model))
    assert name in str(error.value)
    assert {"missing": "missing", "unexpected": "unexpected", "shape": "[5, 5]"}[change] in str(error.value)


@pytest.mark.parametrize("name", [ADAPTER_CONFIG, ADAPTER_WEIGHTS])
def test_missing_files_are_named(name: str, adapter: Path, tiny_model: MakeModel) -> None:
    (adapter / name).unlink()
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        load_adapter(tiny_model(**BASE), adapter)
