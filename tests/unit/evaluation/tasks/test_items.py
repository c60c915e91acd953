"""Items of every kind of task, and files that are wrong."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from diffusionlm.evaluation.tasks.items import read_task_items
from tests.unit.evaluation.tasks.conftest import TASK

ARC = {
    "id": "Mercury_7", "question": "Which is a rock?", "answerKey": "3",
    "choices": {"text": ["air", "tin", "slate"], "label": ["1", "2", "3"]},
}  # fmt: skip
HELLASWAG = {"ind": 24, "ctx": "A man is", "endings": ["up.", "down."], "label": "1"}
PIQA = {"goal": "Boil eggs.", "sol1": "Use a pot.", "sol2": "Use a hat.", "label": 1}
MMLU = {"question": "2 + 2?", "choices": ["3", "4", "5", "6"], "answer": 1}
HUMANEVAL = {"task_id": "HumanEval/0", "prompt": "def f():\n", "test": "def check(f): pass", "entry_point": "f"}


def write(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def read(path: Path, records: list[Any], kind: str, **options: Any) -> Any:
    return read_task_items(TASK.validate_python({"kind": kind, "data": write(path, records), **options}))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "items.jsonl"


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("3 + 4 = <<3+4=7>>7\n#### 7", "7"),
        ("It costs $1,234.50.\n#### $1,234.50", "1234.50"),
        ("#### -3", "-3"),
        ("x\n#### -3.5\n", "-3.5"),
        ("#### 3 \n#### 4", "4"),
        ("so \\boxed{12}", "12"),
        ("42", "42"),
        (42, "42"),
    ],
)
def test_gsm8k(path: Path, answer: Any, gold: str) -> None:
    [item] = read(path, [{"question": "How many?", "answer": answer}], "gsm8k")
    assert (item.id, item.gold, item.fields["question"]) == ("0", gold, "How many?")


def test_multiple_choice_layouts(path: Path) -> None:
    arc, hellaswag, mmlu, piqa = read(path, [ARC, HELLASWAG, MMLU, PIQA], "multiple_choice")
    assert (arc.id, arc.options, arc.gold_index, arc.gold) == ("Mercury_7", ("air", "tin", "slate"), 2, "slate")
    assert (hellaswag.id, hellaswag.fields["question"], hellaswag.gold_index) == ("24", "A man is", 1)
    assert (mmlu.id, mmlu.gold_index, mmlu.fields["options"]) == ("2", 1, "A. 3\nB. 4\nC. 5\nD. 6")
    assert (piqa.fields["question"], piqa.options, piqa.gold_index) == ("Boil eggs.", ("Use a pot.", "Use a hat."), 1)


@pytest.mark.parametrize(("gold", "index"), [(0, 0), ("B", 1), ("down", 1), ("2", 2), (2, 2)])
def test_gold_is_an_index_a_letter_or_a_text(path: Path, gold: Any, index: int) -> None:
    [item] = read(path, [{"question": "q", "choices": ["up", "down", "out"], "gold": gold}], "multiple_choice")
    assert item.gold_index == index


def test_other_kinds(path: Path) -> None:
    [item] = read(path, [HUMANEVAL], "humaneval")
    assert (item.id, item.fields["entry_point"]) == ("HumanEval/0", "f")
    [item] = read(path, [{"text": "The cat sat on the mat. "}], "cloze")
    assert (item.fields["context"], item.gold) == ("The cat sat on the", "mat.")
    [item] = read(path, [{"q": "2 + 2 =", "a": "4"}], "cloze", text_field="q", answer_field="a")
    assert (item.fields["context"], item.gold) == ("2 + 2 =", "4")
    [item] = read(path, [{"prompt": "Hi", "completion": " Hello!"}], "exact_match")
    assert item.gold == "Hello!" and item.messages == ({"role": "user", "content": "Hi"},)


@pytest.mark.parametrize(
    ("record", "kind", "words"),
    [
        ({"question": "q", "answer": "I do not know"}, "gsm8k", ["line 1", "'0'", "####"]),
        ({"question": "q", "answer": "#### 18\nmore text"}, "gsm8k", ["line 1", "'0'", "more text"]),
        ({"question": "q"}, "gsm8k", ["'0'", "answer_field", "'question'"]),
        ({**HUMANEVAL, "test": None}, "humaneval", ["HumanEval/0", "test_field"]),
        ({**PIQA, "sol2": None}, "multiple_choice", ["None", "list of texts"]),
        ({"question": "q", "choices": ["a", "b"], "gold": 2}, "multiple_choice", ["right option 2"]),
        ({"question": "q", "choices": ["1", "0"], "gold": "1"}, "multiple_choice", ["ambiguous"]),
        ({"question": "q", "choices": ["a"], "gold": 0}, "multiple_choice", ["1 options"]),
        ({"question": "q", "choices": ["a", " "], "gold": 0}, "multiple_choice", ["empty"]),
        ({"text": "word"}, "cloze", ["no context"]),
        ({"prompt": "Hi"}, "exact_match", ["line 1", "'0'"]),
        ("no object", "gsm8k", ["line 1", "not an object"]),
    ],
)
def test_items_without_an_answer_are_named(path: Path, record: Any, kind: str, words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"items\.jsonl") as caught:
        read(path, [record], kind)
    assert all(word in str(caught.value) for word in words), caught.value


def test_malformed_files(path: Path) -> None:
    good = json.dumps({"question": "q", "answer": "1"})
    for text, words in (
        (f"{good}\n{good[:-3]}\n", ["line 2", "malformed JSON"]),
        ("\n\n", ["no items"]),
        (f'{good}\n{{"question": "\\ud800", "answer": "1"}}\n', ["line 2", "surrogate"]),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"items\.jsonl") as caught:
            read_task_items(TASK.validate_python({"kind": "gsm8k", "data": path}))
        assert all(word in str(caught.value) for word in words), caught.value
    for name, word in (("none.jsonl", "No such file"), ("items.csv", ".jsonl")):
        with pytest.raises(ValueError, match=name) as caught:
            read_task_items(TASK.validate_python({"kind": "gsm8k", "data": path.with_name(name)}))
        assert word in str(caught.value)


def test_ids_must_differ(path: Path) -> None:
    with pytest.raises(ValueError, match=r"line 2: item '5' has the id of .*line 1.*id_field"):
        read(path, [{**MMLU, "id": 5}, {**MMLU, "id": 5}], "multiple_choice")
    with pytest.raises(ValueError, match=r"number.*id_field"):
        read(path, [MMLU], "multiple_choice", id_field="number")


def test_json_parquet_and_compressed_files_have_the_same_items(path: Path) -> None:
    records = [{"question": f"q{number}", "answer": str(number), "id": f"i{number}"} for number in range(5)]
    expected = read(path, records, "gsm8k")
    array = path.with_name("array.json")
    array.write_text(json.dumps(records))
    parquet = path.with_name("rows.parquet")
    pq.write_table(pa.Table.from_pylist(records), parquet)
    archive = path.with_name("items.jsonl.gz")
    archive.write_bytes(gzip.compress(path.read_bytes()))
    for other in (array, parquet, archive):
        assert read_task_items(TASK.validate_python({"kind": "gsm8k", "data": other})) == expected


def test_subsets(path: Path) -> None:
    records = [{"question": f"q{number}", "answer": str(number)} for number in range(40)]
    small, large = ([item.id for item in read(path, records, "gsm8k", limit=limit, seed=3)] for limit in (5, 10))
    assert len(small) == 5 and set(small) < set(large)
    assert large == sorted(large, key=int) and large != [str(number) for number in range(10)]
    assert [item.id for item in read(path, records, "gsm8k", limit=5, seed=4)] != small
    shuffled = read(
        path, [{**record, "id": str(number)} for number, record in enumerate(records)][::-1], "gsm8k", limit=5, seed=3
    )
    assert {item.id for item in shuffled} == set(small)
    assert [item.id for item in read(path, records, "gsm8k", item_ids=["7", "2"])] == ["2", "7"]
    with pytest.raises(ValueError, match="item_ids: '40'"):
        read(path, records, "gsm8k", item_ids=["7", "40"])
