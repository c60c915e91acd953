"""Prompts as texts and chats, examples, and the tokens of options."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from config.generation import GenerationConfig
from diffusionlm.evaluation.pair_encoding import PairEncoder
from diffusionlm.evaluation.tasks.item_task import TaskItem
from diffusionlm.evaluation.tasks.items import read_task_items
from diffusionlm.evaluation.tasks.prompts import PromptBuilder, fill_template
from diffusionlm.inference.request_builder import RequestBuilder
from diffusionlm.inference.settings import resolve_settings
from tests.conftest import MakeConfig
from tests.unit.data.chat_cases import chat_tokenizer
from tests.unit.evaluation.conftest import token_ids
from tests.unit.evaluation.tasks.conftest import TASK
from tokenizer import CHAT_TEMPLATES, encode_chat


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "items.jsonl"
    records = [{"question": f"{number} + 1?", "answer": f"#### {number + 1}"} for number in range(4)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def build(path: Path, *encoders: Any, **prompt: Any) -> tuple[PromptBuilder, list[TaskItem]]:
    task = TASK.validate_python({"kind": "gsm8k", "data": path, "prompt": prompt})
    return PromptBuilder(task, *(encoders or (PairEncoder(chat_tokenizer(), (), None),))), read_task_items(task)


def test_text_with_examples_that_are_not_the_item(path: Path) -> None:
    builder, items = build(path, shots=2, shots_data=path)
    assert builder.text(items[3]) == (
        "Question: 0 + 1?\nAnswer: #### 1\n\nQuestion: 1 + 1?\nAnswer: #### 2\n\nQuestion: 3 + 1?\nAnswer:"
    )
    assert [shot.id for shot in builder.select_shots(items[0])] == ["1", "2"]
    assert [shot.id for shot in builder.select_shots(items[1])] == ["0", "2"]


def test_templates_and_the_beginning_of_the_answer(path: Path) -> None:
    builder, [item, *_] = build(
        path, template="Q: {question} {{}}", answer_prefix="({question})", delimiter="\n", separator="--",
        shots=1, shots_data=path, answer_template="A: {answer}",
    )  # fmt: skip
    assert builder.text(item) == "Q: 1 + 1? {}\nA: #### 2--Q: 0 + 1? {}\n(0 + 1?)"


def test_chats(path: Path) -> None:
    prompt = {"format": "chat", "system": "Be short.", "shots": 1, "shots_data": path, "template": "{question}"}
    builder, [item, *_] = build(path, **prompt)
    assert builder.messages(item) == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "#### 2"},
        {"role": "user", "content": "0 + 1?"},
    ]
    builder, [item, *_] = build(path, **prompt, shots_as="text")
    assert builder.messages(item)[1:] == [{"role": "user", "content": "1 + 1? #### 2\n\n0 + 1?"}]


def test_encoded_prompts(path: Path, make_config: MakeConfig) -> None:
    tokenizer = chat_tokenizer()
    model = make_config(**token_ids(tokenizer))
    encoder = PairEncoder.from_model(tokenizer, model)
    builder, [item, *_] = build(path, encoder)
    encoded = builder.encode(item)
    assert encoded.token_ids == (encoder.encode("Question: 0 + 1?\nAnswer:"))
    assert builder.hash_prompt(item) == hashlib.sha256(b"Question: 0 + 1?\nAnswer:").hexdigest()
    pairs = builder.encode_options(item, ["1", "two"])
    assert [pair.continuation_ids for pair in pairs] == [
        encoder.encode_pair("Question: 0 + 1?\nAnswer:", f" {text}").continuation_ids for text in ("1", "two")
    ]

    template, settings = CHAT_TEMPLATES["chatml"], resolve_settings(GenerationConfig(), model)
    encoders = encoder, template, RequestBuilder(tokenizer, settings, template)
    builder, [item, *_] = build(path, *encoders, format="chat", answer_prefix="It is ")
    encoded = builder.encode(item)
    messages = builder.messages(item)
    expected = encode_chat(tokenizer, template, messages, add_generation_prompt=True) + tokenizer.encode("It is ")
    assert list(encoded.token_ids) == expected
    pairs = builder.encode_options(item, ["1"])
    text = tokenizer.decode([*pairs[0].context_ids, *pairs[0].continuation_ids])
    assert text.endswith("It is 1")


@pytest.mark.parametrize(
    ("template", "words"),
    [("{answe}", "'answer'"), ("{question.x}", "question.x"), ("{question!r}", "{question}"), ("{question", "braces")],
)
def test_wrong_templates(path: Path, template: str, words: str) -> None:
    builder, [item, *_] = build(path, template=template)
    with pytest.raises(ValueError, match=r"prompt\.template") as caught:
        builder.text(item)
    assert words in str(caught.value)


def test_fields_that_are_not_texts_are_json() -> None:
    assert fill_template("{a} {b}", {"a": 1.5, "b": ["x", None]}, "key") == '1.5 ["x", null]'


def test_copies_of_an_item_are_no_examples_of_it(path: Path) -> None:
    """Neither a copy with another field, nor several; as many further examples are read."""
    copies = [{"question": "0 + 1?", "answer": "#### 1", "source": number} for number in range(3)]
    shots = path.with_name("shots.jsonl")
    shots.write_text("".join(json.dumps(record) + "\n" for record in copies) + path.read_text())
    builder, items = build(path, shots=2, shots_data=shots)
    assert [shot.fields["question"] for shot in builder.select_shots(items[0])] == ["1 + 1?", "2 + 1?"]
    assert [shot.fields["question"] for shot in builder.select_shots(items[1])] == ["0 + 1?", "0 + 1?"]
    builder, items = build(path, shots=4, shots_data=shots)
    assert len(builder.select_shots(items[1])) == 4
    with pytest.raises(ValueError, match=r"shots\.jsonl has 3 examples.*shots = 4"):
        builder.select_shots(items[0])
    builder, items = build(path, shots=4, shots_data=path)
    with pytest.raises(ValueError, match=r"has 3 examples.*shots = 4"):
        builder.text(items[3])
