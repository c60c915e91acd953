"""Conversions: what is written is the source, but for what was asked."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

from cli.analyze import format_analysis
from cli.convert import main
from config.convert import ConvertConfig
from config.finetune.lora import LoraConfig
from config.model import ModelConfig
from diffusionlm.checkpoints.adapter_files import save_adapter
from diffusionlm.checkpoints.analyze import analyze
from diffusionlm.checkpoints.convert import convert, prepare_conversion
from diffusionlm.checkpoints.huggingface import load_model, save_model_directory
from diffusionlm.checkpoints.model_files import load_tokenizer
from diffusionlm.evaluation.nelbo import nelbo
from diffusionlm.families.hub import download_description, download_model
from diffusionlm.models.init import init_weights
from diffusionlm.models.lora import adapter_modules, add_adapter
from diffusionlm.models.patterns import Causal
from diffusionlm.models.transformer import Transformer
from files.json_files import read_json_object
from logger.pages.terminal import render_text
from tokenizer import Tokenizer, save_tokenizer, train_bpe

TOKENS = torch.tensor([[3, 99, 200, 7, 7, 41]])


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """258 tokens; none stands for noise."""
    trained = train_bpe(["the cat sat on the mat"], vocab_size=259)
    special = {"<|endoftext|>": trained.special_tokens["<|endoftext|>"]}
    return Tokenizer(trained.vocab, trained.merges, special, "qwen", eos_token="<|endoftext|>")


def source(path: Path, tokenizer: Tokenizer, rows: int, **changes: Any) -> Path:
    """An autoregressive model with so many rows in its embedding."""
    config = ModelConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=24,
        max_position_embeddings=32,
        vocab_size=rows,
        eos_token_id=tokenizer.eos_token_id,
        logit_alignment="shifted",
        block_length=1,
        **changes,
    )
    model = Transformer(config)
    init_weights(model, 0)
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=rng))
    save_model_directory(model, tokenizer, path)
    return path


def test_source_on_the_hub(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are downloaded by `convert` only, and the card names the model instead of the cache."""
    snapshot = source(tmp_path / "models--org--tiny" / "snapshots" / ("c" * 40), tokenizer, 300)
    (snapshot / "README.md").unlink()
    calls: list[tuple[str, str | None, bool]] = []

    def download(repository: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        calls.append((repository, revision, "model.safetensors" in allow_patterns))
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    for function in (download_description, download_model):
        function.cache_clear()
    target = tmp_path / "target"
    plan = prepare_conversion(ConvertConfig(source=Path("org/tiny@v1"), target=target))
    assert calls == [("org/tiny", "v1", False)]
    convert(plan)
    load_tokenizer("org/tiny@v1")
    logits = [load_model(model)(TOKENS, pattern=Causal()) for model in ("org/tiny@v1", target)]
    assert torch.equal(*logits)
    assert calls[1:] == [("org/tiny", "c" * 40, True)]
    assert f"Converted from org/tiny, commit {'c' * 40}, whose" in (target / "README.md").read_text(encoding="utf-8")


def converted(path: Path, target: Path, **options: Any) -> Transformer:
    config = ConvertConfig(source=path, target=target, **options)
    convert(prepare_conversion(config))
    return load_model(target)


def test_a_new_row_for_the_mask_token(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = source(tmp_path / "ar", tokenizer, tokenizer.vocab_size)
    before = load_model(path)
    after = converted(path, tmp_path / "masked", diffusion={"block_length": 4, "untie_head": True})
    rows = tokenizer.vocab_size
    assert (after.config.vocab_size, after.config.mask_token_id, after.config.block_length) == (rows + 1, rows, 4)
    assert after.config.logit_alignment == "shifted" and not after.config.tie_word_embeddings
    masked = load_tokenizer(tmp_path / "masked")
    assert (masked.mask_token_id, masked.mask_token, masked.eos_token_id) == (rows, "<|mask|>", tokenizer.eos_token_id)
    assert masked.encode("the cat") == tokenizer.encode("the cat")
    with torch.no_grad():
        one, other = before(TOKENS, pattern=Causal()), after(TOKENS, pattern=Causal())
        assert torch.equal(one, other[..., :rows]), "for the tokens that it knew it is the same model"
    assert nelbo(after, TOKENS, num_mc_samples=2, block_length=4).nats_per_token > 0


def test_a_row_that_no_token_used(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = source(tmp_path / "ar", tokenizer, 272, tie_word_embeddings=False)
    first = tokenizer.vocab_size
    after = converted(path, tmp_path / "masked", diffusion={"mask_token": "<M>", "logit_alignment": "same_position"})
    assert (after.config.vocab_size, after.config.mask_token_id) == (272, first)
    assert after.config.logit_alignment == "same_position" and after.config.block_length is None
    chosen = converted(path, tmp_path / "chosen", diffusion={"mask_token_id": 270})
    assert chosen.config.mask_token_id == 270 == load_tokenizer(tmp_path / "chosen").mask_token_id
    changed = {pair.a.name for pair in analyze(path, tmp_path / "chosen").pairs if pair.max_difference}
    assert changed == {"model.embed_tokens.weight", "lm_head.weight"}
    before = load_model(path).lm_head.weight
    other_rows = [row for row in range(272) if row != 270]
    assert torch.equal(before[other_rows], chosen.lm_head.weight[other_rows])
    torch.testing.assert_close(chosen.lm_head.weight[270], before[other_rows].mean(0))


@pytest.mark.parametrize("mask_row", ["mean", "random", "reuse:7"])
def test_values_of_the_mask_row(mask_row: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Of a new row, and of the row of a mask token that is there; embedding and head alike, all other rows stay."""
    path, rows = source(tmp_path / "ar", tokenizer, tokenizer.vocab_size), tokenizer.vocab_size
    table = load_model(path).lm_head.weight
    new = converted(path, tmp_path / "new", diffusion={"mask_row": mask_row})
    converted(tmp_path / "new", tmp_path / "same", diffusion={})
    again = converted(tmp_path / "new", tmp_path / "again", diffusion={"mask_row": mask_row, "untie_head": True})
    assert analyze(tmp_path / "new", tmp_path / "same").is_equal, "without mask_row a row of a mask token stays"
    for weight in (new.lm_head.weight, again.lm_head.weight, again.model.embed_tokens.weight):
        assert torch.equal(weight[:rows], table) and len(weight) == rows + 1
        if mask_row == "mean":
            torch.testing.assert_close(weight[rows], table.mean(0))
        elif mask_row == "reuse:7":
            assert torch.equal(weight[rows], table[7])
        else:
            assert (weight[rows].std() / table.std()).item() == pytest.approx(1.0, abs=0.5)
            assert torch.equal(weight[rows], new.lm_head.weight[rows])


def test_mask_row_of_an_unknown_id(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = source(tmp_path / "ar", tokenizer, tokenizer.vocab_size)
    with pytest.raises(ValueError, match=r'mask_row = "reuse:999999": the embedding has \d+ rows'):
        converted(path, tmp_path / "new", diffusion={"mask_row": "reuse:999999"})
    with pytest.raises(ValueError, match='must be "mean", "random" or "reuse:ID"'):
        ConvertConfig(diffusion={"mask_row": "reuse"})  # type: ignore[arg-type]


@pytest.mark.parametrize(("dtype", "stored"), [("bfloat16", "BF16"), ("float16", "F16")])
def test_conversion_without_diffusion_keeps_the_model(
    dtype: Any, stored: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = source(tmp_path / "ar", tokenizer, 260)
    after = converted(path, tmp_path / "copy")
    assert after.config == load_model(path).config and analyze(path, tmp_path / "copy").is_equal
    converted(path, tmp_path / "half", dtype=dtype)
    before, half = load_model(path), load_model(tmp_path / "half", dtype="keep")
    for name, parameter in half.named_parameters():
        assert torch.equal(parameter, before.get_parameter(name).to(getattr(torch, dtype)))
    converted(tmp_path / "half", tmp_path / "again")
    result = analyze(tmp_path / "half", tmp_path / "again")
    assert result.is_equal and {pair.b.dtype for pair in result.pairs} == {stored}, "its dtype is kept"


def test_another_family_and_back(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = source(tmp_path / "ar", tokenizer, 260, stop_token_ids=(tokenizer.eos_token_id, 7))
    diffusion = {"block_length": 4, "logit_alignment": "same_position"}
    qwen3 = converted(path, tmp_path / "qwen3", diffusion=diffusion)
    sdar = converted(tmp_path / "qwen3", tmp_path / "sdar", model_type="sdar")
    values = json.loads((tmp_path / "sdar/config.json").read_text())
    expected = {"model_type": "sdar", "architectures": ["SDARForCausalLM"], "block_size": 4, "mask_token_id": 258}
    assert {key: values.get(key) for key in expected} == expected and "block_length" not in values
    assert sdar.config == qwen3.config.model_copy(update={"model_type": "sdar"})
    back = converted(tmp_path / "sdar", tmp_path / "back", model_type="qwen3")
    assert back.config == qwen3.config and back.config.stop_token_ids == (tokenizer.eos_token_id, 7)
    for name in ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "qwen3" / name).read_bytes(), name
    at_once = converted(path, tmp_path / "at-once", model_type="sdar", diffusion=diffusion)
    assert at_once.config == sdar.config and analyze(tmp_path / "at-once", tmp_path / "sdar").is_equal


def test_token_causal_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """It is in config.json, and no family whose own code is block-causal takes it."""
    path = source(tmp_path / "ar", tokenizer, 260)
    diffusion = {"block_length": 4, "logit_alignment": "same_position", "clean_alignment": "shifted"}
    model = converted(path, tmp_path / "blocks", diffusion=diffusion)
    assert (model.config.clean_alignment, model.config.noisy_attention) == ("shifted", "block")
    values = json.loads((tmp_path / "blocks/config.json").read_text())
    assert values["clean_alignment"] == "shifted" and "noisy_attention" not in values
    with pytest.raises(ValueError, match=r"'sdar'.*no model with clean_alignment = 'shifted' \(it has None"):
        converted(path, tmp_path / "sdar", model_type="sdar", diffusion=diffusion)


def test_a_tokenizer_that_does_not_fit(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = source(tmp_path / "small", tokenizer, 258)
    values = json.loads((path / "config.json").read_text()) | {"mask_token_id": 97}
    (path / "MANIFEST.json").unlink(missing_ok=True)
    (path / "config.json").write_text(json.dumps(values))
    config = ConvertConfig(source=path, target=tmp_path / "new")
    with pytest.raises(ValueError, match=r"mask_token_id = 97 is the ordinary token '.'"):
        prepare_conversion(config)
    masked = Tokenizer(tokenizer.vocab, tokenizer.merges, {**tokenizer.special_tokens, "<|mask|>": 258}, "qwen")
    save_tokenizer(masked, path)
    with pytest.raises(ValueError, match=r"tokenizer has 259 ids, .*vocab_size = 258"):
        load_tokenizer(path)
    (path / "config.json").write_text('{"model_type": "gpt2"}')  # of a model that is not supported, only the tokenizer
    assert load_tokenizer(path).vocab_size == 259
    (path / "config.json").write_text(json.dumps(values))
    # The remedy that the message names.
    assert converted(path, tmp_path / "new", diffusion={}).config.vocab_size == 259


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["diffusion.mask_token_id=5"], "diffusion.mask_token_id = 5"),
        (['diffusion={mask_token="<|endoftext|>", mask_token_id=3}'], "'<|endoftext|>' has the id"),
        (["model_type=llama"], "qk_norm = True (it has False)"),
        (["model_type=sdar"], "no mask_token_id (add [diffusion])"),
        (
            ["model_type=sdar", "diffusion.logit_alignment=same_position"],
            "no block_length (set diffusion.block_length)",
        ),
    ],
)
def test_unsupported_conversions_are_rejected(
    overrides: list[str],
    message: str,
    tokenizer: Tokenizer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = source(tmp_path / "ar", tokenizer, 260)
    arguments = ["--source", str(path), "--target", str(tmp_path / "new")]
    with pytest.raises(SystemExit) as caught:
        main([*arguments, *[part for override in overrides for part in ("--set", override)]])
    assert caught.value.code == 2 and message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_the_command(tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = source(tmp_path / "ar", tokenizer, 260)
    arguments = ["--source", str(path), "--target", str(tmp_path / "new"), "--set", "diffusion.block_length=4"]
    main([*arguments, "--dry-run"])
    steps = capsys.readouterr().out
    for part in ("qwen3 (Qwen3ForCausalLM)", "'<|mask|>', id 258", "block length     4\n", "shifted"):
        assert part in steps
    assert not (tmp_path / "new").exists(), "--dry-run writes nothing"
    main(arguments)
    assert capsys.readouterr().out.startswith(steps) and (tmp_path / "new/config.json").is_file()
    for wrong, message in (([*arguments], "target = "), (arguments[:2], "add --target DIR")):
        with pytest.raises(SystemExit) as caught:
            main(wrong)
        assert caught.value.code == 2 and message in capsys.readouterr().err


def test_a_target_that_overlaps_the_source(tokenizer: Tokenizer, tmp_path: Path) -> None:
    checkpoint = tmp_path / "run/checkpoints/step-1"
    source(checkpoint, tokenizer, 260)
    (tmp_path / "run/checkpoints/latest").symlink_to("step-1")
    (tmp_path / "link").symlink_to(checkpoint)
    inside, outside = dict.fromkeys(("run/checkpoints/latest/new", "link/new"), "lies in"), {"run": "contains"}
    relations = {"run/checkpoints/latest": "is", "link": "is", **inside, **outside, "run/checkpoints": "contains"}
    of_source = dict.fromkeys(("run/checkpoints/step-1", "link", "run/checkpoints/latest"), relations)
    for source_name, of_target in (*of_source.items(), ("run", dict.fromkeys(relations, "lies in") | {"run": "is"})):
        for target_name, relation in of_target.items():
            config = ConvertConfig(source=tmp_path / source_name, target=tmp_path / target_name)
            message = rf"^target = {config.target} {relation} the source, .*: name a directory apart"
            with pytest.raises(ValueError, match=message):
                prepare_conversion(config)


def test_a_target_that_cannot_be_written(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = source(tmp_path / "ar", tokenizer, 260)
    (tmp_path / "dangling").symlink_to("nowhere")
    for target, remedy in (
        (path.parent / "file" / "new", "file is not a directory; choose another path"),
        (Path("/proc/new"), "/proc: .*; choose another directory"),
        (tmp_path / "dangling", "exists: name another directory"),
    ):
        (path.parent / "file").touch()
        with pytest.raises(ValueError, match=f"^target = {target} .*{remedy}"):
            prepare_conversion(ConvertConfig(source=path, target=target))


FOLDERS = {"source": "base", "adapter": "adapter", "target": "merged"}


@pytest.mark.parametrize(("stored", "target"), [("bfloat16", "keep"), ("float32", "bfloat16")])
def test_an_adapter_is_merged_with_one_rounding(
    stored: str, target: Any, tokenizer: Tokenizer, tmp_path: Path, tiny_model: Callable[..., Transformer]
) -> None:
    """In float32 from the stored weights, then rounded to the dtype of the target."""
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    base = tiny_model(dtype=dtypes[stored], vocab_size=300, mask_token_id=258)
    save_model_directory(base, tokenizer, tmp_path / "base")
    config = LoraConfig(rank=2, trainable_tokens=(258,))
    add_adapter(base, config)
    with torch.no_grad():
        for parameter in base.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    (tmp_path / "adapter").mkdir()
    save_adapter(base, config, tmp_path / "adapter")
    paths = (f"--{name}={tmp_path / folder}" for name, folder in FOLDERS.items())
    main([*paths, "--set", f"dtype={target}"])
    merged = load_model(tmp_path / "merged", dtype="keep")
    exact = load_model(tmp_path / "base", adapter=tmp_path / "adapter")
    for name, module in adapter_modules(exact):
        expected = module.effective_weight().to(dtypes[stored if target == "keep" else target])
        assert torch.equal(merged.get_parameter(f"{name}.weight"), expected)
    config_path = tmp_path / "adapter/adapter_config.json"
    values = read_json_object(config_path) | {"base_model_name_or_path": str(tmp_path / "base")}
    config_path.write_text(json.dumps(values))
    analysis = analyze(tmp_path / "adapter", tmp_path / "merged")
    assert analysis.is_equal and analysis.merged == ("a",)
    analysis = analyze(tmp_path / "base", tmp_path / "adapter")
    differing = {pair.a.name for pair in analysis.pairs if pair.max_difference}
    assert differing == {f"{name}.weight" for name, _ in adapter_modules(exact) if name != "lm_head"}
    text = render_text(format_analysis(analysis, 40), StringIO())
    largest = max(pair.max_difference or 0.0 for pair in analysis.pairs if "q_proj" in pair.a.name)
    assert "b is an adapter" in text
    assert re.search(rf"model\.layers\.\*\.self_attn\.q_proj\.weight +2 +{largest:.3g}\n", text)
