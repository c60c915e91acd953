"""Tasks during a run: logged at their steps, the same with two ranks, without influence on training."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from config.evaluation.tasks import TrainingEvaluationConfig
from config.load import load_config
from config.train import TrainConfig
from ddp.process_group import World
from diffusionlm.evaluation.tasks.evaluation import LiveEvaluation
from diffusionlm.evaluation.tasks.results import MetricValue, read_items
from diffusionlm.models.transformer import Transformer
from diffusionlm.training.checkpointing.run_directory import open_run_directory
from diffusionlm.training.checkpointing.store import read_selection_value
from diffusionlm.training.loop import train
from tests.distributed.forked import run_ranks
from tests.tiny_run import read_records, write_train_config
from tests.unit.evaluation.conftest import token_ids
from tokenizer import Tokenizer


@pytest.fixture
def tasks(tmp_path: Path) -> list[dict[str, Any]]:
    """Short prompts, which fit the tiny runs' context of 16 tokens."""
    choice, math = tmp_path / "choice.jsonl", tmp_path / "math.jsonl"
    texts = [("the", ["cat", "dog", "mat"], 0), ("sat", ["on", "at", "the"], 1), ("a", ["mat", "cat"], 1)]
    choice.write_text("".join(json.dumps({"question": q, "choices": c, "gold": g}) + "\n" for q, c, g in texts))
    math.write_text("".join(json.dumps({"question": f"{n}", "answer": f"#### {n}"}) + "\n" for n in range(5)))
    return [
        {"kind": "multiple_choice", "name": "choice", "data": str(choice), "prompt": {"template": "{question}"}},
        {
            "kind": "gsm8k",
            "data": str(math),
            "prompt": {"template": "{question}"},
            "generation": {"max_new_tokens": 4, "temperature": 1.0},
            "repeats": 2,
        },
    ]


def records(config: TrainConfig, key: str) -> list[dict[str, Any]]:
    return [
        {"step": record["step"], **record["metrics"]} for record in read_records(config) if key in record["metrics"]
    ]


def test_a_run_with_tasks(tasks: list[dict[str, Any]], tmp_path: Path) -> None:
    evaluation = {"tasks": tasks, "every_steps": 4}
    config = load_config(TrainConfig, write_train_config(tmp_path, evaluation=evaluation))
    train(config)
    logged = records(config, "tasks/choice/acc")
    assert [record["step"] for record in logged] == [4, 8]
    assert all(0.0 <= record["tasks/choice/acc"] <= 1.0 for record in logged)
    assert [record["step"] for record in records(config, "tasks_stopped/gsm8k")] == [4, 8]
    items = list(read_items(config.run.directory / "evaluation/step-00000008-choice.jsonl"))
    accuracy = sum(item.is_correct["acc"] for item in items) / 3
    assert logged[1]["tasks/choice/acc"] == pytest.approx(accuracy)
    assert len(list(read_items(config.run.directory / "evaluation/step-00000004-gsm8k.jsonl"))) == 10
    # Training is the same without the tasks.
    plain = load_config(TrainConfig, write_train_config(tmp_path, "plain", run={"directory": str(tmp_path / "plain")}))
    train(plain)
    weights = [c.run.directory / "checkpoints/latest/model.safetensors" for c in (config, plain)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_the_best_checkpoint_by_a_task(
    tasks: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The accuracy falls from 1 at step 2 to 0.25 at step 8; step 2 is kept for it."""
    evaluate = LiveEvaluation.evaluate

    def fall(self: LiveEvaluation, model: Transformer) -> list[Any]:
        [(result, items)] = evaluate(self, model)
        accuracies.append(accuracies[-1] - 0.25 if accuracies else 1.0)
        return [(replace(result, metrics={"acc": MetricValue(accuracies[-1])}), items)]

    accuracies: list[float] = []
    monkeypatch.setattr(LiveEvaluation, "evaluate", fall)
    evaluation = {"tasks": tasks[:1], "every_steps": 2, "best": "choice/acc"}
    checkpoint = {"every_steps": 2, "keep_last": 1}
    config = load_config(TrainConfig, write_train_config(tmp_path, evaluation=evaluation, checkpoint=checkpoint))
    train(config)
    checkpoints = config.run.directory / "checkpoints"
    assert (checkpoints / "best").resolve().name == "step-00000002"
    assert sorted(path.name for path in checkpoints.glob("step-*")) == ["step-00000002", "step-00000008"]
    assert [read_selection_value(path, "choice/acc") for path in sorted(checkpoints.glob("step-*"))] == [-1.0, -0.25]
    assert read_selection_value(checkpoints / "best", "choice/other") is None


def test_ranks_share_the_answers(
    tasks: list[dict[str, Any]], tokenizer: Tokenizer, tiny_model: Callable[..., Transformer], tmp_path: Path
) -> None:
    model = tiny_model(**token_ids(tokenizer)).eval()
    config = TrainingEvaluationConfig.model_validate({"tasks": tasks})
    alone = LiveEvaluation(config, tokenizer, model.config).evaluate(model)

    def act(world: World) -> Any:
        for is_collective in (False, True):
            live = LiveEvaluation(config, tokenizer, model.config, world, is_collective=is_collective)
            outcomes = live.evaluate(model)
            for (result, items), (expected, expected_items) in zip(outcomes, alone, strict=True):
                assert result.list_logged_values() == expected.list_logged_values()
                assert [(item.id, item.output) for item in items] == [(item.id, item.output) for item in expected_items]
        return len(outcomes)

    assert run_ranks(act, tmp_path) == [2, 2]


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"best": "choice/exact"}, "choice/exact"),
        ({"best": "other/acc"}, "other/acc"),
        ({"tasks": [], "every_steps": 4}, "every_steps"),
        ({"best": None, "tasks.0.data": "missing.jsonl"}, "evaluation.tasks.0"),
    ],
)
def test_wrong_sections(change: dict[str, Any], key: str, tasks: list[dict[str, Any]], tmp_path: Path) -> None:
    if "tasks.0.data" in change:
        tasks[0]["data"] = str(tmp_path / change.pop("tasks.0.data"))
    values = {"tasks": tasks, **{name: value for name, value in change.items() if value is not None}}
    path = write_train_config(tmp_path, evaluation=values)
    with pytest.raises(ValueError, match=key):
        train(load_config(TrainConfig, path))
    with open_run_directory(load_config(TrainConfig, write_train_config(tmp_path))) as directory:
        assert directory.store.steps() == []
