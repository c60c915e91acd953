"""Runs with [lora]: only the adapter is trained and saved, exact resume, and the errors before work."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cli.train import check_files, main
from config.convert import ConvertConfig
from config.load import ConfigError, load_config
from config.model import ModelConfig
from config.train import TrainConfig
from diffusionlm.checkpoints.adapter_files import read_adapter
from diffusionlm.checkpoints.convert import convert, prepare_conversion
from diffusionlm.checkpoints.huggingface import load_model, save_model, save_model_directory
from diffusionlm.checkpoints.model_files import load_tokenizer
from diffusionlm.models.init import init_weights
from diffusionlm.models.lora import LoRALinear, TrainedRowsEmbedding, adapter_modules, before_training
from diffusionlm.models.patterns import Bidirectional
from diffusionlm.models.transformer import Transformer
from diffusionlm.training.loop import train
from diffusionlm.training.run import Run
from diffusionlm.training.run_checkpoint import resume_run
from profiling.estimate import estimate_run
from tests.tiny_run import build_changed_run, change_config, read_losses, write_train_config

Configure = Callable[..., TrainConfig]
TOKENS = torch.arange(10)[None]
PREFIX = "base_model.model."
NORMS = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
WEIGHTS = "checkpoints/latest/adapter_model.safetensors"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a tiny model with two steps of training."""
    folder = tmp_path_factory.mktemp("base")
    train(load_config(TrainConfig, write_train_config(folder, training={"max_steps": 2})))
    return folder / "run"


@pytest.fixture
def configure(base: Path, tmp_path: Path) -> Configure:
    """``configure(name, **sections)``: a run of four steps with [lora] from the base, in the directory ``name``."""

    def make(name: str = "lora", **sections: dict[str, Any]) -> TrainConfig:
        changes: dict[str, dict[str, Any]] = {
            "run": {"directory": str(tmp_path / name)},
            "model": {"init_from": str(base)},
            "lora": {"rank": 2, "alpha": 4.0},
            "training": {"max_steps": 4, "micro_batch_size": 2},
            "optimizer": {"kind": "adamw", "learning_rate": 1e-2},
        }
        for section, values in sections.items():
            changes[section] = changes.get(section, {}) | values
        return load_config(TrainConfig, write_train_config(tmp_path, name, **changes))

    return make


@pytest.fixture
def adapter_run(configure: Configure) -> Path:
    """A run directory with one step of training."""
    config = configure(training={"max_steps": 1})
    train(config)
    return config.run.directory


def write_base(base: Path, directory: Path, **options: Any) -> Path:
    """Write an untrained model like the base, with other options."""
    model = Transformer(ModelConfig(**load_model(base).config.model_dump() | options))
    init_weights(model, 0)
    save_model_directory(model, load_tokenizer(base), directory)
    return directory


def build(config: TrainConfig) -> Run:
    return build_changed_run(config, config.run.directory)


def logits(path: Path, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        return load_model(path, **options)(TOKENS, pattern=Bidirectional())


def test_only_the_adapter_is_trained_and_saved(configure: Configure, base: Path) -> None:
    config = configure(lora={"trainable_tokens": [3]}, training={"ema_decay": 0.5})
    train(config)
    checkpoint = config.run.directory / "checkpoints/latest"
    names = {path.name for path in checkpoint.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "config.json", "README.md", "tokenizer.json"} <= names
    assert "model.safetensors" not in names
    card = (checkpoint / "README.md").read_text(encoding="utf-8")
    assert "--adapter . --prompt" in card and "tags: [text-generation, masked-diffusion, diffusion, lora, peft]" in card
    assert card.count("rank = 2") == 1
    run = build(config)
    frozen = {name for name, value in run.state.model.named_parameters() if not value.requires_grad}
    before = load_file(base / "checkpoints/latest/model.safetensors")
    assert frozen >= before.keys()
    for name in before:
        assert torch.equal(run.state.model.get_parameter(name), before[name])
    trained = dict(run.state.model.named_parameters()).keys() - frozen
    assert {key.rpartition(".")[0] for key in run.state.optimizers.state_dict()} <= trained
    assert run.state.ema is not None and run.state.ema.averages.keys() == trained
    rows = {"model.embed_tokens.trained_rows", "lm_head.trained_rows"} & trained
    assert len(trained) == 7 * 2 + len(rows)


def test_run_directory_is_base_with_adapter(configure: Configure, base: Path, tmp_path: Path) -> None:
    """For inference and conversion alike; the block length is that of the run."""
    config = configure(objective={"kind": "block_diffusion", "block_length": 4})
    train(config)
    run = config.run.directory
    model = load_model(run)
    assert model.config.block_length == 4
    assert any(isinstance(module, LoRALinear) for _, module in adapter_modules(model))
    assert torch.equal(logits(base, adapter=run), logits(run))
    assert not torch.allclose(logits(base), logits(run), atol=1e-4)
    convert(prepare_conversion(ConvertConfig(source=run, target=tmp_path / "merged")))
    torch.testing.assert_close(logits(tmp_path / "merged"), logits(run), atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="has an adapter"):
        load_model(run, adapter=run)
    with pytest.raises(ValueError, match="is an adapter without the weights of its base"):
        build(configure("next", model={"init_from": str(run)}))


@pytest.mark.parametrize(
    ("lora", "ema"),
    [
        ({"dropout": 0.3, "trainable_tokens": [3]}, 0.5),
        ({"init": "pissa", "dora": True, "lr_ratio_b": 4.0}, 0.0),
        ({"modules_to_save": ["lm_head", "norm"], "layers_to_transform": [0]}, 0.5),
        ({"targets": ["q_proj", "lm_head"], "modules_to_save": ["embed_tokens", "mlp"], "bias": "lora_only"}, 0.5),
    ],
)
@pytest.mark.slow
def test_resume_is_exact(lora: dict[str, Any], ema: float, configure: Configure, base: Path, tmp_path: Path) -> None:
    untied = write_base(base, tmp_path / "untied", tie_word_embeddings=False, attention_bias=True)
    sections: dict[str, Any] = {"lora": lora, "training": {"ema_decay": ema}, "model": {"init_from": str(untied)}}
    straight = configure("straight", **sections)
    train(straight)
    resumed = configure("resumed", **sections)
    train(resumed)
    checkpoints = resumed.run.directory / "checkpoints"
    shutil.rmtree(checkpoints / "step-00000004")
    (checkpoints / "latest").unlink()
    (resumed.run.directory / "summary.json").unlink()
    train(resumed)
    expected, actual = (load_file(config.run.directory / WEIGHTS) for config in (straight, resumed))
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    assert read_losses(resumed)[-2:] == read_losses(straight)[-2:]


@pytest.mark.slow
def test_whole_modules_are_trained_merged_and_taken_over(configure: Configure, base: Path, tmp_path: Path) -> None:
    """`norm` of the tied base and its table, which the head shares, beside the row that "mask" would train."""
    lora = {"modules_to_save": ["embed_tokens", "norm"]}
    config = configure(lora=lora)
    train(config)
    stored = load_file(config.run.directory / WEIGHTS)
    whole = {name for name in stored if ".lora_" not in name}
    names = ["embed_tokens", "norm", *(f"layers.0.{name}" for name in NORMS)]
    assert whole == {f"{PREFIX}lm_head.weight", *(f"{PREFIX}model.{name}.weight" for name in names)}
    before = load_file(base / "checkpoints/latest/model.safetensors")
    for name in whole - {f"{PREFIX}lm_head.weight"}:
        assert not torch.equal(stored[name], before[name.removeprefix(PREFIX)])
    convert(prepare_conversion(ConvertConfig(source=config.run.directory, target=tmp_path / "merged")))
    torch.testing.assert_close(logits(tmp_path / "merged"), logits(config.run.directory), atol=1e-5, rtol=1e-4)
    served = load_model(base)
    with pytest.raises(ValueError, match=r"trains parameters of its base .*: merge it"):
        read_adapter(served, config.run.directory)
    expected = load_model(base).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in served.state_dict().items()), "others are served"
    second = build(configure("second", lora=lora | {"init_from": str(config.run.directory)}))
    assert torch.equal(second.state.model.lm_head.weight, stored[f"{PREFIX}lm_head.weight"])
    stored[f"{PREFIX}lm_head.weight"] += 1.0
    save_file(stored, tmp_path / "adapter_model.safetensors")
    shutil.copy(config.run.directory / "checkpoints/latest/adapter_config.json", tmp_path)
    with pytest.raises(ValueError, match=r"embedding and head apart, .*ensure_weight_tying"):
        load_model(base, adapter=tmp_path)


def test_the_row_of_the_mask_token(configure: Configure) -> None:
    model = build(configure(lora={"trainable_tokens": "mask"})).state.model
    embedding = model.model.embed_tokens
    assert isinstance(embedding, TrainedRowsEmbedding)
    assert embedding.trained_token_ids.tolist() == [model.config.mask_token_id]


def test_dropout_of_the_head_is_refused(configure: Configure, base: Path, tmp_path: Path) -> None:
    untied = write_base(base, tmp_path / "untied", tie_word_embeddings=False)
    with pytest.raises(ValueError, match=r"lora\.dropout = 0\.1 is not supported for the head"):
        build(configure(model={"init_from": str(untied)}, lora={"dropout": 0.1, "targets": ["lm_head"]}))


def test_training_goes_on_from_an_adapter(configure: Configure) -> None:
    first = configure()
    train(first)
    second = build(configure("second", lora={"init_from": str(first.run.directory)}))
    stored = load_file(first.run.directory / WEIGHTS)
    name = "model.layers.0.self_attn.q_proj.lora_B"
    assert torch.equal(second.state.model.get_parameter(name), stored[f"base_model.model.{name}.weight"])
    for lora, message in (({"rank": 3}, r"lora_A.weight is \[2, 16\]"), ({"alpha": 8.0}, "set lora.rank, lora.alpha")):
        with pytest.raises(ValueError, match=message):
            build(configure("wrong", lora={**lora, "init_from": str(first.run.directory)}))


def test_a_changed_base_is_refused(configure: Configure, base: Path, tmp_path: Path) -> None:
    shutil.copytree(base / "checkpoints/latest", tmp_path / "base")
    config = configure(model={"init_from": str(tmp_path / "base")}, training={"max_steps": 2})
    train(config)
    other = load_model(base)
    with torch.no_grad():
        other.get_parameter("model.layers.0.mlp.up_proj.weight")[1, 2] += 1e-6
    save_model(other, tmp_path / "base")
    (tmp_path / "base/MANIFEST.json").unlink()
    message = r"trained on another base than this model: model.layers.0.mlp.up_proj.weight has other values\. Use the"
    with pytest.raises(ValueError, match=message):
        load_model(config.run.directory)
    longer = configure(
        model={"init_from": str(tmp_path / "base")}, checkpoint={"config_change": "accept"}, training={"max_steps": 4}
    )
    with pytest.raises(ValueError, match=message):
        train(longer)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"lora": {"r": 8}}, r"lora\.r\b.*lora\.rank"),
        ({"optimizer": {"kind": "muon"}}, r'optimizer\.kind = "muon" orthogonalizes'),
        ({"runtime": {"weights": "bfloat16_with_master"}, "training": {"precision": "bfloat16"}}, r"lora\.base"),
        ({"lora": {"init": "pissa", "init_from": "x"}}, "init_from are alternatives"),
        ({"lora": {"base": "nf4"}, "parallel": {"strategy": "fsdp"}}, r'set parallel\.strategy = "ddp"'),
    ],
)
def test_config_errors(sections: dict[str, Any], message: str, configure: Configure) -> None:
    with pytest.raises(ConfigError, match=message):
        configure(**sections)


def test_base_in_four_bits(configure: Configure, base: Path) -> None:
    """Near the float32 base at first, and training lowers the loss; resuming finds the same base."""
    pytest.importorskip("bitsandbytes")
    configs = [
        configure(f"base-{dtype}", lora={"base": dtype, "dropout": 0.2}, training={"ema_decay": 0.5})
        for dtype in ("float32", "nf4")
    ]
    for config in configs:
        train(config)
    assert read_losses(configs[1]) == pytest.approx(read_losses(configs[0]), rel=0.05)
    assert read_losses(configs[1]) != read_losses(configs[0])
    run = build(configs[1])
    module = run.state.model.get_submodule("model.layers.0.mlp.up_proj")
    assert isinstance(module, LoRALinear) and module.quantized is not None
    with torch.no_grad(), before_training(run.state.model):
        approximate = run.state.model(TOKENS, pattern=Bidirectional())
        torch.testing.assert_close(approximate, logits(base), atol=0.5, rtol=0.1)
    resume_run(run)
    assert run.progress.step == 4
    assert torch.isfinite(logits(configs[1].run.directory)).all()


def test_four_bits_need_bitsandbytes(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure(lora={"base": "nf4"})
    assert estimate_run(config).bytes_weights < estimate_run(configure("float32")).bytes_weights
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ValueError, match=r'lora\.base = "nf4": the package bitsandbytes does not work'):
        build(config)


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"targets": ["q_proj", "w_proj"]}, "lora.targets: 'w_proj' is the name of no projection; the model has down_"),
        ({"exclude": ["qproj"]}, "lora.exclude: 'qproj' is the name of no"),
        (
            {"modules_to_save": ["head_"]},
            "lora.modules_to_save: 'head_' ends the name of no module; the model has down_",
        ),
        ({"bias": "all"}, 'lora.bias = "all", and the model has no bias'),
        ({"rank_patterns": {"x.*": 4}}, r"lora.rank_patterns: 'x\.\*' is the name of no"),
    ],
)
def test_names_that_match_nothing(
    lora: dict[str, Any], message: str, configure: Configure, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are said before the run begins, with exit code 2."""
    configure(lora=lora)
    with pytest.raises(SystemExit, match="2"):
        main(["--config", str(tmp_path / "lora.toml")])
    assert re.search(f"diffusionlm-train: error: {message}", capsys.readouterr().err)
    check_files(configure(lora={"exclude": ["lm_head", "q_proj"], "rank_patterns": {"k_proj": 4}}))


@pytest.mark.parametrize("lora", [{"rank": 3}, {"dora": True}])
def test_a_run_does_not_go_on_with_another_adapter(
    lora: dict[str, Any], configure: Configure, adapter_run: Path
) -> None:
    changes = {"training": {"max_steps": 2}, "checkpoint": {"config_change": "accept"}}
    with pytest.raises(ValueError, match=r"adapter_model.safetensors does not fit \[lora\]: .*lora_"):
        train(configure(str(adapter_run), lora=lora, **changes))
    assert (adapter_run / "checkpoints/step-00000001").is_dir()


def test_adapter_of_llada_has_its_module_names(configure: Configure, base: Path, tmp_path: Path) -> None:
    write_base(base, tmp_path / "llada", qk_norm=False, model_type="llada")
    config = configure(
        model={"init_from": str(tmp_path / "llada"), "qk_norm": False, "max_position_embeddings": 16},
        lora={"targets": ["ff_proj"]},
        training={"max_steps": 1},
    )
    check_files(config)
    train(config)
    names = load_file(config.run.directory / WEIGHTS)
    assert "base_model.model.model.transformer.blocks.0.ff_proj.lora_A.weight" in names
    assert torch.equal(logits(tmp_path / "llada", adapter=config.run.directory), logits(config.run.directory))
    wrong = configure("wrong", model={"init_from": str(tmp_path / "llada"), "qk_norm": False}, lora={"targets": ["x"]})
    with pytest.raises(ValueError, match="the model has attn_out, ff_out, ff_proj"):
        check_files(wrong)


@pytest.mark.parametrize(
    "sections", [{"lora": {}}, {"data": {"source": "chat_tasks"}, "objective": {"kind": "preference"}}]
)
def test_a_model_to_start_from_is_required(sections: dict[str, Any], train_config: TrainConfig) -> None:
    with pytest.raises(ValueError, match=r"model\.init_from"):
        change_config(train_config, **sections)
