"""Runs in a folder: resumed after an interruption, refused with other settings, summarized and compared."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cli.eval.report import read_evaluations
from config.infer import InferModelConfig
from diffusionlm.evaluation.tasks import runner
from diffusionlm.evaluation.tasks.evaluation import pass_at_k
from diffusionlm.evaluation.tasks.preparation import Variant
from diffusionlm.evaluation.tasks.results import (
    EvaluationResults,
    ItemResult,
    format_item_line,
    read_items,
    read_results,
    to_file_name,
)
from diffusionlm.evaluation.tasks.runner import TaskRun, fingerprint_model
from diffusionlm.models.transformer import Transformer
from tests.unit.evaluation.tasks.conftest import MakeTask

QUESTIONS = [{"question": f"{number} + 1 = ?", "answer": f"#### {number}"} for number in range(6)]
SAMPLING = {"max_new_tokens": 12, "temperature": 1.0, "denoising_steps": 4}


@pytest.fixture
def run_tasks(tmp_path: Path, make_task: MakeTask, random_model: Transformer, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``run_tasks(folder, variants, end_after=...)``: settings of a gsm8k task by variant, of `random_model`."""
    monkeypatch.setattr(runner, "load_configured_model", lambda config: random_model)
    monkeypatch.setattr(runner, "fingerprint_model", lambda config, directory: "model")

    def run(folder: str, variants: dict[str, dict[str, Any]], end_after: int | None = None) -> EvaluationResults:
        planned = [
            Variant(
                name,
                InferModelConfig(path=Path("model")),
                (),
                (make_task("gsm8k", QUESTIONS, **{"generation": SAMPLING, **options}),),
            )
            for name, options in variants.items()
        ]
        counts: list[int] = []

        def interrupt(phase: str, unit: str, done: int, total: int | None) -> None:
            counts.append(done)
            if len(counts) == end_after:
                raise KeyboardInterrupt

        return TaskRun(tmp_path / folder, planned).run(interrupt, "command")

    return run


def read_lines(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    return sorted(({**line, "seconds": 0} for line in lines), key=lambda line: (line["id"], line.get("repeat", 0)))


def without_times(results: EvaluationResults) -> EvaluationResults:
    return dataclasses.replace(results, results=tuple(dataclasses.replace(r, seconds=0.0) for r in results.results))


def test_a_killed_run_is_continued(run_tasks: Any, tmp_path: Path) -> None:
    variants = {"a": {"repeats": 2}, "b": {"seed": 9, "repeats": 2}}
    expected = run_tasks("whole", variants)
    with pytest.raises(KeyboardInterrupt):
        run_tasks("killed", variants, end_after=15)
    path = tmp_path / "killed" / "items" / "b.jsonl"
    assert len(read_lines(path)) == 3
    content = path.read_bytes()
    path.write_bytes(content[:-20])  # as of a process that was killed while it wrote
    assert without_times(run_tasks("killed", variants)) == without_times(expected)
    for name in ("a", "b"):
        whole, continued = (tmp_path / folder / "items" / f"{name}.jsonl" for folder in ("whole", "killed"))
        assert read_lines(continued) == read_lines(whole)
    before = path.read_bytes()
    again = run_tasks("killed", variants)  # nothing is left to do
    assert without_times(again) == without_times(expected) and again == read_results(tmp_path / "killed")
    assert path.read_bytes() == before


def test_other_settings_are_refused(run_tasks: Any, tmp_path: Path) -> None:
    run_tasks("run", {"a": {}})
    for variants, words in (
        ({"a": {"seed": 1}}, ["a, gsm8k: seed: 0 -> 1"]),
        ({"a": {"generation": {**SAMPLING, "temperature": 0.5}}}, ["generation.temperature: 1.0 -> 0.5"]),
        ({"a": {"prompt": {"template": "{question}"}}}, ["prompt.template"]),
        ({"b": {}}, ["a, gsm8k: is missing"]),
        ({"a": {"name": "other"}}, ["a, gsm8k: is missing"]),
    ):
        with pytest.raises(ValueError, match="another evaluation") as caught:
            run_tasks("run", variants)
        assert all(word in str(caught.value) for word in words), caught.value
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="not empty"):
        run_tasks("other", {"a": {}})


def test_a_run_is_extended(run_tasks: Any, tmp_path: Path) -> None:
    small = run_tasks("run", {"a": {"limit": 3, "batch_size": 1}})
    assert small.results[0].num_items == 3
    extended = run_tasks("run", {"a": {"repeats": 2}, "b": {"seed": 9}})
    expected = run_tasks("whole", {"a": {"repeats": 2}, "b": {"seed": 9}})
    assert without_times(extended) == without_times(expected)
    assert run_tasks("run", {"a": {"limit": 3}, "b": {"seed": 9}}).results[0].num_items == 3


def test_results_are_means_over_items(run_tasks: Any, tmp_path: Path) -> None:
    results = run_tasks("run", {"a": {"repeats": 4}, "b": {"seed": 9, "repeats": 4}})
    by_variant = {}
    for result in results.results:
        lines = read_lines(tmp_path / "run" / "items" / f"{result.variant}.jsonl")
        assert len(lines) == 24
        counts = np.array(
            [sum(line["is_correct"]["flexible"] for line in lines if line["id"] == str(n)) for n in range(6)]
        )
        by_variant[result.variant] = counts / 4
        metric = result.metrics["flexible"]
        assert metric.value == pytest.approx((counts / 4).mean())
        assert metric.standard_error == pytest.approx((counts / 4).std(ddof=1) / math.sqrt(6))
        assert list(result.metrics) == ["strict", "flexible"]
        assert result.pass_at_k["flexible"].keys() == {1, 2, 4}
        for size, value in result.pass_at_k["flexible"].items():
            assert value.value == pytest.approx(np.mean([pass_at_k(4, int(count), size) for count in counts]))
        assert result.num_tokens == sum(line.get("num_tokens", 0) for line in lines)
        assert result.num_forwards == sum(line["num_forwards"] for line in lines)
        assert result.shares is not None
        assert result.shares.stopped == np.mean([line["finish_reason"] == "stop" for line in lines])
        assert result.shares.stopped + result.shares.length == pytest.approx(1.0)
        missing = [all(value is None for value in line["extracted"].values()) for line in lines]
        assert result.shares.invalid == np.mean(missing)
        assert result.protocol["generation"]["remasking_strategy"] == "low_confidence"
    assert any(counts.any() for counts in by_variant.values())


# ----------------------------------------------------------------------------------------------------------------------
# Files


GENERATED = ItemResult(
    task="gsm8k", variant="a", id="7", repeat=1, prompt_sha256="00", gold="18", output="= 18\u2028 \n#### 18",
    extracted={"strict": "18", "flexible": None}, is_correct={"strict": 1.0, "flexible": 0.0},
    finish_reason="stop", num_tokens=9, num_forwards=4, seconds=0.5,
)  # fmt: skip
CHOICE = ItemResult(
    task="arc", variant="a", id="7", repeat=0, prompt_sha256="00", gold="1", is_correct={"acc": 1.0},
    option_log_likelihoods=(-1.5, -1.25), option_standard_errors=(0.0, 0.125), chosen={"acc": 1},
)  # fmt: skip


def test_item_lines_are_read_back(tmp_path: Path) -> None:
    lines = [format_item_line(GENERATED), format_item_line(CHOICE)]
    assert "option_log_likelihoods" not in json.loads(lines[0])
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert list(read_items(path)) == [GENERATED, CHOICE]
    path.write_text(f'{lines[0]}\n{{"task": "arc"}}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"a\.jsonl: line 2: .*is_correct"):
        list(read_items(path))


def test_other_contents_are_no_results(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(ValueError, match=r"results\.json.*results"):
        read_results(tmp_path)


def test_empty_and_invalid_answers() -> None:
    blank = dataclasses.replace(GENERATED, output=" \n", extracted={"strict": None})
    wrong = dataclasses.replace(GENERATED, error="ZeroDivisionError")
    assert [item.is_empty for item in (GENERATED, CHOICE, blank, wrong)] == [False, False, True, False]
    assert [item.is_invalid for item in (GENERATED, CHOICE, blank, wrong)] == [False, False, True, True]


def test_file_names_of_variants() -> None:
    assert to_file_name("block_length=8") == "block_length=8"
    names = ["org/model", "org model", "../x", "", "a" * 200]
    files = [to_file_name(name) for name in names]
    assert len(set(files)) == len(names)
    assert all("/" not in file and not file.startswith(".") for file in files)


def test_a_report_has_the_items_of_the_results(run_tasks: Any, tmp_path: Path) -> None:
    """The folder keeps the answers of an earlier run with more items and repeats."""
    run_tasks("run", {"a": {"repeats": 2}})
    results = run_tasks("run", {"a": {"limit": 2}})
    [variant] = read_evaluations([tmp_path / "run"]).tasks[0].variants
    assert len(read_lines(tmp_path / "run" / "items" / "a.jsonl")) == 12
    assert [(item.id, item.repeat) for item in variant.items] == [(id_, 0) for id_ in results.item_ids["gsm8k"]]
    assert len(variant.items) == variant.result.num_items == 2


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer_config.json", "preprocessor_config.json"])
def test_a_changed_byte_in_the_middle_changes_the_fingerprint(name: str, tmp_path: Path) -> None:
    for folder in ("a", "b", "copy"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "model.safetensors").write_bytes(bytes(300_000))
        (tmp_path / folder / name).write_bytes(bytes(300_000))
    with (tmp_path / "b" / name).open("r+b") as file:
        file.seek(150_000)
        file.write(b"x")
    model = InferModelConfig(path=tmp_path / "a")
    first, second, copy = (fingerprint_model(model, tmp_path / folder) for folder in ("a", "b", "copy"))
    assert first == copy != second
