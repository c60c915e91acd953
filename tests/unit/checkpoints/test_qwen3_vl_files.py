"""Directories of Qwen3-VL against transformers: read, written, converted and adapted, dense and with experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cli.analyze import format_directory
from config.convert import ConvertConfig
from config.finetune.lora import LoraConfig
from config.model import VISION_PREFIX
from diffusionlm.checkpoints.adapter_files import save_adapter
from diffusionlm.checkpoints.analyze import analyze
from diffusionlm.checkpoints.base_fingerprint import BaseFingerprint
from diffusionlm.checkpoints.convert import convert, prepare_conversion
from diffusionlm.checkpoints.huggingface import load_model, save_model, save_model_directory
from diffusionlm.families.hub import DESCRIPTION_FILES, PROCESSOR_FILES
from diffusionlm.models.lora import adapter_modules, add_adapter
from diffusionlm.models.patterns import AttentionPattern, Bidirectional, Causal
from diffusionlm.models.transformer import Transformer
from tests.qwen3_vl_oracle import (
    CONFIG,
    END,
    IMAGE,
    START,
    Example,
    build_example,
    build_oracle,
    reload_in_transformers,
)
from tokenizer import Tokenizer, save_tokenizer, train_bpe

EXPERTS: dict[str, Any] = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
CASES: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "experts": EXPERTS,
    "experts-square-gates": EXPERTS | {"moe_intermediate_size": CONFIG.hidden_size // 2},
    "experts-square-outputs": EXPERTS | {"moe_intermediate_size": CONFIG.hidden_size, "tie_word_embeddings": True},
}
TOKENS = torch.arange(40).view(2, 20)


def build_case(name: str) -> Any:
    return build_oracle(shape=CONFIG.model_copy(update=CASES[name]))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    trained = train_bpe(["the cat sat on the mat"], vocab_size=259)
    special = {"<|endoftext|>": trained.special_tokens["<|endoftext|>"], "<|image_pad|>": IMAGE}
    special |= {"<|video_pad|>": IMAGE + 1, "<|vision_start|>": START, "<|vision_end|>": END}
    return Tokenizer(trained.vocab, trained.merges, special, "qwen", eos_token="<|endoftext|>")


@pytest.fixture
def source(tokenizer: Tokenizer, tmp_path: Path) -> Path:
    """A directory of transformers with a tokenizer and the settings of processors."""
    folder = tmp_path / "source"
    build_oracle().save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    for name in PROCESSOR_FILES[:2]:
        (folder / name).write_text(f'{{"of": "{name}"}}')
    return folder


def load_weights(folder: Path) -> dict[str, Tensor]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


@torch.no_grad()
def compute_logits(model: Transformer, example: Example, pattern: AttentionPattern | None = None) -> Tensor:
    return model(example.tokens_1L, pattern=pattern or Causal(), images=example.images)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


# Reading and writing.


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_round_trip(name: str, tmp_path: Path) -> None:
    """Theirs, loaded here; what is written here, loaded here and there. No value changes on the way."""
    theirs = build_case(name)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="50KB")
    ours, example = load_model(tmp_path / "theirs"), build_example(theirs)
    assert ours.config.tie_word_embeddings == theirs.config.tie_word_embeddings
    expected = theirs(**example.oracle_inputs).logits
    assert_close(compute_logits(ours, example), expected)
    (tmp_path / "ours").mkdir()
    save_model(ours, tmp_path / "ours", max_shard_size=50_000)
    again, back = load_model(tmp_path / "ours"), reload_in_transformers(tmp_path / "ours")
    assert again.config == ours.config
    assert all(torch.equal(value, again.get_parameter(key)) for key, value in ours.named_parameters())
    assert_close(compute_logits(again, example), expected)
    assert back.state_dict().keys() == theirs.state_dict().keys()
    assert all(torch.equal(value, back.state_dict()[key]) for key, value in theirs.state_dict().items())
    assert back.config.video_token_id == IMAGE + 1
    assert load_weights(tmp_path / "ours").keys() == load_weights(tmp_path / "theirs").keys()


def test_experts_are_written_as_published(tmp_path: Path) -> None:
    """[experts, in, out], where transformers 5 writes [experts, out, in]."""
    build_case("experts").save_pretrained(tmp_path / "theirs")
    (tmp_path / "ours").mkdir()
    save_model(load_model(tmp_path / "theirs"), tmp_path / "ours")
    ours, theirs = load_weights(tmp_path / "ours"), load_weights(tmp_path / "theirs")
    stem = "model.language_model.layers.1.mlp.experts"
    assert ours[f"{stem}.gate_up_proj"].shape == (3, 64, 48) and ours[f"{stem}.down_proj"].shape == (3, 24, 64)
    for name, value in theirs.items():
        assert torch.equal(ours[name], value.mT if ".experts." in name else value)
    comparison = analyze(tmp_path / "ours", tmp_path / "ours")
    assert comparison.is_equal and format_directory(tmp_path / "ours", 0)


@pytest.mark.parametrize("text", ["language_model.", "language_model.model."])
def test_names_of_parts(text: str, tmp_path: Path) -> None:
    """Of a model without its outer class, and of a language model with its own."""
    build_oracle().save_pretrained(tmp_path)
    expected = load_model(tmp_path).state_dict()
    tensors = {
        name.replace("model.language_model.", text).replace("model.visual.", "visual."): value
        for name, value in load_weights(tmp_path).items()
    }
    if text.endswith(".model."):
        tensors["language_model.lm_head.weight"] = tensors.pop("lm_head.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    state = load_model(tmp_path).state_dict()
    assert state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in state)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
@pytest.mark.parametrize("name", ["tied", "experts"])
def test_parameters_are_memory_mapped(name: str, tmp_path: Path) -> None:
    """Of files of transformers also experts: a slice of [experts, out, in] is contiguous."""
    build_case(name).save_pretrained(tmp_path)
    model, path = load_model(tmp_path), str(tmp_path / "model.safetensors")
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(path)]
    ranges = [[int(address, 16) for address in line[0].split("-")] for line in lines]
    for parameter in model.parameters():
        assert any(start <= parameter.data_ptr() < end for start, end in ranges)


@torch.no_grad()
def test_text_is_that_of_qwen3(tmp_path: Path) -> None:
    build_oracle().save_pretrained(tmp_path / "theirs")
    model = load_model(tmp_path / "theirs")
    text_model = Transformer(model.config.model_copy(update={"vision": None}))
    text_model.load_state_dict({key: t for key, t in model.state_dict().items() if not key.startswith(VISION_PREFIX)})
    (tmp_path / "text").mkdir()
    save_model(text_model, tmp_path / "text")
    qwen3 = load_model(tmp_path / "text")
    assert torch.equal(model(TOKENS, pattern=Causal()), qwen3(TOKENS, pattern=Causal()))


# Conversion.


def convert_directory(source: Path, target: Path, **options: Any) -> Transformer:
    convert(prepare_conversion(ConvertConfig(source=source, target=target, **options)))
    return load_model(target)


@torch.no_grad()
def test_conversion_adds_a_mask_token(source: Path, tmp_path: Path) -> None:
    before, target = load_model(source), tmp_path / "masked"
    after = convert_directory(source, target, diffusion={"logit_alignment": "same_position"})
    changed = {key for key, *_ in analyze(source, target).config_differences}
    assert {"mask_token_id", "text_config.is_causal"} < changed and "vision_config.depth" not in changed
    assert (after.config.mask_token_id, after.config.block_length, after.config.vocab_size) == (258, None, 300)
    for name, parameter in after.named_parameters():
        rows = [row for row in range(300) if row != 258 or name.startswith(VISION_PREFIX)]
        is_table = name in ("lm_head.weight", "model.embed_tokens.weight")
        assert torch.equal(*(p[rows] if is_table else p for p in (parameter, before.get_parameter(name))))
    for name in PROCESSOR_FILES[:2]:
        assert (target / name).read_bytes() == (source / name).read_bytes()
    card = (target / "README.md").read_text()
    assert "pipeline_tag: image-text-to-text" in card and "AutoModelForImageTextToText" in card
    assert "| vision | " in card
    # transformers reads is_causal of the text, and computes the same.
    theirs = reload_in_transformers(target)
    example = build_example(theirs)
    assert_close(compute_logits(after, example, Bidirectional()), theirs(**example.oracle_inputs).logits)
    assert convert_directory(target, tmp_path / "again").config == after.config
    assert (tmp_path / "again" / PROCESSOR_FILES[0]).exists()


def test_files_of_processors_belong_to_vision(source: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert set(PROCESSOR_FILES) < set(DESCRIPTION_FILES), "downloaded and pushed"
    model = Transformer(CONFIG.model_copy(update={"vision": None}))
    save_model_directory(model, tokenizer, tmp_path / "text", source=source)
    assert not [name for name in PROCESSOR_FILES if (tmp_path / "text" / name).exists()]


def test_other_families_have_no_vision(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="model_type = 'qwen3': the family has no model with a vision tower"):
        convert_directory(source, tmp_path / "text", model_type="qwen3")
    model = Transformer(CONFIG.model_copy(update={"vision": None, "model_type": "qwen3_vl"}))
    with pytest.raises(ValueError, match="model_type = 'qwen3_vl': the family has no model with no vision tower"):
        save_model(model, tmp_path)


# Adapters.


def add_moved_adapter(model: Transformer, config: LoraConfig) -> None:
    add_adapter(model, config)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)


@torch.no_grad()
def test_adapters_of_the_text(source: Path, tmp_path: Path) -> None:
    """The tower has none, PEFT reads ours, and a merged one is the same model."""
    from peft import PeftModel

    model, adapter = load_model(source), tmp_path / "adapter"
    fingerprint = BaseFingerprint.from_model(model)
    config = LoraConfig(rank=3)
    add_moved_adapter(model, config)
    assert not [name for name, _ in adapter_modules(model) if name.startswith(VISION_PREFIX)]
    adapter.mkdir()
    save_adapter(model, config, adapter, fingerprint=fingerprint)
    names = load_file(adapter / "adapter_model.safetensors").keys()
    assert {name.rpartition(".layers.")[0] for name in names} == {"base_model.model.model.language_model"}
    theirs = PeftModel.from_pretrained(reload_in_transformers(source), adapter)
    example = build_example(theirs.base_model.model)
    expected = compute_logits(model, example)
    assert_close(theirs(**example.oracle_inputs).logits, expected)
    again = load_model(source, adapter=adapter)
    assert torch.equal(compute_logits(again, example), expected)
    assert_close(compute_logits(convert_directory(source, tmp_path / "merged", adapter=adapter), example), expected)


@torch.no_grad()
def test_adapters_of_experts(tokenizer: Tokenizer, tmp_path: Path) -> None:
    build_case("experts").save_pretrained(tmp_path / "base")
    save_tokenizer(tokenizer, tmp_path / "base")
    model, adapter = load_model(tmp_path / "base"), tmp_path / "adapter"
    config = LoraConfig(rank=2, modules_to_save=("merger",))
    fingerprint = BaseFingerprint.from_model(model)
    add_moved_adapter(model, config)
    adapter.mkdir()
    save_adapter(model, config, adapter, base=str(tmp_path / "base"), fingerprint=fingerprint)
    convert_directory(tmp_path / "base", tmp_path / "merged", adapter=adapter)
    comparison = analyze(adapter, tmp_path / "merged")
    assert comparison.merged == ("a",) and not comparison.only_a and not comparison.only_b
    assert comparison.is_equal


def test_an_adapter_of_the_tower_is_refused(source: Path, tmp_path: Path) -> None:
    model = load_model(source)
    with pytest.raises(ValueError, match=r"lora\.targets = \('qkv',\) selects no projection; the model has down_proj"):
        add_adapter(model, LoraConfig(targets=("qkv",)))
