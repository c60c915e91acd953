"""``diffusionlm-pipeline`` with real stages, killed in several places."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from cli.pipeline.stages import build_server, build_stages
from config.finetune.pipeline import PipelineConfig
from config.load import load_config
from tests.tiny_run import write_train_config

ROOT = Path(__file__).parents[2]


def write_pipeline(folder: Path) -> Path:
    """Train, tune an adapter on the best checkpoint, evaluate and merge it."""
    folder.mkdir(exist_ok=True)
    path = write_train_config(
        folder,
        "train",
        training={"max_steps": 40},
        validation={"every_steps": 10, "rows": 4, "final_rows": 8, "num_mc_samples": 1},
        checkpoint={"every_steps": 5},
    )
    values = tomllib.loads(path.read_text())
    values["data"]["source"]["paths"] = ["a.txt"]
    path.write_text(tomli_w.dumps(values))
    evaluation = {"data": {"source": values["data"]["source"], "max_rows": 8}, "model": {"threads": 1}}
    tuning = {"training": {"max_steps": 60}, "lora": {"rank": 2, "targets": "all-linear"}}
    stages: list[dict[str, Any]] = [
        {"name": "base", "kind": "train", "config": "train.toml"},
        {
            "name": "tune",
            "kind": "train",
            "from": "base",
            "checkpoint": "best",
            "config": "tune.toml",
            "settings": tuning,
        },
        {"name": "after", "kind": "evaluate", "from": "tune"},
        {"name": "half", "kind": "merge", "from": "tune", "settings": {"dtype": "bfloat16"}},
    ]
    (folder / "tune.toml").write_text(tomli_w.dumps({name: values[name] for name in values if name != "model"}))
    pipeline = {"directory": "out", "common": {"evaluate": evaluation}, "stages": stages}
    (folder / "pipeline.toml").write_text(tomli_w.dumps(pipeline))
    return folder


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-m", "cli", "pipeline", "--config", "pipeline.toml", *arguments]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=folder, env=environment, **pipes)


def finish(folder: Path, *arguments: str) -> str:
    process = start(folder, *arguments)
    output, _ = process.communicate(timeout=250)
    assert process.returncode == 0, output
    return output


def kill_when(folder: Path, is_reached: Callable[[Path], bool], number: signal.Signals = signal.SIGKILL) -> int:
    """Start the pipeline and send it a signal when it is at a place. Returns its exit code."""
    process = start(folder)
    deadline = time.monotonic() + 120
    while not is_reached(folder / "out"):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(number)
    process.communicate(timeout=60)
    return process.returncode


def outputs(folder: Path) -> dict[str, Any]:
    """The weights and results of the stages that are done."""
    out = folder / "out"
    done = {path.parent.name for path in out.glob("*/done.json")}
    files = [*out.glob("*/run/checkpoints/latest/*.safetensors"), *out.glob("*/model/*.safetensors")]
    values: dict[str, Any] = {str(path.relative_to(out)): path.read_bytes() for path in files}
    result = json.loads((out / "after" / "result.json").read_text()) if "after" in done else {}
    values["after"] = {key: result[key] for key in result if key not in ("seconds", "tokens_per_second")}
    return {"done": done, **values}


@pytest.mark.slow  # ten processes that load torch
@pytest.mark.timeout(900)
def test_a_killed_pipeline_ends_with_the_same_hashes(tmp_path: Path) -> None:
    whole, killed = write_pipeline(tmp_path / "whole"), write_pipeline(tmp_path / "killed")
    finish(whole)
    assert outputs(whole)["done"] == {"base", "tune", "after", "half"}
    assert len(outputs(whole)) == 5

    def reaches(pattern: str) -> Callable[[Path], bool]:
        return lambda out: any(out.glob(pattern))

    assert kill_when(killed, reaches("base/run/checkpoints/step-00000005")) == -9
    assert kill_when(killed, reaches("tune/run/checkpoints/step-00000010"), signal.SIGINT) == 130
    assert kill_when(killed, reaches("tune/run/checkpoints/step-00000030")) == -9
    assert kill_when(killed, reaches("after/stage.json")) == -9
    finish(killed)
    assert outputs(killed) == outputs(whole)
    steps = [json.loads(line)["step"] for line in (killed / "out/tune/run/metrics.jsonl").open()]
    assert max(steps) == 60
    report = (killed / "out/report.html").read_text()
    assert "4 of 4 stages done" in report and "<svg" in report


@pytest.mark.parametrize(
    ("name", "directory", "names", "model"),
    [
        ("pipeline", "pipeline", ["pretrain", "before", "tune", "after", "answers"], "tune"),
        ("chat_pipeline", "chat", ["chat", "exam"], "chat"),
    ],
)
def test_the_recipes_are_valid(name: str, directory: str, names: list[str], model: str) -> None:
    config = load_config(PipelineConfig, ROOT / "config" / "resources" / f"{name}.toml")
    stages = build_stages(config)
    assert [stage.name for stage in stages] == names
    assert {stage.directory.parent for stage in stages} == {Path("runs", directory)}
    server = build_server(config, stages)
    assert (server.model.path, server.serve.model_name) == (Path("runs", directory, model, "run"), model)
