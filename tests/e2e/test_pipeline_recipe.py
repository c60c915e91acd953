"""config/resources/pipeline.toml: it is valid as a whole, and a smaller one of the same stages runs."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from cli.pipeline import main
from cli.pipeline.stages import build_stages
from config.finetune.pipeline import PipelineConfig
from config.load import load_config

RECIPE = Path(__file__).parents[2] / "config" / "resources" / "pipeline.toml"
STAGES = ["pretrain", "before", "tune", "after", "answers"]


def test_the_recipe_is_valid() -> None:
    stages = build_stages(load_config(PipelineConfig, RECIPE))
    assert [stage.name for stage in stages] == STAGES
    assert {stage.directory.parent for stage in stages} == {Path("runs/pipeline")}


@pytest.mark.slow  # five processes that load torch
@pytest.mark.timeout(600)
def test_a_small_version_of_the_recipe_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its results are those of an untrained model; the report has all of them."""
    values: dict[str, Any] = tomllib.loads(RECIPE.read_text(encoding="utf-8"))
    stages = {stage["name"]: stage for stage in values["stages"]}
    for name in ("pretrain", "tune"):
        settings = stages[name]["settings"]
        settings["training"] |= {"max_steps": 4, "batch_size": 2}
        settings["validation"] |= {"final_rows": 4}
        settings["data"] |= {"row_shuffle_window": 4}
    pretrain = stages["pretrain"]["settings"]
    pretrain["model"] |= {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32}
    pretrain["tokenizer"] |= {"vocab_size": 300, "max_training_bytes": 20_000}
    evaluation = values["common"]["evaluate"]
    text, chats = evaluation["tasks"]
    text["text"]["max_rows"] = 4
    chats["limit"] = 8
    monkeypatch.chdir(tmp_path)
    Path("pipeline.toml").write_text(tomli_w.dumps(values))
    assert main(["--config", "pipeline.toml"]) == 0
    result = json.loads(Path("runs/pipeline/after/result.json").read_text())
    text, chats = result["results"]
    assert text["metrics"]["nats_per_token"]["value"] > 0 and chats["num_items"] == 8
    assert "exact_match" in chats["metrics"] and any(name.startswith("exact_match/") for name in chats["metrics"])
    answers = [json.loads(line) for line in Path("runs/pipeline/answers/answers.jsonl").read_text().splitlines()]
    assert len(answers) == len(stages["answers"]["settings"]["input"]["chats"])
    report = Path("runs/pipeline/report.md").read_text()
    assert all(f"| {name} |" in report for name in STAGES)
    assert "## Before and after" in report and "## Tasks" in report and "### answers" in report
    assert main(["--config", "pipeline.toml", "--dry-run"]) == 0
