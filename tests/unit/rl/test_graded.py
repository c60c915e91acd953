"""Tasks that are graded by rewards: their metrics, the rewards of steps, evaluations, answers that fill masks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from config.evaluation.tasks import AnyItemTask, TrainingEvaluationConfig
from diffusionlm.evaluation.tasks.evaluation import LiveEvaluation, evaluate_task, grade, summarize_task
from diffusionlm.evaluation.tasks.item_task import TaskItem
from diffusionlm.evaluation.tasks.items import draw_seed
from diffusionlm.evaluation.tasks.runner import _hash_inputs
from diffusionlm.inference.generate import infill
from diffusionlm.models.transformer import Transformer
from diffusionlm.rl.graded import GradedTask
from diffusionlm.rl.reward_process import RewardError
from tests.unit.evaluation.tasks.conftest import MakeTask
from tokenizer import Tokenizer

EXACT = {"kind": "exact_match"}
STARTS = {"kind": "regex", "pattern": "^y", "weight": -0.5}


def graded(*rewards: dict[str, Any], **options: Any) -> GradedTask:
    return GradedTask.model_validate({"kind": "graded", "data": "items.jsonl", "rewards": rewards, **options})


@pytest.fixture
def step_rewards(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "reward.py"
    path.write_text(
        "def reward(values):\n"
        "    if not values['answer']:\n"
        "        raise ValueError('empty')\n"
        "    return [len(step) for step in values['steps']]\n"
    )
    return {"kind": "python", "path": str(path), "weight": 0.25}


def test_the_total_is_a_weighted_sum() -> None:
    item = TaskItem("yes", {"question": "?"}, id="3")
    assert graded(EXACT).grade(item, " yes\n").is_correct == {"reward": 1.0}
    task = graded({**EXACT, "weight": 2.0, "name": "right"}, STARTS)
    assert task.grade(item, "yes").is_correct == {"reward": 1.5, "right": 1.0, "regex": 1.0}
    assert task.grade(item, "yet").is_correct == {"reward": -0.5, "right": 0.0, "regex": 1.0}
    assert task.grade_steps(item, "yet", ["y", "yet"])[1] is None


def test_process_rewards_are_summed_with_those_of_the_last_step(step_rewards: dict[str, Any]) -> None:
    item = TaskItem("abc", id="3")
    task = graded({**EXACT, "weight": 2.0}, step_rewards)
    verdict, steps = task.grade_steps(item, "abc", ["a", "ab", "abc"])
    assert verdict.is_correct == {"reward": 2.0 + 0.25 * 6, "exact_match": 1.0, "python": 6.0}
    assert steps == (0.25, 0.5, 2.75)
    assert task.grade(item, "abd").is_correct["reward"] == 0.75  # as if one step had decoded it
    with pytest.raises(RewardError, match=r"item '3': reward 'python': .*reward raised ValueError: empty \(line 3\)"):
        task.grade(item, "")


def test_metrics_that_may_leave_0_to_1_are_numbers(step_rewards: dict[str, Any]) -> None:
    half = {"kind": "regex", "pattern": "a", "weight": 0.5}
    assert graded(EXACT).rules == ("reward",) and graded(EXACT).number_metrics == ()
    shares = graded({**EXACT, "weight": 0.5}, half)
    assert (shares.rules, shares.number_metrics) == (("reward", "exact_match", "regex"), ())
    for task in (graded(EXACT, half), graded({**EXACT, "weight": -0.5}, half)):
        assert (task.rules, task.number_metrics) == (("exact_match", "regex"), ("reward",))
    assert (graded(step_rewards).rules, graded(step_rewards).number_metrics) == ((), ("reward",))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rewards": []}, "at least 1 item"),
        ({"rewards": [EXACT, EXACT]}, "'exact_match' is given twice"),
        ({"rewards": [{**EXACT, "name": "reward"}]}, "'reward' is given twice"),
        ({"rewards": [EXACT], "infill": True, "prompt": {"format": "chat"}}, "infill = true needs a text"),
        ({"rewards": [EXACT], "infill": True, "prompt": {"answer_prefix": "A"}}, "infill = true needs a text"),
        ({"rewards": [{"kind": "python"}]}, "path"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        graded(**options)


@pytest.mark.parametrize(
    ("record", "options", "message"),
    [
        ({"question": "?"}, {}, r"item '0': rewards\.0 \(exact_match\): has no right answer"),
        ({"question": "?", "answer": "a"}, {"answer_field": "gold"}, r"has no gold \(answer_field\)"),
        ({"answer": "a"}, {}, r"\{question\} is no field of the item; its fields are 'answer'"),
        ({"question": "?", "answer": "a"}, {"infill": True}, r"has no masked span"),
    ],
)
def test_items_that_cannot_be_asked_or_graded_are_named(
    make_task: MakeTask, record: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_task("graded", [record], rewards=[EXACT], generation={"max_new_tokens": 4}, **options)


def test_prompts_and_answers_of_records(make_task: MakeTask) -> None:
    records: list[dict[str, Any]] = [
        {"question": "1 + 1?", "answer": 2},
        {"prompt": "Say [1].", "answer": [1]},
        {"question": "q", "prompt": "p", "answer": "a"},
    ]
    task = make_task("graded", records, rewards=[EXACT], generation={"max_new_tokens": 4})
    assert [(task.text(item), item.gold) for item in task.items] == [("1 + 1?", "2"), ("Say [1].", "[1]"), ("q", "a")]
    named = make_task(
        "graded",
        [{"nums": [1, 2], "target": 3}],
        rewards=[{"kind": "countdown"}],
        prompt={"template": "{nums} to {target}:", "answer_prefix": "<answer>", "delimiter": " "},
        generation={"max_new_tokens": 4},
    )
    assert named.text(named.items[0]) == "[1, 2] to 3: <answer>" and named.items[0].gold == ""
    assert grade(named, named.items[0], "<answer>2 + 1</answer>").is_correct == {"reward": 1.0}


def test_an_evaluation(make_task: MakeTask, biased_model: Any, step_rewards: dict[str, Any]) -> None:
    """With a model that writes y only, and with one whose answers are empty, so that a reward fails."""
    records = [{"question": "q", "answer": "yyyy"}, {"question": "q", "answer": "yyy"}]
    rewards = [EXACT, {**step_rewards, "weight": 1.0}]
    task = make_task("graded", records, rewards=rewards, generation={"max_new_tokens": 4}, stop=["n"])
    results = list(evaluate_task(biased_model({"y": 9.0}), task))
    assert [result.is_correct for result in results] == [
        {"reward": 5.0, "exact_match": 1.0, "python": 4.0},
        {"reward": 4.0, "exact_match": 0.0, "python": 4.0},
    ]
    summary = summarize_task(task, results)
    assert {name: metric.value for name, metric in summary.metrics.items()} == {
        "reward": 4.5, "exact_match": 0.5, "python": 4.0
    }  # fmt: skip
    assert summary.number_metrics == ("reward", "python") and summary.num_grading_errors == 0
    [failed, _] = evaluate_task(biased_model({"n": 9.0}), task)
    assert failed.error is not None and "item '0': reward 'python'" in failed.error and failed.is_invalid
    assert failed.is_correct == {"exact_match": 0.0}


def test_shares_of_an_answer_have_no_pass_at_k(make_task: MakeTask, biased_model: Any) -> None:
    records = [{"question": "q", "puzzle": "1..." * 4, "solution": "1234" * 4, "answer": "2"}]
    options = {"generation": {"max_new_tokens": 12, "temperature": 1.0}, "repeats": 2}
    model = biased_model({"2": 30.0})
    partial = make_task("graded", records, rewards=[{"kind": "sudoku", "partial": True}], **options)
    summary = summarize_task(partial, list(evaluate_task(model, partial)))
    assert summary.metrics["reward"].value == pytest.approx(1 / 3) and summary.pass_at_k == {}
    whole = make_task("graded", records, rewards=[{"kind": "sudoku"}], **options)
    assert summarize_task(whole, list(evaluate_task(model, whole))).pass_at_k["reward"][2].value == 0.0


def test_answers_fill_the_spans_of_a_text(
    make_task: MakeTask, random_model: Transformer, byte_tokenizer: Tokenizer
) -> None:
    text = "ab[MASK:3]cd[MASK:2]e"
    options = {"rewards": [{"kind": "regex", "pattern": "a"}], "infill": True, "seed": 4}
    generation = {"temperature": 1.0, "denoising_steps": 2, "block_length": 4}
    task = make_task("graded", [{"prompt": text}], generation=generation, **options)
    [result] = evaluate_task(random_model, task)
    request = task.build_request(task.items[0], 0)
    assert byte_tokenizer.decode([*request.canvas_L[[0, 1, 5, 6, 9]]]) == "abcde"
    assert request.masked_positions.tolist() == [2, 3, 4, 7, 8]
    seeds = [draw_seed(4, "0", 0)]
    [filled] = infill(random_model, [request.canvas_L.tolist()], task.requests.settings.config, seeds)
    tokens = [filled.token_ids[position] for position in (2, 3, 4, 7, 8)]
    assert result.output == byte_tokenizer.decode_bytes(tokens).decode(errors="replace")
    assert result.num_tokens == 5 and result.num_forwards == filled.num_forwards


def test_a_held_out_reward_of_training(tmp_path: Path, random_model: Transformer, byte_tokenizer: Tokenizer) -> None:
    path = tmp_path / "items.jsonl"
    path.write_text(json.dumps({"prompt": "1[MASK:3]" * 4, "puzzle": "1..." * 4}))
    task = {"kind": "graded", "data": path, "infill": True, "rewards": [{"kind": "sudoku"}]}
    config = TrainingEvaluationConfig.model_validate({"tasks": [task], "best": "graded/reward"})
    [(result, answers)] = LiveEvaluation(config, byte_tokenizer, random_model.config).evaluate(random_model)
    assert result.metrics["reward"].value == 0.0 and answers[0].num_tokens == 12
    with pytest.raises(ValidationError, match="is no rule of a task"):
        TrainingEvaluationConfig.model_validate({"tasks": [task], "best": "graded/sudoku"})


def test_a_changed_reward_file_is_another_evaluation(make_task: MakeTask, step_rewards: dict[str, Any]) -> None:
    task = make_task("graded", [{"question": "q"}], rewards=[step_rewards], generation={"max_new_tokens": 4})
    before = _hash_inputs(task)
    assert _hash_inputs(task) == before
    Path(step_rewards["path"]).write_text("def reward(values): return 1")
    assert _hash_inputs(task)["data"] != before["data"]


def test_code_is_announced() -> None:
    code = {"kind": "code"}
    assert graded({**code, "run_code": True}, EXACT).runs_code and not graded(code, EXACT).runs_code
    union: TypeAdapter[Any] = TypeAdapter(AnyItemTask)
    assert not union.validate_python(graded(EXACT)).runs_code
