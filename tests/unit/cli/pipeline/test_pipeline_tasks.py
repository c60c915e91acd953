"""A pipeline's evaluate stage runs tasks, and its report has their metrics."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.pipeline import main
from diffusionlm.checkpoints.huggingface import save_model_directory
from diffusionlm.evaluation.tasks.results import read_results
from tests.conftest import MakeModel
from tests.unit.cli.pipeline.conftest import write_pipeline
from tests.unit.data.chat_cases import chat_tokenizer


@pytest.mark.slow
def test_tasks_of_a_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_model: MakeModel) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = chat_tokenizer()
    model = tiny_model(
        vocab_size=tokenizer.vocab_size,
        mask_token_id=tokenizer.mask_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    save_model_directory(model, tokenizer, Path("model"))
    items = [{"question": "q", "choices": ["a", "b"], "gold": number % 2} for number in range(4)]
    Path("items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    task = {"kind": "multiple_choice", "data": "items.jsonl", "score": "letters"}
    stage = {"name": "check", "kind": "evaluate", "from": "model", "settings": {"tasks": [task]}}
    arguments = ["--config", write_pipeline({"directory": "out", "stages": [stage]})]
    assert not main(arguments)
    [result] = read_results(Path("out/check/result_tasks")).results
    metric = result.metrics["acc_norm"]
    report = Path("out/report.md").read_text()
    assert f"| {metric.value:.1%} ± {metric.standard_error:.1%} |" in report
    assert "## Tasks" in report
    modified_ns = Path("out/check/result.json").stat().st_mtime_ns
    assert not main(arguments)
    assert Path("out/check/result.json").stat().st_mtime_ns == modified_ns
    items[0]["gold"] = 1  # changed data make the stage run again
    Path("items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    assert not main([*arguments, "--force"])
    assert read_results(Path("out/check/result_tasks")).results[0].fingerprints != result.fingerprints
