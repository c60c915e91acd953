"""Every shipped config is valid, and what the commands print of it gives the same run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cli.arguments import parse_command
from config.base import Section
from config.bench.inference import BenchInferConfig
from config.bench.serve import BenchServeConfig
from config.bench.training import BenchTokenizerConfig, BenchTrainConfig
from config.data import LocalFiles, PythonStdlib
from config.dump import to_toml
from config.eval import EvalConfig
from config.finetune.pipeline import PipelineConfig
from config.infer import InferConfig
from config.load import ConfigError, load_config
from config.make_data import MakeDataConfig
from config.serving.server import ServeConfig
from config.tokenizer import TrainTokenizerConfig
from config.train import TrainConfig

ROOT = Path(__file__).parents[3]
RESOURCES = ROOT / "config" / "resources"
OTHERS: dict[str, type[Section]] = {
    "infer.toml": InferConfig,
    "serve.toml": ServeConfig,
    "eval.toml": EvalConfig,
    "eval_tasks.toml": EvalConfig,
    "train_tokenizer.toml": TrainTokenizerConfig,
    "make_data.toml": MakeDataConfig,
    "pipeline.toml": PipelineConfig,
    "chat_pipeline.toml": PipelineConfig,
    "speculation.toml": PipelineConfig,
    "rl_addition.toml": PipelineConfig,
    "bench_infer.toml": BenchInferConfig,
    "bench_infer_gpu.toml": BenchInferConfig,
    "bench_speculation.toml": BenchInferConfig,
    "bench_serve.toml": BenchServeConfig,
    "bench_rollouts.toml": BenchTrainConfig,
    "bench_vision.toml": BenchTrainConfig,
    "bench_train.toml": BenchTrainConfig,
    "bench_train_gpu.toml": BenchTrainConfig,
    "bench_tokenizer.toml": BenchTokenizerConfig,
}
CLASSES: dict[str, type[Section]] = {
    path.name: OTHERS.get(path.name, TrainConfig) for path in sorted(RESOURCES.glob("*.toml"))
}
"""All but these are training runs."""
QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "intermediate_size": 3072,
    "max_position_embeddings": 40_960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000},
    "tie_word_embeddings": False,
    "vocab_size": 151_936,
    "mask_token_id": 151_669,
    "block_length": 4,
    "logit_alignment": "same_position",
}
QWEN3_VL: dict[str, Any] = {
    "model_type": "qwen3_vl",
    "text_config": {
        key: value for key, value in QWEN3.items() if key not in ("mask_token_id", "block_length", "logit_alignment")
    }
    | {
        "head_dim": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5_000_000, "mrope_section": [24, 20, 20]},
    },
    "vision_config": {
        "depth": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_heads": 16,
        "out_hidden_size": 1024,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [5, 11, 17],
    },
    "image_token_id": 151_655,
    "vision_start_token_id": 151_652,
    "vision_end_token_id": 151_653,
    "mask_token_id": 151_669,
    "block_length": 4,
    "logit_alignment": "same_position",
}


def test_every_command_has_a_resource() -> None:
    assert {"train.toml", *OTHERS} <= CLASSES.keys()


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that the recipe of adaptation starts from; those of other recipes have the same model."""
    directory = tmp_path / "models" / "qwen3-mask"
    names = ("models/sft-qwen3", "GSAI-ML/LLaDA-8B-Instruct", "JetLM/SDAR-1.7B-Chat", "JetLM/SDAR-4B-Chat")
    for path in (directory, *(tmp_path / name for name in (*names, "runs/rl-shidoku-start"))):
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(QWEN3), encoding="utf-8")
    vision_model = tmp_path / "models" / "qwen3-vl-mask"
    vision_model.mkdir()
    (vision_model / "config.json").write_text(json.dumps(QWEN3_VL), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return directory


@pytest.mark.usefixtures("checkpoint")
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
    with pytest.raises(ConfigError, match=r"path = 'somewhere' .* remove vocab_size"):
        load_config(TrainConfig, RESOURCES / "train.toml", ["tokenizer.path=somewhere"])


RECIPE = RESOURCES / "adapt_qwen3.toml"


def test_the_architecture_is_that_of_the_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    model = load_config(TrainConfig, RECIPE).model
    shape = (model.hidden_size, model.num_hidden_layers, model.head_dim, model.intermediate_size)
    assert shape == (1024, 28, 128, 3072)
    assert (model.rope_theta, model.tie_word_embeddings, model.logit_alignment) == (1e6, False, "same_position")
    assert (model.max_position_embeddings, model.rope_scaling, model.qk_norm) == (40_960, None, True)
    chosen = load_config(TrainConfig, RECIPE, ["model.max_position_embeddings=4096", "model.logit_alignment=shifted"])
    assert (chosen.model.max_position_embeddings, chosen.model.logit_alignment) == (4096, "shifted")
    # What a run keeps is complete: it does not change with the directory, nor need it to be read.
    config_file = tmp_path / "config.toml"
    config_file.write_text(to_toml(chosen), encoding="utf-8")
    (checkpoint / "config.json").unlink()
    assert load_config(TrainConfig, config_file) == chosen


def test_another_architecture_than_the_checkpoints_is_listed(checkpoint: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(TrainConfig, RECIPE, ["model.rope_theta=1e4", "model.num_hidden_layers=3"])
    for part in ("1 problem", "num_hidden_layers = 3 (checkpoint: 28)", "rope_theta = 10000.0 (checkpoint: 1000000.0)"):
        assert part in str(caught.value)
    assert "hidden_size" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "config.json"),
        ("{", "is not valid JSON"),
        ('{"model_type": "bert"}', "model_type = 'bert' is not supported"),
    ],
)
def test_a_checkpoint_that_cannot_be_read_is_an_error_of_the_config(
    content: str | None, message: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint / "config.json").unlink()
    if content is not None:
        (checkpoint / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises(SystemExit) as caught:
        parse_command(TrainConfig, name="train", description="", example="", argv=["--config", str(RECIPE)])
    stderr = capsys.readouterr().err
    assert caught.value.code == 2 and message in stderr and "init_from = models/qwen3-mask" in stderr


def test_a_source_named_alone_can_be_overridden() -> None:
    overrides = ["data.source.paths=a/*.jsonl,b", "data.source.kind=files", "data.source.text_field=question"]
    source = load_config(TrainConfig, RESOURCES / "train.toml", overrides).data.source
    assert source == LocalFiles(paths=("a/*.jsonl", "b"), text_field="question")
    source = load_config(TrainConfig, RESOURCES / "train.toml", ["data.source.validation_share=20"]).data.source
    assert source == PythonStdlib(validation_share=20)


def test_the_training_command_answers_without_torch(checkpoint: Path) -> None:
    """All of it in one process: starting one takes longer than what it does."""
    code = """
import contextlib, io, json, sys
import cli.train
answers = []
for arguments in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = cli.train.main(arguments)
        except SystemExit as ended:
            status = ended.code
    answers.append((status, out.getvalue(), err.getvalue(), "torch" in sys.modules))
print(json.dumps(answers))
"""
    common, adapt = ["--config", str(RESOURCES / "train.toml")], ["--config", str(RECIPE)]
    start = f"model.init_from={checkpoint}"
    calls = [
        ["--help"],
        [*common, "--print-config"],
        [*common, "--schema"],
        [*common, "--dry-run"],
        [*common, "--set", "a.b=1"],
        [*adapt, "--set", start, "--print-config"],
    ]
    command = [sys.executable, "-c", code, json.dumps(calls)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    assert [(status or 0, torch) for status, _, _, torch in answers] == [(0, False)] * 4 + [(2, False), (0, False)]
    helped, printed, schema, plan, refused, adapted = answers
    assert "--print-config" in helped[1] and "[training]" in printed[1] and "a.b=1" in refused[2]
    assert json.loads(schema[1])["title"] == "TrainConfig"
    assert "1,115,520" in plan[1]
    assert "num_hidden_layers = 28" in adapted[1] and "rope_theta = 1000000.0" in adapted[1]
