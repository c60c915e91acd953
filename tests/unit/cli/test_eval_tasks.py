"""Tasks on the command line: arguments, variants, errors before torch, and a run from a model directory."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from cli.eval import main
from cli.eval.task_run import resolve_variants
from config.data import LocalFiles
from config.eval import EvalConfig
from diffusionlm.evaluation.tasks.results import read_results
from tests.unit.cli.conftest import Fails, MakeDirectory
from tests.unit.data.chat_cases import chat_tokenizer

GSM8K = [{"question": f"{number} + 1 = ?", "answer": f"#### {number + 1}"} for number in range(4)]
RESOURCE = Path(__file__).parents[3] / "config" / "resources" / "eval.toml"
CHOICES = [{"question": "q", "choices": ["a", "b"], "gold": number % 2} for number in range(4)]


def write(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def print_config(fails: Fails, *arguments: str) -> EvalConfig:
    return EvalConfig.model_validate(tomllib.loads(fails(main, *arguments, "--print-config", code=0)))


@pytest.fixture(scope="module")
def model(make_directory: MakeDirectory) -> Path:
    words = chat_tokenizer()
    return make_directory(words, pad_token_id=words.eos_token_id, max_position_embeddings=128)


def test_arguments_are_overrides(fails: Fails) -> None:
    for order in (("--data", "a.jsonl", "--task", "gsm8k"), ("--task", "gsm8k", "--data", "a.jsonl")):
        config = print_config(fails, "--model", "m", *order, "--limit", "7", "--output", "out")
        [task] = config.tasks
        assert (task.kind, str(task.data), config.data.source) == ("gsm8k", "a.jsonl", None)
        assert (str(config.output.directory), str(config.model.path)) == ("out", "m")
    text = print_config(fails, "--config", str(RESOURCE), "--data", 'a "b".txt', "--json")
    assert (text.data.source, text.data.split) == (LocalFiles(paths=('a "b".txt',)), "all")
    assert text.output.format == "json"
    config = print_config(
        fails, "--model", "m", "--model", "n", "--task", "gsm8k", "--data", "a.jsonl",
        "--vary", "generation.temperature=0,0.5", "--vary", "generation.remasking_strategy=entropy,topk_margin",
    )  # fmt: skip
    names = [variant.name for variant in resolve_variants(config)]
    assert len(names) == len(set(names)) == 8 and names[1] == "m temperature=0 remasking_strategy=topk_margin"
    assert {variant.tasks[0].generation.temperature for variant in resolve_variants(config)} == {0.0, 0.5}  # type: ignore[union-attr]
    assert {str(variant.model.path) for variant in resolve_variants(config)} == {"m", "n"}


def test_a_run_and_its_files(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], fails: Fails) -> None:
    config = tmp_path / "tasks.toml"
    text = tmp_path / "text.txt"
    text.write_text("some text to score " * 20)
    config.write_text(
        f"""
[[tasks]]
kind = "gsm8k"
data = "{write(tmp_path / "gsm8k.jsonl", GSM8K)}"
generation = {{max_new_tokens = 4}}

[[tasks]]
kind = "multiple_choice"
name = "letters"
data = "{write(tmp_path / "choices.jsonl", CHOICES)}"
score = "letters"

[[tasks]]
kind = "perplexity"
data = "{text}"

[[variants]]
name = "plain"

[[variants]]
name = "hot"
generation = {{temperature = 1.0}}
"""
    )
    output = tmp_path / "out"
    arguments = ["--config", str(config), "--model", str(model), "--output", str(output)]
    main(arguments)
    table, messages = capsys.readouterr()
    assert messages.endswith(f"report: {output / 'report.html'}\n")
    assert all(word in table for word in ("gsm8k", "letters", "nats_per_token", "hot - plain", "tokens per forward"))
    results = read_results(output)
    assert [(result.task, result.variant) for result in results.results] == [
        (task, variant) for variant in ("plain", "hot") for task in ("gsm8k", "letters", "perplexity")
    ]
    by_name = {(result.task, result.variant): result for result in results.results}
    assert by_name["letters", "plain"].metrics == by_name["letters", "hot"].metrics
    main(["--model", str(model), "--data", str(text), "--json"])
    likelihood = json.loads(capsys.readouterr().out)
    metrics = by_name["perplexity", "plain"].metrics
    assert metrics["nats_per_token"].value == likelihood["nats_per_token"]
    assert metrics["bits_per_byte"].standard_error == likelihood["bits_per_byte_standard_error"]
    names = {path.name for path in output.iterdir()}
    assert {"config.toml", "fingerprint.json", "items", "results.json", "report.html", "report.md"} <= names
    first = (output / "items" / "hot.jsonl").read_bytes()
    main([*arguments, "--json"])
    assert json.loads(capsys.readouterr().out)["results"][0]["task"] == "gsm8k"
    assert (output / "items" / "hot.jsonl").read_bytes() == first
    message = fails(main, *arguments, "--set", "tasks.0.generation.max_new_tokens=5")
    assert "max_new_tokens: 4 -> 5" in message


@pytest.mark.parametrize(
    ("preset", "key", "values"),
    [
        ("fast-dllm/gsm8k-baseline", "denoising_steps", (1, 2)),
        ("fast-dllm/gsm8k", "remasking_strategy", ("low_confidence", "entropy")),
    ],
)
def test_a_preset_gives_way_to_varied_keys(preset: str, key: str, values: tuple[Any, ...], fails: Fails) -> None:
    arguments = ["--model", "m", "--preset", preset, "--data", "d.jsonl", "--shots-data", "s.jsonl"]
    vary = f"generation.{key}={','.join(map(str, values))}"
    variants = resolve_variants(print_config(fails, *arguments, "--vary", vary))
    generations = [variant.tasks[0].model_dump()["generation"] for variant in variants]
    assert [generation[key] for generation in generations] == list(values)
    assert all(generation["max_new_tokens"] == 256 for generation in generations)
    if key == "denoising_steps":  # a setting of the user does not give way
        config = print_config(fails, *arguments, "--set", "tasks.0.generation.steps=7", "--vary", vary)
        with pytest.raises(ValueError, match="denoising_steps"):
            resolve_variants(config)


def test_wrong_input(model: Path, tmp_path: Path, fails: Fails) -> None:
    data = str(write(tmp_path / "items.jsonl", GSM8K))
    task = ["--task", "gsm8k", "--data", data]
    run = ["--model", str(model), *task, "--set", "tasks.0.generation.max_new_tokens=4"]
    output = ["--output", str(tmp_path / "out")]
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    cases: list[tuple[list[str], list[str]]] = [
        (run, ["--output DIR"]),
        ([*task, *output], ["no model"]),
        ([*run, *output, "--data", str(empty)], ["empty.jsonl", "no items"]),
        ([*run, *output, "--vary", "likelihood.seed=1,2"], ["likelihood.seed", "no effect"]),
        ([*run, *output, "--vary", "temperature=1,2"], ["'temperature'", "generation"]),
        ([*run, *output, "--vary", "generation.temperature"], ["--vary", "SECTION.KEY"]),
        ([*run, *output, "--model", str(model)], ["two variants", "remove one"]),
        (["--model", str(model), "--data", data, *output], ["output.directory", "tasks"]),
        (["--model", str(model), "--set", "exact_match.max_prompts=4"], ["[exact_match]", "[[tasks]]", "limit"]),
        ([*run, *output, "--set", "data.source=python-stdlib"], ["[data]", "tasks"]),
        ([*run, "--output", data], ["--output", "items.jsonl", "not a directory"]),
        (["--model", str(model), "--task", "perplexity", "--data", data, *output], ["perplexity", "text"]),
        (["--task", "perplexity", "--limit", "3", "--data", data, *output], ["--limit 3", "text.max_rows=3"]),
    ]
    for arguments, words in cases:
        message = fails(main, *arguments)
        assert all(word in message for word in words), (arguments, message)
    assert not (tmp_path / "out").exists()
