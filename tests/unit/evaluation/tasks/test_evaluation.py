"""Results of tasks with models whose answers are known, and what results must not depend on."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from config.generation import GenerationConfig
from diffusionlm.evaluation.tasks.evaluation import evaluate_task, summarize_task
from diffusionlm.evaluation.tasks.gsm8k import Gsm8kTask
from diffusionlm.evaluation.tasks.humaneval import find_code_block
from diffusionlm.evaluation.tasks.items import draw_seed, read_task_items
from diffusionlm.evaluation.tasks.preparation import prepare_items
from diffusionlm.evaluation.tasks.results import ItemResult, format_item_line, read_items
from diffusionlm.inference.generate import generate
from diffusionlm.models.transformer import Transformer
from tests.unit.evaluation.tasks.conftest import TASK, MakeTask
from tokenizer import Tokenizer

BiasedModel = Callable[[dict[str, float]], Transformer]
QUESTIONS = [{"question": f"{number} + 1 = ?" * (1 + number % 3), "answer": f"#### {number}"} for number in range(7)]
SAMPLING = {"max_new_tokens": 10, "temperature": 1.0, "block_length": 5, "denoising_steps": 3}


def run(model: Transformer, task: Any, **options: Any) -> dict[tuple[str, int], ItemResult]:
    """Results by item and repeat, without their times."""
    results = evaluate_task(model, task, **options)
    return {(result.id, result.repeat): dataclasses.replace(result, seconds=0.0) for result in results}


def choice_items(num_items: int) -> list[dict[str, Any]]:
    rng = random.Random(0)
    items = []
    for number in range(num_items):
        options = ["n" * rng.randint(1, 3) for _ in range(4)]
        gold = rng.randrange(4)
        options[gold] = "y" * rng.randint(1, 3)
        items.append({"question": f"q{number}", "choices": options, "gold": gold})
    return items


def test_normalized_accuracy_divides_by_characters_or_bytes(make_task: MakeTask, biased_model: BiasedModel) -> None:
    items = [{"question": "q", "choices": ["xxxxxx", "ö", "zz"], "gold": 0}]
    [result] = run(biased_model({"x": -1.0, "z": 0.5}), make_task("multiple_choice", items)).values()
    values = np.array(result.option_log_likelihoods)
    assert result.chosen == {
        "acc": int(values.argmax()),
        "acc_norm": int((values / [6, 1, 2]).argmax()),
        "acc_bytes": int((values / [6, 2, 2]).argmax()),
    }
    assert len(set(result.chosen.values())) > 1


def test_an_unknown_error_is_valid_json(make_task: MakeTask, random_model: Transformer, tmp_path: Path) -> None:
    items = [{"question": "q", "choices": ["long option", "other"], "gold": 0}]
    task = make_task("multiple_choice", items, likelihood={"num_mc_samples": 1})
    [result] = evaluate_task(random_model, task)
    assert result.option_standard_errors == (None, None)
    path = tmp_path / "a.jsonl"
    path.write_text(format_item_line(result) + "\n")
    json.loads(path.read_text(), parse_constant=pytest.fail)
    assert list(read_items(path)) == [result]


def test_letters(make_task: MakeTask, biased_model: BiasedModel) -> None:
    items = [{"question": "q", "choices": ["one", "two", "three"], "gold": gold} for gold in (0, 1, 2)]
    results = run(
        biased_model({"B": 4.0}), make_task("multiple_choice", items, score="letters", prompt={"delimiter": ""})
    )
    assert [result.is_correct["acc"] for result in results.values()] == [False, True, False]
    assert {result.num_forwards for result in results.values()} == {1}  # all letters are read from one output


def test_cloze_is_right_if_greedy_decoding_yields_the_word(
    make_task: MakeTask, biased_model: BiasedModel, byte_tokenizer: Tokenizer
) -> None:
    items = [{"text": "it is yyy", "id": "a"}, {"text": "it is nnn", "id": "b"}]
    model = biased_model({"y": 8.0, " ": 7.0})
    task = make_task("cloze", items, prompt={"delimiter": ""})
    results = run(model, task)
    assert [results[(name, 0)].is_correct["acc"] for name in "ab"] == [True, False]
    log_normalizer = math.log(math.exp(8) + math.exp(7) + byte_tokenizer.vocab_size - 3)
    assert results[("a", 0)].option_log_likelihoods == pytest.approx([3 * (8 - log_normalizer)])


def test_guided_scores_have_no_perplexity(make_task: MakeTask, random_model: Transformer) -> None:
    """Without guidance it is exp of the mean negative log-likelihood."""
    for cfg_scale, names in ((0.0, {"acc", "perplexity"}), (0.5, {"acc"})):
        task = make_task("cloze", [{"text": "it is y"}], likelihood={"cfg_scale": cfg_scale})
        [result] = evaluate_task(random_model, task)
        metrics = summarize_task(task, [result]).metrics
        assert set(metrics) == names
        if cfg_scale == 0.0:
            assert result.option_log_likelihoods is not None
            assert metrics["perplexity"].value == pytest.approx(math.exp(-result.option_log_likelihoods[0]))


@pytest.mark.parametrize("generation", [{}, {"temperature": 1.0, "top_k": 1}], ids=["T = 0", "top-k 1"])
def test_repeats_of_deterministic_answers_are_refused(make_task: MakeTask, generation: dict[str, Any]) -> None:
    generation = {"max_new_tokens": 2, **generation}
    with pytest.raises(ValueError, match=r"repeats = 2 .*generation\.temperature"):
        make_task("gsm8k", QUESTIONS[:1], generation=generation, repeats=2)
    assert make_task("gsm8k", QUESTIONS[:1], generation=generation).config.repeats == 1


def test_answers_are_those_of_single_prompts(
    make_task: MakeTask, random_model: Transformer, byte_tokenizer: Tokenizer
) -> None:
    task = make_task("gsm8k", QUESTIONS, generation=SAMPLING, seed=5)
    results = run(random_model, task)
    for item in task.items:
        prompt = byte_tokenizer.encode(f"Question: {item.fields['question']}\nAnswer:")
        config = GenerationConfig(**SAMPLING, suppress_token_ids=task.requests.settings.config.suppress_token_ids)
        [expected] = generate(random_model, [prompt], config, [draw_seed(5, item.id, 0)])
        result = results[(item.id, 0)]
        assert result.output == byte_tokenizer.decode_bytes(expected.token_ids).decode(errors="replace")
        assert (result.num_forwards, result.num_tokens) == (expected.num_forwards, len(expected.token_ids))


@pytest.mark.parametrize("kind", ["gsm8k", "multiple_choice"])
def test_batch_order_neighbors_and_resume_change_nothing(
    make_task: MakeTask, random_model: Transformer, kind: str
) -> None:
    records = QUESTIONS if kind == "gsm8k" else choice_items(7)
    records = [{**record, "id": f"i{number}"} for number, record in enumerate(records)]
    is_generated = kind == "gsm8k"
    options: dict[str, Any] = {"generation": SAMPLING, "repeats": 2, "stop": [" "]} if is_generated else {}
    expected = run(random_model, make_task(kind, records, **options))
    variations: list[dict[str, Any]] = [{"item_ids": ["i2", "i5"]}]
    variations.append({"batch_size": 3} if is_generated else {"likelihood": {"batch_tokens": 40}})
    for variation in variations:
        results = run(random_model, make_task(kind, records[::-1], **options, **variation))
        assert results.keys() <= expected.keys()
        for key, result in results.items():
            assert_same(result, expected[key])
    done = list(expected)[:3]
    rest = run(random_model, make_task(kind, records, **options), done=done)
    assert rest.keys() == expected.keys() - set(done)
    for key, result in rest.items():
        assert_same(result, expected[key])


def assert_same(a: ItemResult, b: ItemResult) -> None:
    """Equal up to the rounding of log-likelihoods."""
    assert a.option_log_likelihoods == (b.option_log_likelihoods and pytest.approx(b.option_log_likelihoods, abs=1e-9))
    cleared: dict[str, Any] = {"option_log_likelihoods": None, "option_standard_errors": None}
    assert dataclasses.replace(a, **cleared) == dataclasses.replace(b, **cleared)


def test_a_grader_that_throws_makes_the_item_invalid(
    make_task: MakeTask, random_model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    grade_number = Gsm8kTask.grade

    def fail(self: Gsm8kTask, item: Any, text: str) -> Any:
        if item.id == "1":
            raise ZeroDivisionError("no number")
        return grade_number(self, item, text)

    monkeypatch.setattr(Gsm8kTask, "grade", fail)
    results = run(random_model, make_task("gsm8k", QUESTIONS[:3], generation=SAMPLING))
    assert results[("1", 0)].error == "ZeroDivisionError: no number"
    assert results[("1", 0)].is_correct == {"strict": False, "flexible": False}
    assert results[("1", 0)].is_invalid
    assert results[("0", 0)].error is None and results[("2", 0)].error is None


def test_a_source_of_conversations(byte_tokenizer: Tokenizer, biased_model: BiasedModel) -> None:
    """Held-out prompts, with an accuracy for each of the source's tasks. Every answer is "0"."""
    chats = {"kind": "chat_tasks", "tasks": ["copy", "count"], "max_length": 2, "chat": {"template": "chatml"}}
    values = {"kind": "exact_match", "source": chats, "limit": 12, "generation": {"max_new_tokens": 1}}
    config = TASK.validate_python(values)
    model, items = biased_model({"0": 9.0}), read_task_items(config)
    task = prepare_items(config, items, byte_tokenizer, model.config)
    metrics = summarize_task(task, list(evaluate_task(model, task))).metrics
    for name, group in (("exact_match", ""), ("exact_match/copy", "copy"), ("exact_match/count", "count")):
        golds = [item.gold for item in items if group in ("", item.group)]
        assert metrics[name].value == pytest.approx(golds.count("0") / len(golds))
    assert len(items) == 12 and len(metrics) == 3
    with pytest.raises(ValueError, match="source has text, not conversations"):
        read_task_items(TASK.validate_python({**values, "source": {"kind": "python-stdlib"}}))


def test_prompts_that_do_not_fit_are_named(make_task: MakeTask) -> None:
    long = {"question": "x" * 240, "answer": "1", "id": "long"}
    with pytest.raises(ValueError, match=r"item 'long'.*max_new_tokens = 256"):
        make_task("gsm8k", [long])
    with pytest.raises(ValueError, match=r"item 'long': option 0 .*max_position_embeddings"):
        make_task("multiple_choice", [{"question": "x" * 240, "choices": ["a", "b"], "gold": 0, "id": "long"}])


def test_no_item_is_blamed_for_settings(make_task: MakeTask) -> None:
    with pytest.raises(ValueError, match="needs block_length") as caught:
        make_task("gsm8k", QUESTIONS, generation={"attention": "block_causal"})
    assert "item" not in str(caught.value)


def test_all_options_are_checked_with_the_end_of_text(make_task: MakeTask) -> None:
    """The longest option in characters may be a short one in tokens; ö are two bytes, so two tokens."""
    for options, likelihood, problem in (
        (["a" * 130, "ö" * 120], {}, r"option 1 has 2\d\d tokens"),
        (["a", "b" * (256 - len("Question: q\nAnswer: "))], {"end_of_text": "scored"}, "option 1 has 257 tokens"),
        (["a", "<|mask|>"], {}, "option 1 has the mask token"),
    ):
        record = {"question": "q", "choices": options, "gold": 0, "id": "long"}
        with pytest.raises(ValueError, match=f"item 'long': {problem}"):
            make_task("multiple_choice", [record], likelihood=likelihood)


def test_code_needs_permission(make_task: MakeTask) -> None:
    record = {"prompt": "def f():\n", "test": "def check(f): pass", "entry_point": "f"}
    with pytest.raises(ValueError, match=r"run_code.*--run-code"):
        make_task("humaneval", [record])


def test_code_blocks() -> None:
    assert find_code_block("Sure:\n```python\nx = 1\n```\nDone ```no```") == "x = 1\n"
    assert find_code_block("```\nx = 1\ny") == "x = 1\ny"
    assert find_code_block("x = 1") == "x = 1"
