"""Every shipped config is valid, and what the commands print of it gives the same run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from config.base import Section
from config.bench_tokenizer import BenchTokenizerConfig
from config.bench_train import BenchTrainConfig
from config.data import LocalFiles, PythonStdlib
from config.dump import to_toml
from config.eval import EvalConfig
from config.infer import InferConfig
from config.load import ConfigError, load_config
from config.make_data import MakeDataConfig
from config.train import RENAMED, TrainConfig
from config.train_tokenizer import TrainTokenizerConfig

ROOT = Path(__file__).parents[3]
RESOURCES = ROOT / "config" / "resources"
OTHERS: dict[str, type[Section]] = {
    "infer.toml": InferConfig,
    "eval.toml": EvalConfig,
    "train_tokenizer.toml": TrainTokenizerConfig,
    "make_data.toml": MakeDataConfig,
    "bench_train.toml": BenchTrainConfig,
    "bench_tokenizer.toml": BenchTokenizerConfig,
}
CLASSES: dict[str, type[Section]] = {
    path.name: OTHERS.get(path.name, TrainConfig) for path in sorted(RESOURCES.glob("*.toml"))
}
"""All but these are training runs."""


def test_every_command_has_a_resource() -> None:
    assert {"train.toml", *OTHERS} <= CLASSES.keys()


@pytest.mark.parametrize("name", CLASSES)
def test_resources_are_valid_and_come_back(name: str, tmp_path: Path) -> None:
    config = load_config(CLASSES[name], RESOURCES / name)
    printed = tmp_path / name
    printed.write_text(to_toml(config), encoding="utf-8")
    assert load_config(CLASSES[name], printed) == config


def test_a_run_with_a_given_tokenizer_comes_back(tmp_path: Path) -> None:
    """What the run directory keeps has all defaults, those of a new tokenizer, too."""
    config = load_config(TrainConfig, RESOURCES / "train.toml", ['tokenizer={path="somewhere"}'])
    printed = tmp_path / "config.toml"
    printed.write_text(to_toml(config), encoding="utf-8")
    assert load_config(TrainConfig, printed) == config
    with pytest.raises(ConfigError, match="path names a finished tokenizer, so vocab_size cannot be set as well"):
        load_config(TrainConfig, RESOURCES / "train.toml", ["tokenizer.path=somewhere"])


@pytest.mark.parametrize("key", sorted(RENAMED))
def test_keys_of_relatives_are_answered(key: str, tmp_path: Path) -> None:
    section, _, name = key.rpartition(".")
    path = tmp_path / "train.toml"
    path.write_text(f"[{section}]\n{name} = 1\n" if section else f"[{name}]\nx = 1\n", encoding="utf-8")
    with pytest.raises(ValueError, match="is not a valid TrainConfig") as caught:
        load_config(TrainConfig, path, renamed=RENAMED)
    assert RENAMED[key] in str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.batch_size=0", "greater than 0"),
        ("training.batch_size=1.5", "expected an integer"),
        ("training.micro_batch_size=5", "must be a multiple of micro_batch_size = 5"),
        ("optimizer.learning_rate=inf", "must be a finite number"),
        ("data.source=python-stdlibs", "python-stdlib"),
        ("data.row_length=4096", "is longer than the model's context"),
        ("tokenizer.vocab_size=100", "258"),
        ("model.num_key_value_heads=3", "must be a multiple of"),
        ("training.epochs=2", "give either max_steps or epochs"),
        ("schedule.warmup_steps=99999", "must be less than training.max_steps"),
        ("optimizer.rest.betas=[0.9, 1.0]", "must lie in [0, 1)"),
        ("objectiv.kind=x", "objective"),
    ],
)
def test_bad_values_of_the_training_config(override: str, message: str) -> None:
    with pytest.raises(ValueError, match="problem") as caught:
        load_config(TrainConfig, RESOURCES / "train.toml", [override])
    assert message in str(caught.value)


def test_a_source_named_alone_can_be_overridden() -> None:
    overrides = ["data.source.paths=a/*.jsonl,b", "data.source.kind=files", "data.source.text_field=question"]
    source = load_config(TrainConfig, RESOURCES / "train.toml", overrides).data.source
    assert source == LocalFiles(paths=("a/*.jsonl", "b"), text_field="question")
    source = load_config(TrainConfig, RESOURCES / "train.toml", ["data.source.validation_share=20"]).data.source
    assert source == PythonStdlib(validation_share=20)


@pytest.mark.parametrize("arguments", [["--help"], ["--print-config"], ["--schema"], ["--dry-run"], ["--set", "a.b=1"]])
def test_the_training_command_answers_without_torch(arguments: list[str]) -> None:
    code = (
        "import sys, cli.train\n"
        "try:\n    sys.exit(cli.train.main(sys.argv[1:]))\n"
        "finally:\n    assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    config = ["--config", str(RESOURCES / "train.toml")]
    done = subprocess.run(
        [sys.executable, "-c", code, *config, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert "torch was imported" not in done.stderr
    assert done.returncode == (2 if "--set" in arguments else 0), done.stderr
    if "--schema" in arguments:
        assert json.loads(done.stdout)["title"] == "TrainConfig"
    if "--dry-run" in arguments:
        assert "1,115,520" in done.stdout
