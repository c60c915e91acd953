"""Exact match against answers that are decoded one by one, and its counts against known ones."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cli.eval import main
from config.data import ChatTasks, PythonStdlib
from config.finetune.exact_match import ExactMatchConfig
from config.generation import GenerationConfig
from diffusionlm.checkpoints.huggingface import save_model_directory
from diffusionlm.data.chat.reference_answers import ReferenceAnswer, read_reference_answers
from diffusionlm.evaluation import exact_match
from diffusionlm.evaluation.exact_match import evaluate_exact_match
from diffusionlm.evaluation.exact_match_plan import prepare_references
from diffusionlm.inference.generate import Generation, generate
from diffusionlm.inference.requests import PreparedRequest
from tests.conftest import MakeModel
from tests.unit.data.chat_cases import chat_tokenizer
from tokenizer import CHAT_TEMPLATES, Tokenizer, encode_chat

TEMPLATE = CHAT_TEMPLATES["chatml"]


def exact_match_config(**options: Any) -> ExactMatchConfig:
    return ExactMatchConfig(source=PythonStdlib(), **options)


def reference(prompt: str, answer: str, task: str = "") -> ReferenceAnswer:
    return ReferenceAnswer(({"role": "user", "content": prompt},), answer, task)


def test_answers_are_those_of_single_prompts(tokenizer: Tokenizer, tiny_model: MakeModel) -> None:
    model = tiny_model(
        vocab_size=tokenizer.vocab_size,
        mask_token_id=tokenizer.mask_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
        max_position_embeddings=128,
    ).eval()
    config = GenerationConfig(max_new_tokens=3, temperature=0.7)
    prompts = ["copy a", "copy abc", "c"]
    decoded = [
        generate(
            model,
            [encode_chat(tokenizer, TEMPLATE, reference(text, "").messages, add_generation_prompt=True)],
            config,
            [5 + number],
        )[0]
        for number, text in enumerate(prompts)
    ]
    texts = [tokenizer.decode(result.token_ids).strip() for result in decoded]
    references = [reference(prompts[0], texts[0]), reference(prompts[1], "z"), reference(prompts[2], f" {texts[2]}\n")]
    progress: list[tuple[int, int]] = []
    report = evaluate_exact_match(
        model,
        prepare_references(
            references,
            TEMPLATE,
            tokenizer,
            model.config,
            exact_match_config(generation=config, batch_size=2, seed=5),
        ),
        on_progress=lambda done, total: progress.append((done, total)),
    )
    assert report.exact_match == pytest.approx(2 / 3) and report.num_prompts == 3
    assert [(sample.prompt, sample.answer, sample.is_exact) for sample in report.samples] == [
        ("copy abc", texts[1], False),
        ("copy a", texts[0], True),
        ("c", texts[2], True),
    ]
    assert report.num_forwards == sum(result.num_forwards for result in decoded)
    assert progress == [(2, 3), (3, 3)] and report.max_new_tokens == 3


def test_counts_by_task(tokenizer: Tokenizer, tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks of 3 and 1 prompts; lengths in bytes, because no merge fits."""
    model = tiny_model(
        vocab_size=tokenizer.vocab_size, mask_token_id=tokenizer.mask_token_id, max_position_embeddings=128
    )
    outputs = iter([("xy", "stop"), ("xyz", "length"), ("zz", "stop"), ("", "stop")])

    def decode(model: object, requests: Sequence[PreparedRequest]) -> list[Generation]:
        results = []
        for _ in requests:
            text, reason = next(outputs)
            ids = tuple(tokenizer.encode(text))
            results.append(Generation(ids, reason, 2, (0.0,) * len(ids), (1,) * len(ids)))  # type: ignore[arg-type]
        return results

    monkeypatch.setattr(exact_match, "decode", decode)
    references = [
        reference("p", "xy", "b"),
        reference("p", "xy", "b"),
        reference("p", "x", "a"),
        reference("p", "", "b"),
    ]
    plan = prepare_references(references, TEMPLATE, tokenizer, model.config, exact_match_config(samples=2))
    report = evaluate_exact_match(model, plan)
    assert (report.exact_match, report.stop_rate, report.mean_length_difference) == (0.5, 0.75, 0.5)
    assert list(report.by_task) == ["a", "b"] and math.isinf(report.by_task["a"].standard_error)
    assert report.by_task["b"].exact_match == pytest.approx(2 / 3) and report.by_task["a"].exact_match == 0.0
    assert report.standard_error == pytest.approx(math.sqrt(0.25 / 3)) and report.num_forwards == 8
    assert [sample.is_exact for sample in report.samples] == [False, True]


@pytest.fixture
def model_directory(tmp_path: Path, tiny_model: MakeModel) -> Path:
    """An untrained model whose tokenizer has the special tokens of chatml."""
    tokenizer = chat_tokenizer()
    model = tiny_model(
        vocab_size=tokenizer.vocab_size,
        mask_token_id=tokenizer.mask_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
        max_position_embeddings=96,
    )
    save_model_directory(model, tokenizer, tmp_path / "model")
    return tmp_path / "model"


EXACT_MATCH = """
[exact_match]
max_prompts = 6
batch_size = 4
samples = 3
source = { kind = "chat_tasks", tasks = ["copy", "count"], max_length = 3, chat = { template = "chatml" } }
generation = { max_new_tokens = 4 }
"""


def test_the_command_answers_held_out_prompts(
    model_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, result = tmp_path / "eval.toml", tmp_path / "result.json"
    config.write_text(EXACT_MATCH)
    arguments = ["--config", str(config), "--model", str(model_directory), "--set", f"output.file={result}"]
    main(arguments)
    values = json.loads(result.read_text())["exact_match"]
    assert values["num_prompts"] == 6 and set(values["by_task"]) == {"copy", "count"}
    assert values["max_new_tokens"] == 4 and len(values["samples"]) == 3
    source = ChatTasks(tasks=("copy", "count"), max_length=3)
    references = read_reference_answers(source, "validation", "source", 6)
    answers = {(reference.messages[-1]["content"], reference.answer) for reference in references}
    assert {(sample["prompt"], sample["reference"]) for sample in values["samples"]} <= answers
    rows = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert rows == ["prompts", "copy", "count", "all"]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ('exact_match.source={kind="python-stdlib"}', "exact_match.source has text, not conversations"),
        ("exact_match.source.chat.template=qwen5", 'exact_match.source.chat.template = "qwen5"'),
        ("exact_match.generation.max_new_tokens=90", "exact_match.source: prompt 1"),
        ("exact_match.generation.block_length=200", "block_length = 200"),
        ('exact_match.source="shards"', "has tokens, not text"),
    ],
)
def test_mistakes_are_reported_before_the_model_is_loaded(
    setting: str,
    message: str,
    model_directory: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("diffusionlm.checkpoints.huggingface.load_configured_model", None)
    config = tmp_path / "eval.toml"
    config.write_text(EXACT_MATCH)
    with pytest.raises(SystemExit) as caught:
        main(["--config", str(config), "--model", str(model_directory), "--set", setting])
    error = capsys.readouterr().err
    assert caught.value.code == 2 and message in error and "Traceback" not in error
