"""Prompts as texts and chats, examples, and the tokens of options."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diffusionlm.evaluation.pair_encoding import PairEncoder
from diffusionlm.evaluation.tasks.item_task import TaskItem
from diffusionlm.evaluation.tasks.items import read_task_items
from diffusionlm.evaluation.tasks.preparation import PreparedItems, fill_template
from tests.conftest import MakeConfig
from tests.unit.data.chat_cases import chat_tokenizer
from tests.unit.evaluation.conftest import token_ids
from tests.unit.evaluation.tasks.conftest import TASK
from tokenizer import CHAT_TEMPLATES, encode_chat

Build = Callable[..., tuple[PreparedItems, list[TaskItem]]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "items.jsonl"
    records = [{"question": f"{number} + 1?", "answer": f"#### {number + 1}"} for number in range(4)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def build(path: Path, make_config: MakeConfig) -> Build:
    """``build(**prompt)``: a task of the file, and its items."""

    def build_task(**prompt: Any) -> tuple[PreparedItems, list[TaskItem]]:
        task, tokenizer = TASK.validate_python({"kind": "gsm8k", "data": path, "prompt": prompt}), chat_tokenizer()
        items = read_task_items(task)
        return PreparedItems(
            task, items, tokenizer, make_config(**token_ids(tokenizer), max_position_embeddings=512)
        ), items

    return build_task


def test_text_with_examples_that_are_not_the_item(path: Path, build: Build) -> None:
    task, items = build(shots=2, shots_data=path)
    assert task.text(items[3]) == (
        "Question: 0 + 1?\nAnswer: #### 1\n\nQuestion: 1 + 1?\nAnswer: #### 2\n\nQuestion: 3 + 1?\nAnswer:"
    )
    assert [shot.id for shot in task.select_shots(items[0])] == ["1", "2"]
    assert [shot.id for shot in task.select_shots(items[1])] == ["0", "2"]


def test_templates_and_the_beginning_of_the_answer(path: Path, build: Build) -> None:
    task, [item, *_] = build(
        template="Q: {question} {{}}", answer_prefix="({question})", delimiter="\n", separator="--",
        shots=1, shots_data=path, answer_template="A: {answer}",
    )  # fmt: skip
    assert task.text(item) == "Q: 1 + 1? {}\nA: #### 2--Q: 0 + 1? {}\n(0 + 1?)"


def test_chats(path: Path, build: Build) -> None:
    prompt = {"format": "chat", "system": "Be short.", "shots": 1, "shots_data": path, "template": "{question}"}
    task, [item, *_] = build(**prompt)
    assert task.messages(item) == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "#### 2"},
        {"role": "user", "content": "0 + 1?"},
    ]
    task, [item, *_] = build(**prompt, shots_as="text")
    assert task.messages(item)[1:] == [{"role": "user", "content": "1 + 1? #### 2\n\n0 + 1?"}]


def test_encoded_prompts(build: Build, make_config: MakeConfig) -> None:
    tokenizer = chat_tokenizer()
    encoder = PairEncoder(tokenizer, make_config(**token_ids(tokenizer)))
    task, [item, *_] = build()
    assert task.build_request(item, 0).token_ids == list(encoder.encode("Question: 0 + 1?\nAnswer:"))
    assert task.hash_prompt(item) == hashlib.sha256(b"Question: 0 + 1?\nAnswer:").hexdigest()
    context, continuations = task.encode_options(item, ["1", "two"])
    assert context.token_ids == encoder.encode("Question: 0 + 1?\nAnswer:")
    assert continuations == tuple(
        encoder.encode_pair("Question: 0 + 1?\nAnswer:", f" {text}").continuation_ids for text in ("1", "two")
    )

    task, [item, *_] = build(format="chat", chat_template="chatml", answer_prefix="It is ")
    messages = task.messages(item)
    expected = encode_chat(tokenizer, CHAT_TEMPLATES["chatml"], messages, add_generation_prompt=True)
    assert task.build_request(item, 0).token_ids == expected + tokenizer.encode("It is ")
    context, [continuation] = task.encode_options(item, ["1"])
    text = tokenizer.decode([*context.token_ids, *continuation])
    assert text.endswith("It is 1")


@pytest.mark.parametrize(
    ("template", "words"),
    [("{answe}", "'answer'"), ("{question.x}", "question.x"), ("{question!r}", "{question}"), ("{question", "braces")],
)
def test_wrong_templates(path: Path, build: Build, template: str, words: str) -> None:
    task, [item, *_] = build(template=template)
    with pytest.raises(ValueError, match=r"prompt\.template") as caught:
        task.text(item)
    assert words in str(caught.value)


def test_fields_that_are_not_texts_are_json() -> None:
    assert fill_template("{a} {b}", {"a": 1.5, "b": ["x", None]}, "key") == '1.5 ["x", null]'


def test_copies_of_an_item_are_no_examples_of_it(path: Path, build: Build) -> None:
    """Neither a copy with another field, nor several; as many further examples are read."""
    copies = [{"question": "0 + 1?", "answer": "#### 1", "source": number} for number in range(3)]
    shots = path.with_name("shots.jsonl")
    shots.write_text("".join(json.dumps(record) + "\n" for record in copies) + path.read_text())
    task, items = build(shots=2, shots_data=shots)
    assert [shot.fields["question"] for shot in task.select_shots(items[0])] == ["1 + 1?", "2 + 1?"]
    assert [shot.fields["question"] for shot in task.select_shots(items[1])] == ["0 + 1?", "0 + 1?"]
    task, items = build(shots=4, shots_data=shots)
    assert len(task.select_shots(items[1])) == 4
    with pytest.raises(ValueError, match=r"shots\.jsonl has 3 examples.*shots = 4"):
        task.select_shots(items[0])
    task, items = build(shots=4, shots_data=path)
    with pytest.raises(ValueError, match=r"has 3 examples.*shots = 4"):
        task.text(items[3])
