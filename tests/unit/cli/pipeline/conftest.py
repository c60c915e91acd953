"""A pipeline of four stages; a small program replaces their commands, so that torch is not loaded."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from cli import child_process
from cli.pipeline import runner
from tests.tiny_run import MODEL

PROGRAM = """
import hashlib, json, os, pathlib, signal, sys, time, tomllib
path = pathlib.Path(sys.argv[1])
config = tomllib.loads(path.read_text())
name = path.parent.name
with open(path.parent.parent / "log", "a") as file:
    file.write(name + "\\n")
if name == os.environ.get("CHANGING"):
    pathlib.Path("b.txt").write_text("changed line\\n" * 300)
if name == os.environ.get("FAILING"):
    sys.exit("no")
if "run" in config:
    run = pathlib.Path(config["run"]["directory"])
    run.mkdir(exist_ok=True)
    (run / "config.toml").write_bytes(path.read_bytes())
    if name == os.environ.get("WAITING"):
        def stop(number, frame):
            (run / "saved").write_text(f"half, {signal.Signals(number).name}")
            sys.exit(128 + number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, stop)
        (run / "ready").write_text(str(os.getpid()))
        while os.read(0, 1):
            pass
        os._exit(9)
    start = config["model"].get("init_from")
    before = (pathlib.Path(start) / "model.safetensors").read_text() if start else ""
    data = "".join(pathlib.Path(p).read_text() for p in config["data"]["source"]["paths"])
    value = hashlib.sha256(f"{before}{data}{config['training']}".encode()).hexdigest()
    folder = run / "checkpoints" / "latest"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_text(value)
    (folder / "state.json").write_text(json.dumps({"seconds": time.time()}))
    evaluation = {"nats_per_token": 2.0, "standard_error": 0.1}
    (run / "summary.json").write_text(json.dumps({"evaluation": evaluation, "tokens_seen": 320}))
else:
    weights = (pathlib.Path(config["model"]["path"]) / "model.safetensors").read_text()
    result = {"nats_per_token": int(weights[:2], 16) / 100, "num_tokens": 7, "seconds": time.time(), "weights": weights}
    metrics = {"exact_match": {"value": 0.5, "standard_error": None}}
    shares = {"stopped": 1.0}
    task = {"task": "copy", "variant": "a | <b>", "num_items": 2, "metrics": metrics, "shares": shares}
    result["results"] = [task]
    pathlib.Path(config["output"]["file"]).write_text(json.dumps(result))
"""


def train_settings(paths: list[str], **training: Any) -> dict[str, Any]:
    source = {"kind": "files", "paths": paths, "sample_by": "line", "validation_fraction": 0.2}
    return {"data": {"source": source}, "training": {"batch_size": 4, "max_steps": 10, **training}}


def build_pipeline(folder: Path) -> dict[str, Any]:
    """A pipeline that trains on a.txt, goes on with b.txt, and evaluates both models on a.txt."""
    for name in ("a", "b"):
        lines = [f"{name} line {index}" for index in range(300)]
        (folder / f"{name}.txt").write_text("\n".join(lines))
    evaluation = {"data": {"source": {"kind": "files", "paths": ["a.txt"], "sample_by": "line"}}}
    return {
        "directory": "out",
        "common": {"train": {"run": {"device": "cpu"}}, "evaluate": evaluation},
        "stages": [
            {"name": "after", "kind": "evaluate", "from": "tune"},
            {"name": "base", "kind": "train", "settings": {"model": MODEL, **train_settings(["a.txt"])}},
            {"name": "tune", "kind": "train", "from": "base", "settings": train_settings(["b.txt"])},
            {"name": "before", "kind": "evaluate", "from": "base"},
        ],
    }


def write_pipeline(values: dict[str, Any], path: Path = Path("pipeline.toml")) -> str:
    path.write_text(tomli_w.dumps(values))
    return str(path)


def stage_of(values: dict[str, Any], name: str) -> dict[str, Any]:
    """The table of a stage."""
    [stage] = [stage for stage in values["stages"] if stage["name"] == name]
    return stage


@pytest.fixture
def pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """`build_pipeline` in a fresh working directory; its stages are `PROGRAM`."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    def build_command(name: str, config: Path) -> list[str]:
        return [sys.executable, "-I", "-S", str(program), str(config)]

    monkeypatch.setattr(runner, "build_command", build_command)
    monkeypatch.setattr(child_process, "POLL_SECONDS", 0.01)
    monkeypatch.chdir(tmp_path)
    return build_pipeline(tmp_path)
